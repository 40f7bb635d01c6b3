"""A pipeline whose stages update by themselves: two steps of its stream, and the stream's figures.

A stream has no end of a step at which the pipe runs empty. It is simulated for more steps than are
drawn, so that the last of them shows the steady state.
"""

from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.pipeline.instructions import Backward, BackwardWeight, Forward, Plan, with_messages
from mpitrain.pipeline.memory import staleness, versions, weights
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.pipeline.simulate import Cost, Event, Simulation, simulate
from mpitrain.plan.chart import holds, letters, listed
from mpitrain.plan.words import several

DRAWN = 2
"""Steps that are drawn, from an empty pipe."""

MEANING = (
    "version: of its weights, which a stage computes with; * an update follows, which makes the "
    "next version"
)


class Stream(NamedTuple):
    """A stream that was simulated.

    plan           of all steps that were simulated
    micro_batches  of a step
    every          micro-batches of an update, as of `memory.weights`
    drawn          the first steps alone; stages go on with the next one
    step_ms        from step to step, once the pipe is full
    fill_ms        from the first forward of the stream to the first one of the last stage
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
        """The version that each drawn instruction uses, with * where an update follows."""
        return [
            [
                f"{each.used}{'*' * each.is_updated}"
                for each in weights(mine, self.every)[: len(events)]
            ]
            for mine, events in zip(self.plan.lists, self.drawn.timeline, strict=True)
        ]

    def idle(self, cost: Cost) -> float:
        """The share of a step in which stages do not compute, once the pipe is full."""
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
    """Simulate a schedule of STREAMS; times in ms, and the last four arguments as of `simulate`.

    raises  ConfigError for fewer micro-batches in a step than stages
    """
    step = find_plan(name, stages, micro_batches, chunks)
    p, m = len(step.lists), step.micro_batches
    if m < p:
        raise ConfigError(
            "A stream has at least as many micro-batches in a step as stages, "
            f"but these are {m} and {p}.",
            f"Take --micro-batches {p} or more.",
        )
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
            for event in mine
            if event.start < end
        )
        for mine in simulation.timeline
    )
    return Stream(
        name,
        plan,
        m,
        m if STREAMS[name](p) else 0,
        Simulation(drawn, ()),
        starts[(steps - 1) * m] - starts[(steps - 2) * m],
        simulation.timeline[-1][0].start,
    )


def title(found: Stream) -> str:
    """What is drawn."""
    return (
        f"{found.name}: {several(found.stages, 'stage')}, "
        f"{several(found.micro_batches, 'micro-batch', 'micro-batches')} "
        f"a step; the first {DRAWN} steps of a stream that goes on"
    )


def summary(found: Stream, cost: Cost) -> list[str]:
    """What the signs mean, and the figures of the stream, in words."""
    lists, every = found.plan.lists, found.every
    updates = found.micro_batches // (every or 1)
    return [
        letters(found.plan),
        MEANING,
        f"a step in the steady state {found.step_ms:.6g} ms, of which a stage computes "
        f"{found.micro_batches * sum(cost[:3]):.6g}: idle {100 * found.idle(cost):.1f}%, "
        "no bubble between steps",
        "the pipe fills at the start, and after evaluations and checkpoints: the last stage begins "
        f"after {found.fill_ms:.6g} ms",
        f"{several(updates, 'update')} a step on each stage",
        "versions of the weights that are held, by stage: "
        + listed(versions(mine, every) for mine in lists),
        "staleness of a gradient when it is applied, by stage: "
        + listed(staleness(mine, every) for mine in lists)
        + " updates",
        *holds(found.plan, [cost] * found.stages),
    ]
