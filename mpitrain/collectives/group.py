"""Group: ranks and the algorithms of their collectives; the only communicator that layers see."""

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
    """Communicator of our own collectives, as a process group of torch.distributed.

    Every method is collective. All but `bind_all_to_all` work in place, on contiguous arrays of
    any shape. An array on n ranks has n chunks of nearly equal length; chunk r belongs to rank r.

    Parameters
    ----------
    transport : Transport
        The ranks: see `from_communicator`, `connect` and `run_ranks`.
    algorithm : str
        Algorithm of all-reduces, as `replication.algorithm`. "auto" takes, for each array, the
        algorithm that `tuning` predicts to be the fastest. Reduce-scatters and all-gathers use the
        algorithm of the same name, or "auto" if there is none.
    tuning, arithmetic : optional
        As in `bind`.
    arena : Arena, optional
        Counts the bytes that `exchange` leases.

    Attributes
    ----------
    scratch_bytes : int
        Bytes that all collectives bound so far have allocated, without the arrays they work on.

    Raises
    ------
    CommError
        By every method, on every rank, if numbers of elements or dtypes differ.
    ConfigError
        By every method, on every rank, for an algorithm that is unknown or cannot run here.

    Notes
    -----
    A `bind` method compares the arguments of all ranks once. Its Reduction runs any number of
    times, on the present contents of its array. The other methods bind at every call, which costs
    a round of messages.
    """

    def __init__(
        self,
        transport: Transport,
        algorithm: str = "auto",
        tuning: Tuning | None = None,
        arithmetic: Arithmetic | None = None,
        arena: Arena | None = None,
    ):
        self.transport, self.algorithm = transport, algorithm
        self.tuning, self.arithmetic = tuning or DEFAULT, arithmetic or HOST
        self.arena = arena or Arena()
        self._exchanges = ActivationPool(self.arena)
        self.scratch_bytes = 0

    @property
    def rank(self) -> int:
        """Number of this process within the group, from 0."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.transport.size

    def bind(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind an all-reduce of `array`; a persistent collective, as MPI_Allreduce_init returns.

        op is "add" or "maximum", in all methods.
        """
        return self._noted(
            "all-reduce",
            array,
            lambda: bind(self.transport, array, op, self.algorithm, self.tuning, self.arithmetic),
        )

    def bind_lossy(
        self, array: np.ndarray, wire: Wire, matrices: Sequence[Matrix] = ()
    ) -> Reduction:
        """Bind a sum of a float32 array in a wire format: nearly the sum, the same bits on all ranks.

        matrices are matrices within `array`, for powersgd; empty: the array as one matrix.
        """
        return self._noted(
            "all-reduce",
            array,
            lambda: bind_lossy(self.transport, array, wire, matrices, self.arithmetic),
        )

    def bind_reduce_scatter(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind a reduce-scatter: chunk r ends as the reduction on rank r.

        The other chunks of the array end as scratch.
        """
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
                self.transport,
                array,
                half_of("all-gather", self.algorithm),
                self.tuning,
                self.arithmetic,
            ),
        )

    def bind_coded_all_gather(self, array: np.ndarray, wire: Wire) -> Reduction:
        """Bind an all-gather of equal float32 chunks, with messages in fp16, bf16 or int8."""
        before = self.scratch_bytes
        reduction = bind_coded_all_gather(
            self.transport, array, self.arithmetic.codecs[wire.name], self.bind_all_gather
        )
        # The reduction's own count includes the scratch of the gather of bytes.
        self.scratch_bytes = before + reduction.scratch_bytes
        return reduction

    def bind_broadcast(self, array: np.ndarray, root: int = 0) -> Reduction:
        """Bind a broadcast of the root's array."""
        return self._noted("broadcast", array, lambda: bind_broadcast(self.transport, array, root))

    def bind_reduce(self, array: np.ndarray, op: str = "add", root: int = 0) -> Reduction:
        """Bind a reduction into the root's array; the arrays of all other ranks are scratch."""
        return self._noted(
            "reduce",
            array,
            lambda: bind_reduce(self.transport, array, op, root, arithmetic=self.arithmetic),
        )

    def bind_all_to_all(self, outgoing: np.ndarray, incoming: np.ndarray) -> Reduction:
        """Bind an all-to-all: chunk q of `outgoing` on rank p becomes chunk p of `incoming` on q.

        The arrays have one dtype and size, a multiple of the number of ranks, and do not overlap.
        """
        return self._noted(
            "all-to-all", outgoing, lambda: bind_all_to_all(self.transport, outgoing, incoming)
        )

    def _noted(self, operation: str, array: Any, bind: Callable[[], Reduction]) -> Reduction:
        reduction = bind_traced(self.transport, operation, array, bind)
        self.scratch_bytes += reduction.scratch_bytes
        return reduction

    def exchange(self, shape: Sequence[int], dtype: Any) -> ActivationBuffer:
        """Lease an uninitialised buffer for an activation, which layers reduce or gather in place.

        The lease ends when its array and all views of it are garbage. The buffer is then leased
        again, with its bound collectives. On one host it is in a shared window.

        Raises
        ------
        CommError
            On every rank, if ranks lease buffers that differ in size or dtype.
        """
        return self._exchanges.lease(self, shape, dtype)

    @property
    def exchanged_s(self) -> float:
        """Seconds that this rank has waited in collectives of activations so far."""
        return self._exchanges.waited.seconds

    def all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        """Reduce `array` over all ranks, in place: `bind`, then one run."""
        self.bind(array, op).run()

    def reduce_scatter(self, array: np.ndarray, op: str = "add") -> None:
        """Reduce-scatter `array`, in place: `bind_reduce_scatter`, then one run."""
        self.bind_reduce_scatter(array, op).run()

    def all_gather(self, array: np.ndarray) -> None:
        """All-gather the chunks of `array`, in place: `bind_all_gather`, then one run."""
        self.bind_all_gather(array).run()

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Broadcast the root's array, in place: `bind_broadcast`, then one run."""
        self.bind_broadcast(array, root).run()
