"""A Group: ranks and the algorithm they reduce with. The only communicator a layer sees."""

from collections.abc import Sequence

import numpy as np

from mpitrain.collectives.arithmetic import HOST, Arithmetic
from mpitrain.collectives.bind import (
    bind,
    bind_all_gather,
    bind_all_to_all,
    bind_broadcast,
    bind_reduce,
    bind_reduce_scatter,
)
from mpitrain.collectives.cost import Tuning
from mpitrain.collectives.execute import Reduction
from mpitrain.collectives.lossy import bind_lossy
from mpitrain.collectives.matrices import Matrix
from mpitrain.collectives.tuning import DEFAULT
from mpitrain.collectives.wire import Wire
from mpitrain.transport.base import Transport


class Group:
    """The ranks of a transport. All methods are collective and work in place.

    The `bind` methods agree once and can be run any number of times. Those without agree every time they are called,
    which costs a round of messages: they are for start-up, tests and interactive use.
    """

    def __init__(self, transport: Transport, algorithm: str = "ring", tuning: Tuning = DEFAULT,
                 arithmetic: Arithmetic = HOST):
        self.transport, self.algorithm, self.tuning, self.arithmetic = transport, algorithm, tuning, arithmetic

    @property
    def rank(self) -> int:
        """This process, counted within the group."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.transport.size

    def bind(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind an all-reduce of the array."""
        return bind(self.transport, array, op, self.algorithm, self.tuning, self.arithmetic)

    def bind_lossy(self, array: np.ndarray, wire: Wire, matrices: Sequence[Matrix] = ()) -> Reduction:
        """Bind a sum of a float32 array that travels in a wire format: near the sum, and the same bits on all ranks."""
        return bind_lossy(self.transport, array, wire, matrices, self.arithmetic)

    def bind_reduce_scatter(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind a reduce-scatter: chunk r ends as the reduction on rank r; the rest of the array is scratch."""
        return bind_reduce_scatter(self.transport, array, op, arithmetic=self.arithmetic)

    def bind_all_gather(self, array: np.ndarray) -> Reduction:
        """Bind an all-gather: chunk r of rank r ends in everyone's array."""
        return bind_all_gather(self.transport, array)

    def bind_broadcast(self, array: np.ndarray, root: int = 0) -> Reduction:
        """Bind a broadcast of root's array."""
        return bind_broadcast(self.transport, array, root)

    def bind_reduce(self, array: np.ndarray, op: str = "add", root: int = 0) -> Reduction:
        """Bind a reduction to root's array; the others end as scratch."""
        return bind_reduce(self.transport, array, op, root, arithmetic=self.arithmetic)

    def bind_all_to_all(self, outgoing: np.ndarray, incoming: np.ndarray) -> Reduction:
        """Bind an all-to-all: chunk q of rank p's `outgoing` becomes chunk p of rank q's `incoming`."""
        return bind_all_to_all(self.transport, outgoing, incoming)

    def all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        """All-reduce the array now."""
        self.bind(array, op).run()

    def reduce_scatter(self, array: np.ndarray, op: str = "add") -> None:
        """Reduce-scatter the array now."""
        self.bind_reduce_scatter(array, op).run()

    def all_gather(self, array: np.ndarray) -> None:
        """All-gather the array now."""
        self.bind_all_gather(array).run()

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Broadcast root's array now."""
        self.bind_broadcast(array, root).run()
