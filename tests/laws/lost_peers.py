"""Calls that need a peer, to be made when that peer has died: each must raise PeerLost."""

import numpy as np

from mpitrain.collectives.group import Group

LARGE = 1 << 20
"""Elements of a message that no MPI sends before its receive is posted."""


def wait_any(transport, peer):
    array = np.zeros(4)
    transport.wait_any([transport.start_recv(array, peer), transport.start_recv_any(array, 1)])


def poll(transport, peer):
    request = transport.start_recv(np.zeros(4), peer)
    transport.wait_until(request.test, what=request)


def bound(transport, peer):
    # Its steps are receives and sends that one executor has bound before.
    reduction = Group(transport, "ring").bind(np.ones(1 << 12))
    transport.barrier()
    yield
    reduction.run()


def native(operation):
    def run(transport, peer):
        call = transport.bind_native(operation, np.ones(64), np.ones(64))
        transport.barrier()
        yield
        call()

    return run


def split(transport, peer):
    transport.split(0)


CALLS = {
    "send": lambda transport, peer: transport.send(np.zeros(LARGE), peer),
    "recv": lambda transport, peer: transport.recv(np.zeros(4), peer),
    "recv-any": lambda transport, peer: transport.start_recv_any(np.zeros(4)).wait(),
    "exchange": lambda transport, peer: transport.exchange(
        np.zeros(LARGE), peer, np.zeros(LARGE), peer
    ),
    "wait-any": wait_any,
    "wait-until": poll,
    "barrier": lambda transport, peer: transport.barrier(),
    "split": split,
    "gather-text": lambda transport, peer: transport.gather_text("here"),
    "allocate": lambda transport, peer: transport.allocate(64, np.float32),
    "native": lambda transport, peer: transport.native_all_reduce(np.ones(64)),
    "native-started": lambda transport, peer: transport.start_native_all_reduce(np.ones(64)).wait(),
    "broadcast": native("broadcast"),
    "all-to-all": native("all-to-all"),
    "ring": bound,
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


GENERATORS = (bound, CALLS["broadcast"], CALLS["all-to-all"])
