"""Replicated: averages the gradients of a training loop of one's own (as DDP's Reducer).

A step sends the bytes of the all-reduces of all buckets, and one control message of 16 bytes, which
counts the wrong and the missing gradients of all ranks. Each gradient is padded to a multiple of 32
elements.

The caller computes gradients with any library, and copies each into the flat buffer of
`GradientSums`. Its `Buckets` are the reducer that a `Trainer` uses, too. A bucket is reduced while
the caller's backward pass still computes the gradients of earlier parameters.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.arithmetic import arithmetic_of, parse_wire
from mpitrain.collectives.group import Group
from mpitrain.collectives.selection.algorithm import is_file
from mpitrain.config import KEPT_ON_HOST, Replication, parse
from mpitrain.errors import CommError, ConfigError, MpitrainError
from mpitrain.layers.base import Parameter, zeros
from mpitrain.layers.flat import GRAIN, FlatLayout
from mpitrain.machine.backend import Arena, copy_rows
from mpitrain.machine.cuda import as_array, kind_of
from mpitrain.ops.device import Device, device_for
from mpitrain.parallel.buckets import Buckets, LossyBuckets, best_bytes
from mpitrain.transport.agreement import from_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device import over_device

NAMED = 8
"""The largest number of faults of one rank that an error lists."""


class TensorFacts(NamedTuple):
    """The facts of a tensor in which all ranks agree.

    name        in error messages
    kind        of its device, "cpu" or "cuda"
    is_trained  whether it has a gradient
    """

    name: str
    kind: str
    dtype: str
    shape: Sequence[int]
    is_trained: bool = True

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        frozen = "" if self.is_trained else ", without a gradient"
        return f"{self.dtype} of shape ({shape}) on {self.kind}{frozen}"


class GradientSums:
    """The sums over all ranks of one gradient per parameter, in buckets of one flat buffer.

    A step calls `ready` for each parameter, then `wait`. The buffer is float64 if any parameter is,
    else float32.

    leaves  by parameter: a view of the flat buffer in its shape. The caller writes the gradient to
            it before `ready`, and reads the sum after `wait`
    taken   the parameters that are ready in this step
    group   all ranks; its messages are apart from those of the caller's transport
    """

    def __init__(
        self,
        transport: Transport,
        look: Callable[[], list[TensorFacts]],
        algorithm: str,
        wire: str,
        bucket_mb: float,
    ):
        """Agree with all ranks, and bind the reductions; collective.

        look    returns the facts of this rank's tensors, a trained one first; called once, without
                messages
        raises  as the constructor of `Replicated`
        """
        facts, settings, dtype = agreed(
            transport,
            look,
            {"algorithm": algorithm, "wire": wire, "bucket_mb": bucket_mb, "dense_steps": 0},
        )
        part = transport.split(0)
        assert part is not None
        self._own: Transport | None = part
        self.device = device = device_for(facts[0].kind)
        self.arena = device.arena()
        self._outer = over_device(part, device.backend, "auto")
        # A thread may progress the messages of the buckets, while this one counts faults.
        inner = self._outer.split(0)
        assert inner is not None
        self._inner = inner
        self.group = Group(
            inner, settings.algorithm, arithmetic=arithmetic_of(device), arena=self.arena
        )
        try:
            self._build(settings, dtype, [one.shape for one in facts if one.is_trained])
        except MpitrainError:
            inner.close()
            part.close()
            raise
        transport.tenants.add(self._close)

    def _build(self, settings: Replication, dtype: str, shapes: Sequence[Sequence[int]]) -> None:
        layout = FlatLayout(
            [
                [Parameter(str(index), tuple(shape), zeros, decayed=False)]
                for index, shape in enumerate(shapes)
            ],
            np.dtype(dtype),
            GRAIN,
        )
        group = self.group
        self._flat = self._outer.allocate(layout.length, layout.dtype)
        cuts = layout.buckets(best_bytes(layout, group, settings.bucket_mb))
        wire = parse_wire(settings.wire)
        kind: Callable[..., Buckets] = Buckets
        if wire.name != "none":
            kind = partial(LossyBuckets, wire=wire, layout=layout)
        writers = [{*bucket.units} for bucket in cuts]
        self._buckets = kind(group, self._flat, cuts, writers, settings.overlap)
        self.leaves = [entry.view(self._flat) for entry in layout.entries]
        self._counts = np.zeros(2)
        self._control = Group(self._outer, settings.algorithm).bind(self._counts)
        self._step = 0
        self._begin()

    def broadcast(self) -> None:
        """Copy the leaves of rank 0 to all ranks; collective."""
        self.group.broadcast(self._flat)

    def _begin(self) -> None:
        self._buckets.begin(self._step)
        self.taken: set[int] = set()
        self._next = len(self.leaves) - 1

    def missing(self) -> list[int]:
        return [index for index in range(len(self.leaves)) if index not in self.taken]

    def ready(self, index: int) -> None:
        """Reduce the leaf of this parameter, once those of all later ones are ready."""
        self.taken.add(index)
        # The last parameter first: so all ranks start their buckets in one order.
        while self._next in self.taken:
            self._pass_on()
        self._buckets.poll()

    def _pass_on(self) -> None:
        """Report the next gradient to the buckets; a missing one counts as zeros."""
        if self._next not in self.taken:
            self.leaves[self._next].fill(0)
        self._buckets.ready(self._next)
        self._next -= 1

    def wait(self, faults: int) -> tuple[int, int]:
        """End the step: the leaves hold the sums; collective. Missing gradients count as zeros.

        faults   of this rank
        returns  the faults of all ranks, and the gradients that were missing on all ranks together
        """
        self._counts[:] = faults, len(self.leaves) - len(self.taken)
        while self._next >= 0:
            self._pass_on()
        self._control.start()
        self._buckets.wait()
        self._outer.wait_until(self._control.poll)
        self._step += 1
        self._begin()
        all_faults, all_missing = map(int, self._counts)
        return all_faults, all_missing

    def refusal(self, faults: Sequence[str], way_out: str) -> CommError:
        """Return the error about the faults of all ranks in this step; collective."""
        assert self._own is not None
        everyone = self._own.gather_text(faults[:NAMED])
        listed = [f"{fault} on rank {rank}" for rank, own in enumerate(everyone) for fault in own]
        return CommError(
            f"rank {self._own.rank}: every parameter needs one gradient per step on every rank, but "
            f"{'; '.join(listed)}.",
            way_out,
        ).on_every_rank()

    def _close(self) -> None:
        if self._own is None:
            return
        self.leaves.clear()
        del self._buckets, self._control, self._flat  # They own arrays in windows.
        self._inner.close()
        self._own.close()
        self._own = None


def agreed(
    transport: Transport, look: Callable[[], list[TensorFacts]], settings: dict[str, Any]
) -> tuple[list[TensorFacts], Replication, str]:
    """Return the facts, the section [replication] and the dtype of the sums, the same on all ranks; collective.

    settings  keys of [replication]
    raises    as the constructor of `Replicated`
    """
    sections: list[tuple[Replication, str]] = []

    def facts() -> list[Any]:
        all_facts = look()
        own = {**settings, "bucket_mb": float(settings["bucket_mb"])}
        shared = {key: str(value) for key, value in own.items()}
        if is_file(shared["algorithm"]):
            from mpitrain.collectives.selection.own_algorithm import file_algorithm

            own["algorithm"] = file_algorithm(shared["algorithm"])
        is_wide = any(one.is_trained and one.dtype == "float64" for one in all_facts)
        tables = {"replication": own, "device": {"kind": all_facts[0].kind}}
        tables["precision"] = {"compute": "float64" if is_wide else "float32"}
        config = parse(tables)
        sections.append((config.replication, config.precision.stored))
        _check_wire(own["wire"], is_wide, all_facts[0].kind)
        return [shared, all_facts]

    (first, shapes), *everyone = from_all_ranks(transport, facts)
    for rank, (other, others) in enumerate(everyone, 1):
        if other != first:
            raise _differing("settings", first, other, rank)
        if len(others) != len(shapes):
            raise _differing("number of parameters", len(shapes), len(others), rank)
        for one, another in zip(shapes, others, strict=True):
            if one[0] != another[0]:
                raise _differing("name of a parameter", one[0], another[0], rank)
            if one != another:
                raise _differing(one[0], TensorFacts(*one), TensorFacts(*another), rank)
    return [TensorFacts(*one) for one in shapes], *sections[0]


def _check_wire(wire: str, is_wide: bool, kind: str) -> None:
    """Raise ConfigError if gradients of this dtype, on this kind of device, have no such wire format."""
    if wire != "none" and is_wide:
        raise ConfigError(
            f"Wire formats carry float32, but a parameter is float64 with wire {wire}.",
            "Pass wire='none', or parameters in float32.",
        )
    if wire.startswith(KEPT_ON_HOST) and kind == "cuda":
        raise ConfigError(
            f"Wire format {wire} keeps its residuals in host memory, but a parameter is on cuda.",
            "Pass wire='fp16', 'bf16', 'int8' or 'none'.",
        )


def _differing(thing: str, first: object, other: object, rank: int) -> CommError:
    return CommError(
        f"All ranks must replicate the same parameters, but the {thing} is {first} on rank 0 and {other} on rank {rank}.",
        "Build the same model on every rank.",
    ).on_every_rank()


FLOATS = ("float32", "float64")
"""The dtypes of the parameters that `Replicated` takes."""

Average = Callable[[Any, Any], None]
"""(sum over the ranks, gradient): write the average into the gradient."""


def average_on(device: Device, ranks: int, arena: Arena) -> Average:
    """Return the function that averages on a device: with NumPy on the host, else with our kernels."""
    weight = 1 / ranks
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


def checked(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters as arrays; errors as the constructor of `Replicated`."""
    if not isinstance(parameters, Iterable):
        raise ConfigError(
            f"Replicated needs parameters, but they are a {type(parameters).__name__}.",
            "Pass the arrays themselves, for example list(model.parameters()).",
        )
    arrays = [as_array(array, f"Parameter {n}") for n, array in enumerate(parameters)]
    if not arrays:
        raise ConfigError(
            "Replicated needs parameters, but the list is empty.",
            "A generator can be read only once: pass a list.",
        )
    all_facts = [facts_of(array, "") for array in arrays]
    first = all_facts[0]
    for number, (array, facts) in enumerate(zip(arrays, all_facts, strict=True)):
        if facts.dtype not in FLOATS or (facts.dtype, facts.kind) != (first.dtype, first.kind):
            raise ConfigError(
                f"All parameters must be float32, or all float64, on one kind of device, but parameter {number} is "
                f"{facts} and parameter 0 {first}.",
                "Make one Replicated for each kind of parameter.",
            )
        if not getattr(array.flags, "writeable", True):
            raise ConfigError(
                f"Rank 0's values are written to each parameter, but parameter {number} is read-only.",
                "Pass a writable copy.",
            )
    return arrays


def facts_of(array: Any, name: str) -> TensorFacts:
    return TensorFacts(name, kind_of(array), array.dtype.name, array.shape)


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
        As in the section [replication]; bucket_mb 0: the best size for the hosts.

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
        bucket_mb: float = 0.0,
    ):
        self._parameters: list[Any] = []

        def look() -> list[TensorFacts]:
            self._parameters = checked(parameters)
            return [facts_of(array, f"parameter {n}") for n, array in enumerate(self._parameters)]

        self._sums = sums = GradientSums(transport, look, algorithm, wire, bucket_mb)
        self._facts = [facts_of(array, "") for array in self._parameters]
        self._average = average_on(sums.device, transport.size, sums.arena)
        self._begin()
        for leaf, array in zip(sums.leaves, self._parameters, strict=True):
            copy_rows(leaf, array)
        sums.broadcast()
        for leaf, array in zip(sums.leaves, self._parameters, strict=True):
            copy_rows(array, leaf)

    def _begin(self) -> None:
        self._gradients: dict[int, Any] = {}
        self._faults: list[str] = []

    def ready(self, index: int, gradient: Any) -> None:
        """Pass the gradient of parameter `index`, from 0; `wait` writes the average into it."""
        fault, array = self._checked(index, gradient)
        if fault:
            self._faults.append(fault)
            return
        self._gradients[index] = array
        copy_rows(self._sums.leaves[index], array)
        self._sums.ready(index)

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
        own, facts = self._facts[index], facts_of(array, "")
        if facts != own:
            return f"gradient {index} is {facts}, and its parameter {own}", None
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
        missing = [f"gradient {n} is missing" for n in self._sums.missing()]
        gradients, faults = self._gradients, self._faults + missing
        failed, _ = self._sums.wait(len(faults))
        self._begin()
        if failed:
            raise self._sums.refusal(
                faults,
                "Call ready(index, gradient) once per parameter, with zeros if it has no gradient.",
            )
        self._sums.arena.rewind()
        for index, gradient in gradients.items():
            self._average(self._sums.leaves[index], gradient)
