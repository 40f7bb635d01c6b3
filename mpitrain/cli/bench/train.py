"""`mpitrain bench train`: training steps, in turns with other settings or PyTorch, or in many shapes."""

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click

from mpitrain.cli.bench.rows import BenchReport
from mpitrain.cli.job_options import (
    CP,
    DEVICE,
    GEMM,
    PP,
    PRESET,
    SET,
    TP,
    Finite,
    changes,
    configured,
    counted,
    output_option,
)
from mpitrain.cli.session import mpi_session

PEERS = ("torch", "torch-compiled")
"""The peers of the table of shapes, unless the command names some."""
ROW_SECONDS = 120.0
"""The default of --row-seconds."""
SHAPE = {
    "model.layers": 4,
    "model.width": 256,
    "model.heads": 4,
    "model.context": 128,
    "optimizer.clip": 0.0,
    "optimizer.lr": 1e-3,
}
"""The settings of the job: a GPT of which each rank computes a few sequences."""
SEQUENCES = 16
"""Sequences per rank in a step."""
ALONE = [
    "layout.dp=1",
    "layout.tp=1",
    "layout.pp=1",
    "layout.sequence_parallel=false",
    "replication.mode=all-reduce",
    "replication.shard=all",
    "run.delay=",
    "run.inject=",
]
"""Settings that turn the job into a job of one rank."""


class TrainingJob(NamedTuple):
    """The job of `bench train`, and the turns in which it is measured.

    settings  `section.key=value` that change SHAPE or the preset
    blocks    turns of each side
    steps     steps in a turn
    """

    settings: list[str]
    blocks: int
    steps: int
    preset: str | None = None

    def configured(self, ranks: int, more: Sequence[str] = ()) -> Any:
        """Return the configuration.

        ranks  number of ranks, which batch.size depends on
        more   further `section.key=value`
        """
        from mpitrain.config import preset
        from mpitrain.tools.bench.training.steps import WARM_UP

        batch = preset(self.preset).get("batch", {"size": SEQUENCES, "micro_batches": 1})
        rows = batch["size"] // max(1, batch["micro_batches"])
        settings = [*self.settings, *more]
        ours = [
            f"batch.size={rows * ranks}",
            "batch.micro_batches=0",
            f"run.steps={WARM_UP + self.blocks * self.steps}",
        ]
        job = [] if self.preset else settings_of(settings)
        return configured(None, [*job, *ours, *settings], self.preset)


def settings_of(settings: Sequence[str] = ()) -> list[str]:
    """Return the settings of SHAPE, without those of the model if run.init_from has a model."""
    is_given = any(setting.replace(" ", "").startswith("run.init_from=") for setting in settings)
    return [
        f"{key}={value}"
        for key, value in SHAPE.items()
        if not (is_given and key.startswith("model."))
    ]


@click.command("train")
@DEVICE
@GEMM
@CP
@TP
@PP
@click.option(
    "--against",
    "others",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Measure a second job in turns with the first: the same job with this setting "
    "(repeatable; all settings belong to the second job).",
)
@click.option(
    "--alone",
    is_flag=True,
    help="Also measure one rank alone, in turns: it computes the whole batch while the others wait.",
)
@click.option(
    "--peer",
    "peers",
    type=click.Choice(PEERS),
    multiple=True,
    help="Also measure PyTorch, in turns, with its counterpart of the first job's "
    "replication; torch-compiled is DDP under torch.compile (repeatable).",
)
@click.option(
    "--peer-backend",
    "backends",
    type=click.Choice(["gloo", "mpitrain"]),
    multiple=True,
    help="Backend of torch.distributed for each --peer (repeatable).  [default: gloo]",
)
@click.option(
    "--floor", is_flag=True, help="Also measure the matrix products of a step alone, in turns."
)
@click.option(
    "--shapes",
    metavar="all|NAME[,NAME...]",
    help="Measure a table of shapes instead, on 2 ranks, against all peers: "
    "mpitrain/tools/bench/README.md lists the names.",
)
@click.option(
    "--row-seconds",
    type=Finite(0, min_open=True),
    help="With --shapes: bound of the turns of a shape; compilation comes on top.  [default: 120]",
)
@counted("--blocks", 1, 5, "Turns of each side.")
@counted("--steps", 1, 10, "Training steps in a turn.")
@PRESET
@SET
@output_option("--json", "Write the times of all sides to this JSON file, at the end.")
def command(
    others: tuple[str, ...],
    alone: bool,
    peers: tuple[str, ...],
    backends: tuple[str, ...],
    floor: bool,
    shapes: str | None,
    row_seconds: float | None,
    blocks: int,
    steps: int,
    preset: str | None,
    settings: tuple[str, ...],
    json_file: Path | None,
    **options: Any,
) -> None:
    """Measure whole training steps of a GPT: 4 layers, width 256, context 128, 16 sequences a rank.

    A step of a --preset is one of its micro-batches on each rank.

    All sides start from the same weights and see the same batches. So equal losses show that they
    do the same work. For a pipeline, each stage has a line: its messages and peak memory in a step
    of the first job.
    """
    has_shapes = shapes is not None
    if row_seconds is not None and not has_shapes:
        raise click.UsageError("--row-seconds bounds the rows of --shapes. Add --shapes.")
    if has_shapes and (others or alone or preset):
        raise click.UsageError("--shapes takes no --against, --alone and --preset.")
    job = TrainingJob(changes(settings, **options), blocks, steps, preset)
    if backends and not (peers or has_shapes):
        raise click.UsageError("--peer-backend is the backend of a --peer. Add --peer torch.")
    rivals = [*product(peers or (PEERS if has_shapes else ()), backends or ["gloo"])]
    level = "multiple" if rivals and "mpitrain" in backends else "serialized"
    with mpi_session(kind=lambda: job.configured(1).device.kind, thread_level=level) as transport:
        if shapes is not None:
            measure_shapes(transport, job, shapes, rivals, row_seconds or ROW_SECONDS, json_file)
        else:
            measure_sides(transport, job, list(others), alone, rivals, floor, json_file)


def measure_sides(
    transport: Any,
    work: TrainingJob,
    others: list[str],
    alone: bool,
    peers: Sequence[tuple[str, str]],
    floor: bool,
    json_file: Path | None,
) -> None:
    """Measure the job in turns with the other sides. Collective.

    peers  keys of PEERS and backends of PyTorch
    """
    from mpitrain.cli.terminal.progress import way
    from mpitrain.collectives.selection.tuning import foreign
    from mpitrain.run.build import build
    from mpitrain.tools.bench.results import header
    from mpitrain.tools.bench.training.floor import BareProducts, floor_line, recorded
    from mpitrain.tools.bench.training.peers import peer_of
    from mpitrain.tools.bench.training.steps import (
        STAGES,
        LookingOn,
        Ours,
        alternate,
        check_common_steps,
        check_same_work,
        named,
        stage_rows,
        table,
    )
    from mpitrain.transport.agreement import on_all_ranks

    def all_configured() -> list[Any]:
        check_same_work(others)
        configs = [work.configured(transport.size, more) for more in ([], others, ALONE)]
        for config in configs:
            check_common_steps(config)
        return configs

    facts = header(transport, "train", "cpu", sys.argv[1:])
    shown = BenchReport(transport, facts, {"json_file": json_file})
    first, second, third = on_all_ranks(transport, all_configured)
    job = build(transport, first)
    jobs = [job, build(transport, second, source=job.source)] if others else [job]
    config = job.trainer.config  # here device.kind "auto" is resolved
    sides: list[Any] = [Ours(job, named(job.trainer.config, others)) for job in jobs]
    if alone:
        own = transport.split(None if transport.rank else 0)
        single = on_all_ranks(transport, lambda: own and build(own, third, source=job.source))
        name = "one rank of mpitrain"
        sides.append(Ours(single, name) if single else LookingOn(name))
    rivals = [peer_of(transport, job, *peer) for peer in dict.fromkeys(peers)]
    sides += rivals
    compared = len(sides)
    if floor:
        sides.append(BareProducts(recorded(transport, job)))
    results = alternate(transport, job, sides, work.blocks, work.steps)
    of_stages = []
    if config.layout.pp > 1:
        of_stages = stage_rows(job.trainer, *job.trainer.replica.batch(job.data, 0))
    # After an error no side is closed: closing waits for ranks that may not have the error.
    for side in sides:
        side.close()
    if config.replication.algorithm == "auto" and (
        advice := foreign(job.trainer.job.tuning, transport.hosts)
    ):
        shown.say(f"{advice} in replication.tuning")
    tokens = config.batch.size * config.model.context if job.source.form == "tokens" else 0
    lines = [
        f"{transport.size} ranks, {config.batch.size} rows per step, "
        f"{job.trainer.parameter_count} parameters, "
        f"{way(config)}, {config.device.kind}, products by {_multiplier(config)}; "
        f"{work.blocks} blocks of {work.steps} steps",
        *table(results[:compared], tokens),
        *(note for rival in rivals for note in rival.notes()),
    ]
    lines += [floor_line(results[0], results[-1])] if floor else []
    lines += ["", *STAGES.lines(of_stages)] if of_stages else []
    facts["device"] = config.device.kind
    shown.rows += results
    shown.show("\n".join(lines))
    shown.end()


def _multiplier(config: Any) -> str:
    from mpitrain.ops.host.product import multiplier

    if config.device.kind == "cpu":
        return multiplier()
    library = {"cuda": "cuBLAS", "cuda-sim": "NumPy"}[config.device.kind]
    return library if config.device.gemm == "library" else "our kernels"


def measure_shapes(
    transport: Any,
    work: TrainingJob,
    names: str,
    peers: Sequence[tuple[str, str]],
    seconds: float,
    json_file: Path | None,
) -> None:
    """Measure and print shapes one by one. Collective.

    names    of shapes, separated by commas
    peers    keys of PEERS and backends of PyTorch
    seconds  upper limit of the time of a shape's turns
    """
    from mpitrain.errors import ConfigError
    from mpitrain.ops.host.product import multiplier
    from mpitrain.tools.bench.results import header, printed
    from mpitrain.tools.bench.training.shapes import SHAPES, TABLE, chosen, measure_shape, settings
    from mpitrain.tools.bench.training.steps import check_common_steps
    from mpitrain.transport.agreement import on_all_ranks

    def all_configured() -> dict[str, Any]:
        configs = {}
        for name in chosen(names, transport.size):
            own = settings(SHAPES[name], transport.size)
            configs[name] = configured(None, [*settings_of(), *own, *work.settings])
            check_common_steps(configs[name])
        return configs

    wanted = on_all_ranks(transport, all_configured)
    facts = header(transport, "train", "cpu", ["train", "--shapes", names])
    facts["products"] = multiplier()
    shown = BenchReport(transport, facts, {"json_file": json_file})
    products = f"# products by {facts['products']}"
    shown.begin([*printed(facts), products, "", *TABLE.heading()], len(wanted), "shapes")
    for name, config in wanted.items():
        try:
            measured = measure_shape(
                transport, name, config, peers, work.blocks, work.steps, seconds
            )
        except ConfigError as error:
            if not error.agreed:
                raise
            lines = [f"{name}: not measured. {error.law}"]
        else:
            shown.rows += measured.rows
            lines = [*map(TABLE.line, measured.rows), *measured.notes]
        shown.count()
        shown.show("\n".join(lines))
    shown.end()
    if not shown.rows:
        raise ConfigError(
            "--shapes measures at least one shape, but none was measured.", lines[-1]
        ).on_every_rank()
