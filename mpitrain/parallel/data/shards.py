"""The shards of ZeRO: each of s replicas updates its s-th of every bucket."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.layers.flat import Bucket, Piece, shard
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.replication.protocol import ReplicationContext


class Shards:
    """This rank's shard of every bucket.

    With replication.shard "all", s is the number n of replicas. With "host" it is the number of
    replicas on a host (as FSDP's hybrid sharding). Parameters then never travel between hosts. The
    h = n/s replicas with the same shard all-reduce its gradient once a step. They do so after the
    reduce-scatter on each host.

    dividing  the sharding group of s replicas
    alike     the replication group of h replicas
    buckets   in the order of their reduction
    pieces    this rank's shard of each bucket, in order of storage
    owned     the same shards
    length    elements of all shards
    source    Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
              VLDB 16(12)
    """

    def __init__(self, replica: ReplicationContext, buckets: Sequence[Bucket]):
        """Split the groups; collective."""
        self.dividing, self.alike = replica.grid.shard_groups(replica.config.replication.shard)
        self.buckets = buckets
        self.owned = shard(buckets, self.dividing.rank, self.dividing.size)
        self.pieces = dict(zip(sorted(buckets), self.owned, strict=True))
        self.length = sum(piece.stop - piece.start for piece in self.owned)

    def counted(self, grid: Grid) -> list[Piece]:
        """Return the pieces that this rank squares for the norm.

        The replication group divides the squaring of its shards evenly.
        """
        found = []
        for bucket, (start, stop, place) in self.pieces.items():
            if grid.counts(bucket.holders):
                mine = share(stop - start, self.alike.rank, self.alike.size)
                found.append(Piece(start + mine.start, start + mine.stop, place + mine.start))
        return found

    def within(self, views: Mapping[Bucket, Any]) -> dict[Bucket, Any]:
        """Return this rank's shard in full-size views of buckets."""
        return {
            bucket: views[bucket][piece.start - bucket.start : piece.stop - bucket.start]
            for bucket, piece in self.pieces.items()
        }

    def parameters(self, replica: ReplicationContext) -> Any:
        """Allocate and initialise the parameters of all shards, concatenated."""
        backend = replica.device.backend
        found = backend.zeros(self.length, replica.storage.dtype)
        replica.storage.initialize(found, replica.config.run.seed, backend, self.owned)
        return found
