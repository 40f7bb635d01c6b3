"""The tables of `mpitrain compare`: a line per mode, memory and losses, formulas, and the picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.tools.bench.comparison.formulas import letters_in
from mpitrain.tools.bench.comparison.measure import (
    KINDS,
    ModeRow,
    blocks_agree,
    equal_time,
    fullest,
    loss_at,
)
from mpitrain.tools.bench.plot_loss import draw

COLUMNS = (
    "mode",
    "workers",
    "step ms",
    "samples/s",
    "exposed ms",
    "sent bytes",
    "by formula",
    "held MB",
    "stale",
    "val loss",
)
WIDTHS = (18, 7, 9, 9, 10, 13, 13, 8, 5, 8)
MEMORY = ("mode", "idle %", *KINDS, "all MB")
MEMORY_WIDTHS = (18, 7, 10, 9, 8, 8, 11, 8)


def wide(modes: Sequence[str]) -> int:
    """Return the width of the column of modes."""
    return max(WIDTHS[0], *map(len, modes))


def heading(first: int = WIDTHS[0]) -> str:
    """Return the line of column names.    first: width of the first column"""
    return aligned(COLUMNS, (first, *WIDTHS[1:]))


def line(row: ModeRow, first: int = WIDTHS[0], mark: str = "") -> str:
    """Format a row of the table: bytes of the busiest rank, memory of the fullest rank.

    mark  follows the time
    """
    formula = "-" if row.formula_bytes is None else f"{row.formula_bytes:,.0f}"
    cells = (
        row.mode,
        str(row.workers),
        f"{1e3 * row.step_s:.1f}{mark}",
        f"{row.samples_per_s:.1f}",
        f"{1e3 * row.comm_s:.1f}",
        f"{max(row.sent_bytes):,.0f}",
        formula,
        f"{1e-6 * max(row.held_bytes):.1f}",
        str(row.staleness or "-"),
        f"{row.val_loss:.4f}",
    )
    return aligned(cells, (first, *WIDTHS[1:]))


def mark(row: ModeRow, first: ModeRow) -> str:
    """Return ~ if the blocks disagree whether a mode is faster than the first one."""
    return "" if row is first or blocks_agree(row, first) else "~"


def memory_table(rows: Sequence[ModeRow]) -> list[str]:
    """Return lines with the idle time, the memory by kind and the losses of each mode.

    Memory is that of the fullest rank. Losses are training losses after equal steps and equal time.
    """
    seconds, steps = equal_time(rows), len(rows[0].curve)
    names = (*MEMORY, f"loss, {steps} steps", f"loss, {seconds:.3g} s")
    widths = (wide([row.mode for row in rows]), *MEMORY_WIDTHS[1:], *map(len, names[-2:]))
    lines = [aligned(names, widths)]
    for row in rows:
        memory = fullest(row)
        losses = (loss_at(row), loss_at(row, seconds))
        cells = (
            row.mode,
            f"{100 * row.idle:.1f}",
            *(f"{1e-6 * memory[kind]:.2f}" for kind in KINDS),
            f"{1e-6 * sum(memory.values()):.2f}",
            *("-" if loss is None else f"{loss:.4f}" for loss in losses),
        )
        lines.append(aligned(cells, widths))
    return lines


def aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of cells, the first to the left and the others to the right."""
    return " ".join(
        f"{cell:>{width}}" if number else f"{cell:<{width}}"
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


def footer(rows: Sequence[ModeRow]) -> list[str]:
    """Return the formulas of these modes in words, and the meaning of their letters."""
    first = wide([row.mode for row in rows])
    formulas = {row.mode: row.formula for row in rows if row.formula}
    letters = [
        f"{letter} {meaning}" for letter, meaning in letters_in([*formulas.values()]).items()
    ]
    return [
        *(f"{mode:<{first}} sends {words}" for mode, words in formulas.items()),
        *([f"with {', '.join(letters)}; besides, control messages and headers"] if letters else []),
    ]


def spread(rows: Sequence[ModeRow]) -> list[str]:
    """Return a line about the marks of time, if there are several blocks."""
    blocks = len(rows[0].blocks)
    if blocks == 1:
        return []
    marked = sum(bool(mark(row, rows[0])) for row in rows)
    return [
        f"step ms: median of {blocks} blocks in turns; ~ {marked} of {len(rows)} modes: their blocks disagree "
        f"whether they are faster than {rows[0].mode}"
    ]


def plot(rows: Sequence[ModeRow], title: str, path: Path) -> None:
    """Draw training losses over time, and the final validation loss of each mode."""
    draw({row.mode: _records(row) for row in rows}, "time", False, path, title)


def _records(row: ModeRow) -> list[dict[str, Any]]:
    trained = [
        {"step": step, "wall_s": end, "loss": loss} for step, (end, loss) in enumerate(row.curve, 1)
    ]
    return [*trained, {"step": len(trained), "wall_s": row.evaluated_s, "val_loss": row.val_loss}]
