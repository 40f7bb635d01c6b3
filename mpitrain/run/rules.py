"""Every rule between keys of a configuration, with the text for a user who breaks it, in one list.

Rules about ranks stand where these are known (`resolve_here`), those about data in `run/build.py`, and
those of a replication mode in its row of `parallel/modes.py`.
"""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mpitrain.config import EPOCH, KEPT_ON_HOST, Config, Data, Lora, refusal
from mpitrain.data import TENTH, absolute, is_fraction, source_kind, spellings, validating
from mpitrain.data.table import MIXTURE
from mpitrain.errors import ConfigError, multiples_near
from mpitrain.layers.plain import LOSSES
from mpitrain.models.table import MODELS, form_for, kinds
from mpitrain.optim import RULES
from mpitrain.optim.rule import ElementWise
from mpitrain.parallel.modes import STREAMS, check_synchronous, refusal_of
from mpitrain.pipeline import schedules

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
    kind, memory, lora, every = (
        config.device.kind,
        config.memory,
        config.lora,
        config.run.eval_every,
    )
    is_on_kernels = kind in ("cuda", "cuda-sim")
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
    yield (
        kind == "cuda" and wire.startswith(KEPT_ON_HOST),
        f"Wire format {wire} keeps its residuals in host memory, but device.kind is cuda.",
        "Set replication.wire to fp16, bf16, int8 or none, or device.kind to cpu.",
    )
    yield (
        is_on_kernels and memory.attention == "whole",
        f"Kernels compute attention in tiles, but memory.attention is whole on {kind}.",
        "Set memory.attention to auto, or device.kind to cpu.",
    )
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
    layout = config.layout
    yield (
        is_on_kernels
        and config.precision.is_half
        and layout.tp > 1
        and layout.algorithm == "native"
        and not layout.sequence_parallel,
        f"layout.algorithm native sums activations by MPI, but they are {compute} on {kind}, "
        "which MPI has no type for.",
        "Set layout.algorithm to auto, or precision.compute to float32.",
    )


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
    """The rules of replication modes and schedules; their rows raise some by themselves."""
    name, run = config.pipeline.schedule, config.run
    yield (
        (name in STREAMS) != (name in schedules.STREAMS),
        f"An asynchronous schedule has a row in STREAMS of pipeline/schedules.py and of parallel/modes.py, but {name} has "
        "only one of them.",
        "Add the other row, or choose another pipeline.schedule.",
    )
    if error := refusal_of(config):
        raise error
    for is_set, reason in (
        (run.digest_every, "run.digest_every reads the state between"),
        (run.on_spike != "ignore", "run.on_spike compares the losses of"),
        (run.patience, "run.patience ends the run between"),
    ):
        if is_set:
            check_synchronous(config, reason)


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
    of_a_llama = ("kv_heads", "head_dim", "qk_norm", "qkv_bias", "rope_scaling")
    for key in (*of_a_llama, "activation", "scaled_embedding"):
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
    if layout.ep > 1:
        check_synchronous(config, "layout.ep sends tokens between ranks in")
    share = model.top_k * model.context / max(1, model.experts)
    for is_broken, law, way_out in (
        (
            not row.writes,
            f"model.experts is for a {' or '.join(kinds(lambda row: row.writes))}, but model.kind is {model.kind}.",
            "Leave out model.experts.",
        ),
        (
            model.top_k > model.experts,
            f"model.top_k experts of model.experts are chosen, but {model.top_k} of {model.experts}.",
            f"Set model.top_k to at most {model.experts}, or model.experts to {model.top_k} or more.",
        ),
        (
            model.capacity and model.capacity * share < 1,
            f"model.capacity {model.capacity:g} lets an expert take less than 1 token of a sequence: an equal share of "
            f"{model.context} tokens, with {model.top_k} of {model.experts} experts each, is {share:g}.",
            f"Set model.capacity to {1 / share:.3g} or more, or to 0: no token is dropped.",
        ),
        (
            layout.cp > 1 and (model.capacity or model.balance),
            "model.capacity and model.balance count the tokens of whole sequences, which layout.cp divides: layout.cp is "
            f"{layout.cp}, model.capacity {model.capacity:g}, model.balance {model.balance:g}.",
            "Set both to 0, or layout.cp to 1.",
        ),
        (
            model.experts % layout.ep,
            f"layout.ep divides model.experts, but {layout.ep} does not divide {model.experts}.",
            f"Set model.experts to {multiples_near(model.experts, layout.ep)}, or layout.ep to a divisor.",
        ),
        (
            layout.tp > 1,
            f"Tensor parallelism does not divide experts, but layout.tp is {layout.tp} and model.experts {model.experts}.",
            "Set layout.tp to 1: more ranks become replicas, or stages of layout.pp.",
        ),
        (
            model.activation != "silu",
            f"The gates of experts are silu, but model.activation is {model.activation}.",
            "Leave out model.activation, or set model.experts to 0.",
        ),
        (
            config.device.kind in ("cuda", "cuda-sim"),
            f"Experts have no kernels yet, but device.kind is {config.device.kind}.",
            "Set device.kind to cpu, or model.experts to 0.",
        ),
    ):
        yield (model.experts and is_broken, law, way_out)
    for key in ("top_k", "router", "capacity", "balance", "z", "shared"):
        yield (
            not model.experts and getattr(model, key) != type(model).model_fields[key].default,
            f"Without experts the keys of their router have their defaults, but model.{key} is "
            f"{getattr(model, key)!r} and model.experts is 0.",
            f"Set model.experts, or leave model.{key} out.",
        )
    row.check(config)


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
