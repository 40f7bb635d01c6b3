"""A simulated pipeline as text: a row of instructions per stage, and what it comes to in words."""

import math
from collections.abc import Callable, Iterable, Sequence

from mpitrain.pipeline.files import LETTERS
from mpitrain.pipeline.instructions import Compute, Forward, Plan
from mpitrain.pipeline.memory import peak, versions
from mpitrain.pipeline.simulate import Cost, Event, Simulation

NAMES = {"F": "forward", "B": "input half of backward", "W": "weight half", "BW": "both halves"}
BANDS = 6
"""Rows in which a chart is continued below itself, at most: a longer one is drawn smaller, without some numbers."""

TICK = 10
"""Columns between two times of the ruler, at least."""


def labels(plan: Plan) -> Callable[[Compute], str]:
    """What stands for an instruction: kind, micro-batch, and where a stage has several parts which of them, a, b or c."""
    place = plan.place
    chunks = [chr(97 + place[:part].count(stage)) if place.count(stage) > 1 else "" for part, stage in enumerate(place)]
    return lambda instruction: f"{LETTERS[type(instruction)]}{instruction.micro}{chunks[instruction.part]}"


def chart(plan: Plan, simulation: Simulation, width: int) -> list[str]:
    """A row per stage, in bands of at most `width` columns, each under a ruler of times in ms."""
    events = [event for mine in simulation.timeline for event in mine]
    margin = len(f"stage {len(plan.lists) - 1}") + 2
    room, label = width - margin, labels(plan)
    shortest = min(event.end - event.start for event in events if event.end > event.start)
    widest = max((1 + len(label(i))) * shortest / (end - start) for start, end, i in events if end > start)
    units = simulation.makespan / shortest
    fitting = (cell for cell in range(math.ceil(widest), 0, -1) if units * cell <= BANDS * (room // cell * cell))
    cell = next(fitting, 1)  # columns of the shortest instruction
    scale, band = min(cell / shortest, BANDS * room / simulation.makespan), room // cell * cell
    columns = math.ceil(simulation.makespan * scale)
    rows = {"": _ruler(simulation.makespan, scale, band)}
    rows |= {f"stage {stage}": _row(mine, label, scale, columns) for stage, mine in enumerate(simulation.timeline)}
    lines = []
    for start in range(0, columns, band):
        lines += [f"{name:<{margin}}{row[start:start + band]}".rstrip() for name, row in rows.items()] + [""]
    return lines[:-1]


def _row(mine: Sequence[Event], label: Callable[[Compute], str], scale: float, columns: int) -> str:
    row, at = "", 0
    for event in mine:
        start, stop = round(event.start * scale), round(event.end * scale)
        row += _cell("", start - at, ".") + _cell(label(event.instruction), stop - start, "-")
        at = stop
    return row + _cell("", columns - at, ".")


def _cell(text: str, columns: int, fill: str) -> str:
    """A text in so many columns, filled up but for a gap at the end; of one that does not fit, its first letter."""
    shown = text if len(text) < columns else text[:1]
    return shown.ljust(columns - 1, fill)[:max(columns - 1, 1)].ljust(columns)[:max(columns, 0)]


def _ruler(makespan: float, scale: float, band: int) -> str:
    """Times at their columns; none that a band would cut in two."""
    least = TICK / scale
    power = 10 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    row = ""
    for tick in range(int(makespan / step) + 1):
        at, text = round(tick * step * scale), f"{tick * step:g}"
        if at % band + len(text) <= band:
            row = row.ljust(at) + text
    return row


def streaming(plan: Plan, simulation: Simulation, every: int) -> list[str]:
    """What a schedule comes to that goes on over the ends of steps, in words; the whole plan is one stream.

    every  as of `versions`
    """
    idle = total = 0.0
    for mine in simulation.timeline:
        first = next(at for at, event in enumerate(mine) if not isinstance(event.instruction, Forward))
        last = max(at for at, event in enumerate(mine) if isinstance(event.instruction, Forward))
        steady = mine[first:last + 1]
        if steady:
            total += steady[-1].end - steady[0].start
            idle += steady[-1].end - steady[0].start - sum(event.end - event.start for event in steady)
    held = _listed(versions(mine, every) for mine in plan.lists)
    lines = [f"versions of the parameters, by stage: {held}"]
    if total:
        lines.append("a stream goes on over the ends of steps: between a stage's first backward and its last forward it stands "
                     f"still for {100 * idle / total:.1f}%")
    return lines


def summary(plan: Plan, simulation: Simulation, costs: Sequence[Cost]) -> list[str]:
    """What the letters mean, makespan, bubble, and what each stage holds at most, in words."""
    peaks = [peak(mine, costs) for mine in plan.lists]
    held = "micro-batches" if len(plan.place) == len(plan.lists) else "micro-batches of one part each"
    kinds = {LETTERS[type(instruction)] for mine in plan.lists for instruction in mine}
    lines = [
        ", ".join(f"{letters} {meaning}" for letters, meaning in NAMES.items() if letters in kinds)
        + ("; parts of a stage a, b, ..." if len(plan.place) > len(plan.lists) else ""),
        f"makespan {simulation.makespan:.6g} ms, of which a stage computes {simulation.busy / len(plan.lists):.6g}: "
        f"bubble {100 * simulation.bubble:.1f}%",
        f"peak live, by stage: {_listed(each.live for each in peaks)} {held}",
    ]
    if any(each.pending for each in peaks):
        lines.append(f"of these wait for their weight half: at most {_listed(each.pending for each in peaks)}")
    if any(each.nbytes for each in peaks):
        lines.append(f"peak activations, by stage: {_listed(each.nbytes / 1e6 for each in peaks)} MB")
    return lines


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)
