"""Replicated: averages the gradients of a training loop of one's own (as DDP's Reducer).

A step sends the bytes of the all-reduces of all buckets, and one control message of 40 bytes. The
control message counts the wrong gradients of all ranks. Each gradient is padded to a multiple of
32 elements.

The caller computes gradients with any library. `Replicated` copies each gradient into the flat
buffer of its `Buckets`, the reducer that a `Trainer` uses, too. A bucket is reduced while the
caller's backward pass still computes the gradients of earlier parameters.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, cast

import numpy as np

from mpitrain.collectives.engine.arithmetic import arithmetic_of, parse_wire
from mpitrain.collectives.selection.algorithm import is_file
from mpitrain.config import Config, parse
from mpitrain.errors import CommError, ConfigError, MpitrainError, on_every_rank
from mpitrain.layers.base import Layer, Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.initial import zeros
from mpitrain.layers.plain import Plain
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.machine.cuda import as_array, kind_of
from mpitrain.ops.device import Device, device_for
from mpitrain.parallel.buckets import Buckets, common_buckets
from mpitrain.parallel.grid import Axes, Grid
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.step_end import ControlMessage, weight_of
from mpitrain.transport.agreement import from_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device import over_device

FLOATS = ("float32", "float64")
"""The dtypes of the parameters that `Replicated` takes."""

Average = Callable[[Any, Any], None]
"""(sum over the ranks, gradient): write the average into the gradient."""


def average_on(device: Device, ranks: int, arena: Arena) -> Average:
    """Return the function that averages on a device: with NumPy on the host, else with our kernels."""
    weight = weight_of(ranks)
    if device.kernels is None:
        return lambda total, gradient: np.multiply(total, weight, out=gradient)

    def write(total: Any, gradient: Any) -> None:
        is_flat = gradient.flags.c_contiguous
        target = gradient if is_flat else arena.take(gradient.shape, gradient.dtype)
        target.fill(0)
        # The step of SGD from 0 with learning rate -1 is 0 + total / ranks.
        device.ops.sgd(target.reshape(-1), total.reshape(-1), weight, -1.0, 0.0, arena)
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


NAMED = 8
"""The largest number of faults of one rank that an error lists."""


class Replicated:
    """Data parallelism for a training loop of one's own, as torch's DistributedDataParallel.

    It copies rank 0's parameters to all ranks. A step calls `ready` for each gradient, then `wait`.

    Parameters
    ----------
    transport : Transport
        The ranks.
    parameters : iterable of arrays
        NumPy, CuPy or PyTorch; all float32, or all float64.
    algorithm, wire, bucket_mb
        As in the section [replication].

    Raises
    ------
    MpitrainError
        On every rank, if parameters differ between ranks, or an argument does not fit.
    """

    def __init__(
        self,
        transport: Transport,
        parameters: Iterable[Any],
        algorithm: str = "auto",
        wire: str = "none",
        bucket_mb: float = 25.0,
    ):
        self._parameters, config = agreed(
            transport,
            parameters,
            {"algorithm": algorithm, "wire": wire, "bucket_mb": bucket_mb, "dense_steps": 0},
        )
        self._rank = transport.rank
        part = transport.split(0)
        assert part is not None
        self._own: Transport | None = part
        device = device_for(config.device.kind)
        self._arena = device.arena()
        self._average = average_on(device, transport.size, self._arena)
        self._grid = Grid(
            over_device(part, device.backend, config.device.cuda_aware),
            Axes(dp=transport.size),
            config.replication.algorithm,
            arithmetic=arithmetic_of(device),
            arena=self._arena,
        )
        try:
            self._build(config, device)
        except MpitrainError:
            self._grid.close()
            part.close()
            raise
        transport.tenants.add(self._close)

    def _build(self, config: Config, device: Device) -> None:
        units = [
            Unit(str(index), cast(Layer, _Tensor(tuple(array.shape))))
            for index, array in enumerate(self._parameters)
        ]
        replica = ReplicationContext(
            config,
            self._grid,
            Storage(units, self._parameters[0].dtype),
            parse_wire(config.replication.wire),
            device,
            self._arena,
            Plain(device.ops).loss(),
        )
        bind = self._grid.dp.bind
        self._reducer = Buckets(replica, common_buckets(replica), bind, (), ())
        self._leaves = [self._reducer.gradients(index)["value"] for index in range(len(units))]
        self._control = ControlMessage(self._grid.world)
        self._step = 0
        self._begin()
        self._broadcast()

    def _broadcast(self) -> None:
        for leaf, array in zip(self._leaves, self._parameters, strict=True):
            copy_rows(leaf.array, array)
        self._grid.dp.broadcast(self._reducer.buffer)
        for leaf, array in zip(self._leaves, self._parameters, strict=True):
            copy_rows(array, leaf.array)

    def _begin(self) -> None:
        self._reducer.begin(self._step)
        self._gradients: dict[int, Any] = {}
        self._faults: list[str] = []
        self._next = len(self._parameters) - 1

    def ready(self, index: int, gradient: Any) -> None:
        """Pass the gradient of parameter `index`, from 0; `wait` writes the average into it."""
        fault, array = self._checked(index, gradient)
        if fault:
            self._faults.append(fault)
            return
        self._gradients[index] = array
        copy_rows(self._leaves[index].array, array)
        self._leaves[index].filled = True
        # The last parameter first: so all ranks start their buckets in one order.
        while self._next in self._gradients:
            self._pass_on()
        self._reducer.poll()

    def _pass_on(self) -> None:
        """Report the next gradient to the buckets; a missing one counts as zeros."""
        self._reducer.ready(self._next, is_last=True)
        self._next -= 1

    def _checked(self, index: int, gradient: Any) -> tuple[str, Any]:
        count = len(self._parameters)
        if not isinstance(index, Integral) or index not in range(count):
            return f"gradient {index} has no parameter: they are 0 to {count - 1}", None
        if index in self._gradients:
            return f"gradient {index} came twice", None
        try:
            array = as_array(gradient, f"gradient {index}")
        except ConfigError as error:
            return error.law.rstrip("."), None
        own, facts = facts_of(self._parameters[index]), facts_of(array)
        if facts != own:
            return f"gradient {index} is {named(facts)}, and its parameter {named(own)}", None
        if not getattr(array.flags, "writeable", True):
            return f"gradient {index} is read-only", None
        return "", array

    def wait(self) -> None:
        """Write the averages over all ranks into the gradients; collective.

        Raises
        ------
        CommError
            On every rank, if a gradient is missing, came twice, or has another shape or dtype.
        """
        missing = [n for n in range(len(self._parameters)) if n not in self._gradients]
        faults = self._faults + [f"gradient {n} is missing" for n in missing]
        while self._next >= 0:
            self._pass_on()
        self._reducer.wait()
        gradients = self._gradients
        (failed,) = self._control.total(float(len(faults)))
        self._step += 1
        self._begin()
        if failed:
            self._refuse(faults)
        self._arena.rewind()
        for index, gradient in gradients.items():
            self._average(self._leaves[index].array, gradient)

    def _refuse(self, faults: list[str]) -> None:
        assert self._own is not None
        everyone = self._own.gather_text(faults[:NAMED])
        listed = [f"{fault} on rank {rank}" for rank, own in enumerate(everyone) for fault in own]
        raise on_every_rank(
            CommError(
                f"rank {self._rank}: every parameter needs one gradient per step on every rank, but "
                f"{'; '.join(listed)}.",
                "Call ready(index, gradient) once per parameter, with zeros if it has no gradient.",
            )
        )

    def _close(self) -> None:
        if self._own is None:
            return
        self._leaves.clear()
        del self._reducer, self._control  # They own arrays in windows.
        self._grid.close()
        self._own.close()
        self._own = None


class _Tensor:
    """The description of a layer with one tensor, for the unit of a caller's parameter."""

    def __init__(self, shape: tuple[int, ...]):
        self._shape = shape

    def parameters(self) -> list[Parameter]:
        return [Parameter("value", self._shape, zeros, decayed=False)]
