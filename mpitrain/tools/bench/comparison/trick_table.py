"""The table of `plan tricks`: faster? smaller? by how much, and the line to set."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from mpitrain.tools.bench.comparison.table import aligned
from mpitrain.tools.bench.comparison.tricks import Tried

COLUMNS = (
    "trick", "faster?", "times", "blocks", "memory MB", "without", "smaller?", "sent MB", "without"
)  # fmt: skip
WIDTHS = (22, 7, 6, 14, 9, 8, 8, 8, 8)


def heading() -> str:
    return f"{aligned(COLUMNS, WIDTHS)}  set"


def line(tried: Tried) -> str:
    """Format a measured trick.

    Memory is that of the fullest rank. Sent bytes are those of the busiest rank in a step.
    """
    assert tried.on and tried.off
    ratios = tried.ratios
    smaller = "yes" if tried.smaller < 1 else "no" if tried.smaller > 1 else "same"
    words = {"faster": "yes", "slower": "no", "~": "~"}
    cells = (
        tried.name,
        words[tried.speed],
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f} .. {max(ratios):.2f}",
        f"{tried.on.nbytes / 1e6:.2f}",
        f"{tried.off.nbytes / 1e6:.2f}",
        f"{smaller} {tried.smaller:.2f}" if smaller != "same" else smaller,
        f"{max(tried.on.sent) / 1e6:.3f}",
        f"{max(tried.off.sent) / 1e6:.3f}",
    )
    settings = "set already" if tried.is_used else " ".join(tried.settings)
    return f"{aligned(cells, WIDTHS)}  {settings}"


def summary(tried: Sequence[Tried]) -> list[str]:
    """Return lines: the marks, the check of counted bytes, and tricks that do not apply."""
    measured = [each for each in tried if not each.reason]
    absent = [each for each in tried if each.reason]
    lines = [""]
    if measured:
        unsure = sum(each.speed == "~" for each in measured)
        lines.append(
            f"times: the step without the trick / with it, median of {len(measured[0].ratios)} blocks in turns; "
            f"~ {unsure} of {len(measured)}: the blocks disagree"
        )
        activations, sent = checks(measured)
        lines.append(
            f"activations equal the counted bytes in {activations[0]} of {activations[1]} jobs"
        )
        if sent[1]:
            lines.append(f"sent bytes equal the formula in {sent[0]} of {sent[1]} jobs")
    if absent:
        lines += ["", "Not for this job:", *(f"{each.name}: {each.reason}" for each in absent)]
    return lines


def checks(measured: Sequence[Tried]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (equal, all) for the bytes of activations, and for sent bytes that have a formula."""
    sides = [side for each in measured for side in (each.on, each.off) if side]
    equal = sum([memory["activations"] for memory in side.memory] == side.counted for side in sides)
    known = [side for side in sides if side.formula is not None]
    return (equal, len(sides)), (sum(max(s.sent) == s.formula for s in known), len(known))


class TrickRow(NamedTuple):
    """A trick in the JSON file; without measurements, `reason` gives the cause.

    speed         `faster`, `slower`, or ~ if the blocks disagree
    ratios        times as fast with the trick, by block
    smaller       memory with the trick, relative to the memory without
    on, off       the measurements of the job with the trick and without
    """

    name: str
    settings: list[str]
    is_used: bool
    reason: str
    speed: str
    ratios: list[float]
    smaller: float | None
    on: dict[str, Any] | None
    off: dict[str, Any] | None


def as_row(tried: Tried) -> TrickRow:
    """Return a trick as an object of the JSON file."""
    if tried.reason or not tried.on or not tried.off:
        return TrickRow(*tried[:4], "", [], None, None, None)
    sides = tried.on._asdict(), tried.off._asdict()
    return TrickRow(*tried[:4], tried.speed, tried.ratios, tried.smaller, *sides)
