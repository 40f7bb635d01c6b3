"""A transport of one rank whose peers do not exist: no message is sent, and none is awaited."""

from collections.abc import Callable
from typing import Any

from mpitrain.trace.recorder import SILENT
from mpitrain.transport.base import Traffic
from mpitrain.transport.windows import Tenants


class Ended:
    """A message that is complete as soon as it starts."""

    source = -1

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class Unsent:
    """An endpoint without peers: the calls of a `Transport` that layers and stages make.

    A receive leaves its array as it is. A gather returns this rank's value for every rank.
    """

    admits_threads = False
    native_dtypes: frozenset[str] = frozenset()

    def __init__(
        self, rank: int, size: int, allocate: Callable[[int, Any], Any], recorder: Any = SILENT
    ):
        """Make an endpoint.

        allocate  (elements, dtype) -> the array that `allocate` returns
        """
        self.rank, self.size, self.recorder = rank, size, recorder
        self.hosts, self.members = ("",) * size, tuple(range(size))
        self.traffic, self.tenants, self._allocate = Traffic(), Tenants(), allocate

    def claim_tag(self) -> int:
        return 0

    def start_send(self, array: Any, to: int, tag: int = 0) -> Ended:
        return Ended()

    def start_recv(self, array: Any, source: int, tag: int = 0) -> Ended:
        return Ended()

    def gather_text(self, value: Any) -> list[Any]:
        return [value] * self.size

    def allocate(self, count: int, dtype: Any) -> Any:
        return self._allocate(count, dtype)
