"""The modes of replication that are topics: settings and sentences of each."""

from mpitrain.collectives.plans import ring
from mpitrain.parallel.averaging.gossip import NeighbourAverage, distances
from mpitrain.parallel.averaging.local_sgd import PeriodicAverage
from mpitrain.parallel.data.buckets import Buckets
from mpitrain.parallel.data.sharded_gradients import ShardedGradients
from mpitrain.parallel.data.zero import GatheredAfterUpdate, scattered_once
from mpitrain.parallel.data.zero_three import GatheredOnUse
from mpitrain.parallel.servers.master import BroadcastAndUpdate, BroadcastParameters
from mpitrain.parallel.servers.synchronous import PushAndPull, PushedGradients, ServedUpdate
from mpitrain.pipeline.stage import Stage
from mpitrain.tools.textbook.explain.explanation import Text, sentence
from mpitrain.tools.textbook.explain.recorders.replication import Shown

TRAINING = ("tests/ranks/parallel/test_training.py",)
AVERAGING = ("tests/ranks/parallel/test_averaging.py",)
TRAFFIC = ("tests/ranks/bench/test_compare.py",)
WITH_STATE = ("parameters", "gradients", "optimizer state")
MOMENTUM = "optimizer.name=momentum"
ONE_UNIT = "replication.bucket_mb=0.000001"

MODES: dict[str, tuple[Text, Shown]] = {
    "ddp": (
        sentence("Data parallelism: buckets of gradients, and overlap with the backward"),
        Shown(
            (ONE_UNIT,),
            (
                sentence("Each of {n} ranks has all parameters and one row of the batch."),
                sentence("The backward goes from the last unit to the first."),
                sentence(
                    "A bucket is a run of units. Its all-reduce starts when its gradients are complete."
                ),
                sentence("The other units compute their backward meanwhile: this is the overlap."),
                sentence("All ranks then make the same update, and no parameter is sent."),
            ),
            (Buckets, ring.all_reduce),
            (*TRAINING, *TRAFFIC),
        ),
    ),
    "master": (
        sentence("Master: rank 0 alone updates"),
        Shown(
            ("replication.mode=master",),
            (
                sentence("Rank 0 reads all rows, and sends each rank its own."),
                sentence("Gradients go up a tree to rank 0, which updates."),
                sentence("Parameters come down the same tree before the next step."),
                sentence("Only rank 0 has optimizer state, and its links carry the most."),
            ),
            (BroadcastAndUpdate, BroadcastParameters),
            (*TRAINING, *TRAFFIC),
        ),
    ),
    "server": (
        sentence("Parameter server, synchronous: workers push gradients and pull parameters"),
        Shown(
            ("replication.mode=server",),
            (
                sentence("The last rank is a server: it has the parameters and computes no rows."),
                sentence(
                    "Each of {w} workers pushes the gradient of a unit as soon as it is complete."
                ),
                sentence(
                    "The server waits for all workers, adds in the order of ranks, and updates."
                ),
                sentence("It sends the new parameters to all workers: W S bytes through one link."),
            ),
            (PushedGradients, ServedUpdate, PushAndPull),
            (*TRAINING, *TRAFFIC),
            servers=1,
        ),
    ),
    "zero1": (
        sentence("ZeRO stage 1: optimizer state is sharded"),
        Shown(
            ("replication.zero=1", MOMENTUM),
            (
                sentence("Every rank has all parameters and all gradients."),
                sentence(
                    "After a reduce-scatter each rank has the sum of one shard; the rest is a partial sum."
                ),
                sentence(
                    "A rank has only the optimizer state of its shard, and updates only this shard."
                ),
                sentence("An all-gather sends the updated shards to all ranks."),
            ),
            (scattered_once, GatheredAfterUpdate),
            (*TRAINING, *TRAFFIC, "tests/unit/machine/test_memory.py"),
            units=0,
            groups=WITH_STATE,
            memory=("(8+8) P + 8 P/n", lambda p, n, unit: 16 * p + 8 * p / n),
        ),
    ),
    "zero2": (
        sentence("ZeRO stage 2: gradients are sharded, too"),
        Shown(
            ("replication.zero=2", MOMENTUM, ONE_UNIT),
            (
                sentence(
                    "Every rank has all parameters, but only a shard of gradients and optimizer state."
                ),
                sentence(
                    "The gradient of a bucket is in a full-size buffer only until it is reduce-scattered."
                ),
                sentence(
                    "Then the rank adds its chunk to its shard, and the next bucket uses the buffer."
                ),
                sentence("An all-gather sends the updated shards to all ranks, as in stage 1."),
            ),
            (ShardedGradients, GatheredAfterUpdate),
            (*TRAINING, *TRAFFIC, "tests/unit/machine/test_memory.py"),
            units=2,
            is_split=True,
            groups=WITH_STATE,
            memory=(
                "8 P + (8+8) P/n + 2 x 8 U, U in a unit",
                lambda p, n, unit: 8 * p + 16 * p / n + 16 * unit,
            ),
        ),
    ),
    "zero3": (
        sentence("ZeRO stage 3 (FSDP): parameters are sharded, too"),
        Shown(
            ("replication.zero=3", MOMENTUM),
            (
                sentence(
                    "A rank stores a shard of every unit: parameters, gradients and optimizer state."
                ),
                sentence("Just before a unit computes, an all-gather collects its parameters."),
                sentence(
                    "A later unit uses the buffer again, so at most two units are unsharded at once."
                ),
                sentence(
                    "After its backward, a reduce-scatter leaves each rank the sum of its shard."
                ),
            ),
            (GatheredOnUse, ShardedGradients),
            (*TRAINING, *TRAFFIC, "tests/unit/machine/test_memory.py"),
            units=3,
            is_split=True,
            kinds=("forward", "weight"),
            groups=WITH_STATE,
            memory=(
                "(8+8+8) P/n + 2 x (8+8) U, U in a unit",
                lambda p, n, unit: 24 * p / n + 32 * unit,
            ),
        ),
    ),
    "accumulation": (
        sentence("Gradient accumulation: micro-batches add, and one reduction follows"),
        Shown(
            ("replication.bucket_mb=0.000001",),
            (
                sentence("Each rank divides its rows into two micro-batches."),
                sentence(
                    "The first backward overwrites the gradient buffer, the second one adds to it."
                ),
                sentence(
                    "Only the last micro-batch starts reductions: the bytes sent do not grow."
                ),
            ),
            (Stage, Buckets),
            (*TRAINING, *TRAFFIC),
            units=2,
            micros=2,
        ),
    ),
    "local": (
        sentence("Local SGD: workers update alone, and average every second step"),
        Shown(
            ("replication.mode=local", "replication.period=2"),
            (
                sentence("Each worker updates its own parameters with its own gradient."),
                sentence("After two steps an all-reduce averages the parameters of all workers."),
                sentence("Between averages no message is sent, but the workers drift apart."),
            ),
            (PeriodicAverage,),
            (*AVERAGING, *TRAFFIC),
            units=1,
            steps=2,
            kinds=(),
        ),
    ),
    "gossip": (
        sentence("Gossip: each worker averages with one neighbour after each step"),
        Shown(
            ("replication.mode=gossip",),
            (
                sentence("Each worker updates alone, then takes the mean with one other worker."),
                sentence(
                    "The neighbour is at distance 1, 2, 4, ... in turn, so news reaches all in lg n steps."
                ),
                sentence("At the end of the run an all-reduce takes the average of all workers."),
            ),
            (NeighbourAverage, distances),
            (*AVERAGING, *TRAFFIC),
            units=1,
            steps=2,
            kinds=(),
        ),
    ),
}
