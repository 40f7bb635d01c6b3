"""Group: ranks and the algorithms of their collectives; the only communicator that layers see.

Binding makes a Reduction from an operation, an algorithm and a buffer. It is collective: all ranks
bind in the same order. Binding compares the arguments of all ranks (`agree` lists the errors), and
gives the Reduction a tag of its own. The Reduction then runs any number of times. A run compares,
checks and allocates nothing.

A collective is bound to an address, but an activation from the arena has a new address in every
call. So a group has its own buffers for activations (`exchange`). Each one keeps its bound
collectives, and is leased again for activations of the same number of elements and dtype.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from mpitrain.collectives.direct import SMALL, give_up_shared, is_offer_of_all, offer
from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic, Wire
from mpitrain.collectives.engine.executor import (
    Execution,
    ExposedTime,
    Reduction,
    agree,
    mover,
    unfit,
)
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.routes import ROUTES, TAGS, Routes
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import Tuning, choose
from mpitrain.collectives.selection.table import PLANS, TABLES, choices, title
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.errors import CommError, multiples_near
from mpitrain.machine.backend import Arena, on_device, overlap, padded
from mpitrain.transport.base import Transport

if TYPE_CHECKING:
    from mpitrain.collectives.compression import Matrix

SLAB = 32 << 20
"""Largest number of bytes that are allocated in advance for later buffers.

MPI has a limited number of windows, and a host has little memory for them.
"""


class Group:
    """Communicator of our own collectives, as a process group of torch.distributed.

    Every method is collective. Collectives of one array work in
    place. Arrays are contiguous, of any shape. An array on n ranks has n chunks of nearly equal
    length; chunk r belongs to rank r.

    Parameters
    ----------
    transport : Transport
        The ranks: see `from_communicator`, `connect` and `run_ranks`.
    algorithm : str
        Algorithm of all-reduces, as `replication.algorithm`. "auto" takes, for each array, the
        algorithm that `tuning` predicts to be the fastest. Reduce-scatters and all-gathers use the
        algorithm of the same name, or "auto" if there is none.
    tuning, arithmetic : optional
        As in `mpitrain.bind`.
    arena : Arena, optional
        Counts the bytes that `exchange` leases.
    compares : bool
        Whether bindings compare the arguments of all ranks. False: the caller knows that they are
        equal, and errors are raised on this rank alone.

    Attributes
    ----------
    rank, size : int
        Number of this process within the group, from 0; number of ranks.
    exposed : ExposedTime
        The time that this rank has been blocked in collectives of leases (`exchange`) and of
        rows (`routes`).
    scratch_bytes : int
        Bytes that all bound collectives have allocated, beside their arrays.

    Raises
    ------
    CommError
        By every method, on every rank, if numbers of elements or dtypes differ.
    ConfigError
        By every method, on every rank, for an algorithm that is unknown or cannot run here.

    Notes
    -----
    A `bind` method compares the arguments of all ranks once, if `compares`. Its Reduction runs any number of
    times. The other methods bind at every call, which costs a round of messages.
    """

    def __init__(
        self,
        transport: Transport,
        algorithm: str = "auto",
        tuning: Tuning | None = None,
        arithmetic: Arithmetic | None = None,
        arena: Arena | None = None,
        compares: bool = True,
    ):
        self.transport, self.algorithm, self.compares = transport, algorithm, compares
        self.rank, self.size = transport.rank, transport.size
        self.tuning, self.arithmetic = tuning or DEFAULT, arithmetic or HOST
        self.arena = arena or Arena()
        self._counts: dict[int, tuple[np.ndarray, Reduction]] = {}
        self._route_tags: deque[int] = deque()
        self.scratch_bytes, self.exposed = 0, ExposedTime()

    @cached_property
    def _exchanges(self) -> ActivationPool:
        return ActivationPool(self.arena)

    def bind(self, array: np.ndarray, op: str = "add", is_alike: bool = True) -> Reduction:
        """Bind an all-reduce of `array`, as MPI_Allreduce_init.

        In all methods, op is the name of a function of NumPy: "add", "multiply", "maximum",
        "minimum", "bitwise_and", "bitwise_or" or "bitwise_xor". If bindings compare nothing, `is_alike` says
        whether all ranks have the array at the same place of an array from `allocate`, or all elsewhere.
        """
        choice = op, self.algorithm, self.tuning, self.arithmetic, self.compares, is_alike
        return self._noted(
            "all-reduce", array, lambda: bind_algorithm(self.transport, "allreduce", array, *choice)
        )

    def bind_lossy(
        self, array: np.ndarray, wire: Wire, matrices: Sequence[Matrix] = ()
    ) -> Reduction:
        """Bind a sum of a float32 array in a wire format: nearly the sum, the same bits on all ranks.

        matrices: the parts of `array` that powersgd compresses as matrices. With none, powersgd
        compresses the whole array as one matrix.
        """
        from mpitrain.collectives.compression import bind_lossy

        return self._noted(
            "all-reduce",
            array,
            lambda: bind_lossy(
                self.transport, array, wire, matrices, self.arithmetic, self.compares
            ),
        )

    def bind_reduce_scatter(self, array: np.ndarray, op: str = "add") -> Reduction:
        """Bind a reduce-scatter: a run leaves the reduction of chunk r in the array of rank r.

        The other chunks of that array are then scratch. `chunk_bounds` returns the bounds of all
        chunks.
        """
        return self._half("reduce-scatter", array, op)

    def bind_all_gather(self, array: np.ndarray) -> Reduction:
        """Bind an all-gather: a run copies chunk r of rank r to the array of every rank, for all r."""
        return self._half("all-gather", array, "add")

    def bind_coded_all_gather(self, array: np.ndarray, wire: Wire) -> Reduction:
        """Bind an all-gather of equal float32 chunks, with messages in fp16, bf16 or int8."""
        from mpitrain.collectives.compression import bind_coded_all_gather

        before = self.scratch_bytes
        reduction = bind_coded_all_gather(
            self.transport, array, self.arithmetic.codecs[wire.name], self.bind_all_gather
        )
        # The reduction's own count includes the scratch of the gather of bytes.
        self.scratch_bytes = before + reduction.scratch_bytes
        return reduction

    def bind_broadcast(self, array: np.ndarray, root: int = 0) -> Reduction:
        """Bind a broadcast of the root's array."""
        return self._noted(
            "broadcast",
            array,
            lambda: bind_plan(
                self.transport, "broadcast", "binomial", array, compares=self.compares, root=root
            ),
        )

    def bind_reduce(self, array: np.ndarray, op: str = "add", root: int = 0) -> Reduction:
        """Bind a reduction into the root's array; the arrays of all other ranks are scratch."""
        return self._noted(
            "reduce",
            array,
            lambda: bind_plan(
                self.transport,
                "reduce",
                "binomial",
                array,
                self.arithmetic,
                self.compares,
                op=op,
                root=root,
            ),
        )

    def bind_all_to_all(self, outgoing: np.ndarray, incoming: np.ndarray) -> Reduction:
        """Bind an all-to-all: chunk q of `outgoing` on rank p becomes chunk p of `incoming` on q.

        Both have one dtype and size, a multiple of the ranks, and do not overlap.
        """
        return self._noted(
            "all-to-all",
            outgoing,
            lambda: bind_all_to_all(self.transport, outgoing, incoming, compares=self.compares),
        )

    def routes(self, counts: np.ndarray) -> Routes:
        """Tell all ranks the rows that this rank sends to each: counts (n, k), of k parts."""
        n, k = counts.shape
        if k not in self._counts:
            everyone = np.empty((n, n, k), np.int64)
            self._counts[k] = everyone, self.bind_all_gather(everyone)
            self._counts[k][1].exposed = self.exposed
        everyone, gather = self._counts[k]
        everyone[self.rank] = counts
        gather.run()
        if not self._route_tags:
            self._route_tags.extend(self.transport.claim_tag() for _ in range(TAGS))
        return Routes(self, everyone.copy())

    def _next_route_tag(self) -> int:
        self._route_tags.rotate(-1)
        return self._route_tags[-1]

    def bind_shift(
        self, outgoing: np.ndarray, incoming: np.ndarray, distance: int = 1
    ) -> Reduction:
        """Bind a shift from each rank r to r + distance, as above."""
        arrays = outgoing, incoming
        return self._noted(
            "shift",
            outgoing,
            lambda: _bind_apart(
                "shift", self.transport, *arrays, "ring", 1, self.compares, distance=distance
            ),
        )

    def _half(self, operation: str, array: np.ndarray, op: str) -> Reduction:
        algorithm = self.algorithm if self.algorithm in TABLES[operation] else "auto"
        choice = op, algorithm, self.tuning, self.arithmetic, self.compares
        return self._noted(
            operation, array, lambda: bind_algorithm(self.transport, operation, array, *choice)
        )

    def _noted(self, operation: str, array: Any, bind: Callable[[], Reduction]) -> Reduction:
        """Call `bind` and count its scratch; a trace records the runs under the recorder's `naming`."""
        recorder = self.transport.recorder
        what = f"{operation} of {recorder.naming}" if recorder.naming else operation
        with recorder.called(what):
            reduction = bind()
        if recorder.is_on:
            name = recorder.name(what, self.transport.members)
            reduction.noted_as(recorder, name, array.nbytes)
        self.scratch_bytes += reduction.scratch_bytes
        return reduction

    @contextmanager
    def beside(self, *reductions: Reduction) -> Iterator[None]:
        """Run reductions of this group while the `with` block computes, and wait at its end.

        Between hosts, a thread progresses the messages meanwhile.
        """
        moving = mover(self.transport, reductions)
        for reduction in reductions:
            moving.start(reduction)
        yield
        moving.leave()
        for reduction in reductions:
            reduction.wait()

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

    def all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        """Reduce `array` over all ranks: `bind`, then one run."""
        self.bind(array, op).run()

    def reduce_scatter(self, array: np.ndarray, op: str = "add") -> None:
        """Reduce-scatter `array`: `bind_reduce_scatter`, then one run."""
        self.bind_reduce_scatter(array, op).run()

    def all_gather(self, array: np.ndarray) -> None:
        """All-gather the chunks of `array`: `bind_all_gather`, then one run."""
        self.bind_all_gather(array).run()

    def all_to_all(self, rows: np.ndarray, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Send counts[r] rows to each rank r, as MPI_Alltoallv; rows: first those for rank 0.

        Returns the received rows, first those of rank 0, and the number that each rank sent.
        """
        mine, fits = [int(count) for count in counts], unfit(rows) is None and rows.ndim > 0
        is_right = fits and len(mine) == self.size and min(mine) >= 0 and sum(mine) == len(rows)
        facts = [None if is_right else f"counts {mine} for an array of shape {np.shape(rows)}"]
        width = list(rows.shape[1:]) if fits else None
        array = rows[:0] if fits else rows
        agreed = agree(
            self.transport,
            "all-to-all",
            array,
            ROUTES,
            "pairwise",
            facts,
            self.compares,
            width=width,
        )
        for rank, (wrong,) in enumerate(agreed.owns):
            if wrong:
                raise CommError(
                    f"rank {self.rank}: all-to-all needs a count for each of {self.size} ranks, none below 0, and as "
                    f"many rows as their sum, but rank {rank} passed {wrong}.",
                    "Pass the rows of rank 0 first, then those of rank 1 and so on, without gaps.",
                ).on_every_rank()
        routes = self.routes(np.array(mine, np.int64)[:, None])
        received = np.empty_like(rows, shape=(routes.received, *rows.shape[1:]))
        routes.bind(rows, received).run()
        return received, routes.counts[:, self.rank, 0].copy()

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Broadcast the root's array: `bind_broadcast`, then one run."""
        self.bind_broadcast(array, root).run()


def bind(
    transport: Transport,
    array: np.ndarray,
    op: str = "add",
    algorithm: str = "ring",
    tuning: Tuning | None = None,
    arithmetic: Arithmetic | None = None,
) -> Reduction:
    """Bind an all-reduce of `array`, in place, over all ranks (as MPI_Allreduce_init); collective.

    Parameters
    ----------
    transport : Transport
        The ranks.
    array : ndarray
        Contiguous, any shape. The number of elements and the dtype are the same on every rank.
    op : str
        Reduction operator, as in `Group.bind`.
    algorithm : str
        As `replication.algorithm`; "auto" takes the one that `tuning` predicts to be the fastest.
    tuning : Tuning, optional
        Constants of the cost model, in seconds and bytes; None: the built-in constants.
    arithmetic : Arithmetic, optional
        Adds received chunks; None: NumPy.

    Returns
    -------
    Reduction
        Runs any number of times, with `run()`, or with `start()` and `wait()`. Its attribute
        `algorithm` names the algorithm in use.

    Raises
    ------
    CommError
        On every rank, if numbers of elements or dtypes differ.
    ConfigError
        On every rank, for an unknown algorithm, or one that cannot run here.
    """
    return bind_algorithm(
        transport, "allreduce", array, op, algorithm, tuning or DEFAULT, arithmetic or HOST
    )


def bind_algorithm(
    transport: Transport,
    operation: str,
    array: np.ndarray,
    op: str,
    algorithm: str,
    tuning: Tuning,
    arithmetic: Arithmetic,
    compares: bool = True,
    is_alike: bool = True,
    is_trial: bool = False,
) -> Reduction:
    """Bind an operation of TABLES by the algorithm of this name, or by the choice of "auto".

    operation  "allreduce", "reduce-scatter" or "all-gather"
    compares   as of `agree`
    is_alike   as of `Group.bind`
    is_trial   whether this is the second binding of an added algorithm, to whole numbers
    """
    asked, table, own, owns = algorithm, TABLES[operation], None, list[Any]()

    def best(memory: str) -> str:
        return chosen(tuning, topology, array.size, array.itemsize, memory, operation)

    if unfit(array) is None:
        topology = topology_of(transport, array)
        if asked == "auto":
            algorithm = best("window")
        # Messages that suit any memory need no facts of other ranks. Locations differ: a host with one
        # rank, or without room, has no window, and a tied tensor has another offset on each stage.
        is_settled = algorithm in table and table[algorithm].plans is not None
        if is_settled and asked == "auto":
            is_settled = algorithm == best("plain")
        if not is_settled and not topology.is_on_device:
            own = offer(transport, array)
            if not compares and is_alike and is_offer_of_all(transport, array):
                own, owns = None, [own] * transport.size
    settings = {"op": op}
    if asked == "auto" and tuning is not DEFAULT:
        settings["tuning"] = f"{crc32(repr(tuning).encode()):08x}"
    what, known = title(operation), choices(operation)
    agreed = agree(transport, what, array, known, asked, own, compares, **settings)
    if owns:
        agreed = agreed._replace(owns=owns)
    has_offers = asked == "auto" and any(agreed.owns)
    if has_offers and not all(location for location, _ in agreed.owns):
        algorithm = best("plain")
    if refusal := table[algorithm].refusal(topology):
        raise refusal.on_every_rank()
    if table.is_added(algorithm):
        from mpitrain.collectives.selection.own_algorithm import bind_added

        rest = op, asked, tuning, arithmetic, compares, is_alike, True
        return bind_added(
            transport,
            operation,
            algorithm,
            array,
            op,
            agreed,
            arithmetic,
            None
            if is_trial
            else lambda numbers: bind_algorithm(transport, operation, numbers, *rest),
        )
    reduction = table[algorithm].bind(transport, array, op, agreed, arithmetic)
    if reduction is None:
        give_up_shared(transport, array, asked)
        algorithm = best("plain") if asked == "auto" and on_device(array) else "ring"
        reduction = table[algorithm].bind(transport, array, op, agreed, arithmetic)
    assert reduction is not None  # a ring runs on any machine
    reduction.algorithm = algorithm
    return reduction


def chosen(
    tuning: Tuning, topology: Topology, count: int, itemsize: int, memory: str, operation: str
) -> str:
    """Return the algorithm that "auto" takes for an array of `count` elements in this memory class.

    One rank sends nothing: a ring is an empty loop. Ranks of one host use their shared memory, if
    the array is in it or is small enough for a copy. The default constants say so for all sizes,
    and no tuning covers shared GPU memory. All other choices are those of the cost model.
    """
    ranks = len(topology.hosts)
    if ranks == 1:
        return "ring"
    if len(set(topology.hosts)) == 1 and (tuning is DEFAULT or topology.is_on_device):
        is_small = not topology.is_on_device and count * itemsize * ranks <= SMALL
        if memory == "window" or is_small:
            return "shared"
    if topology.is_on_device:
        memory = "plain"
    return choose(tuning, topology, count, itemsize, memory, operation)


def topology_of(transport: Transport, array: np.ndarray) -> Topology:
    """Return the Topology of these ranks and this array, on which the algorithms depend."""
    dtype = array.dtype.name
    return Topology(transport.hosts, dtype, dtype in transport.native_dtypes, on_device(array))


def memory_of(transport: Transport, array: np.ndarray) -> str:
    """Return the memory class of an array in the cost model; collective.

    It is "window" if the array is in a shared window on every rank, else "plain".
    """
    location = transport.windows.locate(array, transport.members[transport.rank])
    return "window" if all(transport.gather_text(location is not None)) else "plain"


def bind_plan(
    transport: Transport,
    operation: str,
    algorithm: str,
    array: np.ndarray,
    arithmetic: Arithmetic = HOST,
    compares: bool = True,
    **settings: Any,
) -> Reduction:
    """Bind an operation of PLANS: a broadcast, a reduce or a ping-pong ("sendrecv").

    settings  op of a reduce; root of a reduce or a broadcast
    raises    as `agree`; CommError on every rank if there is no rank `root`
    """
    known = (*PLANS[operation],)
    tag, _ = agree(transport, operation, array, known, algorithm, compares=compares, **settings)
    root = {"root": settings["root"]} if "root" in settings else {}
    if root and not (isinstance(root["root"], int) and 0 <= root["root"] < transport.size):
        raise CommError(
            f"rank {transport.rank}: root {root['root']} is not among ranks 0 to {transport.size - 1}."
        ).on_every_rank()
    plan = PLANS[operation][algorithm](transport.rank, transport.size, array.size, **root)
    op = settings.get("op", "add")
    return Execution(transport, array, op, plan, tag, combining=arithmetic.combining)


def bind_all_to_all(
    transport: Transport,
    outgoing: np.ndarray,
    incoming: np.ndarray,
    algorithm: str = "pairwise",
    compares: bool = True,
) -> Reduction:
    """Bind an all-to-all: chunk q of rank p's `outgoing` becomes chunk p of rank q's `incoming`.

    raises   CommError on every rank also if the two arrays overlap, differ in size or dtype, or do
             not divide into one chunk per rank
    """
    arrays = outgoing, incoming
    return _bind_apart("all-to-all", transport, *arrays, algorithm, transport.size, compares)


def _bind_apart(
    operation: str,
    transport: Transport,
    outgoing: np.ndarray,
    incoming: np.ndarray,
    algorithm: str,
    chunks: int = 1,
    compares: bool = True,
    **more: int,
) -> Reduction:
    """Bind an operation of PLANS that works out of place, on two arrays of `chunks` equal chunks.

    more  arguments of the plan, the same on all ranks
    """
    known = (*PLANS[operation],)
    tag, _ = agree(transport, operation, outgoing, known, algorithm, compares=compares, **more)
    agree(transport, operation, incoming, known, algorithm, compares=compares)
    is_overlap = overlap(outgoing, incoming)
    if any(transport.gather_text(is_overlap) if compares else [is_overlap]):
        error = CommError(
            f"rank {transport.rank}: {operation} needs two arrays that overlap on no rank.",
            "Receive into an array of its own.",
        )
        raise error.on_every_rank() if compares else error
    if outgoing.size % chunks or (outgoing.size, outgoing.dtype) != (incoming.size, incoming.dtype):
        raise CommError(
            f"rank {transport.rank}: {operation} needs two arrays alike that divide into {chunks} chunks, but they "
            f"have {outgoing.size} x {outgoing.dtype} and {incoming.size} x {incoming.dtype}.",
            f"Pad both to {-(-max(outgoing.size, incoming.size) // chunks) * chunks} elements.",
        ).on_every_rank()
    plan = PLANS[operation][algorithm](transport.rank, transport.size, outgoing.size, **more)
    return Execution(transport, incoming, "add", plan, tag, outgoing)


class BoundBuffer(NamedTuple):
    """Memory of a group for activations, with the collectives that are bound to it so far.

    number    in the order in which the group made its buffers: the same on all ranks
    raw       bytes, padded to a multiple of 64
    elements  array that collectives are bound to: (count,)
    bound     {(operation, op): reduction}; of an all-to-all or a shift, op has the number of the other buffer
    """

    number: int
    raw: Any
    elements: Any
    bound: dict[tuple[str, str], Reduction]


class ActivationBuffer:
    """Lease of an activation's buffer from a Group, with collectives; all but the all-to-all and the
    shift work in place.

    Methods `bound_...` return a reduction of the buffer, and do not run it. The first call of each
    method for a buffer binds the reduction, and so is collective.

    The lease ends when no reference to `array`, to a view of it or to this object is left. If a
    reduction is still in flight then, the next lease of the buffer waits for it.

    array   uninitialised, contiguous, of the shape and dtype of the lease
    """

    def __init__(self, group: Any, buffer: BoundBuffer, array: Any):
        self._group, self._buffer, self.array = group, buffer, array

    def bound_all_reduce(self, op: str = "add") -> Reduction:
        return self._bound("all-reduce", op, lambda elements: self._group.bind(elements, op))

    def bound_reduce_scatter(self, op: str = "add") -> Reduction:
        """Return a reduce-scatter that leaves this rank's chunk of the sum in `own` (or `own_rows`).

        The rest of the array is then scratch.
        """
        return self._bound(
            "reduce-scatter", op, lambda elements: self._group.bind_reduce_scatter(elements, op)
        )

    def bound_all_gather(self) -> Reduction:
        """Return an all-gather of the `own` (or `own_rows`) of each rank."""
        return self._bound("all-gather", "", self._group.bind_all_gather)

    def bound_all_to_all(self, incoming: ActivationBuffer) -> Reduction:
        """Return an all-to-all, out of place: chunk q of this array on rank p becomes chunk p of
        `incoming` on rank q.

        incoming  another lease of the same group, with as many elements of the same dtype
        """
        return self._apart("all-to-all", self._group.bind_all_to_all, incoming)

    def bound_shift(self, incoming: ActivationBuffer, distance: int = 1) -> Reduction:
        """Return a shift, out of place: this array on rank r becomes `incoming` on rank r + distance.

        incoming  as in `bound_all_to_all`
        """
        return self._apart("shift", self._group.bind_shift, incoming, distance)

    def _apart(
        self, operation: str, bind: Callable[..., Reduction], incoming: ActivationBuffer, *more: int
    ) -> Reduction:
        buffer = incoming._buffer
        return self._bound(
            operation,
            " ".join(map(str, (buffer.number, *more))),
            lambda elements: bind(elements, buffer.elements, *more),
        )

    @property
    def own(self) -> Any:
        """This rank's chunk of the elements (see `chunk_bounds`), as a 1-D view."""
        start, stop = chunk_bounds(self.array.size, self._group.size)[self._group.rank]
        return self.array.reshape(-1)[start:stop]

    @property
    def own_rows(self) -> Any:
        """This rank's chunk as rows, a view: (rows / ranks, length of the last dim).

        All dims but the last count as rows.

        raises  CommError if the number of rows is no multiple of the number of ranks
        """
        rows, n = math.prod(self.array.shape[:-1]), self._group.size
        if rows % n:
            raise CommError(
                f"rank {self._group.rank}: every rank needs equally many rows of an activation, but {rows} rows are "
                f"to be divided by {n} ranks.",
                f"Use {multiples_near(rows, n)} rows.",
            )
        return self.own.reshape(rows // n, self.array.shape[-1])

    def _bound(self, operation: str, op: str, bind: Callable[[Any], Reduction]) -> Reduction:
        bound, key = self._buffer.bound, (operation, op)
        if key not in bound:
            bound[key] = bind(self._buffer.elements)
            bound[key].exposed = self._group.exposed
        return bound[key]


class ActivationPool:
    """Pool of a group's activation buffers, by number of elements and dtype.

    All ranks must lease the same shapes and dtypes in the same order. Whenever they lease, the same
    earlier leases must have ended on all ranks. Then all ranks get the buffer of the same number.
    These conditions are checked only when a buffer is allocated. Ranks that break them elsewhere
    wait for each other, or reduce different activations.

    arena   counts the bytes of the leases, and the allocations for them
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        self._buffers: list[BoundBuffer] = []
        self._free: dict[tuple[int, np.dtype], list[BoundBuffer]] = {}
        self._rest: Any = np.empty(0, np.uint8)

    def lease(self, group: Any, shape: Sequence[int], dtype: Any) -> ActivationBuffer:
        shape, dtype = tuple(shape), np.dtype(dtype)
        count = math.prod(shape)
        free = self._free.setdefault((count, dtype), [])
        if free:
            buffer = min(free, key=attrgetter("number"))
            free.remove(buffer)
            _settle(buffer)
        else:
            buffer = self._made(group, count, dtype)
        return ActivationBuffer(
            group, buffer, self._arena.lend(buffer.raw, shape, dtype, buffer, free)
        )

    def close(self) -> None:
        """Wait for all reductions in flight, and drop all buffers; collective.

        Leased buffers live until their leases end.
        """
        for buffer in self._buffers:
            _settle(buffer)
        self._buffers, self._free, self._rest = [], {}, np.empty(0, np.uint8)

    def _made(self, group: Any, count: int, dtype: np.dtype) -> BoundBuffer:
        """Allocate a buffer; collective. CommError on every rank if sizes or dtypes differ."""
        number, nbytes = len(self._buffers), padded(count * dtype.itemsize)
        agree(
            group.transport,
            "exchange",
            np.empty(0, dtype),
            choices("allreduce"),
            group.algorithm,
            compares=group.compares,
            size=count,
            buffer=number,
        )
        if self._rest.nbytes < nbytes:
            taken = sum(buffer.raw.nbytes for buffer in self._buffers)
            self._rest = group.transport.allocate(max(nbytes, min(taken, SLAB)), np.uint8)
        if not self._buffers:
            group.transport.tenants.add(self.close)
        raw, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        buffer = BoundBuffer(number, raw, raw[: count * dtype.itemsize].view(dtype), {})
        self._buffers.append(buffer)
        self._arena.allocations += 1
        return buffer


def _settle(buffer: BoundBuffer) -> None:
    """Wait for reductions that are still in flight, because their lease ended early."""
    for reduction in buffer.bound.values():
        if not reduction.poll():
            reduction.wait()
