"""The table and the picture of a comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.tools.bench.plot_loss import draw
from mpitrain.tools.bench.turns import Row, spread
from mpitrain.tools.text_table import TextColumn, TextTable

WIDE = 18
"""Least width of the column of sides."""
ANSWERS = {"faster": "yes", "slower": "no"}
UNSURE = ("~", "spoilt")


def mark(row: Row) -> str:
    """Return ~ if the blocks disagree whether a side is faster than the first one, or other work ran."""
    return "~" * (row.speed in UNSURE)


def with_energy(columns: str, rows: Sequence[Row]) -> str:
    """Return the columns, with joules of a token beside its rate if they were measured."""
    if all(row.joules is None for row in rows):
        return columns
    return columns.replace("tokens/s", "tokens/s|J/token")


def _largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


COLUMNS = {
    "of": TextColumn("shape", "<18", "of"),
    "workers": TextColumn("workers", "7", "workers"),
    "step ms": TextColumn("step ms", "9", lambda row: f"{1e3 * row.step_s:.1f}{mark(row)}"),
    "ratio": TextColumn(
        "ratio", "7", lambda row: f"{row.ratio:.3f}" if row.speed != "spoilt" else None
    ),
    "blocks": TextColumn("blocks", "<14", lambda row: spread(row.ratios), gap=2),
    "faster?": TextColumn("faster?", "7", lambda row: ANSWERS.get(row.speed, row.speed) or None),
    "samples/s": TextColumn("samples/s", "9.1f", lambda row: row.samples / row.step_s),
    "tokens/s": TextColumn(
        "tokens/s", "9,.0f", lambda row: row.tokens / row.step_s if row.tokens else None
    ),
    "J/token": TextColumn(
        "J/token",
        "9.3g",
        lambda row: row.joules / row.tokens if row.tokens and row.joules is not None else None,
    ),
    "exposed ms": TextColumn(
        "exposed ms", "10.1f", lambda row: None if row.comm_s is None else 1e3 * row.comm_s
    ),
    "sent bytes": TextColumn("sent bytes", "13,.0f", lambda row: _largest(row.sent_bytes)),
    "by formula": TextColumn("by formula", "13,.0f", "formula_bytes"),
    "held MB": TextColumn("held MB", "8.1f", lambda row: 1e-6 * max(row.held_bytes)),
    "memory MB": TextColumn("memory MB", "9.2f", lambda row: 1e-6 * row.nbytes),
    "space": TextColumn("ratio", "6.2f", "space"),
    "stale": TextColumn("stale", "5", lambda row: row.staleness or None),
    "val loss": TextColumn("val loss", "8.4f", lambda row: f"{row.val_loss:.4f}"),
    "loss": TextColumn("loss", "8.5f", lambda row: row.losses[-1] if row.losses else None),
    "apart": TextColumn("apart", "8.1e", "apart"),
    "same": TextColumn("#same", "7,", "same"),
    "set": TextColumn(
        "set", "<", lambda row: "set already" if row.is_used else " ".join(row.settings), gap=2
    ),
}
"""The columns of a comparison: bytes are those of the busiest rank, memory that of the fullest rank.

~ behind a time: the blocks disagree whether the side is faster than the first one, or it is spoilt.
"""

TRAINED = "workers|step ms|samples/s|exposed ms|sent bytes|by formula|held MB|stale|val loss"
KEPT = "step ms|ratio|blocks|faster?|tokens/s|exposed ms|loss|apart"
TRIED = "ratio|blocks|faster?|memory MB|space|sent bytes|set"
WRITTEN = "step ms|ratio|blocks|faster?|tokens/s|same"
"""Columns behind the side: of trainings from the start, sides in memory, tricks, and generation."""


def table(columns: str, sides: Sequence[str], *more: TextColumn) -> TextTable:
    """Return the table of a comparison.

    columns  keys of COLUMNS; `of` comes first if it is among them
    sides    names of all sides
    more     further columns, before the last one
    """
    names = columns.split("|")
    side = TextColumn("side", f"<{max(WIDE, *map(len, sides))}", "side")
    before = [COLUMNS[name] for name in names if name == "of"]
    behind = [COLUMNS[name] for name in names if name != "of"]
    return TextTable([*before, side, *behind[:-1], *more, behind[-1]])


def agreement(rows: Sequence[Row]) -> list[str]:
    """Return lines about the ratios and their blocks; none if there is one side."""
    others = [row for row in rows if row.speed]
    if not others:
        return []
    blocks = len(others[0].blocks)
    first = next(row.side for row in rows if not row.speed)
    unsure = sum(row.speed in UNSURE for row in others)
    if blocks == 1:
        return []
    return [
        f"step ms: median of {blocks} blocks in turns; ~ {unsure} of {len(others)} others: their blocks disagree "
        f"whether they are faster than {first}, or other work ran"
    ]


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the losses of all sides that have some over time."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in (row for row in rows if any(row.losses)):
        runs[row.side] = [
            {"step": step, "wall_s": end, "loss": loss}
            for step, (end, loss) in enumerate(zip(row.ends, row.losses, strict=True), 1)
        ]
        if row.evaluated_s:
            last = {"step": len(row.ends), "wall_s": row.evaluated_s, "val_loss": row.val_loss}
            runs[row.side].append(last)
    draw(runs, "time", False, path, title)
