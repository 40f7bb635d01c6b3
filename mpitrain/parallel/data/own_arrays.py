"""The arrays of a caller's own training loop: their agreement over the ranks, and averages."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mpitrain.collectives.selection.algorithm import is_file
from mpitrain.config import Config, parse
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.machine.arena import Arena
from mpitrain.machine.cuda import as_array, kind_of
from mpitrain.ops.device import Device
from mpitrain.transport.agreement import from_all_ranks
from mpitrain.transport.base import Transport

FLOATS = ("float32", "float64")
"""The dtypes of the parameters that `Replicated` takes."""

Average = Callable[[Any, Any], None]
"""(sum over the ranks, gradient): write the average into the gradient."""


def averaging(device: Device, ranks: int, arena: Arena) -> Average:
    """Return the function that averages on a device: NumPy's one pass, or our kernels."""
    return _by_numpy(ranks) if device.kernels is None else _by_kernels(device, ranks, arena)


def _by_numpy(ranks: int) -> Average:
    return lambda total, gradient: np.multiply(total, 1 / ranks, out=gradient)


def _by_kernels(device: Device, ranks: int, arena: Arena) -> Average:
    def write(total: Any, gradient: Any) -> None:
        is_flat = gradient.flags.c_contiguous
        target = gradient if is_flat else arena.take(gradient.shape, gradient.dtype)
        target.fill(0)
        # The step of SGD from 0 with learning rate -1 is 0 + total / ranks.
        device.ops.sgd(target.reshape(-1), total.reshape(-1), 1 / ranks, -1.0, 0.0, arena)
        if not is_flat:
            gradient[...] = target

    return write


def facts_of(array: Any) -> list[Any]:
    """Return the facts in which all ranks agree: kind of device, dtype, shape."""
    return [kind_of(array), array.dtype.name, *array.shape]


def named(facts: list[Any]) -> str:
    kind, dtype, *shape = facts
    return f"{dtype} of shape ({', '.join(map(str, shape))}) on {kind}"


def agreed(
    transport: Transport, parameters: Iterable[Any], settings: dict[str, Any]
) -> tuple[list[Any], Config]:
    """Return the parameters as arrays, and the configuration, the same on all ranks; collective.

    settings  keys of [replication]
    raises    as the constructor of `Replicated`
    """
    arrays: list[Any] = []
    configs: list[Config] = []

    def facts() -> list[Any]:
        if not isinstance(parameters, Iterable):
            raise ConfigError(
                f"Replicated needs parameters, but they are a {type(parameters).__name__}.",
                "Pass the arrays themselves, for example list(model.parameters()).",
            )
        arrays[:] = [as_array(array, f"Parameter {n}") for n, array in enumerate(parameters)]
        all_facts = [facts_of(array) for array in arrays]
        _check(arrays, all_facts)
        kind, dtype = all_facts[0][:2]
        own = {**settings, "bucket_mb": float(settings["bucket_mb"])}
        shared = {key: str(value) for key, value in own.items()}
        if is_file(shared["algorithm"]):
            from mpitrain.collectives.selection.own_algorithm import file_algorithm

            own["algorithm"] = file_algorithm(shared["algorithm"])
        tables = {"replication": own, "device": {"kind": kind}}
        configs.append(parse({**tables, "precision": {"compute": dtype}}))
        return [shared, all_facts]

    (first, shapes), *everyone = from_all_ranks(transport, facts)
    for rank, (other, others) in enumerate(everyone, 1):
        if other != first:
            raise _differing("settings", first, other, rank)
        if len(others) != len(shapes):
            raise _differing("number of parameters", len(shapes), len(others), rank)
        for number, (one, another) in enumerate(zip(shapes, others, strict=True)):
            if one != another:
                raise _differing(f"parameter {number}", named(one), named(another), rank)
    return arrays, configs[0]


def _check(arrays: list[Any], all_facts: list[list[Any]]) -> None:
    if not arrays:
        raise ConfigError(
            "Replicated needs parameters, but the list is empty.",
            "A generator can be read only once: pass a list.",
        )
    for number, (array, facts) in enumerate(zip(arrays, all_facts, strict=True)):
        if array.dtype.name not in FLOATS or facts[:2] != all_facts[0][:2]:
            raise ConfigError(
                f"All parameters must be float32, or all float64, on one kind of device, but parameter {number} is "
                f"{named(facts)} and parameter 0 {named(all_facts[0])}.",
                "Make one Replicated for each kind of parameter.",
            )
        if not getattr(array.flags, "writeable", True):
            raise ConfigError(
                f"Rank 0's values are written to each parameter, but parameter {number} is read-only.",
                "Pass a writable copy.",
            )


def _differing(thing: str, first: object, other: object, rank: int) -> CommError:
    return on_every_rank(
        CommError(
            f"All ranks must replicate the same parameters, but the {thing} is {first} on rank 0 and {other} on rank {rank}.",
            "Build the same model on every rank.",
        )
    )
