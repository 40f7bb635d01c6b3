"""Binding: an operation, an algorithm and a buffer become a Reduction, which runs many times.

Every function here is collective: all ranks call it in the same order. Binding compares the
arguments of all ranks (engine/agreement.py lists the errors). A run compares nothing, allocates
nothing and checks nothing. Each bound collective has its own tag.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from functools import partial
from zlib import crc32

import numpy as np

from mpitrain.collectives.direct.cuda_ipc import note_unshared
from mpitrain.collectives.direct.shared_memory import offer, unshared
from mpitrain.collectives.engine.agreement import agree, unfit
from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic
from mpitrain.collectives.engine.executor import Execution, Reduction
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.plans.topology import Topology
from mpitrain.collectives.selection.choose import choose
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.own_algorithm import proven, shown
from mpitrain.collectives.selection.table import PLANS, TABLES, choices
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.machine.backend import on_device, overlap
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device import DeviceTransport


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
    op : {"add", "maximum"}
        Reduction operator.
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
    return _bind(transport, array, op, "allreduce", algorithm, tuning, arithmetic)


def bind_reduce_scatter(
    transport: Transport,
    array: np.ndarray,
    op: str = "add",
    algorithm: str = "ring",
    tuning: Tuning | None = None,
    arithmetic: Arithmetic | None = None,
) -> Reduction:
    """Bind a reduce-scatter of `array`, in place: chunk r ends as the reduction on rank r.

    The other chunks are scratch; `chunk_bounds` gives the bounds of all chunks. The parameters and
    the errors are the same as for `bind`.
    """
    return _bind(transport, array, op, "reduce-scatter", algorithm, tuning, arithmetic)


def bind_all_gather(
    transport: Transport,
    array: np.ndarray,
    algorithm: str = "ring",
    tuning: Tuning | None = None,
    arithmetic: Arithmetic | None = None,
) -> Reduction:
    """Bind an all-gather of `array`, in place: chunk r of rank r ends in the array of every rank.

    The parameters and the errors are the same as for `bind`.
    """
    return _bind(transport, array, "add", "all-gather", algorithm, tuning, arithmetic)


def _bind(
    transport: Transport,
    array: np.ndarray,
    op: str,
    operation: str,
    algorithm: str,
    tuning: Tuning | None,
    arithmetic: Arithmetic | None,
) -> Reduction:
    """Bind an operation that has a table of algorithms; those of plugins are proven.

    tuning, arithmetic  None: the built-in constants, NumPy
    """
    rest = op, operation, algorithm, tuning, arithmetic
    reduction = _bound(transport, array, *rest)
    name, table = reduction.algorithm, TABLES[operation]
    if table.is_added(name) and not on_device(array):
        numbers = np.empty_like(array)
        is_right = _tried(_bound(transport, numbers, *rest), transport, numbers, op, operation)
        if not all(transport.gather_text(is_right)):
            raise on_every_rank(
                ConfigError(
                    f"The algorithm {name}{table.of_plugin(name)} must be an {operation.replace('allreduce', 'all-reduce')} of "
                    f"{transport.size} ranks, but its result of {array.size:,} whole numbers is wrong.",
                    "Correct its bind.",
                )
            )
    return reduction


def _tried(
    reduction: Reduction, transport: Transport, array: np.ndarray, op: str, operation: str
) -> bool:
    """Return whether a run on whole numbers, different on each rank, is right on this rank."""
    n, rank, flat = transport.size, transport.rank, array.reshape(-1)

    def number(r: int, place: np.ndarray) -> np.ndarray:
        """Return the numbers of a rank; at each place that of one rank is 1 more than the others."""
        return 1 + place % 3 + ((place + r) % n == 0)

    place, bounds = np.arange(array.size), chunk_bounds(array.size, n)
    flat[...] = number(rank, place)
    reduction.run()
    if operation == "all-gather":
        right = np.concatenate([number(r, place[slice(*bounds[r])]) for r in range(n)])
    else:
        right = 2 + place % 3 if op == "maximum" else 1 + n * (1 + place % 3)
    own = slice(*bounds[rank]) if operation == "reduce-scatter" else slice(None)
    return bool(np.array_equal(flat[own].astype(float), right[own]))


def _bound(
    transport: Transport,
    array: np.ndarray,
    op: str,
    operation: str,
    algorithm: str,
    tuning: Tuning | None,
    arithmetic: Arithmetic | None,
) -> Reduction:
    """Bind an operation; the plans of an added algorithm are proven by simulation."""
    tuning, arithmetic = tuning or DEFAULT, arithmetic or HOST
    asked, table, name = algorithm, TABLES[operation], operation.replace("allreduce", "all-reduce")
    own, choice = None, {}
    if unfit(array) is None:
        own = offer(transport, array)
        topology = situation(transport, array)
        choice = {
            memory: choose(tuning, topology, array.size, array.itemsize, memory, operation)
            for memory in ("window", "plain")
            if algorithm == "auto"
        }
    agreed = agree(transport, name, array, choices(operation), algorithm, own, op=op, choice=choice)
    if choice:
        is_window = on_device(array) or all(location for location, _ in agreed.owns)
        algorithm = choice["window" if is_window else "plain"]
    if refusal := table[algorithm].refusal(situation(transport, array)):
        raise on_every_rank(refusal)
    if table.is_added(algorithm) and table[algorithm].plans:
        # Each rank plans by itself: a function that is not pure has many answers.
        on_all_ranks(
            transport,
            partial(proven, operation, algorithm, transport.hosts, array.size),
            f"answer of {shown(algorithm)}",
            lambda plans: {"its digest": crc32(repr(plans).encode())},
        )
    reduction = table[algorithm].bind(transport, array, op, agreed, arithmetic)
    if table.is_added(algorithm):
        bound = partial(table.made, algorithm, "algorithm", lambda: reduction)
        on_all_ranks(transport, partial(bound, "a Reduction", _is_reduction))
    if reduction is None:
        # Transports of GPUs have no windows for the few arrays in host memory.
        has_memory = on_device(array) or not transport.allocates_on_device
        if asked == "shared" and transport.size > 1 and has_memory:
            raise unshared(transport, array)
        if isinstance(transport, DeviceTransport):
            note_unshared(transport)
        algorithm = choice["plain"] if choice and on_device(array) else "ring"
        reduction = table[algorithm].bind(transport, array, op, agreed, arithmetic)
    assert reduction is not None  # a ring runs on any machine
    reduction.algorithm = algorithm
    return reduction


def _is_reduction(made: object) -> bool:
    return all(hasattr(made, name) for name in vars(Reduction) if name[0] != "_")


def situation(transport: Transport, array: np.ndarray) -> Topology:
    """Return the Topology of these ranks and this array, on which the algorithms depend."""
    dtype = array.dtype.name
    return Topology(transport.hosts, dtype, dtype in transport.native_dtypes, on_device(array))


def memory_of(transport: Transport, array: np.ndarray) -> str:
    """Return the memory class of an array in the cost model; collective.

    It is "window" if the array is in a shared window on every rank, else "plain".
    """
    location = transport.windows.locate(array, transport.members[transport.rank])
    return "window" if all(transport.gather_text(location is not None)) else "plain"


def bind_broadcast(
    transport: Transport, array: np.ndarray, root: int = 0, algorithm: str = "binomial"
) -> Reduction:
    """Bind a broadcast of the root's array to the arrays of all ranks."""
    tag, _ = agree(transport, "broadcast", array, choices("broadcast"), algorithm, root=root)
    plan = PLANS["broadcast"][algorithm](transport.rank, transport.size, array.size, root)
    return Execution(transport, array, "add", plan, tag)


def bind_reduce(
    transport: Transport,
    array: np.ndarray,
    op: str = "add",
    root: int = 0,
    algorithm: str = "binomial",
    arithmetic: Arithmetic = HOST,
) -> Reduction:
    """Bind a reduction into the root's array; the arrays of all other ranks are scratch."""
    tag, _ = agree(transport, "reduce", array, choices("reduce"), algorithm, op=op, root=root)
    plan = PLANS["reduce"][algorithm](transport.rank, transport.size, array.size, root)
    return Execution(transport, array, op, plan, tag, arithmetic=arithmetic)


def bind_all_to_all(
    transport: Transport, outgoing: np.ndarray, incoming: np.ndarray, algorithm: str = "pairwise"
) -> Reduction:
    """Bind an all-to-all: chunk q of rank p's `outgoing` becomes chunk p of rank q's `incoming`.

    raises   CommError on every rank also if the two arrays overlap, differ in size or dtype, or do
             not divide into one chunk per rank
    """
    tag, _ = agree(transport, "all-to-all", outgoing, choices("all-to-all"), algorithm)
    agree(transport, "all-to-all", incoming, choices("all-to-all"), algorithm)
    if any(transport.gather_text(overlap(outgoing, incoming))):
        raise on_every_rank(
            CommError(
                f"rank {transport.rank}: all-to-all needs two arrays that overlap on no rank.",
                "Receive into an array of its own.",
            )
        )
    if outgoing.size % transport.size or (outgoing.size, outgoing.dtype) != (
        incoming.size,
        incoming.dtype,
    ):
        raise on_every_rank(
            CommError(
                f"rank {transport.rank}: all-to-all needs two arrays alike that divide into {transport.size} chunks, but they "
                f"have {outgoing.size} x {outgoing.dtype} and {incoming.size} x {incoming.dtype}.",
                f"Pad both to {-(-max(outgoing.size, incoming.size) // transport.size) * transport.size} elements.",
            )
        )
    plan = PLANS["all-to-all"][algorithm](transport.rank, transport.size, outgoing.size)
    return Execution(transport, incoming, "add", plan, tag, outgoing)


def bind_ping_pong(
    transport: Transport, array: np.ndarray, algorithm: str = "ping-pong"
) -> Reduction:
    """Bind a message from rank 0 to the last rank, and its way back."""
    tag, _ = agree(transport, "sendrecv", array, choices("sendrecv"), algorithm)
    plan = PLANS["sendrecv"][algorithm](transport.rank, transport.size, array.size)
    return Execution(transport, array, "add", plan, tag)
