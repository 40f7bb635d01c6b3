"""Data parallelism by bucketed all-reduce (as DDP)."""

from mpitrain.parallel.data.buckets import Buckets, common_buckets
from mpitrain.parallel.grid import share
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.replication.step_end import AgreeAndUpdate
from mpitrain.parallel.replication.whole import ReplicaRows, WholeParameters, whole
from mpitrain.regions import Piece


def all_reduce(replica: ReplicationContext) -> Replication:
    """Return data parallelism by all-reduce (as torch's DistributedDataParallel); collective.

    Each rank computes its rows. `Buckets` reduces the flat gradient buffer bucket by bucket, in
    place. The order is from the last unit to the first, while earlier layers still compute.
    Replicas end equal bit for bit, also with a lossy wire format.

    source  Li et al. 2020, PyTorch Distributed, VLDB 13(12)
    """
    owned, grid = whole(replica.storage), replica.grid
    # The replicas divide the squaring evenly: each element is squared on one rank.
    shares = [
        (start, share(stop - start, grid.coords.dp, grid.axes.dp))
        for start, stop, _ in counted_runs(replica)
    ]
    counted = [Piece(start + own.start, start + own.stop, 0) for start, own in shares]
    store = WholeParameters(replica, owned)
    reducer = Buckets(replica, common_buckets(replica), grid.dp.bind, owned, counted)
    return Replication(replica, AgreeAndUpdate(replica, store, reducer), ReplicaRows(replica))


def counted_runs(replica: ReplicationContext) -> list[Piece]:
    """Return the runs of the flat buffer that this rank, and no other of its replica, counts in
    norms.
    """
    runs: list[Piece] = []
    for span in replica.storage.spans:
        if not replica.grid.counts(span.holders):
            continue
        if runs and runs[-1].stop == span.start:
            runs[-1] = runs[-1]._replace(stop=span.stop)
        else:
            runs.append(Piece(span.start, span.stop, 0))
    return runs
