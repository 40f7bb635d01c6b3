"""A Group: ranks and the algorithm they reduce with. The only communicator a layer sees."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.activations import ActivationBuffer, ActivationPool
from mpitrain.collectives.bind import (
    bind,
    bind_all_gather,
    bind_all_to_all,
    bind_broadcast,
    bind_reduce,
    bind_reduce_scatter,
)
from mpitrain.collectives.compression.bind import bind_lossy
from mpitrain.collectives.compression.matrices import Matrix
from mpitrain.collectives.compression.quantized import bind_coded_all_gather
from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic
from mpitrain.collectives.engine.codecs import Wire
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.engine.traced import bind_traced
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.table import half_of
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.machine.arena import Arena
from mpitrain.transport.base import Transport


class Group:
    """Ranks, and the algorithm they reduce with (as a process group of torch.distributed).

    All methods are collective and work in place on contiguous arrays of any shape; chunk r is the r-th of as
    many even runs of elements as there are ranks. The `bind` methods agree once, and what they return can be
    run any number of times. Methods without `bind` agree at every call, which costs a round of messages.

    Parameters
    ----------
    transport : Transport
        The ranks: see `from_communicator`, `connect` and `run_ranks`.
    algorithm : str
        Of all-reduces; "auto", the default as of `replication.algorithm`, takes for each array what
        `tuning` predicts to be fastest. Where it has no reduce-scatter or all-gather, `auto` chooses for these.
    tuning, arithmetic : optional
        As in `bind`.
    arena : Arena, optional
        Counts the bytes that `exchange` leases.
    progress_thread : str
        As `replication.progress_thread`.

    Attributes
    ----------
    scratch_bytes : int
        Bytes that the collectives bound so far have allocated besides the arrays they work on.

    Raises
    ------
    CommError
        By every method, on every rank, if numbers of elements or dtypes differ.
    ConfigError
        By every method, on every rank, for an algorithm that is unknown or cannot run here.
    """

    def __init__(
        self,
        transport: Transport,
        algorithm: str = "auto",
        tuning: Tuning | None = None,
        arithmetic: Arithmetic | None = None,
        arena: Arena | None = None,
        progress_thread: str = "auto",
    ):
        self.progress_thread = progress_thread
        self.transport, self.algorithm = transport, algorithm
        self.tuning, self.arithmetic = tuning or DEFAULT, arithmetic or HOST
        self.arena = arena or Arena()
        self._exchanges = ActivationPool(self.arena)
        self.scratch_bytes = 0

    @property
    def rank(self) -> int:
        """The number of this process within the group, from 0."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.transport.size

    def bind(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind an all-reduce; op is "add" or "maximum"."""
        return self._noted(
            "all-reduce",
            array,
            lambda: bind(self.transport, array, op, self.algorithm, self.tuning, self.arithmetic),
        )

    def bind_lossy(
        self, array: np.ndarray, wire: Wire, matrices: Sequence[Matrix] = ()
    ) -> Reduction:
        """Bind a sum of a float32 array that travels in a wire format: nearly the sum, with the same bits on all ranks."""
        return self._noted(
            "all-reduce",
            array,
            lambda: bind_lossy(self.transport, array, wire, matrices, self.arithmetic),
        )

    def bind_reduce_scatter(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind a reduce-scatter: chunk r ends as the reduction on rank r; the other chunks are scratch."""
        algorithm = half_of("reduce-scatter", self.algorithm)
        return self._noted(
            "reduce-scatter",
            array,
            lambda: bind_reduce_scatter(
                self.transport, array, op, algorithm, self.tuning, self.arithmetic
            ),
        )

    def bind_all_gather(self, array: np.ndarray) -> Reduction:
        """Bind an all-gather: chunk r of rank r ends in the array of every rank."""
        return self._noted(
            "all-gather",
            array,
            lambda: bind_all_gather(
                self.transport, array, half_of("all-gather", self.algorithm), self.tuning
            ),
        )

    def bind_coded_all_gather(self, array: np.ndarray, wire: Wire) -> Reduction:
        """Bind an all-gather of equally long float32 chunks that travel in a wire format."""
        before = self.scratch_bytes
        reduction = bind_coded_all_gather(
            self.transport, array, self.arithmetic.codecs[wire.name], self.bind_all_gather
        )
        self.scratch_bytes = (
            before + reduction.scratch_bytes
        )  # that of the gather of bytes is in it
        return reduction

    def bind_broadcast(self, array: np.ndarray, root: int = 0) -> Reduction:
        """Bind a broadcast of the root's array."""
        return self._noted("broadcast", array, lambda: bind_broadcast(self.transport, array, root))

    def bind_reduce(self, array: np.ndarray, op: str = "add", root: int = 0) -> Reduction:
        """Bind a reduction into the root's array; the arrays of other ranks are scratch."""
        return self._noted(
            "reduce",
            array,
            lambda: bind_reduce(self.transport, array, op, root, arithmetic=self.arithmetic),
        )

    def bind_all_to_all(self, outgoing: np.ndarray, incoming: np.ndarray) -> Reduction:
        """Bind an all-to-all: chunk q of rank p's `outgoing` becomes chunk p of rank q's `incoming`."""
        return self._noted(
            "all-to-all", outgoing, lambda: bind_all_to_all(self.transport, outgoing, incoming)
        )

    def _noted(self, operation: str, array: Any, bind: Callable[[], Reduction]) -> Reduction:
        reduction = bind_traced(self.transport, operation, array, bind)
        self.scratch_bytes += reduction.scratch_bytes
        return reduction

    def exchange(self, shape: Sequence[int], dtype: Any) -> ActivationBuffer:
        """Lease a buffer for an activation that the group reduces or gathers in place; layers use it.

        Ranks lease the same shapes and dtypes in the same order (else CommError on every rank). A buffer
        that is free again is leased again with its bound collectives: after the first step nothing is
        allocated. On one host it lies in a shared window; the transport frees it when it is closed.
        """
        return self._exchanges.lease(self, shape, dtype)

    @property
    def exchanged_s(self) -> float:
        """Seconds that this rank has waited in collectives of activations so far."""
        return self._exchanges.waited.seconds

    def all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        """Reduce the array over all ranks, now."""
        self.bind(array, op).run()

    def reduce_scatter(self, array: np.ndarray, op: str = "add") -> None:
        """As `bind_reduce_scatter`, now."""
        self.bind_reduce_scatter(array, op).run()

    def all_gather(self, array: np.ndarray) -> None:
        """As `bind_all_gather`, now."""
        self.bind_all_gather(array).run()

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """As `bind_broadcast`, now."""
        self.bind_broadcast(array, root).run()
