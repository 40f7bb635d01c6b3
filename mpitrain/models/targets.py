"""Adapters for the linear layers that lora.targets names."""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

from mpitrain.config import ALL_LINEAR, Lora
from mpitrain.errors import ConfigError
from mpitrain.formats.peft import ARCHITECTURES
from mpitrain.layers.adapted import InputDropout, LowRank
from mpitrain.layers.base import Unit
from mpitrain.layers.chunked_logits import ChunkedHead
from mpitrain.layers.dropout import Dropped
from mpitrain.layers.plain import Linear, Plain, Residual, Sequential


class Target(NamedTuple):
    """A linear layer that can get an adapter, or one of the outputs that are joined in it.

    layer   full name of the layer
    region  name of the output, such as q of qkv; empty: the whole layer
    rows    the rows of the unsharded weight that compute this output
    """

    layer: str
    region: str
    rows: range

    def names(self) -> list[str]:
        """Return the full names of the target: ours, then those of Hugging Face."""
        names = [self.layer, *self._modules(self.layer)]
        if not self.region:
            return names
        joined = [f"{name}.{own}" for name in names for own in (self.region, f"{self.region}_proj")]
        return joined + self._modules(joined[0])

    @staticmethod
    def _modules(layer: str) -> list[str]:
        # The blocks of a bert are those of the others, within the sum that it normalises.
        layers = dict.fromkeys((layer, layer.replace(".sum.", ".")))
        modules = (own.module_of(name) for name in layers for own in ARCHITECTURES.values())
        return [*filter(None, modules)]


def adapt(units: Sequence[Unit], lora: Lora, layers: Plain) -> list[Unit]:
    """Give adapters to the layers that lora.targets names, and freeze all other parameters.

    layers   the layer factory that made the units
    raises   ConfigError for a target that names no layer
    """
    chosen = chosen_targets([*targets(units)], lora.targets)
    adapted = []
    for unit in units:
        layer = _adapted(unit.layer, unit.name, chosen, lora, layers)
        frozen = {p.name for p in layer.parameters() if not is_adapter(p.name)}
        adapted.append(replace(unit, layer=layer, frozen=frozen))
    return adapted


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ("lora_A", "lora_B")


def targets(units: Sequence[Unit]) -> Iterator[Target]:
    """Yield every layer that can get an adapter, in the order of computation."""
    for unit in units:
        for name, layer in _linear_layers(unit.layer, unit.name):
            (weight,) = (p for p in layer.parameters() if p.name == "weight")
            yield Target(name, "", range(weight.shape[0]))
            for region, rows in layer.joined.items():
                yield Target(name, region, rows)


def chosen_targets(every: Sequence[Target], patterns: Sequence[str]) -> list[Target]:
    """Return the targets that have one of these names, or end with one of them after a dot.

    raises  ConfigError for a name that fits none, or if a layer is chosen whole and in regions
    """
    chosen = set[Target]()
    for pattern in patterns or [""]:
        if pattern == ALL_LINEAR:
            fitting = [target for target in every[:-1] if not target.region]
        else:
            fitting = [
                target
                for target in every
                if pattern and any(f".{name}".endswith(f".{pattern}") for name in target.names())
            ]
        if not fitting:
            raise ConfigError(
                f"Each name of lora.targets must match a linear layer, but {pattern!r} matches none.",
                f"These exist: {_listed(every)}.",
            )
        chosen |= {*fitting}
    ordered = [target for target in every if target in chosen]
    for target in ordered:
        if target.region and target._replace(region="", rows=_whole(every, target)) in chosen:
            raise ConfigError(
                f"An adapter covers all outputs of a layer or some, but lora.targets names {target.layer} "
                f"and its {target.region}.",
                "Leave one of them out.",
            )
    return ordered


def _whole(every: Sequence[Target], target: Target) -> range:
    return next(whole.rows for whole in every if whole.layer == target.layer and not whole.region)


def _listed(every: Sequence[Target]) -> str:
    """Return the last components of all names, and two full names as examples."""
    if not every:
        return "none, for this model has no linear layer that can be adapted"
    short = dict.fromkeys(name.rpartition(".")[2] for target in every for name in target.names())
    return f"{', '.join(short)}; {' and '.join(dict.fromkeys(every[0].names()))}"


def _linear_layers(layer: Any, name: str) -> Iterator[tuple[str, Linear]]:
    if isinstance(layer, Linear):
        yield name, layer
    elif isinstance(layer, ChunkedHead):
        yield name, layer.head
    elif isinstance(layer, Residual | Dropped):
        yield from _linear_layers(layer.inner, name)
    elif isinstance(layer, Sequential):
        for child, inner in layer.children.items():
            yield from _linear_layers(inner, f"{name}.{child}")


def _adapted(layer: Any, name: str, chosen: Sequence[Target], lora: Lora, layers: Plain) -> Any:
    """Return the layer with adapters for the chosen targets that it contains."""
    own_targets = [
        target for target in chosen if target.layer == name or target.layer.startswith(f"{name}.")
    ]
    if not own_targets:
        return layer
    if isinstance(layer, ChunkedHead):
        raise ConfigError(
            f"The head of lora.targets multiplies all rows at once, but memory.logit_chunks is {layer.count}.",
            "Set memory.logit_chunks to 1, or leave lm_head out of lora.targets.",
        )
    if isinstance(layer, Residual):
        return Residual(_adapted(layer.inner, name, chosen, lora, layers), layer.add)
    if isinstance(layer, Dropped):
        return Dropped(_adapted(layer.inner, name, chosen, lora, layers), layer.drop)
    if isinstance(layer, Sequential):
        return Sequential(
            **{
                child: _adapted(inner, f"{name}.{child}", own_targets, lora, layers)
                for child, inner in layer.children.items()
            }
        )
    if not isinstance(layer, Linear):
        return layer
    adapted = copy(layer)
    adapted.low_rank = LowRank(
        layer.ops,
        layer.parameters(),
        {target.region: target.rows for target in own_targets},
        lora.rank,
        lora.alpha / lora.rank,
        layer.activation,
        InputDropout(layers, lora.dropout, crc32(name.encode())) if lora.dropout else None,
    )
    return adapted
