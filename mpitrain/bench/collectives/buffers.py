"""What a row of a benchmark runs: a collective on an array that stays where it is, or on an activation leased for every run."""

from typing import Any, Protocol

import numpy as np

from mpitrain.collectives.activations import ActivationBuffer
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group

LEASED = "leased"
"""Where activations lie, as --buffers calls it."""


class Bound(Protocol):
    """A collective bound to its array.

    algorithm  which one it became
    """

    algorithm: str

    @property
    def array(self) -> Any:
        """The array, flat; a reference to it is good until it is made anew."""

    @property
    def result(self) -> Any:
        """The elements that a run leaves as its result."""

    def renew(self) -> None:
        """Make the array anew for a run, where it does not stay."""

    def run(self) -> None:
        """Run it."""


class Staying:
    """A collective on an array that stays where it is.

    result  the part of the array that holds the result, or another array that does
    """

    def __init__(self, array: Any, reduction: Reduction, result: Any):
        self.array, self.algorithm, self.run, self.result = (
            array,
            reduction.algorithm,
            reduction.run,
            result,
        )

    def renew(self) -> None:
        """Nothing to do."""


class Leased:
    """An all-reduce of an activation, leased anew for every run, which finds what is bound to its buffer.

    As in a layer: the lease takes the place of one from the arena and comes before the activation is computed.
    """

    def __init__(self, group: Group, count: int, dtype: np.dtype):
        """Collective: binds."""
        self._group, self._count, self._dtype = group, count, dtype
        self._exchange: ActivationBuffer | None = group.exchange((count,), dtype)
        self.algorithm = self._exchange.all_reduce().algorithm

    @property
    def array(self) -> Any:
        """The activation, flat."""
        assert self._exchange is not None
        return self._exchange.array

    @property
    def result(self) -> Any:
        """All of it."""
        return self.array

    def renew(self) -> None:
        """End the lease, and take another one."""
        self._exchange = None
        self._exchange = self._group.exchange((self._count,), self._dtype)

    def run(self) -> None:
        assert self._exchange is not None
        self._exchange.all_reduce().run()
