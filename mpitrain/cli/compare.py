"""`mpitrain compare`: measures one job with several settings, and other programs, in turns."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from mpitrain.cli.bench.rows import BenchReport
from mpitrain.cli.job_options import (
    DEVICE,
    PRESET,
    SET,
    Finite,
    changes,
    configured,
    counted,
    language_option,
    output_option,
    with_options,
)
from mpitrain.cli.session import MOST, mpi_session

JOBS: dict[str, tuple[str, ...]] = {
    "small": (
        "model.layers=2",
        "model.width=64",
        "model.heads=4",
        "model.context=64",
        "batch.size=128",
    ),
    "large": (
        "model.layers=3",
        "model.width=384",
        "model.heads=8",
        "model.context=16",
        "batch.size=8",
    ),
    "gpt": (
        "model.layers=4",
        "model.width=256",
        "model.heads=4",
        "model.context=128",
        "optimizer.clip=0.0",
        "optimizer.lr=0.001",
    ),
}
"""{--job: its settings}. In `small`, activations are most of the memory; in `large`, parameters and their state are.

In `gpt`, which peers can train, each rank computes SEQUENCES sequences.
"""
SEQUENCES = 16
"""Sequences per rank in a step of the job `gpt`."""
EVALUATED = 512
"""Rows of the evaluation: evaluating all of them would take longer than the steps."""
ROW_SECONDS = 120.0
"""The default of --row-seconds."""
ALONE = [
    "layout.dp=1",
    "layout.cp=1",
    "layout.ep=1",
    "layout.tp=1",
    "layout.pp=1",
    "pipeline.partition=",
    "layout.sequence_parallel=false",
    "replication.mode=all-reduce",
    "replication.shard=all",
    "run.delay=",
    "run.inject=",
]
"""Settings that turn a job into a job of one rank."""
TORCH = ("torch", "torch-compiled")
BACKENDS = ("gloo", "mpitrain")
ONE_RANK, PRODUCTS = "one-rank", "bare-products"
WINDOWS, TRANSFORMERS = WRITERS = "whole-windows", "transformers"
"""Peers of --generate."""
PEERS = (*TORCH, *(f"{name}:{BACKENDS[1]}" for name in TORCH), ONE_RANK, PRODUCTS, *WRITERS)
LEAST_BLOCKS = 5
"""Fewer blocks of a trick may agree by chance."""
SERVED = {
    "row_seconds": ("--shapes",),
    "tokens": ("--generate",),
    "prompt_tokens": ("--generate",),
    "batch": ("--generate",),
    "plot_file": ("", "--kept"),
    "steps": ("", "--kept", "--tricks", "--shapes"),
    "peers": ("", "--kept", "--shapes", "--generate"),
    "preset": ("", "--kept", "--tricks", "--generate"),
    "job": ("", "--kept", "--tricks", "--generate"),
}
"""{parameter: options of the kinds of measurement that it acts on}; "" is without such an option. Others act on all."""


class TrainingJob(NamedTuple):
    """A job that is measured, its turns, and the files of its rows.

    settings  `section.key=value` that change a built-in job, a preset or a file
    blocks    turns of each side
    steps     steps in a turn
    job       key of JOBS
    outputs   {parameter of FILES: path or None}
    """

    settings: list[str]
    blocks: int
    steps: int
    preset: str | None = None
    file: Path | None = None
    job: str | None = None
    outputs: Mapping[str, Path | None] = MappingProxyType({})

    def tables(self, first: Sequence[str] = (), more: Sequence[str] = ()) -> Mapping[str, Any]:
        """Return the tables of the job, after an import of its plugins, which may add words.

        first  `section.key=value` that the job replaces
        more   `section.key=value` that replace those of the job
        """
        from mpitrain.config import tables_of
        from mpitrain.config.plugins import load

        settings = [*first, *JOBS.get(self.job or "", ()), *self.settings, *more]
        return load(tables_of(self.file, settings, self.preset))

    def read(self, first: Sequence[str] = (), more: Sequence[str] = ()) -> Any:
        """Return the configuration of `tables`."""
        from mpitrain.run.choices import parse

        return parse(self.tables(first, more), self.file)

    def of_trainings(self) -> list[str]:
        """Return the settings of trainings from the start that the job may replace."""
        return [f"run.steps={self.steps}", f"run.eval_rows={EVALUATED}"]

    def set_keys(self) -> set[str]:
        """Return the keys that the job sets."""
        tables = self.tables()
        return {f"{section}.{key}" for section, values in tables.items() for key in values}

    def configured(self, ranks: int, more: Sequence[str] = ()) -> Any:
        """Return the configuration of sides in memory. A step of a preset is one of its micro-batches on each rank.

        ranks  number of ranks, which batch.size depends on
        more   further `section.key=value`
        """
        from mpitrain.config import preset
        from mpitrain.tools.bench.training.steps import WARM_UP

        settings, job = [*self.settings, *more], list[str]()
        if self.job in (None, "gpt") and self.file is None:
            batch = preset(self.preset).get("batch", {"size": SEQUENCES, "micro_batches": 1})
            rows = batch["size"] // max(1, batch["micro_batches"])
            job = [] if self.preset else gpt(settings)
            job += [f"batch.size={rows * ranks}", "batch.micro_batches=0"]
        elif self.job:
            job = [*JOBS[self.job]]
        steps = f"run.steps={WARM_UP + self.blocks * self.steps}"
        return configured(self.file, [*job, steps, *settings], self.preset)


def gpt(settings: Sequence[str] = ()) -> list[str]:
    """Return the settings of the job `gpt`, without those of the model if run.init_from has a model."""
    is_given = any(setting.replace(" ", "").startswith("run.init_from=") for setting in settings)
    return [each for each in JOBS["gpt"] if not (is_given and each.startswith("model."))]


FILES = with_options(
    output_option(
        "--json",
        "Write the rows to this JSON file: all at the end with --kept, --peer and --generate, else each when "
        "it is measured.",
    ),
    output_option("--csv", "Write the rows to this CSV file, at the same times."),
    output_option("--plot", "Draw the losses of trainings over time to this file, at the end."),
)


@click.command()
@click.argument("words", metavar="[CONFIG.toml] [SETTING]...", nargs=-1)
@PRESET
@click.option(
    "--job",
    type=click.Choice([*JOBS]),
    help="A built-in job: a small model with a large batch, a large model with a small batch, or the GPT that "
    "--kept and --peer train unless told otherwise, there with 16 sequences per rank.",
)
@SET
@DEVICE
@click.option(
    "--peer",
    "peers",
    type=click.Choice(PEERS),
    multiple=True,
    metavar="NAME",
    help="Also measure torch, torch-compiled (over our backend: torch:mpitrain), one-rank, or bare-products, the "
    "matrix products of a step; with --generate: whole-windows, without a cache, or transformers (repeatable).",
)
@click.option(
    "--kept", is_flag=True, help="Keep all sides in memory from turn to turn, as with --peer."
)
@click.option("--tricks", metavar="all|A,B", help="Measure the job with and without each trick.")
@click.option(
    "--shapes",
    metavar="all|A,B",
    help="Measure a table of shapes on 2 ranks: mpitrain/tools/bench/README.md lists them.",
)
@click.option("--generate", is_flag=True, help="Measure the generation of text.")
@click.option("--tokens", type=click.IntRange(1, MOST), help="Tokens after each prompt.")
@counted("--prompt-tokens", 1, 1, "Tokens of each prompt.")
@counted("--batch", 1, 1, "Prompts.")
@click.option(
    "--blocks",
    type=click.IntRange(1, MOST),
    help="Turns of each side.  [default: 3 trainings from the start, else 5]",
)
@click.option(
    "--steps",
    type=click.IntRange(1, MOST),
    help="Steps of a turn.  [default: 30; 10 in memory, 3 of a trick]",
)
@click.option(
    "--row-seconds",
    type=Finite(0, min_open=True),
    help="With --shapes: bound of the turns of a shape.  [default: 120]",
)
@click.option("--modes", metavar="A,B", hidden=True)
@FILES
@language_option(is_passed=False)
def command(
    words: tuple[str, ...],
    modes: str | None,
    preset: str | None,
    job: str | None,
    settings: tuple[str, ...],
    device: str | None,
    peers: tuple[str, ...],
    kept: bool,
    tricks: str | None,
    shapes: str | None,
    generate: bool,
    tokens: int | None,
    prompt_tokens: int,
    batch: int,
    blocks: int | None,
    steps: int | None,
    row_seconds: float | None,
    **files: Path | None,
) -> None:
    """Measure one job with several settings, and other programs, in turns: launch -n 2 -- compare ring zero3+tp2

    A SETTING is a mode of replication, a layout, a schedule, a precision or a technique,
    SECTION.KEY=VALUE, `job` for the job as it is, or several joined by +. The others are compared
    with the first. Without any, all modes of replication are measured.

    Each side trains from the start in each turn. Sides of --peer and --kept stay in memory and
    go on training, on equal batches.

    \b
    step ms     time of a step; of all tokens in generation. ~: the blocks
                disagree whether the side is faster than the first
    exposed ms  time in a step in which a worker waits for messages
    sent bytes  bytes that the busiest rank sends in a step, also by formula;
                without shared memory and the MPI library's own reductions
    held MB     parameters, gradients, optimizer state and reduction buffers
                on the fullest rank, without activations
    stale       largest staleness of a gradient, in updates
    ratio       time, or memory, relative to the first side
    apart       largest difference of a loss from the first side's
    #same       tokens equal to those of the first side
    """
    file = None
    if words and words[0].endswith(".toml"):
        file, words = Path(words[0]), words[1:]
    words += tuple(modes.split(",")) if modes else ()  # the old form of the settings
    kinds = {"--tricks": tricks, "--shapes": shapes, "--generate": generate, "--kept": kept}
    named = [name for name, value in kinds.items() if value]
    _check_usage(click.get_current_context(), named, words, file)
    changed = changes(settings, device=device)
    work = TrainingJob(changed, blocks or 5, steps or 10, preset, file, job, files)
    sides = list(dict.fromkeys(words))
    if tricks:
        run_tricks(work._replace(steps=steps or 3), None if tricks == "all" else tricks)
    elif shapes:
        run_shapes(work, shapes, _rivals(peers or TORCH), row_seconds or ROW_SECONDS)
    elif generate:
        run_generation(work, words, (tokens, prompt_tokens, batch), peers)
    elif kept or peers:
        run_kept(work, sides or ["job"], peers)
    else:
        run_trainings(work._replace(blocks=blocks or 3, steps=steps or 30), sides)


def _check_usage(
    context: click.Context, named: list[str], words: Sequence[str], file: Path | None
) -> None:
    """Raise UsageError for options that do not go together, or that would be ignored.

    named  options of kinds
    words  settings of the sides
    """
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} are different measurements. Take one.")
    kind, values = named[0] if named else "", context.params
    for option in context.command.params:
        name = option.name or ""
        if (
            kind in SERVED.get(name, (kind,))
            or context.get_parameter_source(name) == ParameterSource.DEFAULT
        ):
            continue
        if kind:
            raise click.UsageError(f"{option.opts[-1]} has no effect beside {kind}. Take one.")
        (other,) = SERVED[name]
        raise click.UsageError(f"{option.opts[-1]} has no effect without {other}. Add {other}.")
    if kind == "--shapes" and file:
        raise click.UsageError("--shapes has jobs of its own, and takes no file. Use --set.")
    if kind in ("--tricks", "--shapes") and words:
        raise click.UsageError(f"{kind} takes no settings beside it, but {words[0]}. Use --set.")
    if values["preset"] and values["job"]:
        raise click.UsageError("--preset and --job are different jobs. Take one.")
    if kind == "--tricks" and (values["blocks"] or LEAST_BLOCKS) < LEAST_BLOCKS:
        raise click.UsageError(
            f"--tricks takes at least {LEAST_BLOCKS} blocks, since fewer may agree by chance, but --blocks is "
            f"{values['blocks']}."
        )
    allowed = WRITERS if kind == "--generate" else TORCH if kind == "--shapes" else PEERS[:-2]
    for peer in values["peers"]:
        if peer.partition(":")[0] not in allowed:
            raise click.UsageError(f"--peer {peer} is not for {kind or 'training'}.")


def _rivals(peers: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, backend) of the peers that are PyTorch."""
    parts = [peer.partition(":") for peer in dict.fromkeys(peers)]
    return [(name, backend or BACKENDS[0]) for name, _, backend in parts if name in TORCH]


def _level(rivals: Sequence[tuple[str, str]]) -> str:
    """Return the thread level of MPI that these peers need."""
    return "multiple" if any(backend == BACKENDS[1] for _, backend in rivals) else "serialized"


def run_trainings(work: TrainingJob, sides: Sequence[str]) -> None:
    with mpi_session(kind=lambda: work.read(work.of_trainings()).device.kind) as transport:
        measure_modes(transport, work, sides)


def measure_modes(transport: Any, work: TrainingJob, sides: Sequence[str]) -> None:
    """Train a job from the start with each setting, in turns, and print the table. Collective.

    sides  words joined by +; none: all modes of replication
    """
    from mpitrain.tools.bench.comparison.compare import compare, footer, memory_table
    from mpitrain.tools.bench.comparison.modes import check_resolved, jobs, usual
    from mpitrain.tools.bench.results import header
    from mpitrain.tools.bench.table import TRAINED, agreement, plot, table
    from mpitrain.transport.agreement import on_all_ranks

    names = sides or usual()
    configs = on_all_ranks(
        transport, lambda: jobs(names, [], transport.hosts, work.tables(work.of_trainings()))
    )
    check_resolved(transport, configs)
    job = next(iter(configs.values()))
    steps = job.run.steps
    facts = header(transport, "compare", job.device.kind, sys.argv[1:])
    facts |= {"steps": steps, "blocks": work.blocks}
    title = (
        f"{job.model.kind}, {job.model.layers} layers of width {job.model.width} on {job.data.source}: {steps} steps "
        f"of {job.batch.size} rows by {transport.size} ranks on {facts['hosts']} host(s), {job.precision.compute}"
    )
    shown = BenchReport(transport, facts, work.outputs)
    rows, shape = shown.rows, table(TRAINED, names)
    machine_line = f"{facts['processor']}, {facts['cores']} cores; {facts['mpi']}"
    shown.begin(
        [title, machine_line, "", *shape.heading()], len(configs) * steps * work.blocks, "steps"
    )

    def stepped(mode: str, loss: float) -> None:
        shown.count(f"{mode}, loss {loss:.3f}")

    for row in compare(transport, configs, stepped, work.blocks):
        rows.append(row)
        shown.show(shape.line(row))
    shown.end(
        lambda: ["", *memory_table(rows), "", *agreement(rows), *footer(rows)],
        lambda path: plot(rows, title, path),
    )


def run_kept(work: TrainingJob, sides: Sequence[str | list[str]], peers: Sequence[str]) -> None:
    with mpi_session(
        kind=lambda: work.configured(1).device.kind, thread_level=_level(_rivals(peers))
    ) as transport:
        measure_sides(transport, work, sides, peers)


def measure_sides(
    transport: Any, work: TrainingJob, sides: Sequence[str | list[str]], peers: Sequence[str]
) -> None:
    """Measure the job with each setting in turns with peers, all in memory. Collective.

    sides  words joined by +, or lists of `section.key=value`; the first is the job which peers train
    """
    from mpitrain.cli.terminal.progress import way
    from mpitrain.collectives.selection.tuning import foreign
    from mpitrain.run.build import build
    from mpitrain.tools.bench.comparison.modes import JOB, settings_of
    from mpitrain.tools.bench.results import header
    from mpitrain.tools.bench.table import KEPT, agreement, plot, table, with_energy
    from mpitrain.tools.bench.training.floor import BareProducts, recorded
    from mpitrain.tools.bench.training.peers import peer_of
    from mpitrain.tools.bench.training.steps import (
        STAGES,
        LookingOn,
        Ours,
        alternate,
        check_common_steps,
        check_same_work,
        stage_rows,
    )
    from mpitrain.transport.agreement import on_all_ranks

    def all_configured() -> list[Any]:
        keys = work.set_keys()
        own = [side if isinstance(side, list) else [*settings_of(side, keys)] for side in sides]
        for each in own:
            check_same_work(each)
        configs = [work.configured(transport.size, more) for more in [*own, ALONE]]
        for config in configs:
            check_common_steps(config)
        return configs

    facts = header(transport, "compare", "cpu", sys.argv[1:])
    shown = BenchReport(transport, facts, work.outputs)
    *configs, single = on_all_ranks(transport, all_configured)
    words = [side if isinstance(side, str) else "+".join(side) for side in sides]
    names = ["mpitrain" if word == JOB else f"mpitrain {word}" for word in words]
    job = build(transport, configs[0])
    jobs = [job, *(build(transport, each, source=job.source) for each in configs[1:])]
    config = job.trainer.config  # here device.kind "auto" is resolved
    measured: list[Any] = [Ours(*each) for each in zip(jobs, names, strict=True)]
    if ONE_RANK in peers:
        own = transport.split(None if transport.rank else 0)
        alone = on_all_ranks(transport, lambda: own and build(own, single, source=job.source))
        name = "one rank of mpitrain"
        measured.append(Ours(alone, name) if alone else LookingOn(name))
    rivals = [peer_of(transport, job, *peer) for peer in _rivals(peers)]
    measured += rivals
    if PRODUCTS in peers:
        measured.append(BareProducts(recorded(transport, job)))
    rows = alternate(transport, job, measured, work.blocks, work.steps)
    of_stages = []
    if config.layout.pp > 1:
        of_stages = stage_rows(job.trainer, *job.trainer.replica.batch(job.data, 0))
    # After an error no side is closed: closing waits for ranks that may not have the error.
    for each in measured:
        each.close()
    if config.replication.algorithm == "auto" and (
        advice := foreign(job.trainer.job.tuning, transport.hosts)
    ):
        shown.say(f"{advice} in replication.tuning")
    title = (
        f"{transport.size} ranks, {config.batch.size} rows per step, "
        f"{job.trainer.parameter_count} parameters, "
        f"{way(config)}, {config.device.kind}, products by {_multiplier(config)}; "
        f"{work.blocks} blocks of {work.steps} steps"
    )
    shape = table(with_energy(KEPT, rows), [row.side for row in rows])
    lines = [title, *shape.lines(rows), *agreement(rows)]
    lines += [note for rival in rivals for note in rival.notes()]
    lines += ["", *STAGES.lines(of_stages)] if of_stages else []
    facts["device"] = config.device.kind
    shown.rows += rows
    shown.show("\n".join(lines))
    shown.end(draw=lambda path: plot(rows, title, path))


def _multiplier(config: Any) -> str:
    from mpitrain.ops.host.product import multiplier

    if config.device.kind == "cpu":
        return multiplier()
    library = {"cuda": "cuBLAS", "cuda-sim": "NumPy"}[config.device.kind]
    words = {"library": library, "auto": f"our kernels and {library}"}
    return words.get(config.device.gemm, "our kernels")


def run_shapes(
    work: TrainingJob, names: str, peers: Sequence[tuple[str, str]], seconds: float
) -> None:
    with mpi_session(
        kind=lambda: work.configured(1).device.kind, thread_level=_level(peers)
    ) as transport:
        measure_shapes(transport, work, names, peers, seconds)


def measure_shapes(
    transport: Any, work: TrainingJob, names: str, peers: Sequence[tuple[str, str]], seconds: float
) -> None:
    """Measure and print shapes one by one. Collective.

    names    of shapes, separated by commas
    peers    keys of PEERS and backends of PyTorch
    seconds  upper limit of the time of a shape's turns
    """
    from mpitrain.errors import ConfigError
    from mpitrain.ops.host.product import multiplier
    from mpitrain.tools.bench.results import header, printed
    from mpitrain.tools.bench.table import KEPT, table
    from mpitrain.tools.bench.training.shapes import SHAPES, chosen, measure_shape, settings
    from mpitrain.tools.bench.training.steps import check_common_steps
    from mpitrain.transport.agreement import on_all_ranks

    def all_configured() -> dict[str, Any]:
        configs = {}
        for name in chosen(names, transport.size):
            own = settings(SHAPES[name], transport.size)
            configs[name] = configured(None, [*gpt(), *own, *work.settings])
            check_common_steps(configs[name])
        return configs

    wanted = on_all_ranks(transport, all_configured)
    facts = header(transport, "compare", "cpu", ["compare", "--shapes", names])
    facts["products"] = multiplier()
    shown, shape = (
        BenchReport(transport, facts, work.outputs),
        table(f"of|{KEPT}", ["torch DDP compiled, mpitrain"]),
    )
    products = f"# products by {facts['products']}"
    shown.begin([*printed(facts), products, "", *shape.heading()], len(wanted), "shapes")
    for name, config in wanted.items():
        try:
            rows, notes = measure_shape(
                transport, name, config, peers, work.blocks, work.steps, seconds
            )
        except ConfigError as error:
            if not error.agreed:
                raise
            lines = [f"{name}: not measured. {error.law}"]
        else:
            shown.rows += rows
            lines = [*map(shape.line, rows), *notes]
        shown.count()
        shown.show("\n".join(lines))
    shown.end()
    if not shown.rows:
        raise ConfigError(
            "--shapes measures at least one shape, but none was measured.", lines[-1]
        ).on_every_rank()


def run_tricks(work: TrainingJob, names: str | None) -> None:
    with mpi_session(kind=lambda: work.read().device.kind) as transport:
        measure_tricks(transport, work, names)


def measure_tricks(transport: Any, work: TrainingJob, names: str | None) -> None:
    """Measure a job with and without each trick. Collective.

    names  of tricks, separated by commas; None: all
    """
    from mpitrain.cli.terminal.progress import way
    from mpitrain.config import with_settings
    from mpitrain.run.build import build
    from mpitrain.run.choices import parse
    from mpitrain.tools.bench.comparison.tricks import SAID, names_of, summary, try_all
    from mpitrain.tools.bench.results import header
    from mpitrain.tools.bench.table import TRIED, table
    from mpitrain.tools.bench.training.steps import WARM_UP, check_common_steps
    from mpitrain.transport.agreement import on_all_ranks

    blocks, steps = work.blocks, work.steps

    def checked() -> tuple[Any, list[str]]:
        tricks, config = names_of(names), work.read()
        check_common_steps(config)
        length = f"run.steps={len(tricks) * (WARM_UP + blocks * steps)}"
        return parse(with_settings(config.model_dump(), [length])), tricks

    facts = header(transport, "compare", "", sys.argv[1:])
    shown = BenchReport(transport, facts, work.outputs)
    config, tricks = on_all_ranks(transport, checked)
    job, shape = build(transport, config), table(TRIED, tricks, SAID)
    config = job.trainer.config
    facts["device"] = config.device.kind
    shown.begin(
        [
            f"{config.model.kind}, {job.trainer.parameter_count:,} parameters: {config.batch.size} rows a step by "
            f"{transport.size} rank(s), {way(config)}, {config.precision.compute}, {config.device.kind}",
            f"{blocks} blocks of {steps} step(s), with and without each trick in turns",
            "",
            *shape.heading(),
        ],
        len(tricks),
        "tricks",
    )
    for rows in try_all(transport, job, tricks, blocks, steps):
        shown.rows += rows
        shown.count()
        shown.show("" if rows[-1].reason else shape.line(rows[-1]))
    job.close()
    shown.end(lambda: summary(shown.rows))


def run_generation(
    work: TrainingJob,
    words: Sequence[str],
    shape: tuple[int | None, int, int],
    peers: Sequence[str],
    with_transformers: bool = False,
) -> None:
    with mpi_session(kind=lambda: work.read(_of_generation(1)).device.kind) as transport:
        measure_generation(transport, work, words or ("job",), shape, peers, with_transformers)


def _of_generation(ranks: int) -> list[str]:
    """Return the settings of a generation that the job may replace.

    Files of tokens take their vocabulary from run.init_from. No data are opened here.
    """
    return ["data.source=tokens:random", "layout.dp=1", f"batch.size={ranks}"]


def measure_generation(
    transport: Any,
    work: TrainingJob,
    words: Sequence[str],
    shape: tuple[int | None, int, int],
    peers: Sequence[str],
    with_transformers: bool,
) -> None:
    """Measure the generation of the most likely tokens after random prompts. Collective.

    The model has the weights of run.init_from, or random ones.

    shape              tokens after each prompt or None for as many as fit, tokens of each prompt, prompts
    with_transformers  measure transformers, too, if it is installed and can
    """
    from importlib.util import find_spec

    import numpy as np

    from mpitrain.data import Unopened
    from mpitrain.errors import ConfigError
    from mpitrain.formats.peft import ARCHITECTURES
    from mpitrain.run.build import build
    from mpitrain.run.generate import check_writes
    from mpitrain.tools.bench.comparison.modes import JOB, settings_of
    from mpitrain.tools.bench.generate import (
        Cached,
        GenerationSide,
        Transformers,
        WholeWindows,
        measure,
    )
    from mpitrain.tools.bench.table import WRITTEN, agreement, table
    from mpitrain.transport.agreement import on_all_ranks

    count, prompt_tokens, batch = shape

    def refusal(config: Any) -> str:
        """Return why transformers cannot be a side; empty if it can."""
        if not find_spec("transformers"):
            return "it is not installed"
        if config.model.kind not in ARCHITECTURES or config.lora.rank:
            return f"it has no {config.model.kind} with lora.rank {config.lora.rank}"
        if config.device.kind != "cpu" or config.precision.compute != "float32":
            return f"it is measured on the CPU in float32, not {config.device.kind}, {config.precision.compute}"
        return "it is measured on one rank" if transport.size > 1 else ""

    def checked() -> list[Any]:
        first = _of_generation(transport.size)
        work.tables()  # imports the plugins
        own = [settings_of(word, {"replication.algorithm"}) for word in words]
        configs = [work.read(first, more) for more in own]
        config = configs[0]
        check_writes(config.model.kind)
        if prompt_tokens + (count or 1) > config.model.context + 1:
            raise ConfigError(
                f"Prompt and tokens fit into model.context {config.model.context}, but there are "
                f"{prompt_tokens} + {count or 1}.",
                "Lower --tokens or --prompt-tokens, or raise model.context.",
            )
        if WINDOWS in peers and transport.size > 1:
            raise ConfigError(
                f"The peer {WINDOWS} is measured on one rank, but there are {transport.size}.",
                "Leave it out.",
            )
        return configs

    def check_transformers(config: Any) -> None:
        if TRANSFORMERS in peers and (why := refusal(config)):
            raise ConfigError(
                f"The peer {TRANSFORMERS} writes what our model writes, but {why}.", "Leave it out."
            )

    configs = on_all_ranks(transport, checked)
    config = configs[0]
    vocabulary, context = config.data.vocabulary or 256, config.model.context
    many = count or context - prompt_tokens
    shown = BenchReport(transport, {"op": "compare", "arguments": sys.argv[1:]}, work.outputs)
    source = Unopened("tokens", (context,), vocabulary, vocabulary)
    trainers = [build(transport, each, source=source).trainer for each in configs]
    names = ["mpitrain" if word == JOB else f"mpitrain {word}" for word in words]
    sides: list[GenerationSide] = [Cached(*each) for each in zip(trainers, names, strict=True)]
    trainer = trainers[0]
    # Building has resolved device.kind "auto".
    on_all_ranks(transport, lambda: check_transformers(trainer.config))
    if WINDOWS in peers:
        sides.append(WholeWindows(trainer))
    if TRANSFORMERS in peers or (with_transformers and not refusal(trainer.config)):
        sides.append(Transformers(config.model, vocabulary, trainer.tensors()))
    prompts = np.random.default_rng(0).integers(vocabulary, size=(batch, prompt_tokens))
    shown.rows += measure(sides, prompts.tolist(), many, work.blocks)
    facts = {
        "parameters": trainer.parameter_count,
        "layers": config.model.layers,
        "width": config.model.width,
        "context": context,
        "vocabulary": vocabulary,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "ranks": transport.size,
    }
    shown.facts = {**facts, **shown.facts}
    shown.begin([", ".join(f"{name} {number:,}" for name, number in facts.items())])
    lines = table(WRITTEN, [row.side for row in shown.rows]).lines(shown.rows)
    shown.show("\n".join([*lines, *agreement(shown.rows)]))
    shown.end()
