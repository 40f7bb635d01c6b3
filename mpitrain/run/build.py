"""Makes a run from its configuration: data, a check of memory, trainer and state; opens a trained run again."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.config import CONFIG, EPOCH, Config, Epochs, with_settings
from mpitrain.config.plugins import load
from mpitrain.data import (
    Reading,
    Request,
    Source,
    Unopened,
    as_it_is,
    file_digests,
    largest_token,
    open_request,
    rows_of_epoch,
    source_kind,
    targets_of,
    tokenizer_of,
    zeros,
)
from mpitrain.data.source import Targets
from mpitrain.data.tokenizer import TOKENIZER
from mpitrain.errors import ConfigError, gigabytes, say
from mpitrain.formats.chat import special_names
from mpitrain.formats.companions import INIT_FROM
from mpitrain.formats.table import format_of, has_model
from mpitrain.layers.base import Unit, freeze
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import LOSSES
from mpitrain.layers.recomputed import with_recomputation
from mpitrain.machine import process
from mpitrain.models.table import MODELS, adapted, form_for, other_form
from mpitrain.optim import RULES
from mpitrain.parallel.grid import divisor
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.replica import Sizes
from mpitrain.parallel.tensor.layer_factory import described
from mpitrain.pipeline.partition import TIME, UnitTime
from mpitrain.run.checkpoint import loading
from mpitrain.run.checkpoint.manifest import Done, read_chosen
from mpitrain.run.choices import parse
from mpitrain.run.job import (
    FILES,
    Job,
    Room,
    agree_on,
    device_keys,
    found_here,
    machine_of,
    resolve_here,
    say_why_numpy,
    with_data_found,
)
from mpitrain.run.model_keys import adapter_keys, determined, has_adapter
from mpitrain.run.rules import check_each, of_injection, of_schedule
from mpitrain.run.run_dir import (
    check_meaning,
    checkpoint_of,
    configuration,
    held_out_as_before,
    is_run,
    noted_largest,
    noted_scaling,
    text_in,
)
from mpitrain.run.trainer import Trainer, draw
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport

if TYPE_CHECKING:
    from mpitrain.kernels.loader import Kernels
    from mpitrain.run.initial import Models

OF_NUMBERS = "mse"
"""The loss of a run whose targets are numbers and whose configuration names no loss."""


def build(
    transport: Transport,
    config: Config | Job,
    saved: Path | None = None,
    source: Source | Unopened | None = None,
    fills: bool = False,
) -> Job:
    """Build a run from its configuration and, if given, from a checkpoint; collective.

    Parameters
    ----------
    transport : Transport
        The transport that connects all ranks.
    config : Config
        The configuration, from `parse`.
    saved : Path, optional
        A checkpoint directory to load: RUN/checkpoints/step-N.
    source : Source, optional
        A data source that replaces the configured one.
    fills : bool
        Whether the caller gives its values to all state that a step changes.

    Returns
    -------
    Job
        Its `trainer`, its data `source`, and its `step`, the number of steps so far.

    Raises
    ------
    MpitrainError
        On every rank, if configuration, data, checkpoint and ranks do not fit together.
    """
    if not isinstance(config, Job):
        new = partial(opened, transport, checkpoint=saved, source=source)
        job = agree_on(transport, lambda: config, opened=new)
    else:
        job = config
    checkpoint_dir = saved or job.saved
    folder = Path(checkpoint_dir) if checkpoint_dir else None
    if job.source is None:
        scanned = (None, None) if source else _scanned(transport, job)
        job = on_all_ranks(
            transport,
            lambda: opened(transport, job, folder, source, scanned),
            FILES,
            lambda job: job.facts,
        )
    if job.config.pipeline.partition == TIME:
        job = _cut_by_time(transport, job)
        job = on_all_ranks(transport, lambda: checked(transport, job))
    if job.device.kernels is not None:
        _prepare(transport, job.device.kernels)
    trainer = Trainer(transport, None, job, draws=False)
    models, frozen = job.models, trainer.replica.frozen
    kept = trainer.replica.state() if folder or models else []
    if fills:
        kept = [buffer for buffer in kept if buffer.array is frozen]
    checkpoint = loading.read_beside(transport, folder) if folder else None
    if not checkpoint:
        given = {entry.name for entry in trainer.storage.entries if fills}
        draw(trainer, lambda name: name not in given and (not models or models.lack(name)))
    if models:
        trainer.begun_from = models.load(transport, kept, trainer.storage, trainer.backend)
        if checkpoint:
            kept = models.adapters_of(kept, checkpoint.manifest.base, trainer.begun_from)
    if checkpoint:
        checkpoint = loading.load(
            checkpoint, kept, trainer.storage, transport, trainer.backend, job.axes.sizes
        )
    if checkpoint or models:
        trainer.replica.restore(checkpoint.manifest.scalars if checkpoint else {})
    return replace(job, trainer=trainer, done=checkpoint.done if checkpoint else job.done)


def opened(
    transport: Transport,
    job: Job,
    checkpoint: Path | None = None,
    source: Source | Unopened | None = None,
    scanned: tuple[int | None, dict[str, Any] | None] | None = None,
) -> Job:
    """Open the data of a job on this rank: the job with what they determine, checked and counted.

    source   replaces the configured one
    scanned  the result of `_scanned`; None: the ranks have scanned nothing, and do not know each other's
             GPUs. If the job needs these, or times of units, it is returned as it is
    """
    if scanned is None:
        kind = source_kind(job.config.data.source)
        is_scanned = not source and (kind.is_token_file or kind.has_arrays)
        is_timed = job.config.pipeline.partition == TIME
        if is_scanned or is_timed or job.device.kernels is not None:
            return job
    data = source or _source(job, *(scanned or (None, None)))
    name = "this data source" if source else job.config.data.source
    job = fitted(replace(job, source=data), name, transport.rank == 0)
    if job.config.run.init_from or job.config.lora.rank:
        job = replace(job, models=_models(job, checkpoint, transport.rank))
    job = checked(transport, job)
    facts = job.facts if source else job.facts | file_digests(job.config.data)
    if job.models:
        facts = facts | job.models.facts()
    facts = facts | {"inputs": data.inputs, "classes": data.classes, "held_out": data.held_out}
    return replace(job, facts=facts)


def checked(transport: Transport, job: Job) -> Job:
    """Return the job with the counts of a step of this rank, if they are counted before it.

    A job on the host counts nothing unless memory.limit_gb is set, or a plugin made the model: counting
    also finds a layer that returns another output than it states.

    raises  ConfigError if the model does not fit configuration, ranks or memory
    """
    room = check_memory(transport, job, job.described().model)
    is_own = MODELS.is_added(job.config.model.kind)
    if job.device.kernels is None and not job.config.memory.limit_gb and not is_own:
        return job
    from mpitrain.run.count.step import check_activations

    return replace(job, counts=check_activations(job, room, transport.rank))


def fitted(job: Job, name: str, says: bool) -> Job:
    """Return the job with the keys that its data determine; ConfigError if they do not fit.

    name  of the data, for messages
    says  whether to print a note about a loss for numbers
    """
    config, data = job.config, job.source
    if data.form not in MODELS[config.model.kind].takes.split():
        raise other_form(config.model.kind, data.form, name)
    if targets_of(data) != LOSSES[config.model.loss].takes:
        config = _with_loss(config, targets_of(data), name, says)
    config = config.changed({"data.template": getattr(data, "template", config.data.template)})
    if config.run.epochs or config.run.eval_every == EPOCH:
        config = _with_epochs(config, data, job.done)
    if config.run.epochs and config.run.inject:  # Only now the steps are known.
        check_each(of_injection(config.run.inject, job.axes.ranks, config.run.steps))
    return replace(job, config=config)


def _prepare(transport: Transport, kernels: Kernels) -> None:
    """Compile the kernels of the counted step, together with the other ranks of this host."""
    # The same on all ranks, also where a host has only one of them.
    if len({*transport.hosts}) < transport.size:
        here = transport.hosts[transport.rank]
        beside = [rank for rank, host in enumerate(transport.hosts) if host == here]
        turn = beside.index(transport.rank)
        on_all_ranks(transport, lambda: kernels.prepare(turn, len(beside)))


def _models(job: Job, checkpoint: Path | None, rank: int) -> Models | None:
    """Locate the models that the run starts from, as `open_models`."""
    from mpitrain.run.initial import open_models

    config, layout = job.config, job.config.layout.model_copy(update={"tp": 1})
    layers = described(job.device.ops, layout)
    return open_models(config, checkpoint, job.source.inputs, lambda: job.units(layers), rank)


def _with_loss(config: Config, targets: Targets, name: str, says: bool) -> Config:
    """Return the configuration with a loss for targets that model.loss does not take."""
    is_set = "loss" in config.model.model_fields_set or config.model.label_smoothing
    if not is_set and targets == "numbers":
        if says:
            say(
                f"note: the targets of {name} are numbers, so model.loss is {OF_NUMBERS} (or set mae)."
            )
        return config.changed({"model.loss": OF_NUMBERS})
    fitting = [other for other, row in LOSSES.items() if row.takes == targets]
    raise ConfigError(
        f"model.loss {config.model.loss} takes {LOSSES[config.model.loss].takes} as targets, but {name} has {targets}.",
        f"Set model.loss to {' or '.join(fitting)}.",
    )


def _with_epochs(config: Config, data: Source | Unopened, begun: Done) -> Config:
    """Return the configuration with run.steps of run.epochs, and the ends of epochs.

    These steps take the rows of the epochs that those before this start have left, with today's batch.
    """
    if isinstance(data, Unopened):
        return config
    if not (rows := rows_of_epoch(data)):
        raise ConfigError(
            f"{'run.epochs' if config.run.epochs else 'run.eval_every'} needs data that know their size, but "
            f"{config.data.source} does not.",
            "Set a number of steps instead.",
        )
    config = config.with_epochs(Epochs(rows, config.batch.size, begun.step, begun.samples))
    if not config.run.epochs:
        return config
    left = max(0, math.ceil(config.run.epochs * rows) - begun.samples)
    steps = max(1, begun.step + -(-left // config.batch.size))
    check_each(of_schedule(config.optimizer, steps))
    return config.changed({"run.steps": steps})


def open_data(transport: Transport, job: Job) -> Source:
    """Open the configured data source, so that several jobs can share it; collective."""
    largest, scaling = _scanned(transport, job)
    return on_all_ranks(
        transport,
        lambda: _source(job, largest, scaling),
        "data source",
        lambda source: file_digests(job.config.data),
    )


def alone(config: Config, hosts: Sequence[str]) -> Job:
    """Resolve a job of such hosts on this rank alone, and open its data: without a trainer.

    hosts   the host of each rank
    raises  MpitrainError if configuration, data and ranks do not fit together
    """
    (gpu, lacks), name = machine_of(config), config.data.source
    say_why_numpy([lacks], [""])
    job = resolve_here(config, hosts, device_keys(config, [gpu], [lacks]))
    job = with_data_found(job, found_here(config))
    largest = largest_token(name, 0, 1) if source_kind(name).is_token_file else None
    job = fitted(replace(job, source=_source(job, largest)), name, True)
    if config.run.init_from or config.lora.rank:
        _models(job, None, 0)
    return job


def unit_times(job: Job, wanted: Sequence[int] | None = None) -> Iterator[UnitTime | None]:
    """Measure each unit, forward and backward, for one micro-batch on this rank, as `unit_seconds`."""
    from mpitrain.pipeline.partition import unit_seconds

    config, device, axes = job.config, job.device, job.axes
    backend, batch = device.backend, config.batch
    rows = max(1, batch.size // (axes.dp * batch.micro_batches))
    alone = config.layout.model_copy(update={"tp": 1})
    layers = described(device.ops, alone, keys=config.model)
    every = freeze(adapted(job.units(layers), config.lora, layers), config.model.freeze)
    (units,) = with_recomputation([every], min(1, config.memory.segment))
    computed = device.half or config.precision.stored
    inputs, targets = zeros(job.source, rows, config.precision.stored)
    right = backend.from_host(targets.reshape(-1))
    arena = device.arena()

    def loss(logits: Any) -> Any:
        _, gradient = layers.loss().gradient(logits.reshape(len(right), -1), right, 1.0, arena)
        return gradient.reshape(logits.shape)

    placed = backend.from_host(inputs if inputs.dtype.kind != "f" else inputs.astype(computed))
    stored = config.precision.stored
    return unit_seconds(units, placed, loss, backend, arena, stored, computed, wanted=wanted)


def _cut_by_time(transport: Transport, job: Job) -> Job:
    """Measure the time of each unit; return the job with the fastest partition; collective."""
    from mpitrain.pipeline.partition import by_time

    config, axes = job.config, job.axes
    transport.barrier()  # All ranks measure at the same time, as they compute in training.
    own = [each.seconds for each in unit_times(job) if each]
    seconds = transport.gather_text(own)
    stages = [axes.coords(rank).pp for rank in range(axes.ranks)]
    counts = on_all_ranks(transport, lambda: by_time(seconds, stages, job.plan.stage_of))
    values = {"pipeline.partition": ",".join(map(str, counts))}
    return replace(job, config=config.changed(values))


def _scanned(transport: Transport, job: Job) -> tuple[int | None, dict[str, Any] | None]:
    """Return the largest token of data.source if that is a token file, and the scaling of its arrays
    if it has any; collective.

    If the run directory has not noted them, the ranks scan the data, each an equal slice.
    """
    name, dtype = job.config.data.source, job.config.data.dtype
    kind, largest, scaling = source_kind(name), job.largest, job.scaling
    needs_largest, needs_scaling = kind.is_token_file and largest is None, kind.has_arrays
    needs_scaling = needs_scaling and not scaling
    slice_of = transport.rank, transport.size
    if needs_largest:
        largest = max(from_all_ranks(transport, lambda: largest_token(name, *slice_of, dtype)))
    elif needs_scaling:
        from mpitrain.data.arrays import joined

        def scanned() -> Any:
            source: Any = _source(job, None)
            return source.scanned(*slice_of)

        parts = from_all_ranks(transport, scanned)
        scaling = on_all_ranks(transport, lambda: joined(parts, name))
    return largest, scaling


def _source(job: Job, largest: int | None, scaling: dict[str, Any] | None = None) -> Source:
    """Open the data source.

    largest, scaling  the result of `_scanned`
    """
    config, data = job.config, job.config.data
    scan = None
    if largest is not None:
        scan = as_it_is(data.source, data.dtype)._replace(largest=largest)
    request = Request(
        data.source,
        config.model.context,
        config.precision.stored,
        data.vocabulary,
        data.validation,
        scan,
        Reading(**{key: getattr(data, key) for key in Reading._fields}),
        form_for(config.model.kind, data.source),
        LOSSES[config.model.loss].takes,
        scaling,
    )
    is_of_tokens = request.form == source_kind(data.source).form == "tokens"
    if not MODELS[config.model.kind].hides or not is_of_tokens:
        return open_request(request)
    from mpitrain.data.masked import masked  # a run of another kind does not need the module

    run = job.folder if job.has_run else ""
    return masked(request, data, *_tokenizer_of(config, run))


def _tokenizer_of(config: Config, run: str) -> tuple[bytes | None, str]:
    """Return the tokenizer that knows the special tokens, and the name of its mask token, or "".

    The model that a run starts from knows them if the data do not.
    """
    data, folder = config.data, Path(run or config.run.init_from)
    of_data = tokenizer_of(data.mixture or [data.source], data.tokenizer)
    if not (run or config.run.init_from):
        return of_data, ""
    tokenizer, is_of_run = of_data or text_in(folder, TOKENIZER), is_run(folder)
    if not tokenizer and not is_of_run:
        raise ConfigError(
            f"A tokenizer knows the mask token and other special tokens of a {config.model.kind}, but "
            f"neither {data.source} nor {folder} has one ({TOKENIZER}).",
            "Save the tokenizer of the model there, or encode text: mpitrain data prepare --tokenizer.",
        )
    return tokenizer, special_names(folder / INIT_FROM if is_of_run else folder).get(
        "mask_token", ""
    )


def check_memory(transport: Transport, job: Job, model: Sequence[Unit]) -> Room:
    """Raise ConfigError if parameters, gradients and optimizer state exceed the free memory.

    Activations do not count here: `run/count/step.py` checks that they fit in what is left.

    model  all units, as of `Job.described`
    """
    config, gpus = job.config, job.gpus
    places = process.gpu_identities(transport.hosts, gpus) if gpus else transport.hosts
    users = [rank for rank, place in enumerate(places) if place == places[transport.rank]]
    ranks, where = len(users), "on this GPU" if gpus else "on this host"
    storage = Storage(model, config.precision.stored, job.axes.copies)
    shards = divisor(job.axes, transport.hosts, config.replication.shard)
    mode = mode_of(config.replication, config.pipeline.schedule)
    needed = ranks * mode.memory(sizes(job, storage, shards))
    # The rank of a GPU that looked last has seen what the start of the others takes there.
    free = min(gpus[rank].free for rank in users) if gpus else process.free_memory("cpu")
    allowed = "are free"
    if config.memory.limit_gb and config.memory.limit_gb * 1e9 < free:
        free, allowed = int(config.memory.limit_gb * 1e9), "are allowed by memory.limit_gb"
    if needed > free:
        sum_needed, sum_free = gigabytes(needed, free)
        raise ConfigError(
            f"{storage.parameter_count:,} parameters with gradients and optimizer state of {ranks} rank(s) need "
            f"{sum_needed} {where}, but {sum_free} {allowed}.",
            "Lower model.width or model.layers"
            + (", or start fewer ranks per host." if ranks > 1 else "."),
        )
    return Room(free, needed, users, where, allowed)


def sizes(job: Job, storage: Storage, shards: int) -> Sizes:
    """Return the arguments of a mode's memory formula, as the mean over the pipeline stages.

    storage  of all units of the model
    shards   ranks of ZeRO's sharding group
    """
    config, stages, chunks = job.config, job.axes.pp, len(job.plan.stage_of)
    rule, rounded = RULES[config.optimizer.name], job.device.half or storage.dtype
    largest, slot = (
        each.length / chunks if chunks > 1 else each.largest for each in (storage, storage.frozen)
    )
    return Sizes(
        config.replication,
        job.axes,
        shards,
        storage.length / stages,
        largest,
        storage.dtype.itemsize,
        mirror=rounded.itemsize if config.precision.is_half else 0,
        state=rule.step.optimizer.state_bytes(rule, storage) / max(1, storage.length),
        frozen=storage.frozen.length / stages,
        slot=slot,
    )


def trained_configuration(folder: Path, settings: list[str]) -> Config:
    """Return the configuration that a run was last trained with, on one rank.

    settings  of the command: run.plugins names the plugins of the run; other keys are not applied
    """
    if not is_run(folder):
        raise ConfigError(
            f"There is no run in {folder}: it has no {CONFIG}.", "Name the directory of a run."
        )
    load(with_settings({}, settings))  # `configuration` asks for the plugins of the run.
    return configuration(folder)


def configured(folder: Path, settings: list[str]) -> Config:
    """Return the configuration with which one rank opens a run directory, as `open_run` does.

    Keys of layout, replication and pipeline have their defaults, not the values of the run. The
    settings come last, so they may change any key. `folder` may also be one of another project.
    """
    if not is_run(folder) and has_model(folder):
        return _of_folder(folder, settings)
    then, changed = trained_configuration(folder, settings), with_settings({}, settings)
    check_has_adapters(then, changed.get("run", {}).get("init_from"))
    context = changed.get("model", {}).get("context", then.model.context)
    if context != then.model.context:
        raise ConfigError(
            f"A run reads as many tokens as it was trained on, model.context {then.model.context}, not {context}.",
            "Leave out --context, which is for folders of other projects.",
        )
    # The rows of a micro-batch in training, which fit in the memory of a rank.
    rows = max(1, then.batch.size // (max(1, then.layout.dp) * then.batch.micro_batches))
    anew = ["run.delay=", "run.inject=", "batch.micro_batches=0", f"batch.size={rows}"]
    anew.append("run.epochs=0.0")  # These rows are no step of the run, whose run.steps stay.
    anew.append("device.passes=auto")  # This machine may have no compiler.
    # The layout of the training run does not matter here, nor how it reduced gradients.
    alone = {**then.model_dump(), "replication": {}, "layout": {}, "pipeline": {}}
    alone["data"] = held_out_as_before(then.data, settings)
    if source := changed.get("data", {}).get("source"):
        alone["data"] = _read_by(source, then.model.kind, alone["data"])
    return parse(with_settings(alone, [*anew, *settings]))


NO_ROWS, NO_TOKENS = "jsonl:none", "tokens:none"
"""The data.source of a model of another project, of texts or of numbers of tokens, if none is named."""
FROZEN = ["embedding.*", "blocks.*"]
LONGEST = 4096
"""Most tokens that a model of another project reads where no run has set model.context."""


def _of_folder(folder: Path, settings: list[str]) -> Config:
    """Return the configuration of a model in a folder of another project, as `configured`."""
    changed = with_settings({}, settings)
    base, adapter = str(folder), ""
    if has_adapter(folder):
        adapter = str(folder)
        base = changed.get("run", {}).get("init_from") or adapter_keys(folder)["run.init_from"]
    keys = determined(Path(base))
    has_texts = keys["data.tokenizer"] or keys["data.template"]  # bytes need no tokenizer
    data: dict[str, Any] = {"source": NO_ROWS if has_texts else NO_TOKENS}
    if source := changed.get("data", {}).get("source"):
        data = _read_by(source, keys["model.kind"], {})
    tables = {
        "run": {"init_from": base},
        "lora": {"init_from": adapter},
        # Most parameters need no gradient and no optimizer state.
        "model": {
            "context": min(keys["model.context"], LONGEST),
            "freeze": [] if adapter else FROZEN,
        },
        "batch": {"size": 1},
        "data": data,
    }
    return parse(with_settings(tables, settings))


def _say_that_context_is_limited(config: Config) -> None:
    """Print that a model of another project reads fewer tokens here than its folder allows."""
    if config.model.context != LONGEST:
        return
    most = determined(Path(config.run.init_from))["model.context"]
    if most > LONGEST:
        say(
            f"note: {config.run.init_from} reads {most} tokens, but {LONGEST} are taken: --context {most} takes all."
        )


def _read_by(source: str, model: str, data: Mapping[str, Any]) -> dict[str, Any]:
    kind, form = source_kind(source), form_for(model, source)
    kept = {
        key: value
        for key, value in data.items()
        if kind.does_read(key) or key not in Reading._fields
    }
    if kept.get("separator", -1) < 0 and not kept.get("packing"):
        kept.pop("attend", None)  # Rows of this source have no documents.
    if kind.has_arrays or form == "texts":
        kept["validation"] = source  # All of its rows.
    return kept


def check_has_adapters(config: Config, base: str | None) -> None:
    if base and not config.lora.rank:
        raise ConfigError(
            "--base names the model under adapters, but lora.rank of this run is 0.",
            "Leave out --base.",
        )


def open_run(
    transport: Transport,
    folder: Path,
    alone: Callable[[], Config],
    needs_data: bool = True,
    best: bool = False,
) -> Job:
    """Build the job of a run directory from its newest checkpoint, in any layout; collective.

    A folder of another project gives a job that has made no step.

    alone       returns the configuration on one rank, from `configured`
    best        whether to take the checkpoint with the best validation loss
    needs_data  False: build a model that writes text without opening its data source
    """

    from mpitrain.run.generate import (
        check_writes,
    )  # which imports modules that training does not need

    def on_these_ranks() -> Config:
        config = alone()
        size = config.batch.size * transport.size
        return config.changed({"batch.size": size})

    def look(config: Config) -> dict[str, Any]:
        if config.run.init_from and not is_run(folder):
            if not needs_data:
                check_writes(config.model.kind)
            elif config.data.source in (NO_ROWS, NO_TOKENS):
                raise ConfigError(
                    f"A run has data of its own, but {folder} is a model without any.",
                    "Name some: --data SOURCE.",
                )
            _check_is_whole(config, best)
            if transport.rank == 0:
                _say_that_context_is_limited(config)
            return {}
        if transport.rank > 0:
            return {}
        saved, manifest = read_chosen(lambda: checkpoint_of(folder, best))
        check_meaning(configuration(folder).flat(), saved, manifest)
        return {
            "folder": str(folder),
            "has_run": True,
            "saved": str(saved),
            "largest": noted_largest(folder, config.data.source, config.data.dtype),
            "scaling": noted_scaling(folder),
        }

    job = agree_on(transport, on_these_ranks, look)
    vocabulary = job.config.data.vocabulary or 256
    context = job.config.model.context
    is_enough = not needs_data and MODELS[job.config.model.kind].writes
    source = Unopened("tokens", (context,), vocabulary, vocabulary) if is_enough else None
    return build(transport, job, source=source)


HEADS = {"tokens": "head.logits.bias", "texts": "head.classes.weight"}
"""{form of the data: a tensor of the head that a bert needs for them}."""


def _check_is_whole(config: Config, best: bool) -> None:
    """Raise ConfigError unless a folder of another project has all that its model needs."""
    folder = config.run.init_from
    if best:
        raise ConfigError(
            f"--best chooses among the checkpoints of a run, but {folder} is none.", "Leave it out."
        )
    initial = format_of(Path(folder)).read(Path(folder))
    head = HEADS.get(form_for(config.model.kind, config.data.source), "")
    if initial.may_lack and head and head not in initial.tensors:
        raise ConfigError(
            f"{config.data.source} needs a head that was trained, but {folder} lacks {head}.",
            "Train it first: mpitrain train --set run.init_from=" + folder,
        )
