"""Adapter folders of PEFT: their tensor names and keys of adapter_config.json, and ours.

    here                               in a PEFT folder
    blocks.0.attention.qkv.lora_A      base_model.model.transformer.h.0.attn.c_attn.lora_A.weight
    blocks.0.attention.qkv.q.lora_A    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    head.logits.lora_B                 base_model.model.lm_head.lora_B.weight
    lora.rank, lora.alpha              r, lora_alpha
    run.init_from                      base_model_name_or_path

A (r, inputs) and B (outputs, r) have the same shapes in both. Of a GPT-2, adapters of q, k and v are
written as one adapter of c_attn: its A has the rows of all three, and its B is 0 outside of their
blocks. Of a Llama, an adapter of qkv or up is written as several, with the same A. The file
mpitrain.json has the digests of the base model; PEFT ignores this file.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.config import Model
from mpitrain.errors import ConfigError
from mpitrain.formats import folder as folders
from mpitrain.formats.architecture import HEAD, Architecture
from mpitrain.formats.bert import BERT
from mpitrain.formats.folder import (
    FolderContents,
    Format,
    Initial,
    Trained,
    check_float,
    configuration,
    json_text,
    refusing,
)
from mpitrain.formats.gpt2 import GPT2
from mpitrain.formats.llama import LLAMA
from mpitrain.formats.safetensors_files import Located
from mpitrain.formats.tensors import AnyTensor, RowsOfTensor, StoredTensor, padded, stacked

ARCHITECTURES = {own.kind: own for own in (GPT2, LLAMA, BERT)}
"""{model.kind: the names of its layers in transformers}."""

WEIGHTS, CONFIGURATION, RECORD = "adapter_model", "adapter_config.json", "mpitrain.json"
PREFIX = "base_model.model."
PAIR = ("lora_A", "lora_B")
BASE_HEAD = f"{PREFIX}lm_head.base_layer.weight"
"""The frozen weight under an adapter of lm_head; PEFT saves a copy of it with the adapter."""
Pair = tuple[slice, AnyTensor, AnyTensor]
"""An adapter: rows of its weight, A and B."""


Rank = Annotated[int, Field(ge=1, lt=1 << 31)]
Alpha = Annotated[float, Field(gt=0, le=1e30)]
Modules = Annotated[str, Field(pattern=r"^[\w.]+$")]
"""The end of module names. PEFT takes any regular expression; here only the dot may be special."""


class PeftConfiguration(BaseModel):
    """The keys of adapter_config.json that determine an adapter; the defaults are PEFT's."""

    model_config = ConfigDict(strict=True)

    peft_type: str
    r: Rank
    lora_alpha: Alpha
    base_model_name_or_path: str | None = None
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[Modules, Rank] | None = None
    alpha_pattern: dict[Modules, Alpha] | None = None
    init_lora_weights: bool | str | None = True
    alora_invocation_tokens: list[int] | None = None
    layer_replication: list[Any] | None = None
    use_qalora: bool = False
    kasa_config: dict[str, Any] | None = None
    monteclora_config: dict[str, Any] | None = None


ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    # Other initial values, such as "pissa", change the base when PEFT loads the adapter.
    "init_lora_weights": (None, False, "gaussian", "orthogonal", "eva", True),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "use_qalora": (False,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
"""Keys of adapter_config.json, and the only values of each that mpitrain's adapters support."""


class AdapterBase(BaseModel):
    """The model that adapters were trained on: its folder, and the SHA-256 of each file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    folder: str
    sha256: dict[str, str]


class Record(BaseModel):
    model_config = ConfigDict(strict=True)

    base: AdapterBase | None = None
    version: Literal[1] = 1


def keys(folder: Path) -> dict[str, Any]:
    with refusing(folder):
        return _keys(folder)[0]


def base(folder: Path) -> dict[str, Any]:
    """Return the record of the base model in mpitrain.json, {"folder": ..., "sha256": ...}; or {}."""
    with refusing(folder):
        if RECORD not in folders.names(folder):
            return {}
        record = configuration(folder, RECORD, Record).base
        return record.model_dump() if record else {}


def read(folder: Path) -> Initial:
    with refusing(folder):
        keys, tensors, files = _keys(folder)
    return Initial(folder, keys, tensors, [CONFIGURATION, *files])


def _keys(folder: Path) -> tuple[dict[str, Any], dict[str, AnyTensor], list[str]]:
    """Return the keys, the tensors and the files of a folder.

    Adapters of a lower rank than others are padded with rows of A and columns of B that are 0. These
    stay 0 in training, because their gradients are 0.
    """
    config = configuration(folder, CONFIGURATION, PeftConfiguration)
    for key, values in ONLY.items():
        if (value := getattr(config, key)) not in values:
            raise ValueError(
                f"{CONFIGURATION} says {key} {json.dumps(value)[:80]}, but mpitrain has {json.dumps(values[-1])}"
            )
    files, located = folders.tensors(folder, WEIGHTS)
    tensors, modules = _matched(located)
    layers = sorted(modules)
    alphas, ranks = {}, {}
    for layer in layers:
        module = modules[layer]
        if missing := [matrix for matrix in PAIR if f"{layer}.{matrix}" not in tensors]:
            raise ValueError(f"it has no {missing[0]} of {PREFIX}{module}")
        ranks[layer] = rank = _of_module(config.rank_pattern, module, config.r)
        a, b = (tensors[f"{layer}.{matrix}"].shape for matrix in PAIR)
        if (a[0], b[1]) != (rank, rank):
            raise ValueError(
                f"{CONFIGURATION} says r {rank}, but A and B of {module} have the shapes {a} and {b}"
            )
        alphas[layer] = _of_module(config.alpha_pattern, module, config.lora_alpha)
    largest = max(layers, key=ranks.__getitem__)
    rank, alpha = ranks[largest], alphas[largest]
    whole: dict[str, AnyTensor] = dict(tensors)
    for layer in layers:
        if not math.isclose(alphas[layer] / ranks[layer], alpha / rank):
            raise ValueError(
                f"{CONFIGURATION} says alpha {alphas[layer]:g} for r {ranks[layer]} and {alpha:g} for {rank}, "
                "but mpitrain has one alpha / r for all layers"
            )
        for dim, matrix in enumerate(PAIR):
            whole[f"{layer}.{matrix}"] = padded(tensors[f"{layer}.{matrix}"], dim, rank)
    keys = {
        "lora.rank": rank,
        "lora.alpha": float(alpha),
        "lora.targets": layers,
        "run.init_from": config.base_model_name_or_path or "",
    }
    return keys, whole, files


def _of_module(pattern: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """Return the value of the first key that matches a module, as PEFT does; else `otherwise`."""
    fitting = (key for key in pattern or {} if re.fullmatch(rf"(.*\.)?({key})", module))
    return (pattern or {}).get(next(fitting, ""), otherwise)


def _matched(located: Mapping[str, Located]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return {our name: tensor} and {our layer: its module}; ValueError for another tensor."""
    matched, modules = {}, {}
    for name, tensor in located.items():
        if name == BASE_HEAD:
            check_float(name, tensor)
            matched[HEAD] = StoredTensor(tensor)
            continue
        module, _, last = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        layer = next(filter(None, (own.layer_of(module) for own in ARCHITECTURES.values())), "")
        is_known = name.startswith(PREFIX) and name.endswith(".weight") and last in PAIR
        if not is_known or not layer or len(tensor.shape) != 2:
            nouns = " or a ".join(own.noun for own in ARCHITECTURES.values())
            raise ValueError(f"it has a tensor {name!a}, which is no adapter of a {nouns}'s layer")
        check_float(name, tensor)
        matched[f"{layer}.{last}"], modules[layer] = StoredTensor(tensor), module
    if not modules:
        raise ValueError("it has no adapter")
    return matched, modules


def write(model: Trained) -> FolderContents:
    keys, lora = model.keys, model.lora
    own = ARCHITECTURES.get(keys.kind)
    if not lora.rank or not own:
        raise ConfigError(
            f"A folder of kind peft has the adapters of a {' or '.join(ARCHITECTURES)}, but this run has "
            f"lora.rank {lora.rank} and model.kind {keys.kind}.",
            "Leave out --to.",
        )
    tensors: dict[str, AnyTensor] = {}
    ranks = {}
    for layer, pairs in by_layer(model.tensors, keys).items():
        adapters = _by_module(own, layer, pairs, keys)
        if not adapters:
            raise ConfigError(
                f"A folder of kind peft has adapters of a {own.noun}'s layers, but {layer} is none.",
                "Name another run.",
            )
        for module, pair in adapters.items():
            ranks[module] = pair[0].shape[0]
            for name, tensor in zip(PAIR, pair, strict=True):
                tensors[f"{PREFIX}{module}.{name}.weight"] = tensor
    return FolderContents(tensors, _files(model, ranks, own))


def _by_module(
    own: Architecture, layer: str, pairs: list[Pair], model: Model
) -> dict[str, tuple[AnyTensor, AnyTensor]]:
    """Return {module: A and B} of one of our layers, which may be several of theirs."""
    rows, a, b = pairs[0]
    if module := own.module_of(layer):
        return {module: (a, b) if rows == slice(None) else stacked(pairs, 3 * model.width)}
    return {
        module: (a, b if rows == part else RowsOfTensor(b, part))
        for region, part in _regions(model).items()
        if (module := own.module_of(f"{layer}.{region}"))
        for rows, a, b in pairs
        if rows in (slice(None), part)
    }


def by_layer(tensors: Mapping[str, AnyTensor], model: Model) -> dict[str, list[Pair]]:
    """Return {layer: its adapters}."""
    pairs, regions = defaultdict(list), _regions(model)
    for name, a in tensors.items():
        adapter, _, last = name.rpartition(".")
        if last != "lora_A":
            continue
        layer, rows = adapter, slice(None)
        above, _, region = adapter.rpartition(".")
        if region in regions and above.rpartition(".")[2] in ("qkv", "up"):
            layer, rows = above, regions[region]
        pairs[layer].append((rows, a, tensors[f"{adapter}.lora_B"]))
    return pairs


def _regions(model: Model) -> dict[str, slice]:
    """Return the rows of each output that is joined with others in one weight."""
    shared = model.head_channels * (model.kv_heads or model.heads)
    ends = [0, *accumulate((model.head_channels * model.heads, shared, shared))]
    slices = {name: slice(*run) for name, run in zip("qkv", pairwise(ends), strict=True)}
    hidden = model.hidden_units
    return slices | {"gate": slice(0, hidden), "up": slice(hidden, 2 * hidden)}


def _files(model: Trained, ranks: Mapping[str, int], own: Architecture) -> dict[str, bytes]:
    lora = model.lora
    rank = max(set(ranks.values()), key=list(ranks.values()).count)
    # A stacked adapter has the scale of its summands: alpha / r stays.
    alphas = {module: lora.alpha * each / lora.rank for module, each in ranks.items()}
    others = {module: each for module, each in ranks.items() if each != rank}
    texts = {
        CONFIGURATION: {
            "peft_type": "LORA",
            # Without a task peft calls the model as it is: it may have one of several heads.
            "task_type": None if own.heads else "CAUSAL_LM",
            "base_model_name_or_path": model.begun or None,
            "r": rank,
            "lora_alpha": _whole(lora.alpha * rank / lora.rank),
            "lora_dropout": 0.0,
            "target_modules": sorted(ranks),
            "fan_in_fan_out": own.is_transposed,
            "bias": "none",
            "rank_pattern": others,
            "alpha_pattern": {module: _whole(alphas[module]) for module in others},
            "inference_mode": True,
        },
        RECORD: {"base": dict(model.base) or None, "version": 1},
    }
    return {name: json_text(content) for name, content in texts.items()}


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


PEFT = Format("adapters of HuggingFace's peft", WEIGHTS, CONFIGURATION, keys, read, write)
