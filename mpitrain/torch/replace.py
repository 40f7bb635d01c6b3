"""The default process group made anew after a loss, with spares in the places of lost ranks."""

import sys

import torch.distributed as dist

from mpitrain.errors import CommError
from mpitrain.torch import comparison
from mpitrain.torch.process_group import DEFAULT, GROUPS, OPEN, TRACED
from mpitrain.torch.stop import agreement
from mpitrain.torch.store import close_store, open_store, world
from mpitrain.transport.mpi import MpiTransport
from mpitrain.transport.places import Place, change


def replace() -> None:
    """Make the default process group anew after the loss of a rank; all other groups are gone.

    A spare of `mpitrain launch --spares` takes the place of the lost rank: on it `init_process_group` returns. Without a
    spare the ranks are numbered anew. State is the program's: the ranks may be one step apart, and a spare has none.

    Collective over the living ranks; call it where PeerLost was caught. From C++, as in `backward` of
    DistributedDataParallel, PeerLost arrives as a RuntimeError. So if no rank is lost, this raises the error that is handled.
    """
    transport, error = world(), sys.exception()
    if transport.needs_all or not (transport.job.lost or transport.comm.Is_revoked()):
        if error:
            raise error
        law, _, way_out = transport.needs_all.partition("; ")
        raise CommError(
            f"replace() needs the loss of a rank, but {law or 'no rank is lost'}.",
            f"{way_out or 'Call it where PeerLost was caught'}.",
        )
    before = transport.history[-1]
    agreement.cache_clear()
    while True:
        close_store(transport)
        comparison.join()
        for group in [*OPEN]:
            group.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        for group in [*OPEN]:
            group.end_thread()
        OPEN.clear()
        GROUPS.clear()
        TRACED.clear()
        try:
            transport.survivors()
            open_store(transport)
            _say(transport, before)
            dist.init_process_group("mpitrain", **DEFAULT)
            return
        except Exception:
            if not (transport.job.lost or transport.comm.Is_revoked()):
                raise


def _say(transport: MpiTransport, before: list[Place]) -> None:
    """Print what has changed, on the first rank that was here before."""
    changed = change(before, transport.history[-1], transport.living)
    new = [rank for rank, _ in changed.replaced]
    if transport.rank == next(rank for rank in range(transport.size) if rank not in new):
        waiting = transport.spares if transport.had_spares else None
        print(changed.said(len(before), transport.size, waiting), file=sys.stderr, flush=True)
