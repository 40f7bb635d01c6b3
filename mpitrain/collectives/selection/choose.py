"""The choice of an algorithm and of a bucket size, from tuning, topology and array size."""

from collections.abc import Sequence

from mpitrain.collectives.plans.topology import Topology
from mpitrain.collectives.selection.cost_model import Tuning, predict
from mpitrain.collectives.selection.table import ALL_REDUCE, TABLES


def candidates(situation: Topology, operation: str = "allreduce") -> list[str]:
    """Return the algorithms that "auto" considers."""
    return [
        name
        for name, algorithm in TABLES[operation].items()
        if algorithm.refusal(situation) is None and algorithm.is_rival(situation)
    ]


def choose(
    tuning: Tuning,
    situation: Topology,
    count: int,
    itemsize: int,
    memory: str = "window",
    operation: str = "allreduce",
) -> str:
    """Return the algorithm with the shortest predicted time for an array in this memory class.

    memory  "window" for an array on a GPU: the GPUs of a host may read each other's memory. No
            tuning covers that. It is preferred to messages, for which the host must wait
    """
    if situation.is_on_device:
        if memory == "window" and 1 == len(set(situation.hosts)) < len(situation.hosts):
            return "shared"
        memory = "plain"

    def seconds(algorithm: str) -> float:
        predicted = predict(tuning, operation, algorithm, situation.hosts, count, itemsize, memory)
        return predicted if predicted == predicted else float("inf")

    return min(candidates(situation, operation), key=seconds)


PARTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of buckets that a buffer may be cut into."""


def part_bytes(
    tuning: Tuning, algorithm: str, hosts: Sequence[str], count: int, itemsize: int
) -> float:
    """Return the best bucket size in bytes, for reductions that overlap with computation.

    It corresponds to DDP's `bucket_cap_mb`. Buckets are reduced one after the other. One more
    bucket does not overlap: it is computed before the first reduction, or reduced after the last
    computation. Many buckets cost latency; few buckets make this exposed one long.

    algorithm  an algorithm without plans counts as ring
    """
    algorithm = algorithm if algorithm in ALL_REDUCE and ALL_REDUCE[algorithm].plans else "ring"

    def seconds(parts: int) -> float:
        return (parts + 1) * predict(
            tuning, "allreduce", algorithm, hosts, -(-count // parts), itemsize
        )

    return count * itemsize / min(PARTS, key=seconds)
