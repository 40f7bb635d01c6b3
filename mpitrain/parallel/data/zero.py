"""ZeRO stages 1 and 2, and the base of all stages: replicas shard state instead of replicating it.

This is the memory of the sharding group of s = 3 ranks, for one bucket. Rank r updates the r-th
third of every bucket:

                               rank 0           rank 1           rank 2
    stage 1   parameters       [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]
              gradients        [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]
              optimizer state  [ 0 ]                [ 1 ]                [ 2 ]

    stage 2   parameters       [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]
              gradients        [ 0 ]                [ 1 ]                [ 2 ]
              optimizer state  [ 0 ]                [ 1 ]                [ 2 ]

    one step  reduce-scatter of gradients --> update of third r --> all-gather of parameters

In stage 2 full-size gradients exist for a few buckets at a time (unsharded_buffers.py). In half
precision "parameters" above are the rounded ones with which layers compute. The float32 parameters
are then sharded like the optimizer state.

source  Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models, SC'20
"""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.engine.progress import mover
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.layers.base import Gradients, Weights
from mpitrain.layers.flat import Bucket, Piece, shard
from mpitrain.parallel.data.allreduce import AllReduce
from mpitrain.parallel.data.unsharded_buffers import ShardedGradients
from mpitrain.parallel.grid import share
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult
from mpitrain.parallel.replication.state import StateBuffer


class ZeroBase(AllReduce):
    """The base of all ZeRO stages: each of s replicas updates its s-th of every bucket.

    A rank has the optimizer state of its s-th alone. With replication.shard "all", s is the number
    n of replicas. With "host" it is the number of replicas on a host (as FSDP's hybrid sharding).
    Parameters then never travel between hosts. The h = n/s replicas with the same shard all-reduce
    its gradient once a step. They do so after the reduce-scatter on each host.

    dividing  the sharding group of s replicas
    alike     the replication group of h replicas
    source    Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
              VLDB 16(12)
    """

    def __init__(self, replica: ReplicationContext):
        self.dividing, self.alike = replica.grid.shard_groups(replica.config.replication.shard)
        super().__init__(replica)
        self._waited_s = 0.0

    @cached_property
    def _pieces(self) -> dict[Bucket, Piece]:
        """This rank's shard of each bucket, in order of storage."""
        return dict(
            zip(
                sorted(self._cut),
                shard(self._cut, self.dividing.rank, self.dividing.size),
                strict=True,
            )
        )

    def _sharding(self) -> Sequence[Group]:
        return [self.dividing]

    def _owned(self) -> Sequence[Piece]:
        return list(self._pieces.values())

    def _counted(self) -> Sequence[Piece]:
        found = []
        for bucket, (start, stop, place) in self._pieces.items():
            if self.replica.grid.counts(bucket.holders):
                mine = share(stop - start, self.alike.rank, self.alike.size)
                found.append(Piece(start + mine.start, start + mine.stop, place + mine.start))
        return found

    def _divide_parameters(self) -> None:
        """Allocate and initialise this rank's shard of the parameters."""
        storage, backend, pieces = self.replica.storage, self.replica.device.backend, self._owned()
        self.parameters = backend.zeros(
            sum(piece.stop - piece.start for piece in pieces), storage.dtype
        )
        storage.initialize(self.parameters, self.replica.config.run.seed, backend, pieces)

    def finish(self, mine: StepInput) -> StepResult:
        self.sync_parameters()
        outcome = super().finish(mine)
        waited, self._waited_s = self._waited_s, 0.0
        return outcome._replace(comm_s=outcome.comm_s + waited)

    def kept(self) -> list[StateBuffer]:
        self.sync_parameters()
        return super().kept()


class ZeroOne(ZeroBase):
    """ZeRO stage 1: the optimizer state is sharded.

    Gradients are reduce-scattered. The all-gather of the updated parameters overlaps with the next
    forward: `open` waits for the buckets of its unit. In half precision the float32 parameters are
    sharded too, and the all-gather sends their mirror. A lossy wire format is an all-reduce, so
    each rank receives all sums.

    bytes sent  a reduce-scatter and an all-gather by s ranks, and an all-reduce of 1/s of the
                gradient by h; with s = n this equals one all-reduce
    state       1/s of the optimizer's, up to padding
    """

    def _hold_parameters(self) -> None:
        config, grid, storage, _, device, arena, *_ = self.replica
        if not device.mirror:
            super()._hold_parameters()
            return
        self._divide_parameters()
        self.mirror = grid.world.transport.allocate(storage.length, self.replica.computed)
        # Each rank initialises the whole mirror, which saves an all-gather.
        storage.initialize(self.mirror, config.run.seed, device.backend)
        if not device.half:
            device.mirror(self.mirror, self.mirror, arena)
        self._weights = storage.weights(self.mirror)

    def _places(self) -> Sequence[Piece]:
        return super()._places() if self.mirror is None else self._owned()

    def _parameters_of(self, piece: Piece) -> Any:
        if self.mirror is None:
            return super()._parameters_of(piece)
        return self.parameters[piece.place : piece.place + piece.stop - piece.start]

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        cut = list(self._pieces)
        self._gathers = [
            self.dividing.bind_all_gather(self._computed[b.start : b.stop]) for b in cut
        ]
        self._needed = [
            [
                gather
                for gather, bucket in zip(self._gathers, cut, strict=True)
                if unit in bucket.units
            ]
            for unit in range(len(replica.storage.units))
        ]
        self._open: list[Reduction] = []
        self._mover = mover(self.dividing.transport, self._gathers)

    def _sum(self, gradients: np.ndarray) -> Reduction:
        if self.replica.wire.name != "none":
            return super()._sum(gradients)
        start, stop = chunk_bounds(gradients.size, self.dividing.size)[self.dividing.rank]
        links = self.dividing.bind_reduce_scatter(gradients), self.alike.bind(gradients[start:stop])
        return Chain(self._peers().transport, links)

    def open(self, unit: int, part: int) -> Weights:
        if self._open:
            began = time.perf_counter()
            for gather in self._needed[unit]:
                self._finish(gather)
            self._waited_s += time.perf_counter() - began
        return super().open(unit, part)

    def _finish(self, gather: Reduction) -> None:
        if gather in self._open:
            self._mover.wait(gather)
            self._open.remove(gather)

    def poll(self) -> None:
        if self._open:
            self._mover.poll()
        super().poll()

    def _update(self, scale: float, mine: StepInput) -> None:
        self._sum_facts(scale, mine)
        for piece, gather in zip(self.optimizer.pieces, self._gathers, strict=True):
            self._update_piece(piece, scale, mine)
            self._start(gather)
        if not self._overlap:
            began = time.perf_counter()
            self.sync_parameters()
            self._waited_s += time.perf_counter() - began

    def _start(self, gather: Reduction) -> None:
        self._open.append(gather)
        self._mover.start(gather)

    def _write_mirror(self) -> None:
        if self.replica.device.mirror:
            for piece, gather in zip(self.optimizer.pieces, self._gathers, strict=True):
                self.replica.device.mirror(
                    self._parameters_of(piece), self._mirror_of(piece), self.replica.arena
                )
                self._start(gather)

    def sync_parameters(self) -> None:
        for gather in [*self._open]:
            self._finish(gather)


class ZeroShardedGradients(ZeroBase):
    """The base of ZeRO stages 2 and 3: each micro-batch reduce-scatters its gradients out of
    full-size buffers.

    With several model chunks gradients are reduce-scattered once a step. This is possible because
    all micro-batches finish the backward of one chunk before the next chunk begins.

    gradient_buffer  this rank's shards of the summed gradient, concatenated
    """

    buckets: ShardedGradients

    @cached_property
    def _cut(self) -> Sequence[Bucket]:
        return self.replica.storage.buckets(
            self._bucket_bytes, [part.start for part in self.replica.parts]
        )

    def _hold_gradients(self) -> None:
        length = sum(piece.stop - piece.start for piece in self._pieces.values())
        self.gradient_buffer = self.replica.device.backend.zeros(length, self.replica.storage.dtype)
        self._leaves = []  # ShardedGradients resets its own leaves with every micro-batch

    def _reductions(self) -> ShardedGradients:
        return ShardedGradients(
            self.replica,
            self.dividing,
            self.alike,
            self._pieces,
            self.gradient_buffer,
            self._beside(),
            list(self._parts()),
        )

    def _parts(self) -> Iterator[Reduction]:
        for (holders, partial), found in groupby(
            self._pieces.items(), lambda each: (each[0].holders, each[0].partial)
        ):
            if partial:
                pieces = [piece for _, piece in found]  # these are neighbours, here as in storage
                start, stop = pieces[0].place, pieces[-1].place + pieces[-1].stop - pieces[-1].start
                yield self.replica.grid.holders[holders].bind(self.gradient_buffer[start:stop])

    def _beside(self) -> Sequence[Reduction]:
        """Return other reductions for the progress engine of the gradients."""
        return ()

    def held(self) -> int:
        return super().held() + self.buckets.slots.nbytes

    def _gradients_of(self, piece: Piece) -> Any:
        return self.gradient_buffer[piece.place : piece.place + piece.stop - piece.start]

    def gradients(self, unit: int, part: int) -> Gradients:
        began = time.perf_counter()
        found = self.buckets.gradients(unit)
        self._waited_s += time.perf_counter() - began
        return found

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        self.buckets.ready(unit, is_last)
        if not self._overlap:
            began = time.perf_counter()
            self.buckets.settle()
            self._waited_s += time.perf_counter() - began


class ZeroTwo(ZeroShardedGradients, ZeroOne):
    """ZeRO stage 2: optimizer state and gradients are sharded.

    bytes sent  with m micro-batches m reduce-scatters and an all-gather by s ranks, and an
                all-reduce of 1/s of the gradient by h; with several model chunks one reduce-scatter
    gradients   1/s of them up to padding, two buckets in full size, and each bucket with a tied
                tensor; with several model chunks one chunk instead of the two buckets
    """
