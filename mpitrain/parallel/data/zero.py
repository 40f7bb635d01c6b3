"""ZeRO stages 1 and 2, and the table of all stages: replicas shard state instead of replicating it.

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

In stage 2 full-size gradients exist for a few buckets at a time (sharded_gradients.py). In half
precision "parameters" above are the rounded ones with which layers compute. The float32 parameters
are then sharded like the optimizer state.

source  Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models, SC'20
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.engine.progress import mover
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.layers.base import Weights
from mpitrain.layers.flat import Bucket
from mpitrain.parallel.data.buckets import Buckets, common_buckets
from mpitrain.parallel.data.sharded_gradients import ShardedGradients, Shards
from mpitrain.parallel.data.zero_three import GatheredOnUse
from mpitrain.parallel.replication.components import GradientReducer, ParameterStore, StepEnd
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.replication.state import StateBuffer, compact, spread
from mpitrain.parallel.replication.step_end import AgreeAndUpdate
from mpitrain.parallel.replication.whole import FrozenParameters, ReplicaRows, whole
from mpitrain.regions import Piece


class GatheredAfterUpdate(ParameterStore):
    """Parameters of ZeRO stages 1 and 2: whole on each rank, all-gathered after each update.

    The all-gather overlaps with the next forward: `open` waits for the buckets of its unit. In half
    precision the float32 parameters are sharded, and the all-gather sends their mirror.

    bytes sent  an all-gather by s ranks a step
    """

    mirror: Any = None

    def __init__(self, replica: ReplicationContext, shards: Shards):
        """Allocate and initialise the parameters, and bind the gathers; collective."""
        device, storage, owned = replica.device, replica.storage, shards.owned
        config = replica.config
        self._replica = replica
        # Each rank initialises all that layers compute with, which saves an all-gather.
        self.parameters = computed = replica.grid.world.transport.allocate(
            storage.length, replica.computed
        )
        storage.initialize(computed, config.run.seed, device.backend)
        self._pieces, views = whole(storage), spread(computed, owned)
        self._updates: list[tuple[Piece, Any, Any]] = [
            (piece, view, None) for piece, view in zip(owned, views, strict=True)
        ]
        if device.mirror:
            if not device.half:
                device.mirror(computed, computed, replica.arena)
            self.mirror, self.parameters = computed, shards.parameters(replica)
            self._pieces = owned
            masters = compact(self.parameters, owned)
            self._updates = [*zip(owned, masters, views, strict=True)]
        self.owned = {piece: parameters for piece, parameters, _ in self._updates}
        self.sharing = [shards.dividing]
        self.frozen = FrozenParameters(replica)
        self.arrays = [self.parameters, computed, self.frozen.flat]
        self._weights = storage.weights(computed, self.frozen.flat)
        self._gathers = [
            shards.dividing.bind_all_gather(computed[b.start : b.stop]) for b in shards.pieces
        ]
        self._needed = [
            [
                gather
                for gather, bucket in zip(self._gathers, shards.pieces, strict=True)
                if unit in bucket.units
            ]
            for unit in range(len(storage.units))
        ]
        self._open: list[Reduction] = []
        self._engine = mover(shards.dividing.transport, self._gathers)

    def open(self, unit: int, micro: int) -> Weights:
        if self._open:
            with self._replica.exposed:
                for gather in self._needed[unit]:
                    self._finish(gather)
        return self._weights[unit]

    def _start(self, gather: Reduction) -> None:
        self._open.append(gather)
        self._engine.start(gather)

    def _finish(self, gather: Reduction) -> None:
        if gather in self._open:
            self._engine.wait(gather)
            self._open.remove(gather)

    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        for (piece, parameters, mirror), gather in zip(self._updates, self._gathers, strict=True):
            apply(piece, parameters, mirror)
            self._start(gather)
        if not self._replica.config.replication.overlap:
            with self._replica.exposed:
                self.sync()

    def poll(self) -> None:
        if self._open:
            self._engine.poll()

    def sync(self) -> None:
        for gather in [*self._open]:
            self._finish(gather)

    def loaded(self) -> None:
        if self._replica.device.mirror:
            for (_, parameters, mirror), gather in zip(self._updates, self._gathers, strict=True):
                self._replica.device.mirror(parameters, mirror, self._replica.arena)
                self._start(gather)

    def state(self) -> list[StateBuffer]:
        self.sync()
        return [StateBuffer("parameters", self.parameters, self._pieces), *self.frozen.state()]


def scattered_once(replica: ReplicationContext, shards: Shards, store: ParameterStore) -> Buckets:
    """Return the reductions of stage 1: each bucket is reduce-scattered once a step.

    A lossy wire format is an all-reduce, so each rank receives all sums.

    bytes sent  a reduce-scatter over the s ranks of the sharding group, and an all-reduce of 1/s of
                the gradient over the replication group. If all n ranks shard, this and the gather
                of the parameters equal one all-reduce
    """

    def bind(gradients: np.ndarray) -> Reduction:
        start, stop = chunk_bounds(gradients.size, shards.dividing.size)[shards.dividing.rank]
        scatter = shards.dividing.bind_reduce_scatter(gradients)
        return Chain(replica.grid.dp.transport, (scatter, shards.alike.bind(gradients[start:stop])))

    return Buckets(
        replica,
        shards.buckets,
        replica.grid.dp.bind if replica.wire.name != "none" else bind,
        shards.owned,
        shards.counted(replica.grid),
    )


def scattered_each_micro_batch(
    replica: ReplicationContext, shards: Shards, store: ParameterStore
) -> ShardedGradients:
    """Return the reductions of stage 2.

    bytes sent  with m micro-batches m reduce-scatters by s ranks, and an all-reduce of 1/s of the
                gradient by h; with several model chunks one reduce-scatter
    gradients   1/s of them up to padding, two buckets in full size, and each bucket with a tied
                tensor; with several model chunks one chunk instead of the two buckets
    """
    return ShardedGradients(replica, shards)


def beside_gathers(
    replica: ReplicationContext, shards: Shards, store: GatheredOnUse
) -> ShardedGradients:
    """Return the reductions of stage 3, which have one progress engine with the store's gathers.

    bytes sent  as stage 2
    """
    reducer = ShardedGradients(replica, shards, store.gathers)
    store.engine = reducer.engine
    return reducer


class ZeroStage(NamedTuple):
    """A stage of ZeRO, as components of a replication mode.

    buckets  (context) -> the buckets of the flat buffer, in the order of their reduction
    """

    buckets: Callable[[ReplicationContext], Sequence[Bucket]]
    store: Callable[[ReplicationContext, Shards], Any]
    reducer: Callable[[ReplicationContext, Shards, Any], GradientReducer]
    step_end: Callable[[ReplicationContext, ParameterStore, GradientReducer], StepEnd]


STAGES = {
    1: ZeroStage(
        common_buckets,
        GatheredAfterUpdate,
        scattered_once,
        AgreeAndUpdate,
    ),
    2: ZeroStage(
        lambda replica: common_buckets(replica, [chunk.start for chunk in replica.chunks]),
        GatheredAfterUpdate,
        scattered_each_micro_batch,
        AgreeAndUpdate,
    ),
    3: ZeroStage(
        lambda replica: replica.storage.buckets(0),  # each bucket is a unit
        GatheredOnUse,
        beside_gathers,
        AgreeAndUpdate,
    ),
}
"""The stages of ZeRO by replication.zero."""


def zero(stage: ZeroStage, replica: ReplicationContext) -> Replication:
    """Return a stage of ZeRO; collective."""
    shards = Shards(replica, stage.buckets(replica))
    store = stage.store(replica, shards)
    reducer = stage.reducer(replica, shards, store)
    return Replication(replica, stage.step_end(replica, store, reducer), ReplicaRows(replica))
