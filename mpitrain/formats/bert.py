"""BERT of HuggingFace's transformers: its tensors and keys of config.json, and ours.

A folder may have each head or none: of masked tokens (cls), the pooler, and of classes (classifier).
A tied decoder has no tensor of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from mpitrain.config import Model
from mpitrain.formats.architecture import (
    HEAD,
    Architecture,
    Depth,
    Rate,
    Size,
    TensorRow,
    check_heads,
    check_only,
    dropout_notes,
    format_of_architecture,
    numbered,
)
from mpitrain.formats.folder import ModelType, OtherModel

DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")


class BertConfiguration(ModelType):
    """The keys of config.json that determine the model; the defaults are those of BertConfig."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size
    hidden_act: str = "gelu"
    type_vocab_size: Size = 2
    layer_norm_eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-12
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    quantization_config: Any = None
    architectures: list[str] | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None
    hidden_dropout_prob: Rate = 0.1
    attention_probs_dropout_prob: Rate = 0.1


ATTENTION, MLP = "blocks.#.attention", "blocks.#.mlp"
EMBEDDINGS, LAYER, CLS = "bert.embeddings", "bert.encoder.layer.#", "cls.predictions"
LINEAR = {"weight": "weight", "bias": "bias"}
NORM = {"gain": "weight", "bias": "bias"}


def _rows(ours: str, theirs: str, names: dict[str, str], shape: str) -> list[TensorRow]:
    """Return the rows of a layer with a weight of this shape, and a bias of its first dim."""
    ours, colon, region = ours.partition(":")
    return [
        TensorRow(
            f"{ours}.{own}{colon}{region}", f"{theirs}.{name}", shape[: 1 + (own == "weight")]
        )
        for own, name in names.items()
    ]


QKV = [
    _rows(f"{ATTENTION}.sum.qkv:{name[0]}", f"{LAYER}.attention.self.{name}", LINEAR, "CC")
    for name in ("query", "key", "value")
]
TENSORS = (
    TensorRow("embedding.tokens", f"{EMBEDDINGS}.word_embeddings.weight", "VC"),
    TensorRow("embedding.positions", f"{EMBEDDINGS}.position_embeddings.weight", "TC"),
    TensorRow("embedding.types", f"{EMBEDDINGS}.token_type_embeddings.weight", "2C"),
    *_rows("start", f"{EMBEDDINGS}.LayerNorm", NORM, "C"),
    *(row for rows in zip(*QKV, strict=True) for row in rows),
    *_rows(f"{ATTENTION}.sum.out", f"{LAYER}.attention.output.dense", LINEAR, "CC"),
    *_rows(f"{ATTENTION}.norm", f"{LAYER}.attention.output.LayerNorm", NORM, "C"),
    *_rows(f"{MLP}.sum.up", f"{LAYER}.intermediate.dense", LINEAR, "HC"),
    *_rows(f"{MLP}.sum.down", f"{LAYER}.output.dense", LINEAR, "CH"),
    *_rows(f"{MLP}.norm", f"{LAYER}.output.LayerNorm", NORM, "C"),
    *_rows("head.transform", f"{CLS}.transform.dense", LINEAR, "CC"),
    *_rows("head.norm", f"{CLS}.transform.LayerNorm", NORM, "C"),
    TensorRow("head.logits.bias", f"{CLS}.bias", "V"),
    TensorRow(HEAD, f"{CLS}.decoder.weight", "VC"),
    *_rows("head.pooler", "bert.pooler.dense", LINEAR, "CC"),
    *_rows("head.classes", "classifier", LINEAR, "KC"),
)


def keys(config: BertConfiguration) -> dict[str, Any]:
    check_heads(config, "num_attention_heads", "hidden_size")
    inner = config.intermediate_size
    is_classifier = "BertForSequenceClassification" in (config.architectures or [])
    names = (is_classifier and config.id2label) or {}
    labels = [names.get(number, "") for number in map(str, range(len(names)))]
    if is_classifier:  # One label is a number to predict.
        check_only("problem_type", config.problem_type, [None, "single_label_classification"])
        if len(labels) == 1:
            raise OtherModel(
                "it has one class, whose output is a number, but mpitrain has two or more"
            )
    return {
        "model.kind": "bert",
        "model.layers": config.num_hidden_layers,
        "model.width": config.hidden_size,
        "model.heads": config.num_attention_heads,
        "model.context": config.max_position_embeddings,
        "model.tied": config.tie_word_embeddings,
        "model.hidden": 0 if inner == 4 * config.hidden_size else inner,
        "model.epsilon": config.layer_norm_eps,
        "data.vocabulary": config.vocab_size,
        "data.classes": len(labels),
        "data.labels": [] if labels == numbered(labels) else labels,
    }


def described(keys: Model, labels: Sequence[str]) -> dict[str, Any]:
    numbers = {label: number for number, label in enumerate(labels)}
    return {
        "architectures": ["BertForSequenceClassification" if labels else "BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": keys.width,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads,
        "intermediate_size": keys.hidden_units,
        "hidden_act": "gelu",
        "max_position_embeddings": keys.context,
        "type_vocab_size": 2,
        "layer_norm_eps": keys.epsilon,
        "hidden_dropout_prob": keys.dropout,
        "attention_probs_dropout_prob": keys.attention_dropout,
        **({"id2label": dict(enumerate(labels)), "label2id": numbers} if labels else {}),
    }


def notes(config: BertConfiguration, folder: Path) -> list[str]:
    return dropout_notes(config, folder, DROPOUT)


BERT = Architecture(
    kind="bert",
    noun="BERT",
    configs={"bert": BertConfiguration},
    only={
        "hidden_act": ("gelu",),
        "type_vocab_size": (2,),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    tensors=lambda keys: TENSORS,
    keys=keys,
    described=described,
    prefix="bert.",
    # A tied decoder may be there as a copy.
    buffers=r"embeddings\.position_ids|cls\.predictions\.decoder\.weight|cls\.seq_relationship\..*",
    notes=notes,
    heads=("cls.", "bert.pooler.", "classifier."),
    # Version 5 of transformers computes with decoder.bias, which is a tensor of its own unless the decoder
    # is tied; version 4 has one tensor with both names, and writes the other one.
    again={f"{CLS}.bias": f"{CLS}.decoder.bias"},
    earlier={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
FORMAT = format_of_architecture("a BERT of HuggingFace's transformers", BERT)
