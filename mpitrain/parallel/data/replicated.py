"""Replicated: averages the gradients of a training loop of one's own (as DDP's Reducer).

A step sends the bytes of the all-reduces of all buckets, and one control message of 40 bytes. The
control message counts the wrong gradients of all ranks. Each gradient is padded to a multiple of
32 elements.

The caller computes gradients with any library. `Replicated` copies each gradient into the flat
buffer of the same `Buckets` that a `Trainer` uses. A bucket is reduced while the caller's backward
pass still computes earlier parameters.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Iterable
from numbers import Integral
from typing import Any, cast

from mpitrain.collectives.engine.arithmetic import arithmetic_of, parse_wire
from mpitrain.config import Config
from mpitrain.errors import CommError, ConfigError, MpitrainError, on_every_rank
from mpitrain.layers.base import Layer, Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.initial import zeros
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import copy_rows
from mpitrain.machine.cuda import as_array
from mpitrain.ops.device import Device, device_for
from mpitrain.parallel.data.buckets import Buckets, common_buckets
from mpitrain.parallel.data.own_arrays import agreed, averaging, facts_of, named
from mpitrain.parallel.grid import Axes, Grid
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import ControlMessage
from mpitrain.transport.base import Transport
from mpitrain.transport.device import over_device

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
        self._average = averaging(device, transport.size, self._arena)
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
        """Bind the buckets, and broadcast the parameters; collective."""
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
        """Return why a gradient is refused, or "" and its array."""
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
        """Raise the faults of all ranks on every rank; collective."""
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
        """Free the communicators and windows; `transport.close` calls this. Collective."""
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
