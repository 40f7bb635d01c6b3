"""The collective of a benchmark row, bound to a fixed array or to a leased activation buffer."""

from typing import Any, Protocol

import numpy as np

from mpitrain.collectives.activations import ActivationBuffer
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group

LEASED = "leased"
"""The value of --buffers for activation buffers."""


class Bound(Protocol):
    """A protocol for a collective that is bound to its array.

    algorithm  name of the bound algorithm
    """

    algorithm: str

    @property
    def array(self) -> Any:
        """The flat array. A reference to it is valid until the next `renew`."""

    @property
    def result(self) -> Any:
        """The elements of the result of a run."""

    def renew(self) -> None:
        """Get a new array for the next run, unless the array is fixed."""

    def run(self) -> None:
        """Run the collective."""


class Staying:
    """A collective on a fixed array, as a persistent collective of MPI-4.

    result  the region of the array with the result, or another array with it
    """

    def __init__(self, array: Any, reduction: Reduction, result: Any):
        self.array, self.result = array, result
        self.algorithm, self.run = reduction.algorithm, reduction.run

    def renew(self) -> None:
        """Do nothing: the array is fixed."""


class LeasedAllReduce:
    """An all-reduce of an activation buffer that is leased anew for every run, as in a layer.

    The buffer still has the reduction that was bound to it in an earlier lease. A layer computes
    its activation in such a buffer, in place of one from the arena.
    """

    def __init__(self, group: Group, count: int, dtype: np.dtype):
        """Lease a buffer and bind its all-reduce. Collective."""
        self._group, self._count, self._dtype = group, count, dtype
        self._exchange: ActivationBuffer | None = group.exchange((count,), dtype)
        self.algorithm = self._exchange.all_reduce().algorithm

    @property
    def array(self) -> Any:
        assert self._exchange is not None
        return self._exchange.array

    @property
    def result(self) -> Any:
        return self.array

    def renew(self) -> None:
        """End the lease and take a new one."""
        self._exchange = None
        self._exchange = self._group.exchange((self._count,), self._dtype)

    def run(self) -> None:
        assert self._exchange is not None
        self._exchange.all_reduce().run()
