"""A Group: ranks and the algorithm they reduce with. The only communicator a layer sees."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.algorithms import half_of
from mpitrain.collectives.arithmetic import HOST, Arithmetic
from mpitrain.collectives.bind import (
    bind,
    bind_all_gather,
    bind_all_to_all,
    bind_broadcast,
    bind_reduce,
    bind_reduce_scatter,
)
from mpitrain.collectives.coded import bind_coded_all_gather
from mpitrain.collectives.cost import Tuning
from mpitrain.collectives.exchange import Exchange, Exchanges
from mpitrain.collectives.execute import Reduction
from mpitrain.collectives.lossy import bind_lossy
from mpitrain.collectives.matrices import Matrix
from mpitrain.collectives.noted import bind_noted
from mpitrain.collectives.tuning import DEFAULT
from mpitrain.collectives.wire import Wire
from mpitrain.machine.arena import Arena
from mpitrain.transport.base import Transport


class Group:
    """The ranks of a transport. All methods are collective and work in place.

    The `bind` methods agree once and can be run any number of times. Those without agree every time they are called,
    which costs a round of messages: they are for start-up, tests and interactive use.
    algorithm  of all-reduces; "auto", the default as in `replication.algorithm`, takes for each array what `tuning` predicts to
               be fastest; what has no reduce-scatter or all-gather of its name leaves these to `auto`
    arena      counts the activations that `exchange` leases; of the memory that the transport allocates, and the host's if None
    progress_thread  as replication.progress_thread, for these
    """

    def __init__(self, transport: Transport, algorithm: str = "auto", tuning: Tuning = DEFAULT,
                 arithmetic: Arithmetic = HOST, arena: Arena | None = None, progress_thread: str = "auto"):
        self.progress_thread = progress_thread
        self.transport, self.algorithm, self.tuning, self.arithmetic = transport, algorithm, tuning, arithmetic
        self.arena = arena or Arena()
        self._exchanges = Exchanges(self.arena)

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
        return self._noted("all-reduce", array, lambda: bind(
            self.transport, array, op, self.algorithm, self.tuning, self.arithmetic))

    def bind_lossy(self, array: np.ndarray, wire: Wire, matrices: Sequence[Matrix] = ()) -> Reduction:
        """Bind a sum of a float32 array that travels in a wire format: near the sum, and the same bits on all ranks."""
        return self._noted("all-reduce", array, lambda: bind_lossy(self.transport, array, wire, matrices, self.arithmetic))

    def bind_reduce_scatter(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind a reduce-scatter: chunk r ends as the reduction on rank r; the rest of the array is scratch."""
        algorithm = half_of("reduce-scatter", self.algorithm)
        return self._noted("reduce-scatter", array, lambda: bind_reduce_scatter(
            self.transport, array, op, algorithm, self.tuning, self.arithmetic))

    def bind_all_gather(self, array: np.ndarray) -> Reduction:
        """Bind an all-gather: chunk r of rank r ends in everyone's array."""
        return self._noted("all-gather", array, lambda: bind_all_gather(
            self.transport, array, half_of("all-gather", self.algorithm), self.tuning))

    def bind_coded_all_gather(self, array: np.ndarray, wire: Wire) -> Reduction:
        """Bind an all-gather of float32 chunks of one length, which travel in a wire format that codes block by block."""
        return bind_coded_all_gather(self.transport, array, self.arithmetic.codecs[wire.name], self.bind_all_gather)

    def bind_broadcast(self, array: np.ndarray, root: int = 0) -> Reduction:
        """Bind a broadcast of root's array."""
        return self._noted("broadcast", array, lambda: bind_broadcast(self.transport, array, root))

    def bind_reduce(self, array: np.ndarray, op: str = "add", root: int = 0) -> Reduction:
        """Bind a reduction to root's array; the others end as scratch."""
        return self._noted("reduce", array, lambda: bind_reduce(self.transport, array, op, root, arithmetic=self.arithmetic))

    def bind_all_to_all(self, outgoing: np.ndarray, incoming: np.ndarray) -> Reduction:
        """Bind an all-to-all: chunk q of rank p's `outgoing` becomes chunk p of rank q's `incoming`."""
        return self._noted("all-to-all", outgoing, lambda: bind_all_to_all(self.transport, outgoing, incoming))

    def _noted(self, operation: str, array: Any, bind: Callable[[], Reduction]) -> Reduction:
        return bind_noted(self.transport, operation, array, bind)

    def exchange(self, shape: Sequence[int], dtype: Any) -> Exchange:
        """Lease an activation that this group reduces or gathers where it lies: in a shared window, where ranks share a host.

        Whoever computes the activation writes into `array`. It is leased again, with what was bound to it, for as many elements
        of its dtype. The ranks lease the same in the same order, and at every lease the same ones have ended on each.
        Collective where all that there are, are leased: after the first step nothing is bound, allocated or agreed. The transport
        gives the memory back when it is closed, or when this group dies.
        raises  CommError on every rank if they ask for different activations
        """
        return self._exchanges.lease(self, shape, dtype)

    @property
    def exchanged_s(self) -> float:
        """Seconds that this rank has stood still in collectives of activations so far."""
        return self._exchanges.waited.seconds

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
