"""Which all-reduce to use, and how much to reduce at a time: pure functions of the tuning, where the ranks are, and the size."""

from collections.abc import Sequence

from mpitrain.collectives.cost import PLANS, Tuning, predict


def candidates(hosts: Sequence[str], is_native: bool, is_on_device: bool = False) -> list[str]:
    """Algorithms that can run: where ranks are on these hosts, MPI has the dtype or has not, a GPU the array or not."""
    names = ["ring", "halving-doubling", "recursive-doubling", "tree"]
    if is_native:
        names.append("native")
    if len(set(hosts)) == 1 and not is_on_device:
        names.append("shared")
    elif 1 < len(set(hosts)) < len(hosts):
        names.append("hierarchical")
    return names


def choose(tuning: Tuning, hosts: Sequence[str], count: int, itemsize: int, is_native: bool = True,
           memory: str = "window", is_on_device: bool = False) -> str:
    """The all-reduce that the model expects to be fastest, for an array in a class of host memory, or on a GPU."""
    def seconds(algorithm: str) -> float:
        predicted = predict(tuning, "allreduce", algorithm, hosts, count, itemsize, memory)
        return predicted if predicted == predicted else float("inf")

    return min(candidates(hosts, is_native, is_on_device), key=seconds)


PARTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of parts that a buffer may be cut into."""


def part_bytes(tuning: Tuning, algorithm: str, hosts: Sequence[str], count: int, itemsize: int) -> float:
    """Bytes of the parts in which a buffer is reduced soonest that fills, or is needed, while it is being reduced.

    The parts follow each other; beside all of them one more counts, that is computed before the first can begin or reduced
    after the last was computed. Many parts pay for many latencies, few for a long last one.
    algorithm  one that is a plan, or ring in its place
    """
    algorithm = algorithm if algorithm in PLANS["allreduce"] or algorithm == "hierarchical" else "ring"

    def seconds(parts: int) -> float:
        return (parts + 1) * predict(tuning, "allreduce", algorithm, hosts, -(-count // parts), itemsize)

    return count * itemsize / min(PARTS, key=seconds)
