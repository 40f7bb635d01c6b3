"""Results of a GPU job, and their table: what, ours, as predicted, the peer's, the ratio, what it must or shall be.

A result is a line of JSON, written the moment it is known, so that what was measured survives a kill.

python3 jobs/gpu/table.py RESULTS.jsonl    prints it again; the exit code is 1 if anything is wrong, missing or too slow
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

WIDEST = 96
"""Characters of the first column; what is longer goes on below."""

SHORT = 40
"""Characters of a row's name among those that failed or are short."""


def emit(
    what: str,
    ours: str = "-",
    peer: str = "-",
    *,
    ratio: float | None = None,
    required: float | None = None,
    goal: float | None = None,
    predicted: str = "-",
    ok: bool = True,
    **facts: Any,
) -> None:
    """Print a result.

    what          in words; `ours` and `peer` with their units
    ratio         theirs over ours in time, ours over theirs in rate: above 1 is faster than the peer
    required      what the ratio must be; less is a fault
    goal          what it shall be one day; less is none
    predicted     on paper, with its unit: what `ours` should be
    ok            False if something is wrong, whatever the ratio
    facts         numbers beside it, for whoever reads the file
    """
    line = {
        "what": what,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "required": required,
        "goal": goal,
        "predicted": predicted,
        "ok": ok,
        **facts,
    }
    print(json.dumps(line), flush=True)


def micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"


def wrong_words(wrong: int) -> str:
    """What is added to the name of a row with wrong elements."""
    return f", {wrong} wrong" if wrong else ""


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file: a kill may have left half of the last one."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_short(row: dict[str, Any]) -> bool:
    """Whether a ratio is less than it must be, or is not known though one is required."""
    return row["required"] is not None and not (
        row["ratio"] is not None and row["ratio"] >= row["required"]
    )


def misses(rows: Iterable[dict[str, Any]]) -> int:
    return sum(not row["ok"] or is_short(row) for row in rows)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Its lines, parts in the order in which they ran."""
    width = min(WIDEST, max((len(row["what"]) for row in rows), default=4))
    lines = [
        f"{'what':<{width}}  {'ours':>16} {'predicted':>12} {'peer':>16} {'ratio':>7} {'required':>9}"
    ]
    for row in rows:
        ratio, required = (
            "-" if row[key] is None else f"{row[key]:.2f}" for key in ("ratio", "required")
        )
        if row.get("goal") is not None:
            required = f"goal {row['goal']:.2f}"
        mark = "  failed" if not row["ok"] else "  short" if is_short(row) else ""
        first, *rest = wrap(row["what"], width) or [""]
        lines += [
            f"{first:<{width}}  {row['ours']:>16} {row.get('predicted', '-'):>12} {row['peer']:>16} "
            f"{ratio:>7} {required:>9}{mark}",
            *(f"  {line}" for line in rest),
        ]
    return [
        *lines,
        f"{len(rows)} lines, {misses(rows)} of them short of what is required, or failed",
    ]


def shortfalls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What failed or is short once more, in short lines: the end of a long output is what one sees."""
    lines = []
    for row in rows:
        if not row["ok"]:
            lines.append(f"{row['what'][:SHORT]:<{SHORT}} failed")
        elif is_short(row):
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            lines.append(f"{row['what'][:SHORT]:<{SHORT}} {ratio} of {row['required']:.2f}")
    return lines


if __name__ == "__main__":
    found = read(Path(sys.argv[1]))
    print("\n".join([*table(found), *shortfalls(found)]))
    sys.exit(1 if misses(found) or not found else 0)
