"""Calls that need a peer, to be made when that peer has died; and ranks that go on after losses."""

import gc
import threading
import time
import weakref

import numpy as np

from mpitrain.collectives.engine.executor import ProgressThread
from mpitrain.collectives.group import Group
from mpitrain.errors import PeerLost
from mpitrain.transport.native import bind_native, bind_native_all_reduce, native_all_reduce

LARGE = 1 << 20
"""Elements of a message that no MPI sends before its receive is posted."""


def poll(transport, peer):
    request = transport.start_recv(np.zeros(4), peer)
    transport.wait_until(request.test, what=request)


def bound(transport, peer):
    # Its steps are receives and sends that one executor has bound before.
    reduction = Group(transport, "ring").bind(np.ones(1 << 12))
    transport.barrier()
    yield
    reduction.run()


def routed(algorithm):
    def run(transport, peer):
        routes = Group(transport, algorithm).routes(np.full((transport.size, 1), 1 << 12))
        array = np.ones(routes.sent)
        transport.barrier()
        yield
        routes.bind(array, np.empty_like(array)).run()

    return run


def native(operation):
    def run(transport, peer):
        call = bind_native(transport, operation, np.ones(64), np.ones(64))
        transport.barrier()
        yield
        call()

    return run


def split(transport, peer):
    transport.split(0)


CALLS = {
    "send": lambda transport, peer: transport.send(np.zeros(LARGE), peer),
    "recv": lambda transport, peer: transport.recv(np.zeros(4), peer),
    "recv-any": lambda transport, peer: transport.start_recv(np.zeros(4), None).wait(),
    "exchange": lambda transport, peer: transport.exchange(
        np.zeros(LARGE), peer, np.zeros(LARGE), peer
    ),
    "wait-until": poll,
    "barrier": lambda transport, peer: transport.barrier(),
    "split": split,
    "gather-text": lambda transport, peer: transport.gather_text("here"),
    "allocate": lambda transport, peer: transport.allocate(64, np.float32),
    "native": lambda transport, peer: native_all_reduce(transport, np.ones(64)),
    "native-started": lambda transport, peer: (
        bind_native_all_reduce(transport, np.ones(64)).start().wait()
    ),
    "broadcast": native("broadcast"),
    "all-to-all": native("all-to-all"),
    "ring": bound,
    "routes": routed("pairwise"),
    "routes-native": routed("native"),
}
"""The calls by name: (transport, rank of the peer that has died).

A generator binds a collective, which takes all ranks, up to its first `yield`.
"""


def begin(call, transport, peer):
    """Make the collective part of a call, while all ranks live; return the rest as a function."""
    found = call(transport, peer) if call in GENERATORS else None
    if found is None:
        return lambda: call(transport, peer)
    next(found)
    return lambda: next(found, None)


GENERATORS = tuple(
    CALLS[name] for name in ("ring", "broadcast", "all-to-all", "routes", "routes-native")
)


LOSSES = (((1,), ()), ((2,), (0,)), ((3,), ()))
"""Of each loss: the ranks that die in a call, and those that die while the others connect."""
OUTLIVING, SPARES = 8, 2
"""Ranks of the job, with those that wait at first: 6 takes the place of 1, then 7 that of 0."""
JOINED = {6: 0, 7: 1}
"""{spare: the loss after which it has a place}."""
OUTLIVED = {
    4: [(4, 6, 20.0), (3, 5, 25.0), (2, 4, 22.0)],
    5: [(5, 6, 20.0), (4, 5, 25.0), (3, 4, 22.0)],
    6: [(1, 6, 20.0), (1, 5, 25.0), (1, 4, 22.0)],
    7: [(0, 5, 25.0), (0, 4, 22.0)],
}
"""{rank at the start: what `outlive` returns}."""


def outlive(transport, die):
    """Go on after each of LOSSES; return (rank, size, sum of the living ranks' first ranks) after each.

    At each loss a receive that nobody meets, a ring and a progress thread are under way.
    """
    first, seen = transport.number, []
    for in_call, in_survivors in LOSSES[JOINED.get(first, 0) :]:
        stray = ring = lambda: None
        if not transport.joins:
            stray, ring = _under_way(transport, first, in_call, die, in_survivors)
        while True:
            try:
                if not transport.joins:
                    transport.survivors()
                transport.joins = False
                total = np.array([float(first)])
                Group(transport, "ring").all_reduce(total)
                break
            except PeerLost:
                continue
        for thread in threading.enumerate():
            if thread.name == f"mover {first}":
                thread.join(10)
                assert not thread.is_alive()
        until = time.monotonic() + 10
        while (
            stray() is not None or ring() is not None
        ):  # A collection returns at once while another thread collects.
            assert time.monotonic() < until
            gc.collect()
        assert transport.allocate(3, np.float32).tolist() == [0, 0, 0]
        seen.append((transport.rank, transport.size, float(total[0])))
    return seen


def _under_way(transport, first, in_call, die, late):
    part = transport.split(0)
    assert part is not None
    array, stray = np.full(1 << 16, 1.0), np.ones(1)
    ring = Group(part, "ring").bind(array)
    thread = ProgressThread(part)
    part.start_recv(stray, (part.rank + 1) % part.size, 7)
    if first in in_call:
        die()
    try:
        thread.start(ring)
        thread._thread.name = f"mover {first}"
        thread.wait()
        while True:
            part.barrier()
    except PeerLost:
        if first in late:
            die()
    return weakref.ref(stray), weakref.ref(ring)
