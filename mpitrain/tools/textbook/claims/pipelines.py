"""Claims about pipeline schedules: idle time, memory and staleness of simulated instructions.

A forward, and each half of a backward, takes 1 unit of time unless a setting says otherwise.
"""

from collections.abc import Sequence

from mpitrain.pipeline.partition import balanced
from mpitrain.pipeline.schedules import STREAMS, plan_of, with_messages, with_whole_backwards
from mpitrain.pipeline.simulate import Cost, Simulation, peak, simulate, staleness
from mpitrain.tools.plan.schedule import stream
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import PLAIN_MOMENTUM, counted, memory, trained

NARAYANAN = "Narayanan et al., Efficient Large-Scale Language Model Training, SC 2021"
QI = "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024"


def simulated(
    schedule: str,
    stages: int,
    micro_batches: int,
    costs: Sequence[Cost] = (),
    chunks: int | None = None,
    receive: float = 0,
    overhead: float = 0,
    is_whole: bool = False,
) -> Simulation:
    """Simulate one step.

    costs     by chunk; empty: the 3 units of a stage are divided evenly among its chunks
    is_whole  whether a backward is one instruction, as in textbooks
    """
    plan = plan_of(schedule, stages, micro_batches, chunks)
    plan = with_whole_backwards(plan) if is_whole else plan
    share = len(plan.by_stage) / len(plan.stage_of)
    every = costs or [Cost(share, share, share)] * len(plan.stage_of)
    return simulate(with_messages(plan), every, receive=receive, overhead=overhead)


def idle_units(simulation: Simulation) -> float:
    return simulation.makespan * simulation.bubble


def more_micro_batches(overhead: float) -> Figures:
    idle_2, idle_64 = (
        simulated("gpipe", 4, m, [Cost(2 / m, 2 / m, 2 / m)] * 4, overhead=overhead).bubble
        for m in (2, 64)
    )
    return Figures(idle_64 / idle_2, {"% idle, 2": 100 * idle_2, "% idle, 64": 100 * idle_64})


def fewer_stages(few: int, many: int, units: int) -> Figures:

    def bubble(stages: int) -> float:
        sizes = [(s + 1) * units // stages - s * units // stages for s in range(stages)]
        return simulated("gpipe", stages, 16, [Cost(n, n, n) for n in sizes]).bubble

    return Figures(
        bubble(few) / bubble(many),
        {"% idle, few stages": 100 * bubble(few), "% idle, many stages": 100 * bubble(many)},
    )


def async_memory(schedule: str) -> Figures:
    job = ("layout.pp=4", "model.layers=4", "batch.size=32", "batch.micro_batches=16")
    late, synchronous = (
        memory(counted(*job, f"pipeline.schedule={name}")) for name in ("async", schedule)
    )
    return Figures(
        late / synchronous, {"MB, asynchronous": late / 1e6, "MB, synchronous": synchronous / 1e6}
    )


def gpipe_formula(stages: int, slowest: float) -> Figures:
    costs = [Cost(1, 1, 1)] * (stages - 1) + [Cost(slowest, slowest, slowest)]
    bubble, formula = simulated("gpipe", stages, 8, costs).bubble, (stages - 1) / (8 + stages - 1)
    return Figures(
        abs(bubble - formula), {"% idle": 100 * bubble, "% idle by formula": 100 * formula}
    )


def as_gpipe(stages: int, is_whole: bool) -> Figures:
    idle_1f1b, idle_gpipe = (
        simulated(name, stages, 8, is_whole=is_whole).bubble for name in ("1f1b", "gpipe")
    )
    return Figures(
        abs(idle_1f1b - idle_gpipe),
        {"% idle, 1F1B": 100 * idle_1f1b, "% idle, GPipe": 100 * idle_gpipe},
    )


def slow_stage(schedule: str, partition: str, slowest: float) -> Figures:
    """Compare 4 stages, the last of which takes `slowest` times as long for a layer, with equal ones.

    28 layers, each of 1 ms for a forward and for each half of its backward; 16 micro-batches a step.
    The losses are of a small job with 16 updates of 8 rows each. No partition changes them.
    """
    speeds = [1, 1, 1, 1 / slowest] if partition == "time" else None
    layers = balanced([1.0] * 28, 4, speeds)
    times = [count * (slowest if stage == 3 else 1) for stage, count in enumerate(layers)]

    def idle_and_ms(each: Sequence[float]) -> tuple[float, float]:
        costs = [Cost(ms, ms, ms) for ms in each]
        if schedule in STREAMS:
            streamed = stream(schedule, 4, 16, None, costs)
            return streamed.idle, streamed.step_ms
        step = simulated(schedule, 4, 16, costs)
        return step.bubble, step.makespan

    (idle, ms), (idle_equal, ms_equal) = idle_and_ms(times), idle_and_ms([7.0] * 4)
    # An asynchronous pipeline updates after each of the 4 micro-batches.
    rows, steps = (32, 4) if schedule in STREAMS else (8, 16)
    job = ("layout.pp=4", "model.layers=4", f"pipeline.schedule={schedule}")
    loss = trained(
        4,
        *job,
        f"batch.size={rows}",
        "batch.micro_batches=4",
        f"run.steps={steps}",
        *PLAIN_MOMENTUM,
    ).val_loss
    return Figures(
        ms_equal / ms,
        {
            "% idle": 100 * idle,
            "% idle, equal stages": 100 * idle_equal,
            "steps / s": 1e3 / ms,
            "loss after 16 updates": loss,
        },
    )


def live(schedule: str, micro_batches: int) -> Figures:
    most = peak(plan_of(schedule, 4, micro_batches).by_stage[0], [Cost()] * 4).live
    return Figures(most, {"micro-batches saved": most})


def interleaved(chunks: int, receive: float) -> Figures:
    whole = 3.0 * (4 - 1)
    idle = idle_units(simulated("interleaved", 4, 16, chunks=chunks, receive=receive))
    return Figures(
        abs(idle * chunks / whole - 1),
        {"idle units, one chunk": whole, "idle units, interleaved": idle},
    )


def zero_bubble(weight: float) -> Figures:
    costs = [Cost(1, 1, weight)] * 4
    idle_zb, idle_gpipe = (
        idle_units(simulated(name, 4, 16, costs)) for name in ("zero-bubble", "gpipe")
    )
    return Figures(
        idle_zb / idle_gpipe, {"idle units, zero-bubble": idle_zb, "idle units, GPipe": idle_gpipe}
    )


def zero_bubble_memory(stage: int) -> Figures:
    late, early = (
        peak(plan_of(name, 4, 16).by_stage[stage], [Cost()] * 4).live
        for name in ("zero-bubble", "1f1b")
    )
    return Figures(late / early, {"saved, zero-bubble": late, "saved, 1F1B": early})


def stale(schedule: str) -> Figures:
    every = STREAMS[schedule].every
    late = staleness(plan_of(schedule, 4, 32).by_stage[0], every(4) if every else 0)
    return Figures(abs(late - 3), {"updates late": late})


CLAIMS = {
    "more-micro-batches": Claim(
        "The more micro-batches, the more idle time.",
        "a common slip; Huang et al., GPipe, NeurIPS 2019, states the opposite",
        "idle time with 64 micro-batches / with 2",
        (">", 1),
        more_micro_batches,
        (
            usual("no cost of an instruction itself", overhead=0.0),
            other("each instruction costs {overhead} units more", overhead=0.2),
        ),
        "mpitrain plan schedule --schedule gpipe --micro-batches 64",
    ),
    "fewer-stages": Claim(
        "The fewer stages, the more idle time.",
        "a common slip; Huang et al., GPipe, NeurIPS 2019, states the opposite",
        "idle time of few stages / of many",
        (">", 1),
        fewer_stages,
        (
            usual("{few} or {many} stages of {units} equal layers", few=2, many=8, units=8),
            other("{few} or {many} stages of {units} equal layers", few=2, many=3, units=3),
        ),
        "mpitrain plan schedule --schedule gpipe --stages 2",
    ),
    "async-memory": Claim(
        "Asynchronous pipelines save memory.",
        "a common slip; Narayanan et al., PipeDream, SOSP 2019, saves several versions of weights",
        "memory of PipeDream / of the synchronous schedule",
        ("<", 1),
        async_memory,
        (
            usual("against {schedule}", schedule="gpipe"),
            usual("against {schedule}", schedule="1f1b"),
        ),
        "mpitrain plan memory --pp 4 --set pipeline.schedule=async",
    ),
    "gpipe-bubble": Claim(
        "GPipe's bubble is (p - 1) / (m + p - 1).",
        "Huang et al., GPipe, NeurIPS 2019",
        "difference from the formula",
        ("<=", 1e-9),
        gpipe_formula,
        (
            usual("{stages} equal stages", stages=2, slowest=1.0),
            usual("{stages} equal stages", stages=8, slowest=1.0),
            other("{stages} stages, the last {slowest} times slower", stages=4, slowest=2.0),
        ),
        "mpitrain plan schedule --schedule gpipe --stages 8",
    ),
    "1f1b-bubble": Claim(
        "1F1B has the same bubble as GPipe.",
        NARAYANAN,
        "difference of the idle fractions",
        ("<=", 1e-9),
        as_gpipe,
        (
            usual("{stages} stages, whole backwards", stages=3, is_whole=True),
            usual("{stages} stages, whole backwards", stages=8, is_whole=True),
            other("{stages} stages, backwards cut into B and W", stages=4, is_whole=False),
        ),
        "mpitrain plan schedule --schedule 1f1b --whole-backward",
    ),
    "slow-stage": Claim(
        "A pipeline with one slow stage is as fast as one of equal stages.",
        "a common slip; Narayanan et al., PipeDream, SOSP 2019, section 3.1, balances the stages",
        "steps per second / with equal stages",
        (">", 0.8),
        slow_stage,
        tuple(
            usual(
                "{schedule}, partition={partition}, the last of 4 stages {slowest} times slower",
                schedule=schedule,
                partition=partition,
                slowest=2.0,
            )
            for schedule, partition in (
                ("1f1b", "parameters"),
                ("1f1b", "time"),
                ("async", "parameters"),
                ("async", "time"),
            )
        ),
        "mpitrain plan schedule --schedule async --stages 4 --micro-batches 16 --forward-ms 7,7,7,14",
    ),
    "1f1b-memory": Claim(
        "1F1B saves the activations of at most p micro-batches.",
        NARAYANAN,
        "micro-batches that the first of 4 stages saves",
        ("<=", 4),
        live,
        (
            usual("{schedule}, {micro_batches} micro-batches", schedule="1f1b", micro_batches=8),
            usual("{schedule}, {micro_batches} micro-batches", schedule="1f1b", micro_batches=64),
            other("{schedule}, {micro_batches} micro-batches", schedule="gpipe", micro_batches=8),
        ),
        "mpitrain plan schedule --schedule 1f1b --micro-batches 64 --saved-mb 1",
    ),
    "interleaving": Claim(
        "With v chunks on each stage the bubble is v times smaller.",
        NARAYANAN,
        "difference from one chunk's bubble / v, relative",
        ("<=", 0.01),
        interleaved,
        (
            usual("{chunks} chunks, messages cost nothing", chunks=2, receive=0.0),
            usual("{chunks} chunks, messages cost nothing", chunks=4, receive=0.0),
            other("{chunks} chunks, a message costs {receive} units", chunks=4, receive=0.5),
        ),
        "mpitrain plan schedule --schedule interleaved --chunks 4",
    ),
    "zero-bubble": Claim(
        "ZB-H1 has a third of GPipe's bubble.",
        QI,
        "idle time of ZB-H1 / of GPipe",
        ("<=", 0.34),
        zero_bubble,
        (
            usual("the weight half takes {weight} units", weight=1.0),
            other("the weight half takes {weight} units", weight=0.5),
        ),
        "mpitrain plan schedule --schedule zero-bubble",
    ),
    "zero-bubble-memory": Claim(
        "ZB-H1 saves no more micro-batches than 1F1B.",
        QI,
        "micro-batches saved by ZB-H1 / by 1F1B",
        ("<=", 1),
        zero_bubble_memory,
        (
            usual("stage {stage} of 4, the fullest", stage=0),
            other("stage {stage} of 4, the last", stage=3),
        ),
        "mpitrain plan schedule --schedule zero-bubble --saved-mb 1",
    ),
    "pipedream-staleness": Claim(
        "In an asynchronous pipeline the first stage's gradients are p - 1 updates late.",
        "Narayanan et al., PipeDream, SOSP 2019",
        "difference from p - 1, in updates",
        ("<=", 0),
        stale,
        (
            usual("schedule {schedule}", schedule="async"),
            other("schedule {schedule}", schedule="async-2bw"),
        ),
        "mpitrain plan schedule --schedule async",
    ),
}
