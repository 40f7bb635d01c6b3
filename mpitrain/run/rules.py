"""Every rule between keys of a configuration, with the text for a user who breaks it, in one list.

`check` has those between keys alone. Of a job `run/job.py` checks those with its ranks, its device and its schedule. Rules
about data stand in `run/build.py`.
"""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.config import EPOCH, KEPT_ON_HOST, Config, Data, Lora, Optimizer, refusal
from mpitrain.config.faults import KINDS, delays, injection
from mpitrain.data import TENTH, absolute, is_fraction, source_kind, spellings, validating
from mpitrain.data.table import MIXTURE
from mpitrain.errors import ConfigError, multiples_near
from mpitrain.layers.plain import LOSSES
from mpitrain.models.table import MODELS, form_for, is_tied, kinds
from mpitrain.ops import OPERATIONS
from mpitrain.ops.device import cuda_body, no_kernel
from mpitrain.optim import RULES
from mpitrain.optim.coded import BlockWise
from mpitrain.optim.optimizer import DECAYS, EVERY, ElementWise
from mpitrain.optim.tensors import TensorWise
from mpitrain.parallel.grid import Axes
from mpitrain.parallel.modes import STREAMS, is_synchronous, mode_of
from mpitrain.parallel.tensor.rows import sequences_together
from mpitrain.pipeline import schedules
from mpitrain.pipeline.schedules import Plan
from mpitrain.pipeline.simulate import goes_in_passes

Rule = tuple[object, str, str]
"""(whether the rule is broken, the law with the values, the way out)"""


def check(config: Config, path: Path | None = None) -> None:
    """Raise ConfigError for the first rule that a configuration breaks; path: the file of it."""
    for rules in (between_keys, of_data, of_modes, of_model):
        check_each(rules(config), path)


def check_each(rules: Iterable[Rule], path: Path | None = None) -> None:
    """Raise ConfigError for the first of the rules that is broken.

    path  the file that the configuration was read from, for messages
    """
    for is_broken, law, way_out in rules:
        if is_broken:
            raise ConfigError(law, way_out) if way_out else refusal(law, path)


def between_keys(config: Config) -> Iterator[Rule]:
    """The rules that need no row of a table."""
    wire, compute = config.replication.wire, config.precision.compute
    memory, lora, every = config.memory, config.lora, config.run.eval_every
    yield (
        wire != "none" and config.precision.stored != "float32",
        f"Wire formats carry float32, but precision.compute is {compute} with replication.wire {wire}.",
        "Set replication.wire to none, or precision.compute to float32.",
    )
    yield (
        compute == "float16" and wire.startswith(KEPT_ON_HOST),
        f"Wire format {wire} keeps what it leaves out for later steps, which an overflow of float16 "
        "would spoil, but precision.compute is float16.",
        "Set replication.wire to fp16, bf16, int8 or none, or precision.compute to bfloat16.",
    )
    yield from of_device(config)
    yield (
        config.data.attend == "document" and config.data.separator < 0 and not config.data.packing,
        "data.attend=document needs documents, but data.separator is -1 and data.packing is false.",
        "Set data.separator to the token that ends a document, data.packing=true for conversations, "
        "or data.attend to window.",
    )
    keep_every, saves = config.checkpoint.keep_every, config.checkpoint.every
    yield (
        keep_every and (not saves or keep_every % saves),
        f"checkpoint.keep_every {keep_every} must be a multiple of checkpoint.every {saves}.",
        "Set checkpoint.keep_every to a multiple, or to 0."
        if saves
        else "Set checkpoint.every, too.",
    )
    count = 1 if every == EPOCH else int(every)
    yield (
        (config.run.patience and count < 1) or (config.checkpoint.best and count < 0),
        f"run.patience and checkpoint.best need evaluations, but run.eval_every is {every}.",
        "Set run.eval_every to the steps between two evaluations.",
    )
    for key in ("alpha", "targets", "dropout"):
        yield (
            not lora.rank and getattr(lora, key) != Lora.model_fields[key].default,
            f"Without adapters the keys of [lora] have their defaults, but lora.{key} is "
            f"{getattr(lora, key)!r} and lora.rank is 0.",
            f"Set lora.rank, or leave lora.{key} out.",
        )
    yield (
        memory.logit_chunks > 1 and config.replication.mode == "master",
        f"In mode master rank 0 computes the loss of all logits, but memory.logit_chunks is {memory.logit_chunks}.",
        "Set memory.logit_chunks to 1, or replication.mode to all-reduce.",
    )


def of_device(config: Config) -> Iterator[Rule]:
    """The rules of device.kind, which break once more where it replaces `auto`."""
    kind, compute, wire = config.device.kind, config.precision.compute, config.replication.wire
    is_on_kernels = kind in ("cuda", "cuda-sim")
    yield (
        kind == "cuda" and wire.startswith(KEPT_ON_HOST),
        f"Wire format {wire} keeps its residuals in host memory, but device.kind is cuda.",
        "Set replication.wire to fp16, bf16, int8 or none, or device.kind to cpu.",
    )
    yield (
        is_on_kernels and config.memory.attention == "whole",
        f"Kernels compute attention in tiles, but memory.attention is whole on {kind}.",
        "Set memory.attention to auto, or device.kind to cpu.",
    )
    gemm, is_half = config.device.gemm, config.precision.is_half
    yield (
        config.device.tensor_cores == "wgmma" and not (is_half and gemm != "library"),
        "device.tensor_cores=wgmma needs 16 bits and device.gemm tiled, 3xtf32 or auto, but "
        f"precision.compute is {compute} and device.gemm {gemm}.",
        "Set precision.compute to bfloat16 or float16 and device.gemm to tiled, 3xtf32 or auto, or "
        "device.tensor_cores to mma.",
    )
    layout = config.layout
    yield (
        is_on_kernels
        and is_half
        and layout.tp > 1
        and layout.algorithm == "native"
        and not layout.sequence_parallel,
        f"layout.algorithm native sums activations by MPI, but they are {compute} on {kind}, "
        "which MPI has no type for.",
        "Set layout.algorithm to auto, or precision.compute to float32.",
    )
    step = RULES[config.optimizer.name].step
    if is_on_kernels and isinstance(step, ElementWise | BlockWise) and step.op in OPERATIONS:
        yield (cuda_body(step.op) is None, *no_kernel(step.op))


def of_data(config: Config) -> Iterator[Rule]:
    name, validation, mixture = config.data.source, config.data.validation, config.data.mixture
    has_arrays = source_kind(name).has_arrays
    part = "a fraction of the rows between 0 and 1, " * has_arrays
    is_named = validation not in ("", TENTH) and not (has_arrays and is_fraction(validation))
    yield (
        is_named and not source_kind(validation).takes_validation,
        f"data.validation must be {validating()}, or else {part}tenth or empty, but is {validation!r}.",
        "",
    )
    yield (
        (name == MIXTURE) != bool(mixture),
        f"data.source {MIXTURE} and a table data.mixture belong together, but data.source is {name} "
        f"and data.mixture has {len(mixture)} sources.",
        'For example: --set data.source=mixture --set \'data.mixture={"text:a.txt"=0.7, "text:b.txt"=0.3}\'',
    )
    yield (
        len(set(map(absolute, mixture))) < len(mixture),
        f"data.mixture must list each source once, but lists one twice: {', '.join(mixture)}.",
        "Add up its weights.",
    )
    for member, weight in mixture.items():
        yield (
            not {"order", "separator"} <= {*source_kind(member).reads},
            f"data.mixture must list {spellings('order')}, but lists {member!r}.",
            "Name other sources.",
        )
        yield (
            not weight > 0,
            f"A weight of data.mixture must be above 0, but that of {member} is {weight:g}.",
            "Leave the source out, or raise its weight.",
        )


def of_modes(config: Config) -> Iterator[Rule]:
    """The rules of replication modes, ZeRO stages and schedules."""
    settings, name, run = config.replication, config.pipeline.schedule, config.run
    compute, is_stream = config.precision.compute, config.pipeline.schedule in STREAMS
    yield (
        is_stream != (name in schedules.STREAMS),
        f"An asynchronous schedule has a row in STREAMS of pipeline/schedules.py and of parallel/modes.py, but {name} has "
        "only one of them.",
        "Add the other row, or choose another pipeline.schedule.",
    )
    yield (
        settings.wire != "none" and settings.zero > 1,
        "Wire formats carry sums that every replica has whole, but with replication.zero "
        f"{settings.zero} none has, and replication.wire is {settings.wire}.",
        "Set replication.wire to none, or replication.zero to 0 or 1.",
    )
    yield (
        settings.shard != "all" and not settings.zero,
        f"replication.shard {settings.shard} says among whom ZeRO divides, but replication.zero is 0.",
        "Set replication.zero to 1, 2 or 3, or replication.shard to all.",
    )
    yield (
        settings.gather != "none" and (settings.zero != 3 or compute != "float32"),
        f"replication.gather {settings.gather} is of float32 parameters that no rank has whole, but "
        f"replication.zero is {settings.zero} and precision.compute {compute}.",
        "Set replication.gather to none, or replication.zero to 3 and precision.compute to float32.",
    )
    mode = mode_of(settings, name)
    yield (
        is_stream and is_tied(config.model, config.data.source),
        f"With schedule {name} each stage updates by itself, but model.tied has two share a tensor.",
        "Set model.tied to false, or pipeline.schedule to 1f1b.",
    )
    yield (
        is_stream and compute == "float16",
        f"With schedule {name} no stage waits until all know of an overflow, but the loss scale of float16 adapts to "
        "them.",
        "Set precision.compute to bfloat16 or float32, or pipeline.schedule to 1f1b.",
    )
    update = f" with replication.update {settings.update}" if settings.mode == "server" else ""
    yield (
        compute == "float16" and mode.updates_early(settings),
        "In float16 all ranks change the loss scale together after each step, but in mode "
        f"{settings.mode}{update} they have no step in common.",
        "Set precision.compute to bfloat16, or replication.mode to all-reduce, master, or server with update sync.",
    )
    yield from (
        of_needs(config, mode.needs, "pipeline.schedule", "1f1b", "Schedule")
        if is_stream
        else of_needs(config, mode.needs, "replication.mode", "all-reduce", "Mode")
    )
    yield from of_common_steps(config, run.digest_every, "run.digest_every reads the state between")
    yield from of_common_steps(
        config, run.on_spike != "ignore", "run.on_spike compares the losses of"
    )
    yield from of_common_steps(config, run.patience, "run.patience ends the run between")


def of_common_steps(config: Config, is_needed: object, reason: str) -> Iterator[Rule]:
    """The rule of what needs steps of all ranks together.

    reason  a clause that says who needs them, for the message
    """
    schedule = config.pipeline.schedule
    key = "pipeline.schedule" if schedule in STREAMS else "replication.mode"
    yield (
        is_needed and not is_synchronous(config.replication, schedule),
        f"{reason} steps that all ranks take together, but {key} is {config.flat()[key]}.",
        "Set pipeline.schedule=1f1b and replication.mode=all-reduce.",
    )


def of_optimizer(config: Config) -> Iterator[Rule]:
    """The rules of an update rule, which runs of earlier versions may have broken."""
    settings, rule = config.optimizer, RULES[config.optimizer.name]
    unread = rule.unread_keys(settings)
    values = " and ".join(f"optimizer.{key} is {getattr(settings, key)}" for key in unread)
    readers = [name for name, other in RULES.items() if {*unread} <= {*other.reads}]
    yield (
        unread,
        f"Update rule {settings.name} reads {', '.join(rule.reads)} of [optimizer] besides "
        f"{', '.join(EVERY[1:])}, but {values}.",
        f"Leave out {' and '.join(f'optimizer.{key}' for key in unread)}"
        + (f", or set optimizer.name to {' or '.join(readers)}." if readers else "."),
    )
    if not config.run.epochs:  # The data, which give the steps of run.epochs, are not open yet.
        yield from of_schedule(settings, config.run.steps)
    yield (
        isinstance(rule.step, ElementWise | BlockWise) and rule.step.op not in OPERATIONS,
        f"The step of a rule is an operation of the table OPERATIONS, but {settings.name} names "
        f"{getattr(rule.step, 'op', '')!r}.",
        "Add the operation to the table, or choose another optimizer.name.",
    )
    yield (
        isinstance(rule.step, TensorWise) and rule.step.whole and config.layout.tp > 1,
        f"{settings.name.capitalize()} updates whole matrices, but layout.tp {config.layout.tp} divides them.",
        "Set layout.tp to 1, or choose another optimizer.name.",
    )
    yield from of_needs(config, rule.needs, "optimizer.name", "adamw", "Update rule")


def of_needs(
    config: Config, needs: Mapping[str, Any], key: str, other: str, noun: str
) -> Iterator[Rule]:
    """The rules of a row: the values of other keys that it needs.

    key, other  the key that names the row, and a name of a row without such rules
    """
    values = config.flat() if needs else {}
    for name, value in needs.items():
        needed, given = (
            str(v).lower() if isinstance(v, bool) else v for v in (value, values[name])
        )
        yield (
            values[name] != value,
            f"{noun} {values[key]} needs {name} {needed}, but it is {given}.",
            f"Set {name} to {needed}, or {key} to {other}.",
        )


def of_schedule(settings: Optimizer, steps: int) -> Iterator[Rule]:
    """The rules of a learning-rate schedule in a run of so many steps."""
    fields = Optimizer.model_fields
    keys = [
        key for key in ("final", "decay_steps") if getattr(settings, key) != fields[key].default
    ]
    values = " and ".join(f"optimizer.{key} is {getattr(settings, key):g}" for key in keys)
    yield (
        keys and not DECAYS[settings.schedule],
        f"optimizer.schedule {settings.schedule} has no decay, but {values}.",
        f"Leave out {' and '.join(f'optimizer.{key}' for key in keys)}, or choose another schedule.",
    )
    yield (
        settings.decay_steps and settings.warmup + settings.decay_steps > steps,
        f"Warm-up and decay fit in run.steps, but optimizer.warmup {settings.warmup} + "
        f"optimizer.decay_steps {settings.decay_steps} > {steps}.",
        "Lower optimizer.decay_steps, or raise run.steps.",
    )


def of_ranks(config: Config, mesh: Axes, ranks: int) -> Iterator[Rule]:
    """The rules of a mesh on so many ranks."""
    layout, servers, run = config.layout, mesh.servers, config.run
    ways = ["--dp (0 takes all ranks)"] if layout.dp else []
    ways += [f"--{axis}" for axis in ("cp", "tp", "pp") if getattr(layout, axis) > 1]
    if servers:
        ways.append("replication.servers" if servers > 1 else "replication.mode")
    yield (
        mesh.ranks != ranks,
        f"{mesh.product}{f' + servers {servers}' if servers else ''} needs {mesh.ranks} ranks, but {ranks} were started.",
        f"Start with `mpitrain launch -n {mesh.ranks} -- train`, or change {' or '.join(ways)}.",
    )
    if mesh.dp % layout.ep:
        near = multiples_near(mesh.ranks, layout.ep * mesh.ranks // mesh.dp)
        yield (
            True,
            f"layout.ep divides the replicas of layout.dp, but {layout.ep} does not divide {mesh.dp}.",
            f"Set layout.ep to a divisor of {mesh.dp}, or start {near} ranks.",
        )
    yield from of_shares(config, mesh.dp)
    computing = mesh.ranks - servers
    for rank in (delay.rank for delay in (delays(run.delay) if run.delay else ())):
        yield (
            rank is not None and rank >= computing,
            f"run.delay names rank {rank}, but ranks that compute rows are 0 to {computing - 1}.",
            "Name one of these in run.delay, or leave it empty.",
        )
    if run.inject:  # The data, which give the steps of run.epochs, are not open yet.
        yield from of_injection(run.inject, ranks, sys.maxsize if run.epochs else run.steps)


def of_shares(config: Config, dp: int) -> Iterator[Rule]:
    """The rule that each micro-batch of each replica has a row."""
    micro_batches, size = config.batch.micro_batches or 1, config.batch.size
    ways = ["lower batch.micro_batches"] * (micro_batches > 1) + ["start fewer ranks"] * (dp > 1)
    shares = dp * micro_batches
    yield (
        shares > size,
        f"Each of dp {dp} x micro-batches {micro_batches} = {shares} shares needs a sequence, but batch.size is {size}.",
        f"Set batch.size to at least {shares}, or {' or '.join(ways)}.",
    )


def of_injection(text: str, ranks: int, steps: int) -> Iterator[Rule]:
    """The rules of a failure that can happen.    steps: run.steps"""
    failure = injection(text)
    assert failure
    kind, rank, point = KINDS[failure.kind], failure.rank, failure.point
    yield (
        ranks < kind.ranks,
        f"run.inject {failure.kind} needs at least {kind.ranks} ranks, but the job has {ranks}.",
        "Start more ranks, or leave run.inject empty.",
    )
    yield (
        rank >= ranks,
        f"run.inject names rank {rank}, but ranks are 0 to {ranks - 1}.",
        "Name a rank of the job in run.inject, or start more ranks.",
    )
    yield (
        point not in kind.points,
        f"run.inject {failure.kind} can happen at {', '.join(dict.fromkeys(kind.points))}, but the point is {point}.",
        "Leave the point out, or name one of these behind the step.",
    )
    yield (
        point == "publish" and rank,
        f"Rank 0 publishes checkpoints, but run.inject names rank {rank} at publish.",
        f"Write {failure.kind}:0@{failure.step}:publish.",
    )
    yield (
        (failure.step == 0) != (point == "start"),
        f"In run.inject step 0 is the start and steps count from 1, but {text!r} has step {failure.step} and "
        f"point {point}.",
        f"Write {failure.kind}:{rank}@0 for the start, or a step from 1 on.",
    )
    yield (
        failure.step > steps,
        f"The step of run.inject is at most run.steps {steps}, but it is {failure.step}.",
        "Name an earlier step, or raise run.steps.",
    )


def of_plan(config: Config, plan: Plan, mesh: Axes) -> Iterator[Rule]:
    """The rules of a pipeline schedule on a mesh, and of its micro-batches, whose number is resolved."""
    schedule, zero, chunks = config.pipeline.schedule, config.replication.zero, len(plan.stage_of)
    stages = mesh.pp
    yield (
        plan.micro_batches < stages,
        f"A pipeline of {stages} stages is never full with fewer micro-batches, but there are {plan.micro_batches}.",
        f"Set batch.micro_batches to at least {stages}, or --pp to at most {plan.micro_batches}."
        if schedule in schedules.NAMED
        else f"Name a schedule, or a file that has at least {stages} micro-batches.",
    )
    if zero > 1 and chunks > 1 and not all(map(goes_in_passes, plan.by_stage)):
        yield (
            True,
            f"With replication.zero {zero} all micro-batches go through a chunk of the model before the next, "
            f"so that it is gathered and reduced once, but {schedule} comes back to chunks.",
            f"Set pipeline.schedule to {_in_passes(stages, plan.micro_batches, config.pipeline.chunks)}, "
            "or replication.zero to 0 or 1.",
        )
    # With several chunks a whole chunk is gathered at once.
    yield (
        zero == 3 and config.memory.segment > 1 and chunks == 1,
        f"With replication.zero 3 a unit is gathered twice a micro-batch, but memory.recompute {config.memory.recompute} "
        "would gather units a third time.",
        "Set memory.recompute to unit, or replication.zero to 2.",
    )
    yield from of_shares(config, mesh.dp)
    if config.layout.sequence_parallel:
        yield from of_rows(config, mesh)


def _in_passes(stages: int, micro_batches: int, chunks: int) -> str:
    """Name the schedules that finish a chunk for all micro-batches before the next chunk."""
    return " or ".join(
        name
        for name, schedule in schedules.SCHEDULES.items()
        if chunks in (0, schedule.chunks or chunks)
        and not schedule.grouped
        and all(
            map(
                goes_in_passes,
                schedules.plan_of(name, stages, micro_batches, chunks or None).by_stage,
            )
        )
    )


def sequences_of(config: Config) -> int:
    """Return the number of which the sequences of each training micro-batch must be a multiple."""
    return (
        sequences_together(config.model.context // config.layout.cp, config.layout.tp)
        if config.layout.sequence_parallel
        else 1
    )


def of_rows(config: Config, axes: Axes) -> Iterator[Rule]:
    """The rule that the rows of each training micro-batch divide among the tensor-parallel ranks.

    config  a configuration with a resolved batch.micro_batches
    """
    size, parts = config.batch.size, config.batch.micro_batches
    tokens, fitting = config.model.context // axes.cp, sequences_of(config)
    shares = [rows for whole in _shares(size, axes.dp) for rows in _shares(whole, parts)]
    if not (odd := [rows for rows in shares if rows % fitting]):
        return
    ways = [
        # This size gives all micro-batches the same number of sequences.
        f"batch.size to {multiples_near(size, fitting * axes.dp * parts)}",
        f"model.context to {multiples_near(tokens * axes.cp, axes.cp * sequences_together(math.gcd(*shares), axes.tp))}",
    ]
    most, left = divmod(size, fitting * axes.dp)
    if not left and axes.pp == 1:
        smaller = [count for count in range(1, math.isqrt(most) + 1) if most % count == 0]
        counts = sorted([*smaller, *(most // count for count in smaller)])
        ways.append(f"batch.micro_batches to {min(counts, key=lambda count: abs(count - parts))}")
    yield (
        True,
        f"With layout.sequence_parallel {axes.tp} ranks divide the rows of each micro-batch, but one of {odd[0]} sequence(s) of "
        f"{tokens} tokens has {odd[0] * tokens}.",
        f"Set {', '.join(ways)}, or layout.sequence_parallel to false.",
    )


def _shares(count: int, parts: int) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest of `parts` nearly equal runs."""
    return count // parts, -(-count // parts)


def of_model(config: Config) -> Iterator[Rule]:
    """The rules of a kind of model, and of the form of its data."""
    model, layout, data, row = config.model, config.layout, config.data, MODELS[config.model.kind]
    form = form_for(model.kind, data.source)
    are_tokens, are_texts = form == "tokens", form == "texts"
    is_masked = data.mask != Data.model_fields["mask"].default
    writers = f"is for a {' or '.join(kinds(lambda row: row.writes))}"
    hiders = f"hides tokens of a {' or '.join(kinds(lambda row: row.hides))}"
    for key, is_set, fits, law in (
        (
            "layout.sequence_parallel",
            layout.sequence_parallel,
            are_tokens,
            "divides rows of tokens",
        ),
        ("layout.cp", layout.cp > 1, are_tokens, "divides rows of tokens"),
        ("data.mask", is_masked, are_tokens and row.hides, hiders),
        ("data.classes", data.classes > 0, are_texts, "is of labelled texts"),
        ("data.labels", data.labels, are_texts, "is of labelled texts"),
        ("data.packing", data.packing, not are_texts, "is of conversations"),
        ("data.template", data.template, not are_texts, "is of conversations"),
        ("run.sample_prompt", config.run.sample_prompt, row.writes, writers),
        ("model.window", model.window, row.writes, writers),
    ):
        yield (
            is_set and not fits,
            f"{key} {law}, but model.kind is {model.kind}{' and classifies texts' * are_texts}.",
            f"Leave out {key}.",
        )
    is_ring = layout.cp > 1 and layout.cp_mode == "ring"
    chunks, twice = (2 * layout.cp, "2 x ") if is_ring else (layout.cp, "")
    yield (
        model.context % chunks and "tokens" in row.takes,
        f"{twice}layout.cp divides the tokens of a row equally, but {chunks} does not divide model.context {model.context}.",
        f"Set model.context to {multiples_near(model.context, chunks)}.",
    )
    of_later_ones = "pre_norm post_norm nope_every clip_qkv window_theta score_scale score_cap logit_cap dense_blocks"
    of_later_ones += " embedding_scale residual_scale logit_scale"
    of_a_llama = "kv_heads head_dim qk_norm qkv_bias rope_scaling activation scaled_embedding"
    for key in f"{of_a_llama} {of_later_ones}".split():
        yield (
            getattr(model, key) != type(model).model_fields[key].default
            and "kv_heads" not in row.split.split(),
            f"model.{key} is {getattr(model, key)}, but a model of kind {model.kind} has no such choice.",
            f"Leave out model.{key}, or set model.kind to llama.",
        )
    yield (
        model.window_from and (not model.window or model.window_from >= model.layers),
        "model.window_from is the first of model.layers that has model.window, but is "
        f"{model.window_from} of {model.layers} layers, with a window of {model.window}.",
        f"Set it to at most {model.layers - 1}, or leave out model.window."
        if model.window
        else "Leave out model.window_from, or set model.window.",
    )
    for key, value in (("window_every", model.window_every), ("window_theta", model.window_theta)):
        yield (
            value and not model.window,
            f"model.{key} is of a model with windows, but is {value:g} and model.window 0.",
            f"Set model.window, or leave out model.{key}.",
        )
    yield (
        model.logit_cap and config.memory.logit_chunks > 1,
        f"Logits in slices have no soft-cap, but model.logit_cap is {model.logit_cap:g} and memory.logit_chunks "
        f"{config.memory.logit_chunks}.",
        "Set memory.logit_chunks to 1.",
    )
    yield (
        model.scaled_embedding and model.embedding_scale != 1,
        f"model.scaled_embedding takes the square root of model.width, but model.embedding_scale is {model.embedding_scale:g}.",
        "Set model.scaled_embedding to false, or leave out model.embedding_scale.",
    )
    yield (
        not model.pre_norm and not model.post_norm,
        "A block norms what attention and MLP take or what they give, but model.pre_norm and model.post_norm are false.",
        "Leave out model.pre_norm, or set model.post_norm to true.",
    )
    yield (
        model.score_cap and config.memory.attention == "whole",
        f"Saved exponentials have no soft-cap, but model.score_cap is {model.score_cap:g} and memory.attention whole.",
        "Set memory.attention to auto or tiled.",
    )
    yield (
        model.qk_norm == "joint" and layout.tp > 1,
        f"model.qk_norm joint norms all heads of a token together, but layout.tp {layout.tp} divides them.",
        "Set layout.tp to 1: more ranks become replicas, or stages of layout.pp.",
    )
    yield (
        model.shared_gate and not model.shared,
        "model.shared_gate is true, but model.shared is 0: there is no MLP beside the experts.",
        "Set model.shared, or leave out model.shared_gate.",
    )
    yield (
        model.label_smoothing and LOSSES[model.loss].takes != "classes",
        f"model.label_smoothing shares a target among classes, but model.loss is {model.loss}.",
        "Set model.label_smoothing to 0.",
    )
    yield (
        not row.split and layout.tp > 1,
        f"Tensor parallelism does not split a model of kind {model.kind}, but layout.tp is {layout.tp}.",
        "Set layout.tp to 1: more ranks become replicas, or stages of layout.pp.",
    )
    # In a ring, ranks of layout.cp have all heads of some tokens.
    tp, divisor = layout.tp, "layout.tp"
    if layout.cp > 1 and not is_ring:
        tp, divisor = tp * layout.cp, "layout.tp x layout.cp"
    for key in row.split.split():
        if (count := getattr(model, key)) % tp:
            yield (
                True,
                f"{divisor} must divide model.{key}, but {tp} does not divide {count}.",
                _ways_to_split(config, key, tp, divisor),
            )
    for key, other in row.divides:
        count, whole = getattr(model, key), getattr(model, other)
        near = {whole // count * count or count, -(-whole // count) * count} if count else {0}
        yield (
            count and whole % count and not (key == "heads" and model.head_dim),
            f"model.{key} must divide model.{other}, but {count} does not divide {whole}.",
            f"Set model.{other} to {' or '.join(map(str, sorted(near)))}, or model.{key} to a divisor of {whole}.",
        )
    yield (
        model.kind == "cnn" and not model.channels,
        "model.channels must have a number for each convolution, but is [].",
        "Set it to [16], for example, or choose model.kind=mlp.",
    )
    yield (
        model.kind == "cnn" and model.kernel % 2 == 0,
        f"model.kernel must be odd, so that a convolution leaves images their size, but is {model.kernel}.",
        f"Set model.kernel to {model.kernel - 1} or {model.kernel + 1}.",
    )
    yield (
        model.kind == "bert" and is_ring,
        f"With layout.cp_mode ring no token sees later ones, but all tokens of a {model.kind} see each other.",
        "Set layout.cp_mode to ulysses.",
    )
    scaling = model.rope_scaling or [1]
    fits = min(scaling) > 0 and scaling[0] >= 1 and len(scaling) in (1, 4, 5)
    if fits and len(scaling) > 1:
        first, second = scaling[1:3] if len(scaling) == 4 else scaling[2:0:-1]
        fits = first < second and scaling[3] >= 1
    yield (
        model.kind == "llama" and not fits,
        "model.rope_scaling has a factor from 1 on, and then nothing, or a low frequency factor, a higher one and the "
        "earlier context, or a number of fast periods, a lower one, the earlier context and the size of the turns, "
        f"but is {scaling}.",
        "Set it to [4], [32, 1, 4, 8192] or [4, 32, 1, 4096, 1.14], for example, or to [].",
    )
    channels, heads = model.head_channels, model.heads
    fitting = channels - 1 or 2, channels + 1
    yield (
        model.kind == "llama" and channels % 2,
        f"Rotary positions turn pairs of channels, but a head has {channels} of them.",
        f"Set model.head_dim to {fitting[0]} or {fitting[1]}."
        if model.head_dim
        else f"Set model.width to {fitting[0] * heads} or {fitting[1] * heads}.",
    )
    yield (
        layout.ep > 1 and not model.experts,
        f"layout.ep divides experts, but layout.ep is {layout.ep} and model.experts 0.",
        "Set model.experts, or layout.ep to 1.",
    )
    optimizer = config.optimizer.name
    yield (
        layout.ep > 1 and not isinstance(RULES[optimizer].step, ElementWise),
        f"layout.ep divides tensors that optimizer.name {optimizer} needs whole, but is {layout.ep}.",
        "Set optimizer.name to adamw, or layout.ep to 1.",
    )
    yield from of_common_steps(config, layout.ep > 1, "layout.ep sends tokens between ranks in")
    share = model.top_k * model.context / max(1, model.experts)
    for is_broken, law, way_out in (
        (
            not row.writes,
            f"model.experts is for a {' or '.join(kinds(lambda row: row.writes))}, but model.kind is {model.kind}.",
            "Leave out model.experts.",
        ),
        (
            model.top_k > model.experts,
            f"A token chooses model.top_k of model.experts experts, but {model.top_k} of {model.experts} do not exist.",
            f"Set model.top_k to at most {model.experts}, or model.experts to {model.top_k} or more.",
        ),
        (
            model.capacity and model.capacity * share < 1,
            f"model.capacity {model.capacity:g} lets an expert take less than 1 token of a sequence: an equal share of "
            f"{model.context} tokens, with {model.top_k} of {model.experts} experts each, is {share:g}.",
            f"Set model.capacity to {1 / share:.3g} or more, or to 0: no token is dropped.",
        ),
        (
            not {*model.dense_blocks} < {*range(model.layers)},
            f"model.dense_blocks are some of the {model.layers} blocks from 0 on, but not all, and are {model.dense_blocks}.",
            "Set model.dense_blocks to [0], for example, or model.experts to 0.",
        ),
        (
            model.dense_hidden and not model.dense_blocks,
            f"model.dense_hidden is of model.dense_blocks, but is {model.dense_hidden} and there are none.",
            "Set model.dense_blocks, or leave out model.dense_hidden.",
        ),
        (
            model.experts % layout.ep,
            f"layout.ep divides model.experts, but {layout.ep} does not divide {model.experts}.",
            f"Set model.experts to {multiples_near(model.experts, layout.ep)}, or layout.ep to a divisor.",
        ),
        (
            model.activation != "silu",
            f"The gates of experts are silu, but model.activation is {model.activation}.",
            "Leave out model.activation, or set model.experts to 0.",
        ),
    ):
        yield (model.experts and is_broken, law, way_out)
    for key in (
        *("top_k", "router", "capacity", "balance", "z", "shared", "shared_gate"),
        *("dense_blocks", "dense_hidden"),
    ):
        yield (
            not model.experts and getattr(model, key) != type(model).model_fields[key].default,
            f"Without experts the keys of their router have their defaults, but model.{key} is "
            f"{getattr(model, key)!r} and model.experts is 0.",
            f"Set model.experts, or leave model.{key} out.",
        )
    row.check(model)


def _ways_to_split(config: Config, key: str, tp: int, divisor: str) -> str:
    """Return the layouts and values with which `tp` ranks divide a key of [model].

    The ways out begin with layouts: a folder, or a run that has begun, fixes the key.
    """
    model, layout, row = config.model, config.layout, MODELS[config.model.kind]
    count, counts = getattr(model, key), [getattr(model, each) for each in row.split.split()]
    common, own = math.gcd(*counts), math.gcd(layout.tp, *counts)
    ways = [
        f"Set {divisor} to {_nearest([n for n in range(1, common + 1) if common % n == 0], tp)}"
    ]
    ring, rest = "layout.cp_mode to ring", layout.tp // own
    same = [ring] if rest == 1 else []  # Then it is layout.cp that does not fit.
    if tp == layout.tp and rest * layout.pp <= model.layers:
        same.append(f"layout.tp to {own} and layout.pp to {rest * layout.pp}")
    if rest > 1 and "tokens" in row.takes and model.context % (2 * rest * layout.cp) == 0:
        same.append(f"layout.tp to {own}, layout.cp to {rest * layout.cp} and {ring}")
    if same:
        ways.append(f"for as many ranks {', or '.join(same)}")
    bounds = [getattr(model, other) for own, other in row.divides if own == key]
    most = min(bounds, default=count + tp)
    fitting = [n for n in range(tp, most + 1, tp) if all(bound % n == 0 for bound in bounds)]
    if fitting and not config.run.init_from:
        ways.append(f"of a new model model.{key} to {_nearest(fitting, count)}")
    return f"{'; or '.join(ways)}."


def _nearest(numbers: Sequence[int], now: int) -> str:
    return " or ".join(map(str, sorted(sorted(numbers, key=lambda n: abs(n - now))[:2])))
