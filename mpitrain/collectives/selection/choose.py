"""Which algorithm to use, and how much to reduce at a time: pure functions of the tuning, where the ranks are, and the size."""

from collections.abc import Sequence

from mpitrain.collectives.plans.topology import Topology
from mpitrain.collectives.selection.cost_model import Tuning, predict
from mpitrain.collectives.selection.table import ALL_REDUCE, TABLES


def candidates(situation: Topology, operation: str = "allreduce") -> list[str]:
    """The algorithms that `auto` considers."""
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
    """The algorithm that the model expects to be fastest, for an array in a class of host memory, or on a GPU."""

    def seconds(algorithm: str) -> float:
        predicted = predict(tuning, operation, algorithm, situation.hosts, count, itemsize, memory)
        return predicted if predicted == predicted else float("inf")

    return min(candidates(situation, operation), key=seconds)


PARTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of parts that a buffer may be cut into."""


def part_bytes(
    tuning: Tuning, algorithm: str, hosts: Sequence[str], count: int, itemsize: int
) -> float:
    """Bytes of the parts in which a buffer is reduced soonest that fills, or is needed, while it is being reduced.

    The parts follow each other; beside all of them one more counts, that is computed before the first can begin or reduced
    after the last was computed. Many parts pay for many latencies, few for a long last one.
    algorithm  one that is a plan, or ring in its place
    """
    algorithm = algorithm if algorithm in ALL_REDUCE and ALL_REDUCE[algorithm].plans else "ring"

    def seconds(parts: int) -> float:
        return (parts + 1) * predict(
            tuning, "allreduce", algorithm, hosts, -(-count // parts), itemsize
        )

    return count * itemsize / min(PARTS, key=seconds)
