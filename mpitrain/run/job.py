"""A job: the configuration on which all ranks agree, with its automatic values resolved.

`agree_on` makes it in one gather. `build` then opens its data, and makes its trainer.
"""

from __future__ import annotations  # help() prints signatures as they are written here.

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4
from zlib import crc32

from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning
from mpitrain.config import Config
from mpitrain.data import Source, Unopened, beside, source_kind
from mpitrain.data.templates import with_day
from mpitrain.errors import ConfigError, brief, say
from mpitrain.layers.base import Unit, are_units, forward_only, freeze
from mpitrain.layers.plain import Plain
from mpitrain.layers.recomputed import with_recomputation
from mpitrain.machine import process
from mpitrain.machine.compiling import NO_COMPILER
from mpitrain.machine.process import Gpu, gpu_identities
from mpitrain.models.table import MODELS, adapted, units_of
from mpitrain.ops.device import Device, device_for
from mpitrain.ops.host.attention import TILED_FROM
from mpitrain.optim import RULES, check_groups
from mpitrain.optim.optimizer import TUNED, TUNED_ADAPTERS
from mpitrain.parallel.grid import Axes, check_hosts, divisor
from mpitrain.parallel.modes import servers_of
from mpitrain.parallel.tensor.layer_factory import GroupShape, check_units, described
from mpitrain.pipeline.partition import TIME, assign_units, cut
from mpitrain.pipeline.pipeline import Chunks
from mpitrain.pipeline.schedules import NAMED, Plan, plan_of, table_of
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.run.choices import check
from mpitrain.run.rules import check_each, of_device, of_plan, of_ranks, sequences_of
from mpitrain.transport.agreement import check_same, from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport

Units = Sequence[Unit] | Callable[[Plain], Sequence[Unit]]
"""A model, or a function of a layer factory that returns one."""


class StepCounts(NamedTuple):
    """The counts of one rank's training step.

    peak        bytes of activations, as `Pipeline.peak_bytes`
    flops       floating-point operations of matrix products
    recomputed  of `flops`, those that repeat a forward
    problem     the reason why the step could not be counted; empty: it was
    """

    peak: int = 0
    flops: int = 0
    recomputed: int = 0
    problem: str = ""


class Room(NamedTuple):
    """The memory of this rank's host or GPU, in bytes.

    free     bytes before the ranks allocate; at most memory.limit_gb
    needed   bytes of parameters, gradients and optimizer state of `ranks`
    ranks    the ranks that share the memory
    where    name of the memory in a message
    allowed  predicate of `free` in a message
    """

    free: int
    needed: float
    ranks: Sequence[int]
    where: str
    allowed: str = "are free"


@dataclass(frozen=True, eq=False)
class Job:
    """A run in memory: what the ranks have agreed on and resolved; once built, trainer and data.

    config    with device.kind, device.passes and batch.micro_batches set; `build` adds what the
              data determine
    axes      the size of each mesh axis, with dp set
    hosts     the host of each rank, by rank
    plan      the pipeline schedule, and the stage of each model chunk
    tuning    the parameters of the cost model, by which `auto` chooses algorithms
    gpus      the GPU of each rank, by rank; empty unless device.kind is cuda
    device    the device of this rank
    done      the progress: steps and samples so far, and the identity of the run
    folder    the run directory; empty for a new one under runs/, which gets its name in `claim`
    has_run   whether the folder holds a run
    saved     the checkpoint to resume from, or empty
    changed   keys with other values than in the resumed run: {key: [then, now]}
    largest   the largest token of data.source, if the run has noted it since the last change of
              the file; else None
    scaling   of arrays, if the run has noted it; else None
    facts     values that must be equal on all ranks, as JSON; of files and of data
    source    the data source, or only its sizes where no data are needed
    models    Models that the run starts from, located on this rank; None: there are none
    counts    activations and FLOPs of a step on this rank, if they are counted before it
    trainer   a Trainer: the model, ready for training or inference

    Iteration gives trainer, source and done.
    """

    config: Config
    axes: Axes
    hosts: Sequence[str]
    plan: Plan
    tuning: Tuning
    gpus: Sequence[Gpu]
    device: Device
    done: Done = Done(0, 0, "")  # noqa: RUF009  a constant
    folder: str = ""
    has_run: bool = False
    saved: str = ""
    changed: dict[str, list[Any]] = field(default_factory=dict)
    largest: int | None = None
    scaling: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    # `build` sets these. The types of models and trainer are not named: their modules import this one.
    source: Source | Unopened = None  # type: ignore[assignment]
    models: Any = None
    counts: StepCounts = StepCounts()  # noqa: RUF009  a constant
    trainer: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.trainer, self.source, self.done))

    @property
    def data(self) -> Source:
        """The data source, of a job that was built with one."""
        assert not isinstance(self.source, Unopened)
        return self.source

    @property
    def step(self) -> int:
        return self.done.step

    @property
    def layer_settings(self) -> dict[str, Any]:
        """What the layers compute with: the settings of a `Plain`."""
        config = self.config
        return {"keys": config.model, "memory": config.memory, "seed": config.run.seed}

    def units(self, layers: Plain) -> list[Unit]:
        """Return the units of the whole model for the data source; `layers` makes the layers."""
        return list(units_of(self.config.model, self.source, layers))

    def described(self) -> Chunks:
        """Return the model of the last tensor-parallel rank, cut, as `cut`: it has no arrays."""
        layout = self.config.layout
        others = {
            name: GroupShape(ranks - 1, ranks)
            for name, ranks in (("context", layout.cp), ("ep", layout.ep))
            if ranks > 1
        }
        layers = described(self.device.ops, layout, **others, **self.layer_settings)
        return self.cut(layers)

    def cut(self, layers: Plain, units: Units | None = None) -> Chunks:
        """Make the model with a rank's layer factory, and cut it for the pipeline.

        units   of a caller's model; None: the units of this job, in balance before they are timed
        raises  ConfigError if these are no units, or do not fit configuration and hosts
        """
        config, stage_of = self.config, self.plan.stage_of
        partition = config.pipeline.partition
        if units is None and self.source is not None:
            units, partition = self.units, "" if partition == TIME else partition
        made = units(layers) if callable(units) else units
        if not are_units(made):
            raise ConfigError(
                f"A model is a list of units, at least one, but this is {made!r:.60}.",
                "Pass the units, or a function that returns them.",
            )
        model = freeze(adapted(made, config.lora, layers), config.model.freeze)
        chunks, tied = [model], dict[str, list[int]]()
        if len(stage_of) > 1 or partition:
            counts = cut(model, len(stage_of), partition)
            chunks, tied = assign_units(model, counts, stage_of)
        if size := layers.memory.segment:
            chunks = with_recomputation(chunks, size)
        check_units(model, layers, config.data.attend, config.layout.cp)
        if config.optimizer.groups:
            names = [unit.full_name(p) for unit in model for p in unit.layer.parameters()]
            check_groups(config.optimizer, names)
        algorithms = config.replication.algorithm, config.layout.algorithm
        if {*algorithms} != {"auto"}:
            check_hosts(self.axes, self.hosts, *algorithms, tied)
        return Chunks(model, chunks, tied, forward_only(model))

    def with_micro_batches(self, micro_batches: int) -> Job | None:
        """Return the job with this number of micro-batches; None if rows or schedule exclude it."""
        config = self.config.changed({"batch.micro_batches": micro_batches})
        try:
            config, plan = _planned(config, self.axes)
            return replace(self, config=config, plan=plan)
        except ConfigError:
            return None

    def close(self) -> None:
        """Free the communicators and windows of the job; collective. Do not use it afterwards."""
        self.trainer.close()


SEES_GPU = "it sees a GPU."
"""The reason for which a rank compiles no passes for `device.kind=auto`."""
FILES = "data source and checkpoint"
"""The subject of an error about ranks whose `Job.facts` differ."""
OF_RUN = ("folder", "has_run", "saved", "changed", "largest", "scaling")
"""The fields of a job that its run directory tells."""


def agree_on(
    transport: Transport,
    configured: Callable[[], Config],
    look: Callable[[Config], dict[str, Any]] = lambda config: {},
    opened: Callable[[Job], Job] = lambda job: job,
) -> Job:
    """Agree on a configuration, and resolve its automatic values; collective, in one gather.

    Each rank resolves them as if all had its machine. If a rank has another one, all resolve them again.

    configured  returns this rank's configuration
    look        returns what the run directory tells, as JSON; that of rank 0 counts. These are fields of
                the job by name, `progress` (steps and samples so far), and of the run to resume
                `passes` (its device.passes), `named` (its classes, labels and validation, as in [data])
                and `day` (of which its template gives the text)
    opened      of a run that begins anew: returns the job with its data, if one rank can open them
    raises      MpitrainError on every rank, if one of these raises it, if configurations or files
                differ, or if they do not fit ranks, hosts or a rank's device
    """
    hosts = transport.hosts
    own: list[tuple[Config, Job]] = []

    def resolved() -> list[Any]:
        config = configured()
        found, (gpu, lacks) = found_here(config) | look(config), machine_of(config)
        keys = device_keys(config, [gpu], [lacks])
        try:
            job = resolve_here(config, hosts, keys)
        except ConfigError:
            if config.device.kind != "auto" or not gpu.seen:
                raise
            # The others may see no GPU, and the kind is then cpu; else all resolve cuda below.
            keys = device_keys(config, [Gpu()], [lacks])
            job = resolve_here(config, hosts, keys)
        new = opened(with_data_found(job, found))
        own.append((config, new if new.source is not None else job))
        assumed = [*keys.values(), found["beside"], found["today"]]
        products = process.processor().label, process.blas_kernels()
        return [config.flat(), gpu, lacks, products, found, assumed, own[0][1].facts]

    everyone = from_all_ranks(transport, resolved)
    flats, seen, reasons, products, told, assumed, facts = zip(*everyone, strict=True)
    check_same("configuration", flats, hosts)
    ((config, job),), found = own, told[0]
    gpus = [Gpu(*gpu) for gpu in seen]
    if transport.rank == 0:
        if len({*map(tuple, products)}) > 1:
            _say_that_kernels_differ({*zip(hosts, *zip(*products, strict=True), strict=True)})
        if found.get("passes", "auto") == "auto" and any(reasons):
            say_why_numpy(reasons, hosts)
    keys = device_keys(config, gpus, reasons, found.get("passes", "auto"))
    if all(each == [*keys.values(), found["beside"], found["today"]] for each in assumed):
        check_same(FILES, facts, hosts)
    else:  # A rank has assumed what the others do not.
        again = partial(resolve_here, config, hosts, keys)
        job = on_all_ranks(transport, again, FILES, lambda job: job.facts)
    if job.source is None:
        job = with_data_found(job, found)
    step, samples = found.get("progress", (0, 0))
    job = replace(
        job,
        gpus=gpus * (keys["device.kind"] == "cuda"),
        done=Done(step, samples, found["run"]),
        **{key: found[key] for key in OF_RUN if key in found},
    )
    if transport.rank == 0:
        if config.memory.recompute != job.config.memory.recompute:
            say(
                "note: memory.recompute=attention changes nothing here: attention in tiles saves one number of each row. "
                "unit saves more."
            )
        if job.gpus:
            _say_who_shares(gpus, hosts)
    return job


def found_here(config: Config) -> dict[str, Any]:
    """Return what a rank finds where it starts, unless a run says otherwise; that of rank 0 counts.

    run     an identity for a new run
    today   the day, for a template
    beside  the file of held-out rows beside data.source, or ""
    """
    source = config.data.source
    held_out = beside(source) if source_kind(source).is_token_file else ""
    return {"run": uuid4().hex, "today": date.today().isoformat(), "beside": held_out}


def with_data_found(job: Job, found: dict[str, Any]) -> Job:
    """Return the job with the keys of [data] that its run, a file or the day determine.

    found  from `found_here`, and from `look` of `agree_on`
    """
    data, named = job.config.data, {"validation": "", **found.get("named", {})}
    values = {f"data.{key}": getattr(data, key) or then for key, then in named.items()}
    values["data.validation"] = values["data.validation"] or found["beside"]
    if data.template:
        values["data.template"] = with_day(data.template, found.get("day") or found["today"])
    return replace(job, config=job.config.changed(values))


def machine_of(config: Config) -> tuple[Gpu, str]:
    """Return this rank's GPU, and why it has no compiled passes on processors, or "".

    Without a need for either, the GPU is none and the text empty.
    """
    kind = config.device.kind
    gpu = process.current_gpu() if kind in ("auto", "cuda") else Gpu()
    if config.device.passes != "auto" or kind not in ("auto", "cpu"):
        return gpu, ""
    if gpu.seen:
        return gpu, SEES_GPU
    from mpitrain.ops.host import compiled

    return gpu, compiled.lacks(config.precision.stored)


def device_keys(
    config: Config, gpus: Sequence[Gpu], reasons: Sequence[str], passes_then: str = "auto"
) -> dict[str, str]:
    """Return device.kind and device.passes without auto.

    gpus, reasons  of ranks, as of `machine_of`
    passes_then    device.passes of the run to resume
    """
    kind: str = config.device.kind
    passes: str = config.device.passes
    if kind == "auto":
        kind = "cuda" if all(gpu.seen for gpu in gpus) else "cpu"
    if (kind, passes) == ("cpu", "auto"):
        passes = passes_then
        if passes == "auto":
            passes = "numpy" if any(reasons) else "compiled"
    return {"device.kind": kind, "device.passes": passes}


def _say_that_kernels_differ(products: set[tuple[str, str, str]]) -> None:
    """Warn if equal processors multiply by several kernels.

    products  (host, processor, kernels) of the ranks
    """
    if len({(p, k) for _, p, k in products}) > len({p for _, p, _ in products}):
        named = ", ".join(f"{host} {k or 'OpenBLAS by its own'}" for host, _, k in sorted(products))
        say(
            f"warning: equal processors multiply matrices with several kernels: {named}. "
            "To have one rounding, export OPENBLAS_CORETYPE on all hosts."
        )


def say_why_numpy(lacking: Sequence[str], hosts: Sequence[str]) -> None:
    """Print the first reason for which not all ranks have compiled passes.

    lacking  of each rank, as `compiled.lacks` says; nothing is printed where no rank has a compiler
    """
    rank, reason = next(((rank, reason) for rank, reason in enumerate(lacking) if reason), (0, ""))
    if reason and {*lacking} - {NO_COMPILER, SEES_GPU}:
        say(
            "note: LayerNorm, GELU and attention use NumPy's passes, which are slower and round otherwise. "
            f"On rank {rank} ({hosts[rank]}): {brief(' '.join(reason.split()))}"
        )


def resolve_here(config: Config, hosts: Sequence[str], keys: dict[str, str] | None = None) -> Job:
    """Resolve a configuration on this rank; `agree_on` does so on all ranks together.

    hosts   host of every rank, by rank
    keys    from `device_keys`; None: as if all ranks had the machine of this one
    raises  ConfigError if it does not fit the ranks, hosts or this rank's device
    """
    if not config.is_checked:
        check(config)
    is_auto = config.device.kind == "auto"
    if keys is None:
        gpu, lacks = machine_of(config)
        keys = device_keys(config, [gpu], [lacks])
    config = config.changed(keys)
    if is_auto:
        check_each(of_device(config))
    config = with_hyper_parameters(config)
    sizes = axes(config, len(hosts))
    divisor(sizes, hosts, config.replication.shard)  # raises an error
    config, plan = _planned(config, sizes)
    device = device_for(
        config.device.kind,
        config.device.gemm,
        config.device.tiles,
        compute=config.precision.compute,
        attention=config.memory.attention,
        passes=config.device.passes,
        tensor_cores=config.device.tensor_cores,
    )
    if config.memory.recompute == "attention" and _is_tiled(config):
        # Tiles save only one number of each row, and compute the probabilities again anyway.
        config = config.changed({"memory.recompute": "none"})
    parse_wire(config.replication.wire)  # raises an error
    file = config.replication.tuning
    tuning = read_tuning(Path(file)) if file else DEFAULT
    facts = {
        "replication.tuning": crc32(repr(tuning).encode()),
        "pipeline.schedule": crc32(repr(plan).encode()),
    }
    return Job(config, sizes, hosts, plan, tuning, (), device, facts=facts)


def with_hyper_parameters(config: Config) -> Config:
    """Return the configuration with the rule's own defaults of hyper-parameters that are not set.

    The default learning rate is lower if the run starts from a model.
    """
    divisor = (TUNED_ADAPTERS if config.lora.rank else TUNED) if config.run.init_from else 1
    settings = RULES[config.optimizer.name].with_defaults(config.optimizer, divisor)
    return config.model_copy(update={"optimizer": settings})


def axes(config: Config, ranks: int) -> Axes:
    """Return the axes for `ranks` ranks; layout.dp 0 is replaced by the number that fits.

    raises  ConfigError as `of_ranks`
    """
    layout, servers = config.layout, servers_of(config.replication, config.pipeline.schedule)
    dp = layout.dp or max(1, (ranks - servers) // (layout.tp * layout.cp * layout.pp))
    mesh = Axes(layout.tp, dp, layout.pp, servers, layout.cp, layout.ep)
    check_each(of_ranks(config, mesh, ranks))
    return mesh


def _is_tiled(config: Config) -> bool:
    attention = config.memory.attention
    return (
        config.device.kind != "cpu"
        or attention == "tiled"
        or (attention == "auto" and config.model.context >= TILED_FROM)
    )


def slow_heads(config: Config) -> str:
    """Return a line of advice if kernels have no tensor cores for the heads of 16 bits, else ""."""
    head, model = config.model.head_channels, MODELS[config.model.kind]
    if (
        config.device.kind not in ("cuda", "cuda-sim")
        or not config.precision.is_half
        or "heads" not in model.split.split()
    ):
        return ""
    from mpitrain.ops.cuda.attention import has_tensor_kernel

    if has_tensor_kernel(head):
        return ""
    return (
        f"attention multiplies on CUDA cores, not tensor cores: heads have {head} channels, not a "
        "multiple of 16 up to 128"
    )


def _planned(config: Config, sizes: Axes) -> tuple[Config, Plan]:
    """Return the configuration with a number of micro-batches, and the plan of its schedule or of a file."""
    settings, stages, micro_batches = config.pipeline, sizes.pp, config.batch.micro_batches
    name, chunks = settings.schedule, settings.chunks or None
    if name in NAMED and not micro_batches:
        rows = config.batch.size // sizes.dp
        micro_batches = _filling(stages, rows, sequences_of(config)) if stages > 1 else 1
    if name in NAMED and not table_of(name).is_added(name):
        plan = plan_of(name, stages, micro_batches, chunks)
    else:
        from mpitrain.pipeline.schedule_files import find_plan  # It checks what others have made.

        plan = find_plan(name, stages, micro_batches or None, chunks)
    config = config.changed({"batch.micro_batches": plan.micro_batches})
    check_each(of_plan(config, plan, sizes))
    return config, plan


def _filling(stages: int, rows: int, fitting: int) -> int:
    """Return the default number of micro-batches: two per stage if there are enough rows.

    fitting  a number that must divide the rows of a micro-batch; if two micro-batches per stage
             prevent that, there is one per stage
    """
    count = stages * min(2, max(1, rows // stages))
    return count if fitting == 1 or rows % (count * fitting) == 0 else stages


def _say_who_shares(gpus: Sequence[Gpu], hosts: Sequence[str]) -> None:
    users: dict[tuple[str, str, str], list[int]] = {}
    for rank, gpu in enumerate(gpu_identities(hosts, gpus)):
        users.setdefault(gpu, []).append(rank)
    used, seen = Counter(host for host, *_ in users), dict(zip(hosts, gpus, strict=True))
    crowded = {
        host: f"{ranks} ranks on {host} share {used[host]} GPU{'s' * (used[host] > 1)}"
        for host, ranks in Counter(hosts).items()
        if ranks > used[host] >= seen[host].seen
    }
    if crowded:
        say(
            f"warning: {'; '.join(crowded.values())}: they take turns, and each needs its own memory."
        )
    for (host, address, _), ranks in users.items():
        if len(ranks) > 1 and host not in crowded:
            say(
                f"warning: ranks {', '.join(map(str, ranks))} on {host} all use the GPU {address}, but there are "
                f"{seen[host].seen}. Do not hide GPUs from ranks (CUDA_VISIBLE_DEVICES, --gpus-per-task)."
            )
