"""Text charts of a simulated pipeline: a row of instructions for each stage, and a summary."""

import math
from collections.abc import Callable, Iterable, Sequence

from mpitrain.pipeline.instructions import Compute, Plan
from mpitrain.pipeline.schedule_files import LETTERS
from mpitrain.pipeline.simulate import Cost, Event, Simulation, peak

NAMES = {"F": "forward", "B": "input half of backward", "W": "weight half", "BW": "both halves"}
BANDS = 6
"""Largest number of bands into which a chart wraps; a longer chart is drawn smaller."""

TICK = 10
"""Smallest number of columns between two times on the ruler."""


def labels(plan: Plan) -> Callable[[Compute], str]:
    """Return a function that labels instructions: kind, micro-batch, and letter of the chunk.

    The chunks of a stage are a, b, c; a stage with one chunk has no letter.
    """
    stage_of = plan.stage_of
    chunks = [
        chr(97 + stage_of[:chunk].count(stage)) if stage_of.count(stage) > 1 else ""
        for chunk, stage in enumerate(stage_of)
    ]
    return lambda instruction: (
        f"{LETTERS[type(instruction)]}{instruction.micro}{chunks[instruction.chunk]}"
    )


def chart(
    plan: Plan,
    simulation: Simulation,
    width: int,
    notes: Sequence[Sequence[str]] = (),
    name: str = "",
) -> list[str]:
    """Draw a row for each stage, in bands of at most `width` columns under a ruler in ms.

    notes  for each stage a text for each event; a row called `name` below the stage shows them
    """
    events = [event for stage_events in simulation.timeline for event in stage_events]
    margin = len(f"stage {len(plan.lists) - 1}") + 2
    room, label = width - margin, labels(plan)
    shortest = min(event.end - event.start for event in events if event.end > event.start)
    texts = [
        [label(event.instruction) for event in stage_events] for stage_events in simulation.timeline
    ]
    lengths = [
        max(map(len, pair))
        for rows in zip(texts, notes or texts, strict=True)
        for pair in zip(*rows, strict=True)
    ]
    widest = max(
        (1 + length) * shortest / (event.end - event.start)
        for length, event in zip(lengths, events, strict=True)
        if event.end > event.start
    )
    units = simulation.makespan / shortest
    fitting = (
        cell
        for cell in range(math.ceil(widest), 0, -1)
        if units * cell <= BANDS * (room // cell * cell)
    )
    # The shortest instruction takes this many columns.
    cell = next(fitting, 1)
    scale, band = min(cell / shortest, BANDS * room / simulation.makespan), room // cell * cell
    columns = math.ceil(simulation.makespan * scale)
    rows = [("ms", _ruler(simulation.makespan, scale, band))]
    for stage, (stage_events, words) in enumerate(zip(simulation.timeline, texts, strict=True)):
        rows.append((f"stage {stage}", _row(stage_events, words, scale, columns, ".-")))
        if notes:
            rows.append((name, _row(stage_events, notes[stage], scale, columns, "  ")))
    lines = []
    for start in range(0, columns, band):
        lines += [f"{name:<{margin}}{row[start : start + band]}".rstrip() for name, row in rows] + [
            ""
        ]
    return lines[:-1]


def _row(
    events: Sequence[Event], texts: Sequence[str], scale: float, columns: int, fills: str
) -> str:
    """Return a row with a text for each event, at the event's columns.

    events  of one stage
    texts   the text of each event
    scale   columns per unit of time
    fills   the characters that fill the idle time, and the rest of an event
    """
    row, at = "", 0
    for event, text in zip(events, texts, strict=True):
        start, stop = round(event.start * scale), round(event.end * scale)
        row += _cell("", start - at, fills[0]) + _cell(text, stop - start, fills[1])
        at = stop
    return row + _cell("", columns - at, fills[0])


def _cell(text: str, columns: int, fill: str) -> str:
    """Return a text padded to `columns` columns, with a gap at the end.

    A text that does not fit is cut to its letter, or to its star.
    """
    shown = (
        text
        if len(text) < columns
        else text[:1]
        if text[:1].isalpha()
        else "*" * text.endswith("*")
    )
    return shown.ljust(columns - 1, fill)[: max(columns - 1, 1)].ljust(columns)[: max(columns, 0)]


def _ruler(makespan: float, scale: float, band: int) -> str:
    """Return the time labels at their columns. A label that does not fit into its band is left out."""
    least = TICK / scale
    power = 10 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    row = ""
    for tick in range(int(makespan / step) + 1):
        at, text = round(tick * step * scale), f"{tick * step:g}"
        if at % band + len(text) <= band:
            row = row.ljust(at) + text
    return row


def summary(plan: Plan, simulation: Simulation, costs: Sequence[Cost]) -> list[str]:
    """Return lines with the legend, makespan, bubble, and peaks of each stage."""
    makespan = (
        f"makespan {simulation.makespan:.6g} ms, of which a stage computes {simulation.busy / len(plan.lists):.6g}: "
        f"bubble {100 * simulation.bubble:.1f}%"
    )
    return [letters(plan), makespan, *holds(plan, costs)]


def letters(plan: Plan) -> str:
    """Return the legend of a chart's letters."""
    kinds = {
        LETTERS[type(instruction)] for instructions in plan.lists for instruction in instructions
    }
    return (
        ", ".join(f"{kind} {meaning}" for kind, meaning in NAMES.items() if kind in kinds)
        + ", dots idle"
        + ("; chunks of a stage a, b, ..." if len(plan.stage_of) > len(plan.lists) else "")
    )


def holds(plan: Plan, costs: Sequence[Cost]) -> list[str]:
    """Return text lines with each stage's peak activation memory, in micro-batches and in MB.

    costs  of each chunk of the model
    """
    peaks = [peak(instructions, costs) for instructions in plan.lists]
    held = (
        "micro-batches"
        if len(plan.stage_of) == len(plan.lists)
        else "micro-batches of one chunk each"
    )
    lines = [f"peak live, by stage: {listed(each.live for each in peaks)} {held}"]
    if any(each.pending for each in peaks):
        lines.append(
            f"of these, with a pending weight half: at most {listed(each.pending for each in peaks)}"
        )
    if any(each.nbytes for each in peaks):
        lines.append(
            f"peak activations, by stage: {listed(each.nbytes / 1e6 for each in peaks)} MB"
        )
    return lines


def listed(numbers: Iterable[float]) -> str:
    """Return numbers as text, separated by commas."""
    return ", ".join(f"{number:.4g}" for number in numbers)
