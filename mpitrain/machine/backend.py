"""Where arrays live: what a backend is, and that of host memory; `machine/devices.py` has the others' names.

A backend is the only thing that knows how arrays get there and back, and what must be waited for on the way.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpitrain.machine.arena import Arena
from mpitrain.machine.events import Mark
from mpitrain.machine.kinds import Kind


class Copy(Protocol):
    """A copy under way, neither end of which may be touched before `test` has said True or `wait` has returned; or a place."""

    def test(self) -> bool:
        """True once the copy, or what was started before the place, is complete; never blocks."""

    def wait(self) -> None:
        """Block until then."""


class Backend(Protocol):
    """Moves arrays between host memory and the memory that the ops of `kind` work on."""

    kind: Kind
    """As in device.kind, but never auto."""

    def arena(self) -> Arena:
        """A fresh arena of this backend's memory."""

    def holds(self, array: Any) -> bool:
        """Whether the array lies in this backend's memory."""

    def zeros(self, count: int, dtype: Any) -> Any:
        """A zeroed 1-D array in this backend's memory."""

    def from_host(self, array: np.ndarray, arena: Arena | None = None) -> Any:
        """The array in this backend's memory, contiguous; may be the same one. arena: what other memory is leased from."""

    def put(self, target: Any, array: np.ndarray) -> None:
        """Write an array of host memory, of one shape and dtype, over one of this backend's, in the order of its work."""

    def to_host(self, array: Any) -> np.ndarray:
        """The array in host memory, once the work that writes it is done; may be the same one."""

    def synchronize(self) -> None:
        """Wait for all the work that was started here."""

    def mark(self) -> Mark | None:
        """A mark behind the work that was started here; None where the host computes itself."""


@runtime_checkable
class DeviceBackend(Backend, Protocol):
    """A backend whose memory is not the host's: what messages need to get there, and other processes of the host."""

    def staging(self, nbytes: int) -> np.ndarray:
        """Page-locked host bytes, which a device copies to and from while the host does something else."""

    def so_far(self) -> Copy:
        """The place behind all the work that was started here so far."""

    def follow(self, place: Copy) -> None:
        """Let the work that is started here from now on wait for what is before the place; nobody waits on the host."""

    def aside(self) -> AbstractContextManager[Any]:
        """Within it `here` is a place beside the computation: the stream of messages, of the copies and sums that make them."""

    def start_copy(self, target: Any, source: Any, after: Copy) -> Copy:
        """Begin to copy one contiguous array onto another, one of them staging, beside the work under way.

        after   a place behind the work that writes the source, or still reads the target
        """

    def gpus(self) -> tuple[str, list[str]]:
        """PCI addresses of this process's GPU and of all that it sees."""

    def export(self, array: Any) -> tuple[str, int]:
        """What another process needs to `open` the array, which must live as long: a handle of its allocation, its place there.

        raises  CommError if the driver refuses
        """

    def open(self, handle: str, offset: int, like: Any) -> Any:
        """Another process's array, alike in shape and dtype to one of this process's; unmapped when its last view dies.

        raises  CommError if the driver refuses
        """


class HostBackend:
    """NumPy arrays in host memory: nothing to move, nothing to wait for."""

    kind: Kind = "cpu"

    def arena(self) -> Arena:
        return Arena()

    def holds(self, array: Any) -> bool:
        return not on_device(array)

    def zeros(self, count: int, dtype: Any) -> np.ndarray:
        return np.zeros(count, dtype)

    def from_host(self, array: np.ndarray, arena: Arena | None = None) -> np.ndarray:
        return np.ascontiguousarray(array)

    def put(self, target: np.ndarray, array: np.ndarray) -> None:
        target[...] = array

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def synchronize(self) -> None:
        pass

    def mark(self) -> Mark | None:
        return None


def on_device(array: Any) -> bool:
    """Whether the array lies in GPU memory."""
    return hasattr(type(array), "__cuda_array_interface__")


def overlap(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays have bytes in common, wherever they lie."""
    start, begin = address(one), address(other)
    return start < begin + other.nbytes and begin < start + one.nbytes


def address(array: Any) -> int:
    """Where an array begins, in the memory that it lies in."""
    return array.data.ptr if on_device(array) else array.ctypes.data
