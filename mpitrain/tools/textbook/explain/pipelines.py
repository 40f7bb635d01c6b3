"""Topics of pipelines: stages of symbols run a schedule, and its chart fills slot by slot."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import Sentence
from mpitrain.parallel.weight_stashing import PipeDream
from mpitrain.pipeline import schedules
from mpitrain.pipeline.pipeline import Executor
from mpitrain.pipeline.schedule_files import LETTERS, find_plan, write_plan
from mpitrain.pipeline.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Plan,
    training_program,
    with_whole_backwards,
)
from mpitrain.pipeline.simulate import Cost, Event, simulate, staleness, versions
from mpitrain.run.trainer import Trainer
from mpitrain.tools.plan.schedule import draw
from mpitrain.tools.textbook.explain import toy
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

MICRO_BATCHES, FEWEST = 4, 3
"""Micro-batches of a step: if one step is shown, and the least number if several are."""
IDLE = "."
"""A slot in which a stage computes nothing."""


LEGEND = (
    "F0: forward of micro-batch 0; B: input half of its backward; W: weight half; BW: both; . idle. "
    "F, B and W take a slot each, BW two."
)
LEGEND_OF_VERSIONS = (
    "F0v1: forward of micro-batch 0, with the weights after 1 update; B: input half of its backward; "
    "W: weight half; BW: both; . idle."
)


class ShownSchedule(NamedTuple):
    """A schedule to show.

    schedule   its name in the table of schedules
    sentences  the idea, a sentence each
    rule       the function that orders the instructions, shown as source
    words      fraction of idle slots, as a formula in words
    idle       fraction of idle slots, as a function of (stages, micro-batches of all steps)
    saved      most micro-batches saved on stage 0: formula in words, and as a function of (p, m)
    steps      number of training steps
    is_whole   whether a backward is one instruction, as in textbooks; `train` cuts it where the
               schedule does
    """

    schedule: str
    sentences: Sequence[str]
    rule: Any
    words: str
    idle: Callable[[int, int], float]
    saved: tuple[str, Callable[[int, int], int]] = ("min(p, m)", min)
    steps: int = 1
    is_whole: bool = False


class _Done(NamedTuple):
    """An instruction that a stage has executed, and the number of updates that its weights had had."""

    kind: str
    micro: int
    version: int


class _Stage(NamedTuple):
    """What a stage executed in the run, and the bytes that it sent to other stages."""

    done: Sequence[_Done]
    nbytes: int


def record(shown: ShownSchedule, setting: TopicSetting) -> Explanation:
    p, each = setting.ranks, _micro_batches(shown, setting.ranks)
    m = shown.steps * each
    plan = find_plan(shown.schedule, p, m, 1)
    plan = with_whole_backwards(plan) if shown.is_whole else plan
    with tempfile.TemporaryDirectory() as folder:
        name = shown.schedule
        if shown.is_whole:
            name = f"{folder}/whole.json"
            write_plan(Path(name), plan)
        stages: list[_Stage] = run_ranks(p, _run, shown, name)
    program = training_program(plan)
    simulation = simulate(program, [Cost()] * p)
    timeline = simulation.timeline
    executed = Plan(
        plan.stage_of, tuple(tuple(e.instruction for e in events) for events in timeline)
    )
    frames = _frames(timeline, [stage.done for stage in stages], shown.steps > 1)
    slots = len(frames) - 1
    idle = sum(cell == IDLE for cells in frames[-1].cells for cell in cells[:slots])
    row = 8 * toy.VECTOR
    formulas = [
        CountedFormula(
            "bytes of activations and gradients between stages",
            sum(stage.nbytes for stage in stages),
            "2 (p-1) m A",
            2 * (p - 1) * m * row,
        ),
        CountedFormula(
            "most micro-batches saved on stage 0",
            _most_saved(stages[0].done),
            shown.saved[0],
            shown.saved[1](p, m),
        ),
        CountedFormula(
            "idle slots, as a fraction", idle / (p * slots), shown.words, shown.idle(p, m)
        ),
    ]
    if shown.steps > 1:
        formulas += [
            CountedFormula(
                "updates between a gradient and its use, at most, on stage 0",
                _stalest(stages[0].done),
                "p-1",
                staleness(executed.by_stage[0]),
            ),
            CountedFormula(
                "versions of the weights on stage 0",
                _most_versions(stages[0].done),
                "p",
                versions(executed.by_stage[0]),
            ),
        ]
    return Explanation(
        [Sentence(sentence, p=p, m=m) for sentence in shown.sentences],
        LEGEND_OF_VERSIONS if shown.steps > 1 else LEGEND,
        [Sentence("stage {s}", s=stage) for stage in range(p)],
        [
            Columns("time slots", tuple(str(slot) for slot in range(slots))),
            Columns("activations", ("saved",)),
        ],
        frames,
        formulas,
        [SourceLines.of(shown.rule), SourceLines.of(Executor)],
        f"mpitrain plan schedule --schedule {shown.schedule} --stages {p} --micro-batches {each}"
        + " --whole-backward" * shown.is_whole,
        ("tests/unit/pipeline/test_schedules.py", "tests/ranks/pipeline"),
        charted=True,
        chart=partial(
            draw,
            executed,
            simulation,
            f"{shown.schedule}: stages wait for {idle / (p * slots):.1%} of the time (bubble); "
            f"stage 0 saves at most {_most_saved(stages[0].done)} micro-batches",
            notes=_notes(simulation.timeline, stages) if shown.steps > 1 else (),
        ),
    )


def _micro_batches(shown: ShownSchedule, stages: int) -> int:
    """Return the number of micro-batches in a step. An asynchronous pipeline has one per stage, or
    more.
    """
    return MICRO_BATCHES if shown.steps == 1 else max(FEWEST, stages)


def _run(transport: Transport, shown: ShownSchedule, schedule: str) -> _Stage:
    m = _micro_batches(shown, transport.size)
    symbols = toy.basis(shown.steps, m, has_inputs=True)
    numbers = {
        f"{letter}{row}": step * m + row
        for letters in (toy.STEPS, toy.INPUTS)
        for step, letter in enumerate(letters)
        for row in range(m)
    }
    done: list[_Done] = []
    used: dict[int, int] = {}

    def seen(layer_pass: toy.Pass) -> None:
        micro = numbers[symbols.read(np.sign(layer_pass.rows))]
        if layer_pass.kind == "forward":
            # Each update has subtracted the gradient of one micro-batch.
            used[micro] = int(np.count_nonzero(layer_pass.array[1 : symbols.size]))
            done.append(_Done("F", micro, used[micro]))
        else:
            done.append(_Done("B" if layer_pass.kind == "input" else "W", micro, used[micro]))

    config = toy.configured(
        f"layout.pp={transport.size}",
        f"pipeline.schedule={schedule}",
        f"batch.size={m}",
        f"batch.micro_batches={m}",
        f"run.steps={shown.steps}",
    )
    units = toy.units(transport.size, toy.VECTOR, symbols, seen)
    trainer = Trainer(transport, units, config, toy.SymbolLoss())
    source, nbytes = toy.SymbolSource(symbols), 0
    for step in range(shown.steps):
        trainer.step(step, *trainer.replica.batch(source, step))
        if step == shown.steps - 1:
            trainer.sync_parameters()
        nbytes += sum(size for _, size in trainer.pipe.channel.sent.values())
    return _Stage(done, nbytes)


def _frames(
    timeline: Sequence[Sequence[Event]], done: Sequence[Sequence[_Done]], shows_version: bool
) -> list[Frame]:
    """Return the chart after each slot. The simulation says in which slot an instruction is; the run
    says what is written there.

    raises  AssertionError if the run had another order than the simulation
    """
    slots = max(round(events[-1].end) for events in timeline)
    charts, saved = [], []
    for events, passes in zip(timeline, done, strict=True):
        row, alive = [IDLE] * slots, dict[int, None]()
        live: list[tuple[int, ...]] = [()] * slots
        rest = iter(passes)
        at = 0
        for event in events:
            start, end = round(event.start), round(event.end)
            cell = _cell(event.instruction, rest, shows_version)
            live[at:start] = [tuple(alive)] * (start - at)
            if isinstance(event.instruction, Forward):
                alive[event.instruction.micro] = None
            live[start:end] = [tuple(alive)] * (end - start)
            if isinstance(event.instruction, Backward | BackwardWeight):
                del alive[event.instruction.micro]
                live[end - 1] = tuple(alive)
            row[start:end] = [cell] * (end - start)
            at = end
        live[at:] = [tuple(alive)] * (slots - at)
        assert next(rest, None) is None
        charts.append(row)
        saved.append(live)
    frames = [Frame("start", tuple(("",) * (slots + 1) for _ in charts))]
    for slot in range(slots):
        frames.append(
            Frame(
                Sentence("after slot {k}", k=slot),
                tuple(
                    (*row[: slot + 1], *("",) * (slots - slot - 1), " ".join(map(str, live[slot])))
                    for row, live in zip(charts, saved, strict=True)
                ),
            )
        )
    return frames


def _cell(instruction: Compute, rest: Any, shows_version: bool) -> str:
    """Return the text of an instruction.

    rest  iterator over what the stage executed; the instruction is checked against its next entries
    """
    kinds = {Forward: "F", BackwardInput: "B", BackwardWeight: "W", Backward: "BW"}
    passes = [next(rest) for _ in kinds[type(instruction)]]
    taken = "".join(entry.kind for entry in passes), {entry.micro for entry in passes}
    assert taken == (kinds[type(instruction)], {instruction.micro}), (taken, instruction)
    version = f"v{passes[0].version}" if shows_version else ""
    return f"{LETTERS[type(instruction)]}{instruction.micro}{version}"


def _notes(
    timeline: Sequence[Sequence[Event]], stages: Sequence[_Stage]
) -> Sequence[Sequence[str]]:
    """Return for each event the version of the weights; * if an update follows. As `Stream.notes`."""
    notes = []
    for events, stage in zip(timeline, stages, strict=True):
        version = {entry.micro: entry.version for entry in stage.done}
        notes.append(
            [
                f"{version[event.instruction.micro]}"
                + "*" * isinstance(event.instruction, Backward | BackwardWeight)
                for event in events
            ]
        )
    return notes


def _most_saved(done: Sequence[_Done]) -> int:
    live = most = 0
    for entry in done:
        live += (entry.kind == "F") - (entry.kind == "W")
        most = max(most, live)
    return most


def _stalest(done: Sequence[_Done]) -> int:
    """Return the largest number of updates between the forward of a micro-batch and its own update."""
    updates = most = 0
    for entry in done:
        if entry.kind == "W":
            most = max(most, updates - entry.version)
            updates += 1
    return most


def _most_versions(done: Sequence[_Done]) -> int:
    """Return the largest number of versions of the weights that a stage holds at once.

    It holds those of saved micro-batches, and the newest.
    """
    live: dict[int, int] = {}
    updates = most = 0
    for entry in done:
        if entry.kind == "F":
            live[entry.micro] = entry.version
        elif entry.kind == "W":
            del live[entry.micro]
            updates += 1
        most = max(most, len({updates, *live.values()}))
    return most


def _topic(title: str, shown: ShownSchedule) -> Topic:
    return Topic(title, partial(record, shown), ranks=3, most=4)


TOPICS = {
    "gpipe": _topic(
        "GPipe: all forwards, then all backwards",
        ShownSchedule(
            "gpipe",
            (
                "The model is cut into {p} stages, the batch into {m} micro-batches.",
                "A stage sends activations to the next stage, and gradients to the one before.",
                "All micro-batches go forward before the first one goes back.",
                "So a stage saves the activations of all {m} micro-batches.",
                "Stages wait at both ends of a step: this is the bubble.",
            ),
            schedules.gpipe,
            "(p-1) / (m+p-1)",
            lambda p, m: (p - 1) / (m + p - 1),
            saved=("m", lambda p, m: m),
        ),
    ),
    "1f1b": _topic(
        "1F1B: one forward, one backward",
        ShownSchedule(
            "1f1b",
            (
                "A stage runs a backward as soon as one is ready, before the next forward.",
                "So it saves at most p micro-batches, however many a step has.",
                "A backward is whole here, as in textbooks. So the bubble is that of GPipe.",
                "`train` cuts a backward into two halves: see 1f1b-cut.",
            ),
            schedules.one_f_one_b,
            "(p-1) / (m+p-1)",
            lambda p, m: (p - 1) / (m + p - 1),
            is_whole=True,
        ),
    ),
    "1f1b-cut": _topic(
        "1F1B as train runs it: a backward is cut into two halves",
        ShownSchedule(
            "1f1b",
            (
                "The order is that of 1F1B, but a backward has two halves, B and W.",
                "B comes first, since another stage waits for its result. This shortens the bubble.",
                "No stage waits for B of stage 0, so stage 0 runs both halves at once.",
                "A stage saves as many micro-batches as with whole backwards.",
            ),
            schedules.one_f_one_b,
            "2 (p-1) / (3m + 2 (p-1))",
            lambda p, m: 2 * (p - 1) / (3 * m + 2 * (p - 1)),
        ),
    ),
    "zero-bubble": _topic(
        "Zero bubble (ZB-H1): weight halves fill the bubble",
        ShownSchedule(
            "zero-bubble",
            (
                "No other stage waits for a weight half W, so W can come later.",
                "ZB-H1 delays W of 1F1B to slots that would be idle at the end.",
                "A stage saves no more micro-batches than p.",
            ),
            schedules.zero_bubble,
            "i / (3m+i), i = max(p-1, 2p-1-m)",
            lambda p, m: max(p - 1, 2 * p - 1 - m) / (3 * m + max(p - 1, 2 * p - 1 - m)),
        ),
    ),
    "async": _topic(
        "Asynchronous pipeline (PipeDream): no bubble between steps",
        ShownSchedule(
            "async",
            (
                "A stage updates after every micro-batch, and never waits for a step to end.",
                "A backward must use the weights of its forward: older versions are saved.",
                "Stage 0 has p versions, and its gradients are up to p-1 updates late.",
                "Idle slots are only at the start and at the end of training.",
            ),
            PipeDream,
            "2 (p-1) / (3m + 2 (p-1))",
            lambda p, m: 2 * (p - 1) / (3 * m + 2 * (p - 1)),
            steps=2,
        ),
    ),
}
