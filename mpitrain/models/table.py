"""The table of models by kind."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from mpitrain.config import Lora
from mpitrain.config import Model as Keys
from mpitrain.data import Form, Source, Unopened, source_kind
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, are_units
from mpitrain.layers.plain import Plain
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
    check     (section [model]): raises ConfigError for keys that break a rule of a user's kind
    writes    whether it predicts the next token, so that it can generate text
    hides     whether it predicts the tokens that data.mask hides
    has_peer  whether `compare --peer torch` has the same network
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
    check: Callable[[Keys], None] = lambda keys: None
    writes: bool = False
    hides: bool = False
    has_peer: bool = False
    flops: Callable[[Keys, int], float] | None = None
    linear: Sequence[str] = ()
    phrases: Mapping[str, str] = {}


def _transformer(keys: Keys, source: Source | Unopened) -> dict[str, Any]:
    """Return the arguments that a gpt and a bert take."""
    return {
        "vocab": source.inputs,
        "context": keys.context,
        "width": keys.width,
        "heads": keys.heads,
        "depth": keys.layers,
        "tied": keys.tied,
        **{
            key: getattr(keys, key) for key in ("hidden", "epsilon", "dropout", "attention_dropout")
        },
    }


def _gpt(layers: Plain, keys: Keys, source: Source | Unopened) -> Sequence[Unit]:
    more = _transformer(keys, source)
    return gpt(layers, **more, windows=keys.windows, experts=keys.experts)


def _llama(layers: Plain, keys: Keys, source: Source | Unopened) -> Sequence[Unit]:
    from mpitrain.models.llama import llama  # a run of another kind does not need the module

    return llama(layers, source.inputs, keys)


def _bert(layers: Plain, keys: Keys, source: Source | Unopened) -> Sequence[Unit]:
    from mpitrain.models.bert import bert

    classes = 0 if source.form == "tokens" else source.classes
    return bert(layers, classes=classes, **_transformer(keys, source))


def _transformer_flops(keys: Keys, parameters: int) -> float:
    """PaLM, Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T for each of T tokens.

    In a layer with a window each token has the scores of its window, in place of T. Of experts, N has
    those of a token.
    """
    if keys.experts:
        of_expert = keys.width * keys.hidden_units * (3 if keys.kind == "llama" else 2)
        mixtures = keys.layers - len(keys.dense_blocks)
        parameters -= mixtures * (keys.experts - keys.top_k) * of_expert
    scores = sum(min(window or keys.context, keys.context) for window in keys.windows)
    return keys.context * (6 * parameters + 12 * keys.heads * keys.head_channels * scores)


MODELS: Table[str, Model] = Table(
    gpt=Model(
        _gpt,
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


def is_tied(keys: Keys, name: str) -> bool:
    """Return whether a head uses the embedding as its weight: that of classes has none to share.

    name  of the data source
    """
    return keys.tied and form_for(keys.kind, name) == "tokens"


def units_of(keys: Keys, source: Source | Unopened, layers: Plain) -> Sequence[Unit]:
    """Make the units of the configured network for this data source, with a layer factory.

    raises  ConfigError if the row of a plugin makes anything else
    """
    build = partial(MODELS[keys.kind].build, layers, keys, source)
    if not MODELS.is_added(keys.kind):
        return build()
    return MODELS.made(keys.kind, "model", build, "a list of units", are_units)


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


def other_form(kind: str, form: Form, name: str) -> ConfigError:
    """Return the error about data whose form a model of this kind does not take.

    name  name of the data source
    """
    takes = MODELS[kind].takes.split()
    forms = {form, *source_kind(name).also}
    fitting = kinds(lambda row: not forms.isdisjoint(row.takes.split()))
    if not fitting:
        return ConfigError(
            f"model.kind {kind} takes {' or '.join(takes)}, but {name} has {form}, which no model takes.",
            "Choose another data source.",
        )
    return ConfigError(
        f"The model.kind for {name} is {' or '.join(fitting)}, but the configuration says {kind}.",
        f"Train with --set model.kind={fitting[0]}, or choose another data source.",
    )
