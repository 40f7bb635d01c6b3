"""Text for numbers and ranks in the output of `mpitrain plan`."""

from collections.abc import Iterable


def spoken(operation: str) -> str:
    """Return the name of an operation as a sentence writes it."""
    return "all-reduce" if operation == "allreduce" else operation


def several(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def listed(ranks: Iterable[int], between: str) -> str:
    """Return ascending numbers as text; three or more consecutive ones become first-last.

    between  separator between two entries
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return between.join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else between.join(map(str, run)) for run in runs
    )


def data_of(data: int) -> str:
    """Return the ranks that contribute to a chunk as text: 0+2, 0-3, or - for none."""
    return listed((rank for rank in range(data.bit_length()) if data >> rank & 1), "+") or "-"
