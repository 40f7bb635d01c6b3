"""Frozen parameters (as requires_grad False in PyTorch): their choice by name, and its effect."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter, Unit


def parameters_of(unit: Unit) -> list[Parameter]:
    """Return the parameters of a unit's layer; `trainable` is False for those in `unit.frozen`."""
    return [
        p._replace(trainable=False) if p.name in unit.frozen else p for p in unit.layer.parameters()
    ]


def freeze(units: Sequence[Unit], patterns: Sequence[str]) -> list[Unit]:
    """Mark the tensors that match a pattern, in each unit that computes with them.

    Tensors that their layer or unit describes as not trainable are marked as well.

    patterns  of full names, as fnmatch takes them; a tied tensor has the name of its first unit
    raises    ConfigError for a pattern without a match, or if no tensor is left to train
    """
    tensors = {
        unit.full_name(p): p
        for unit in units
        for p in parameters_of(unit)
        if p.name not in unit.tied
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            raise ConfigError(
                "Each pattern of model.freeze matches the full name of a parameter, but "
                f"{pattern!r} matches none of {len(tensors)}.",
                f"The names go from {next(iter(tensors), '')} to {next(reversed(tensors), '')}.",
            )
    frozen = {
        name
        for name, p in tensors.items()
        if not p.trainable or any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if frozen and len(frozen) == len(tensors):
        raise ConfigError(
            f"Training needs a parameter that is not frozen, but all {len(tensors)} are.",
            "Take a pattern out of model.freeze.",
        )
    if not frozen:
        return list(units)
    return [
        replace(
            unit,
            frozen={p.name for p in unit.layer.parameters() if unit.full_name(p) in frozen},
        )
        for unit in units
    ]


def forward_only(units: Sequence[Unit]) -> int:
    """Return the number of first units that need no backward: those before the first trained tensor.

    It is 0 if no tensor is frozen.
    """
    if not any(not p.trainable for unit in units for p in parameters_of(unit)):
        return 0
    return next(
        (n for n, unit in enumerate(units) if any(p.trainable for p in parameters_of(unit))),
        len(units),
    )
