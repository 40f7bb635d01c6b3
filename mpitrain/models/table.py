"""The table of models by kind, and the rules that a configuration must obey for its model."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from mpitrain.config import Config, Data, Layout, Lora
from mpitrain.config import Model as Keys
from mpitrain.data import Form, Source, Targets, Unopened, source_kind
from mpitrain.errors import ConfigError, multiples_near
from mpitrain.layers.base import Unit, are_units
from mpitrain.layers.plain import LOSSES, Plain
from mpitrain.models.classifiers import cnn, mlp
from mpitrain.models.gpt import gpt
from mpitrain.tables import Table


class Model(NamedTuple):
    """A kind of model.

    build     (layer factory, section [model], source or its sizes) -> the units of the model. Each
              layer of model.layers after the first adds the same number of parameters.
    takes     the forms of the data, as words: the first that a source has
    help      the text after this kind in the help of model.kind
    split     the keys of [model], as words, that layout.tp must divide; empty: layout.tp must be 1
    divides   (key, other key) of [model]: the first value must divide the second, unless it is 0
    check     raises ConfigError for keys that break another rule of this kind
    writes    whether it predicts the next token, so that it can generate text
    hides     whether it predicts the tokens that data.mask hides
    has_peer  whether `bench train --peer torch` has the same network
    flops     (section [model], parameters) -> floating-point operations of forward and backward of
              one row, without recomputation; None: they are counted
    linear    the names that all-linear of lora.targets stands for; empty: every layer but the last
    phrases   {key: text about this kind in the help of that key}
    """

    build: Callable[[Plain, Keys, Source | Unopened], Sequence[Unit]]
    takes: str
    help: str
    split: str
    divides: tuple[tuple[str, str], ...] = ()
    check: Callable[[Config], None] = lambda config: None
    writes: bool = False
    hides: bool = False
    has_peer: bool = False
    flops: Callable[[Keys, int], float] | None = None
    linear: Sequence[str] = ()
    phrases: Mapping[str, str] = {}


def _check_convolutions(config: Config) -> None:
    kernel = config.model.kernel
    if not config.model.channels:
        raise ConfigError(
            "model.channels must have a number for each convolution, but is [].",
            "Set it to [16], for example, or choose model.kind=mlp.",
        )
    if kernel % 2 == 0:
        raise ConfigError(
            f"model.kernel must be odd, so that a convolution leaves images their size, but is {kernel}.",
            f"Set model.kernel to {kernel - 1} or {kernel + 1}.",
        )


def _transformer(keys: Keys, source: Source | Unopened) -> dict[str, Any]:
    """Return the arguments that all transformers take."""
    return {
        "vocab": source.inputs,
        "context": keys.context,
        "width": keys.width,
        "heads": keys.heads,
        "depth": keys.layers,
        "tied": keys.tied,
        "epsilon": keys.epsilon,
    }


def _with_windows(keys: Keys, source: Source | Unopened) -> dict[str, Any]:
    """Return the arguments that a gpt and a llama take."""
    return {**_transformer(keys, source), "windows": keys.windows}


def _dropout(keys: Keys) -> dict[str, Any]:
    """Return the arguments that a gpt and a bert take."""
    return {key: getattr(keys, key) for key in ("hidden", "dropout", "attention_dropout")}


def _llama(layers: Plain, keys: Keys, source: Source | Unopened) -> Sequence[Unit]:
    from mpitrain.models.llama import llama  # a run of another kind does not need the module

    return llama(
        layers,
        kv_heads=keys.kv_heads,
        qkv_bias=keys.qkv_bias,
        theta=keys.theta,
        rope_scaling=keys.rope_scaling,
        hidden=keys.hidden_units,
        **_with_windows(keys, source),
    )


def _bert(layers: Plain, keys: Keys, source: Source | Unopened) -> Sequence[Unit]:
    from mpitrain.models.bert import bert

    classes = 0 if source.form == "tokens" else source.classes
    return bert(layers, classes=classes, **_transformer(keys, source), **_dropout(keys))


def _check_all_seen(config: Config) -> None:
    if config.layout.cp > 1 and config.layout.cp_mode == "ring":
        raise ConfigError(
            f"With layout.cp_mode ring no token sees later ones, but all tokens of a {config.model.kind} see each other.",
            "Set layout.cp_mode to ulysses.",
        )


def _check_rotary(config: Config) -> None:
    model = config.model
    scaling = model.rope_scaling or [1, 1, 2, 1]
    if len(scaling) != 4 or min(scaling[0], scaling[3]) < 1 or not 0 < scaling[1] < scaling[2]:
        raise ConfigError(
            "model.rope_scaling has a factor from 1 on, a low frequency factor, a higher one and the earlier context, "
            f"but is {scaling}.",
            "Set it to [32, 1, 4, 8192], for example, or to [].",
        )
    if (each := model.width // model.heads) % 2:
        raise ConfigError(
            f"Rotary positions turn pairs of channels, but a head has {each} of them.",
            f"Set model.width to {(each - 1) * model.heads or 2 * model.heads} or {(each + 1) * model.heads}.",
        )


def _transformer_flops(keys: Keys, parameters: int) -> float:
    """PaLM, Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T for each of T tokens.

    In a layer with a window each token has the scores of its window, in place of T.
    """
    scores = sum(min(window or keys.context, keys.context) for window in keys.windows)
    return keys.context * (6 * parameters + 12 * keys.width * scores)


MODELS: Table[str, Model] = Table(
    gpt=Model(
        lambda layers, keys, source: gpt(layers, **_with_windows(keys, source), **_dropout(keys)),
        takes="tokens",
        help="for tokens",
        split="heads",
        divides=(("heads", "width"),),
        writes=True,
        has_peer=True,
        flops=_transformer_flops,
        phrases={
            "model.layers": "transformer blocks",
            "model.width": "channels of the residual stream",
            "model.dropout": "of the embedding and of each residual branch of a gpt",
            "pipeline.partition": "The units of a gpt are the embedding, 2 per block, and the head.",
        },
    ),
    llama=Model(
        _llama,
        takes="tokens",
        help="for tokens, with rotary positions",
        split="heads kv_heads",
        divides=(("heads", "width"), ("kv_heads", "heads")),
        check=_check_rotary,
        writes=True,
        has_peer=True,
        flops=_transformer_flops,
        linear=[f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
        phrases={
            "model.layers": "transformer blocks",
            "model.width": "channels of the residual stream",
            "pipeline.partition": "The units of a llama are those of a gpt.",
        },
    ),
    bert=Model(
        _bert,
        takes="texts tokens",
        help="for masked tokens, or for the classes of texts",
        split="heads",
        divides=(("heads", "width"),),
        check=_check_all_seen,
        hides=True,
        flops=_transformer_flops,
        linear=["query", "key", "value", "dense"],
        phrases={
            "model.layers": "transformer blocks",
            "model.width": "channels of the residual stream",
            "model.dropout": "of the embedding, of each branch and before the classes of a bert",
            "pipeline.partition": "The units of a bert are the embedding, its norm, 2 per block, and the head.",
        },
    ),
    mlp=Model(
        lambda layers, keys, source: mlp(
            layers,
            features=source.inputs,
            hidden=[keys.width] * keys.layers,
            classes=source.classes,
            dropout=keys.dropout,
        ),
        takes="samples",
        help="for labelled samples",
        split="width",
        phrases={
            "model.layers": "hidden layers of the mlp",
            "model.width": "units of each hidden layer of the mlp",
            "model.dropout": "of the hidden layers of an mlp or cnn",
        },
    ),
    cnn=Model(
        lambda layers, keys, source: cnn(
            layers,
            shape=source.shape,
            channels=keys.channels,
            hidden=[keys.width] * keys.layers,
            classes=source.classes,
            kernel=keys.kernel,
            pool=keys.pool,
            dropout=keys.dropout,
        ),
        takes="images",
        help="for labelled images",
        split="",
        check=_check_convolutions,
        phrases={
            "model.layers": "hidden linear layers of the cnn",
            "model.width": "units of each hidden linear layer of the cnn",
        },
    ),
)
"""Models by kind.

Configuration, help texts and commands read this table, so a new model needs only one entry.
"""


def form_for(kind: str, name: str) -> Form:
    """Return the form in which a model of this kind takes a data source."""
    takes, row = cast("list[Form]", MODELS[kind].takes.split()), source_kind(name)
    return next((form for form in takes if form in (row.form, *row.also)), takes[-1])


def is_tied(config: Config) -> bool:
    """Return whether a head uses the embedding as its weight: that of classes has none to share."""
    model = config.model
    return model.tied and form_for(model.kind, config.data.source) == "tokens"


def units_of(keys: Keys, source: Source | Unopened, layers: Plain) -> Sequence[Unit]:
    """Make the units of the configured network for this data source, with a layer factory.

    raises  ConfigError if the row of a plugin makes anything else
    """
    return MODELS.made(
        keys.kind,
        "model",
        lambda: MODELS[keys.kind].build(layers, keys, source),
        "a list of units",
        are_units,
    )


def adapted(units: Sequence[Unit], lora: Lora, layers: Plain) -> Sequence[Unit]:
    """Return the units with the adapters of section [lora] and all other tensors frozen; without
    adapters, the units as they are.
    """
    if not lora.rank:
        return units
    from mpitrain.models.targets import adapt  # a run without adapters does not need the module

    return adapt(units, lora, layers)


def kinds(does_count: Callable[[Model], bool]) -> list[str]:
    return [kind for kind, row in MODELS.items() if does_count(row)]


def check_model(config: Config) -> None:
    """Raise ConfigError for keys that this kind of model, or the form of its data, does not support."""
    model, layout, row = config.model, config.layout, MODELS[config.model.kind]
    data, form = config.data, form_for(config.model.kind, config.data.source)
    are_tokens, are_texts = form == "tokens", form == "texts"
    is_masked = data.mask != Data.model_fields["mask"].default
    writers = " or ".join(kinds(lambda row: row.writes))
    divides = "divides rows of tokens"
    hiders = " or ".join(kinds(lambda row: row.hides))
    for key, is_set, fits, law in (
        ("layout.sequence_parallel", layout.sequence_parallel, are_tokens, divides),
        ("layout.cp", layout.cp > 1, are_tokens, divides),
        ("data.mask", is_masked, are_tokens and row.hides, f"hides tokens of a {hiders}"),
        ("data.classes", data.classes > 0, are_texts, "is of labelled texts"),
        ("data.labels", data.labels, are_texts, "is of labelled texts"),
        ("data.packing", data.packing, not are_texts, "is of conversations"),
        ("data.template", data.template, not are_texts, "is of conversations"),
        ("run.sample_prompt", config.run.sample_prompt, row.writes, f"is for a {writers}"),
        ("model.window", model.window, row.writes, f"is for a {writers}"),
    ):
        if is_set and not fits:
            raise ConfigError(
                f"{key} {law}, but model.kind is {model.kind}{' and classifies texts' * are_texts}.",
                f"Leave out {key}.",
            )
    chunks, twice = (2 * layout.cp, "2 x ") if _is_ring(layout) else (layout.cp, "")
    if model.context % chunks and "tokens" in row.takes:
        raise ConfigError(
            f"{twice}layout.cp divides the tokens of a row equally, but {chunks} does not divide model.context {model.context}.",
            f"Set model.context to {multiples_near(model.context, chunks)}.",
        )
    for key in ("kv_heads", "qkv_bias", "rope_scaling"):
        if getattr(model, key) and "kv_heads" not in row.split.split():
            raise ConfigError(
                f"model.{key} is {getattr(model, key)}, but a model of kind {model.kind} has no such choice.",
                f"Leave out model.{key}, or set model.kind to llama.",
            )
    if model.window_from and (not model.window or model.window_from >= model.layers):
        raise ConfigError(
            "model.window_from is the first of model.layers that has model.window, but is "
            f"{model.window_from} of {model.layers} layers, with a window of {model.window}.",
            "Leave out model.window_from, or set model.window."
            if not model.window
            else f"Set it to at most {model.layers - 1}, or leave out model.window.",
        )
    if model.label_smoothing and LOSSES[model.loss].takes != "classes":
        raise ConfigError(
            f"model.label_smoothing shares a target among classes, but model.loss is {model.loss}.",
            "Set model.label_smoothing to 0.",
        )
    _check_split(row, config)
    for key, other in row.divides:
        count, of = getattr(model, key), getattr(model, other)
        if count and of % count:
            near = sorted((of // count * count or count, -(-of // count) * count))
            raise ConfigError(
                f"model.{key} must divide model.{other}, but {count} does not divide {of}.",
                f"Set model.{other} to {' or '.join(map(str, dict.fromkeys(near)))}, or model.{key} to a divisor of {of}.",
            )
    row.check(config)


def _is_ring(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_mode == "ring"


def _check_split(row: Model, config: Config) -> None:
    model, layout = config.model, config.layout
    if not row.split and layout.tp > 1:
        raise ConfigError(
            f"Tensor parallelism does not split a model of kind {model.kind}, but layout.tp is {layout.tp}.",
            "Set layout.tp to 1: more ranks become replicas, or stages of layout.pp.",
        )
    for name in row.split.split():
        _check_divided(row, config, name)


def _check_divided(row: Model, config: Config, name: str) -> None:
    """Raise ConfigError unless the tensor-parallel ranks divide a key of the model.

    The ways out begin with layouts: a folder, or a run that has begun, fixes the key.
    """
    model, layout = config.model, config.layout
    cp = 1 if _is_ring(layout) else layout.cp
    key, count, tp = f"model.{name}", getattr(model, name), layout.tp * cp
    divisor = "layout.tp" if cp == 1 else "layout.tp x layout.cp"
    if count % tp == 0:
        return
    counts = [getattr(model, each) for each in row.split.split()]
    common, own = math.gcd(*counts), math.gcd(layout.tp, *counts)
    ways = [
        f"Set {divisor} to {_nearest([n for n in range(1, common + 1) if common % n == 0], tp)}"
    ]
    ring, rest = "layout.cp_mode to ring", layout.tp // own
    same = [ring] if rest == 1 else []  # Then it is layout.cp that does not fit.
    if cp == 1 and rest * layout.pp <= model.layers:
        same.append(f"layout.tp to {own} and layout.pp to {rest * layout.pp}")
    if rest > 1 and "tokens" in row.takes and model.context % (2 * rest * layout.cp) == 0:
        same.append(f"layout.tp to {own}, layout.cp to {rest * layout.cp} and {ring}")
    if same:
        ways.append(f"for as many ranks {', or '.join(same)}")
    bounds = [getattr(model, other) for own, other in row.divides if own == name]
    most = min(bounds, default=count + tp)
    fitting = [n for n in range(tp, most + 1, tp) if all(bound % n == 0 for bound in bounds)]
    if fitting and not config.run.init_from:
        ways.append(f"of a new model {key} to {_nearest(fitting, count)}")
    raise ConfigError(
        f"{divisor} must divide {key}, but {tp} does not divide {count}.", f"{'; or '.join(ways)}."
    )


def _nearest(numbers: Sequence[int], now: int) -> str:
    return " or ".join(map(str, sorted(sorted(numbers, key=lambda n: abs(n - now))[:2])))


def check_data(kind: str, form: Form, name: str) -> None:
    """Raise ConfigError unless a model takes data of this form.

    name  name of the data source, for the message
    """
    takes = MODELS[kind].takes.split()
    if form in takes:
        return
    forms = {form, *source_kind(name).also}
    fitting = kinds(lambda row: not forms.isdisjoint(row.takes.split()))
    if not fitting:
        raise ConfigError(
            f"model.kind {kind} takes {' or '.join(takes)}, but {name} has {form}, which no model takes.",
            "Choose another data source.",
        )
    raise ConfigError(
        f"The model.kind for {name} is {' or '.join(fitting)}, but the configuration says {kind}.",
        f"Train with --set model.kind={fitting[0]}, or choose another data source.",
    )


def check_targets(loss: str, targets: Targets, name: str) -> None:
    """Raise ConfigError unless a loss takes the targets of the data.

    name  of the data source, for the message
    """
    if LOSSES[loss].takes != targets:
        fitting = [other for other, row in LOSSES.items() if row.takes == targets]
        raise ConfigError(
            f"model.loss {loss} takes {LOSSES[loss].takes} as targets, but {name} has {targets}.",
            f"Set model.loss to {' or '.join(fitting)}.",
        )
