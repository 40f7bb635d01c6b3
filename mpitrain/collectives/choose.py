"""Which all-reduce to use: a pure function of the tuning, where the ranks are, and the size."""

from collections.abc import Sequence

from mpitrain.collectives.cost import Tuning, predict


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
