"""`plan schedule`: simulated pipelines as text charts, summaries and pictures.

The stages of an asynchronous pipeline (PipeDream) do not wait for the end of a step. More of its
steps are simulated than drawn, so that the last simulated step shows the steady state.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedule_files import LETTERS, find_plan
from mpitrain.pipeline.schedules import (
    STREAMS,
    Backward,
    BackwardWeight,
    Forward,
    Plan,
    with_messages,
)
from mpitrain.pipeline.simulate import (
    Cost,
    Event,
    Simulation,
    peak,
    simulate,
    staleness,
    versions,
    weights,
)
from mpitrain.plots import PHASES, WALL, numbered, save, subplots, wrapped
from mpitrain.tools.plan import MOST_SHOWN, several
from mpitrain.tools.words import padded, said
from mpitrain.tools.words import width as width_of

NAMES = {"F": "forward", "B": "input half of backward", "W": "weight half", "BW": "both halves"}
BANDS = 6
"""Largest number of bands into which a chart wraps; a longer chart is drawn smaller."""

TICK = 10
"""Smallest number of columns between two times on the ruler."""

ENDS = 4
"""Numbers at each end of a list that is too long."""

DRAWN = 2
"""Number of steps that are drawn, from an empty pipeline."""

MEANING = (
    "version: of its weights, which a stage computes with; * an update follows, which makes the "
    "next version"
)

MOST_PICTURES = 4
"""Largest number of pictures; a longer schedule is drawn smaller."""
ACROSS, DOWN = WALL[0] - 1.4, WALL[1] - 2.2
"""Inches of the boxes in a picture."""
CELL = 0.28
"""Inches of the shortest instruction, if the pictures have room, and of a line in its box."""


def chart(
    plan: Plan,
    simulation: Simulation,
    width: int,
    notes: Sequence[Sequence[str]] = (),
    name: str = "",
    language: str = "en",
) -> list[str]:
    """Return a text chart: a row for each stage under a ruler in ms, in bands of at most `width` columns.

    notes  by stage and event: a text; a row called `name` below the stage shows them
    """
    events = [event for stage_events in simulation.timeline for event in stage_events]
    name, *stages = (
        said(each, language) for each in (name, *map("stage {}".format, range(len(plan.by_stage))))
    )
    margin = width_of(stages[-1]) + 2
    room, stage_of = width - margin, plan.stage_of
    # The chunks of a stage are a, b, c; a stage with one chunk has no letter.
    letters = [
        chr(97 + stage_of[:chunk].count(stage)) if stage_of.count(stage) > 1 else ""
        for chunk, stage in enumerate(stage_of)
    ]
    shortest = min(event.end - event.start for event in events if event.end > event.start)
    texts = [
        [f"{LETTERS[type(i)]}{i.micro}{letters[i.chunk]}" for _, _, i in stage_events]
        for stage_events in simulation.timeline
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
        rows.append((stages[stage], _row(stage_events, words, scale, columns, ".-")))
        if notes:
            rows.append((name, _row(stage_events, notes[stage], scale, columns, "  ")))
    lines = []
    for start in range(0, columns, band):
        lines += [(padded(name, margin) + row[start : start + band]).rstrip() for name, row in rows]
        lines.append("")
    return lines[:-1]


def _row(
    events: Sequence[Event], texts: Sequence[str], scale: float, columns: int, fills: str
) -> str:
    """Return the row of a stage, with the text of each event at the event's columns.

    events  of the stage
    scale   columns per unit of time
    fills   two characters: for idle time, and for the rest of an event behind its text
    """
    row, at = "", 0
    for event, text in zip(events, texts, strict=True):
        start, stop = round(event.start * scale), round(event.end * scale)
        row += _cell("", start - at, fills[0]) + _cell(text, stop - start, fills[1])
        at = stop
    return row + _cell("", columns - at, fills[0])


def _cell(text: str, columns: int, fill: str) -> str:
    """Return a text padded to `columns` columns, the last of which is a gap.

    A text that does not fit is cut to its first letter; of a note, only a star at its end is kept.
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
    """Return the row of times at their columns. A time that does not fit into its band is left out."""
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
    makespan = (
        f"makespan {simulation.makespan:.6g} ms, of which a stage computes {simulation.busy / len(plan.by_stage):.6g}: "
        f"bubble {100 * simulation.bubble:.1f}%"
    )
    return [legend(plan), makespan, *holds(plan, costs)]


def legend(plan: Plan) -> str:
    kinds = {
        LETTERS[type(instruction)] for instructions in plan.by_stage for instruction in instructions
    }
    return (
        ", ".join(f"{kind} {meaning}" for kind, meaning in NAMES.items() if kind in kinds)
        + ", dots idle"
        + ("; chunks of a stage a, b, ..." if len(plan.stage_of) > len(plan.by_stage) else "")
    )


def holds(plan: Plan, costs: Sequence[Cost]) -> list[str]:
    """Return lines with each stage's peak memory of activations, in micro-batches and in MB.

    costs  by chunk of the model
    """
    peaks = [peak(instructions, costs) for instructions in plan.by_stage]
    held = (
        "micro-batches"
        if len(plan.stage_of) == len(plan.by_stage)
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


def halves_of(plan: Plan, is_whole: bool) -> list[str]:
    """Return a line that says whether `train` runs the chart's backwards.

    plan  as `train` runs it
    """
    if not any(isinstance(i, BackwardWeight) for order in plan.by_stage for i in order):
        return []
    if is_whole:
        return ["backwards are whole, as in textbooks; `train` cuts them into B and W"]
    return [
        "backwards are cut into B and W, as in `train`; --whole-backward draws them as textbooks do"
    ]


def listed(numbers: Iterable[float]) -> str:
    texts = [f"{number:.4g}" for number in numbers]
    if len(texts) > MOST_SHOWN:
        texts[ENDS:-ENDS] = [f"... ({several(len(texts) - 2 * ENDS, 'stage')})"]
    return ", ".join(texts)


class Stream(NamedTuple):
    """A simulated asynchronous pipeline.

    plan           instructions of all simulated steps
    micro_batches  number in a step
    every          number of micro-batches between two updates, as in `memory.weights`
    costs          of each stage
    drawn          simulation of the first steps, which later ones follow without a gap
    step_ms        milliseconds of a step in the steady state
    fill_ms        milliseconds from the first forward of the first stage to that of the last stage
    """

    name: str
    plan: Plan
    micro_batches: int
    every: int
    costs: Sequence[Cost]
    drawn: Simulation
    step_ms: float
    fill_ms: float

    @property
    def stages(self) -> int:
        return len(self.plan.by_stage)

    def notes(self) -> list[list[str]]:
        """Return, by stage and drawn instruction, the version of its weights; * behind it marks an
        update.
        """
        return [
            [
                f"{each.used}{'*' * each.is_updated}"
                for each in weights(instructions, self.every)[: len(events)]
            ]
            for instructions, events in zip(self.plan.by_stage, self.drawn.timeline, strict=True)
        ]

    @property
    def busy_ms(self) -> float:
        """Milliseconds of a step in which a stage computes, as the mean over the stages."""
        return self.micro_batches * sum(sum(cost[:3]) for cost in self.costs) / self.stages

    @property
    def idle(self) -> float:
        return max(0.0, 1 - self.busy_ms / self.step_ms)

    @property
    def title(self) -> str:
        return (
            f"{self.name}: {several(self.stages, 'stage')}, "
            f"{several(self.micro_batches, 'micro-batch', 'micro-batches')} "
            f"a step; the first {DRAWN} steps of a stream that goes on"
        )

    def summary(self) -> list[str]:
        lists, every = self.plan.by_stage, self.every
        updates = self.micro_batches // (every or 1)
        return [
            legend(self.plan),
            MEANING,
            f"a step in the steady state {self.step_ms:.6g} ms, of which a stage computes "
            f"{self.busy_ms:.6g}: idle {100 * self.idle:.1f}%, "
            "no bubble between steps",
            "the pipe fills at the start, and after evaluations and checkpoints: the last stage begins "
            f"after {self.fill_ms:.6g} ms",
            f"{several(updates, 'update')} a step on each stage",
            "versions of the weights that are held, by stage: "
            + listed(versions(instructions, every) for instructions in lists),
            "staleness of a gradient when it is applied, by stage: "
            + listed(staleness(instructions, every) for instructions in lists)
            + " updates",
            *holds(self.plan, self.costs),
        ]


def stream(
    name: str,
    stages: int | None,
    micro_batches: int | None,
    chunks: int | None,
    costs: Sequence[Cost],
    transfer: float = 0,
    receive: float = 0,
    is_eager: bool = False,
    overhead: float = 0,
) -> Stream:
    """Simulate an asynchronous schedule, one of STREAMS. Times are in ms.

    costs                                  of each stage
    transfer, receive, is_eager, overhead  as in `simulate`
    raises                                 ConfigError if a step has fewer micro-batches than stages
    """
    step = find_plan(name, stages, micro_batches, chunks)
    p, m = len(step.by_stage), step.micro_batches
    if m < p:
        raise ConfigError(
            "A stream has at least as many micro-batches in a step as stages, "
            f"but these are {m} and {p}.",
            f"Take --micro-batches {p} or more.",
        )
    every = STREAMS[name].every
    steps = DRAWN + 2 + -(-2 * p // m)
    plan = find_plan(name, p, steps * m, chunks)
    simulation = simulate(with_messages(plan), costs, transfer, receive, is_eager, overhead)
    starts = {
        event.instruction.micro: event.start
        for event in simulation.timeline[0]
        if isinstance(event.instruction, Forward)
    }
    end = next(
        event.end
        for event in simulation.timeline[0]
        if event.instruction.micro == DRAWN * m - 1
        and isinstance(event.instruction, BackwardWeight | Backward)
    )
    drawn = tuple(
        tuple(
            Event(event.start, min(event.end, end), event.instruction)
            for event in events
            if event.start < end
        )
        for events in simulation.timeline
    )
    return Stream(
        name,
        plan,
        m,
        m if every and every(p) else 0,
        costs,
        Simulation(drawn, ()),
        starts[(steps - 1) * m] - starts[(steps - 2) * m],
        simulation.timeline[-1][0].start,
    )


def draw(
    plan: Plan, simulation: Simulation, title: str, path: Path, notes: Sequence[Sequence[str]] = ()
) -> list[Path]:
    """Draw a row of boxes for each stage over time in ms; each box has the number of its micro-batch.

    The later chunks of a stage are paler. A time that one picture for a wall has no room for is
    drawn in several.

    notes    of an asynchronous pipeline: as `Stream.notes` returns them
    returns  the files: the path itself, or NAME-1.png and so on
    """
    events = [event for stage_events in simulation.timeline for event in stage_events]
    shortest = min(event.end - event.start for event in events if event.end > event.start)
    inches = simulation.makespan / shortest * CELL
    has_room = DOWN / len(plan.by_stage) > CELL * (2 if notes else 1)
    files = numbered(path, min(math.ceil(inches / ACROSS), MOST_PICTURES) if has_room else 1)
    each = simulation.makespan / len(files)
    for number, file in enumerate(files):
        part = number * each, (number + 1) * each
        _draw(plan, simulation, title, file, notes, part, has_room)
    return files


def _draw(
    plan: Plan,
    simulation: Simulation,
    title: str,
    path: Path,
    notes: Sequence[Sequence[str]],
    part: tuple[float, float],
    has_room: bool,
) -> None:
    """Draw a part of the time, from its first to its last ms.

    has_room  whether the row of a stage has room for numbers
    """
    from matplotlib.patches import Patch

    inch = (part[1] - part[0]) / ACROSS
    figure, axes = subplots()
    for stage, stage_events in enumerate(simulation.timeline):
        chunks = [chunk for chunk, stage_of in enumerate(plan.stage_of) if stage_of == stage]
        for event, (start, end, instruction) in enumerate(stage_events):
            if end < part[0] or start > part[1]:
                continue
            colour = PHASES[LETTERS[type(instruction)]]
            alpha = 1 - 0.6 * chunks.index(instruction.chunk) / len(chunks)
            box = {"color": colour, "alpha": alpha, "edgecolor": "white", "linewidth": 0.5}
            axes.barh(stage, end - start, 0.9, start, **box)
            if has_room and (end - start) / inch > CELL / 2:
                version = f"\nv{notes[stage][event].rstrip('*')}" if notes else ""
                place = {"ha": "center", "va": "center", "fontsize": 13, "clip_on": True}
                axes.text((start + end) / 2, stage, f"{instruction.micro}{version}", **place)
            if notes and notes[stage][event].endswith("*"):
                axes.plot(end, stage + 0.45, "^", color="black", markersize=6, zorder=3)
    has_micros = any(text.get_text() for text in axes.texts)
    axes.set(
        xlabel="time, ms" + "; in each box its micro-batch" * has_micros,
        xlim=part,
        yticks=(shown := range(0, len(plan.by_stage), -(-len(plan.by_stage) // 20))),
        yticklabels=[f"stage {stage}" for stage in shown],
    )
    axes.set_title(wrapped(title))
    axes.invert_yaxis()
    kinds = {LETTERS[type(event.instruction)] for row in simulation.timeline for event in row}
    handles: list[Any] = [
        Patch(color=PHASES[kind], label=NAMES[kind]) for kind in NAMES if kind in kinds
    ]
    if notes:
        handles += axes.plot([], [], "k^", label="update: makes the next version (v)")
    if len(plan.stage_of) > len(plan.by_stage):
        handles.append(
            Patch(color=PHASES["F"], alpha=0.4, label="paler: a later chunk of the stage")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    save(figure, path)
