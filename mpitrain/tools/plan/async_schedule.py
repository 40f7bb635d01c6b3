"""Preview of an asynchronous pipeline (PipeDream): a chart of two steps, and steady-state figures.

The pipeline does not drain between steps. More steps are simulated than drawn, so that the last
simulated step shows the steady state.
"""

from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.pipeline.instructions import Backward, BackwardWeight, Forward, Plan, with_messages
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.pipeline.simulate import (
    Cost,
    Event,
    Simulation,
    simulate,
    staleness,
    versions,
    weights,
)
from mpitrain.tools.plan.chart import holds, letters, listed
from mpitrain.tools.plan.words import several

DRAWN = 2
"""Number of steps that are drawn, from an empty pipeline."""

MEANING = (
    "version: of its weights, which a stage computes with; * an update follows, which makes the "
    "next version"
)


class Stream(NamedTuple):
    """Simulation of an asynchronous pipeline.

    plan           of all simulated steps
    micro_batches  of a step
    every          micro-batches of an update, as in `memory.weights`
    drawn          only the first steps; the stages continue with the next one
    step_ms        from step to step in the steady state
    fill_ms        from the first forward of the pipeline to the first forward of its last stage
    """

    name: str
    plan: Plan
    micro_batches: int
    every: int
    drawn: Simulation
    step_ms: float
    fill_ms: float

    @property
    def stages(self) -> int:
        return len(self.plan.lists)

    def notes(self) -> list[list[str]]:
        """Return the weight version of each drawn instruction, with * if an update follows."""
        return [
            [
                f"{each.used}{'*' * each.is_updated}"
                for each in weights(instructions, self.every)[: len(events)]
            ]
            for instructions, events in zip(self.plan.lists, self.drawn.timeline, strict=True)
        ]

    def idle(self, cost: Cost) -> float:
        """Return the fraction of a steady-state step in which stages do not compute."""
        return max(0.0, 1 - self.micro_batches * sum(cost[:3]) / self.step_ms)


def stream(
    name: str,
    stages: int | None,
    micro_batches: int | None,
    chunks: int | None,
    cost: Cost,
    transfer: float = 0,
    receive: float = 0,
    is_eager: bool = False,
    overhead: float = 0,
) -> Stream:
    """Simulate a schedule of STREAMS; times are in ms, the last four arguments as in `simulate`.

    raises  ConfigError if a step has fewer micro-batches than stages
    """
    step = find_plan(name, stages, micro_batches, chunks)
    p, m = len(step.lists), step.micro_batches
    if m < p:
        raise ConfigError(
            "A stream has at least as many micro-batches in a step as stages, "
            f"but these are {m} and {p}.",
            f"Take --micro-batches {p} or more.",
        )
    every = STREAMS[name].every
    steps = DRAWN + 2 + -(-2 * p // m)
    plan = find_plan(name, p, steps * m, chunks)
    simulation = simulate(with_messages(plan), [cost] * p, transfer, receive, is_eager, overhead)
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
        Simulation(drawn, ()),
        starts[(steps - 1) * m] - starts[(steps - 2) * m],
        simulation.timeline[-1][0].start,
    )


def title(preview: Stream) -> str:
    return (
        f"{preview.name}: {several(preview.stages, 'stage')}, "
        f"{several(preview.micro_batches, 'micro-batch', 'micro-batches')} "
        f"a step; the first {DRAWN} steps of a stream that goes on"
    )


def summary(preview: Stream, cost: Cost) -> list[str]:
    """Return lines with the legend of the chart and the figures of the pipeline."""
    lists, every = preview.plan.lists, preview.every
    updates = preview.micro_batches // (every or 1)
    return [
        letters(preview.plan),
        MEANING,
        f"a step in the steady state {preview.step_ms:.6g} ms, of which a stage computes "
        f"{preview.micro_batches * sum(cost[:3]):.6g}: idle {100 * preview.idle(cost):.1f}%, "
        "no bubble between steps",
        "the pipe fills at the start, and after evaluations and checkpoints: the last stage begins "
        f"after {preview.fill_ms:.6g} ms",
        f"{several(updates, 'update')} a step on each stage",
        "versions of the weights that are held, by stage: "
        + listed(versions(instructions, every) for instructions in lists),
        "staleness of a gradient when it is applied, by stage: "
        + listed(staleness(instructions, every) for instructions in lists)
        + " updates",
        *holds(preview.plan, [cost] * preview.stages),
    ]
