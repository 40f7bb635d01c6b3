"""Reads one of two compared runs: its configuration, logged steps, digests and checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.run.checkpoint.manifest import steps
from mpitrain.run.checkpoint.saving import PARAMETERS
from mpitrain.run.metrics import is_number
from mpitrain.run.replicas import GRADIENT
from mpitrain.run.run_dir import CHECKPOINTS, configuration, is_run, metrics_of

HOW = (
    "layout.",
    "replication.",
    "pipeline.",
    "device.",
    "batch.micro_batches",
    "memory.logit_chunks",
    "memory.attention",
)
"""Prefixes of configuration keys. If such a key differs, sums have another order, and bits are not
compared."""


THREADS = "BLAS threads"
"""The number of a rank's threads, of which the bits of matrix products depend."""
ORDER = (GRADIENT, PARAMETERS)
"""The order in which a step writes buffers; optimizer state comes last."""


class Digests(NamedTuple):
    """The digests of a step.

    tensors  {buffer/tensor: digest over all ranks}
    ranks    digest of each rank
    """

    tensors: Mapping[str, str]
    ranks: list[str]


class ComparedRun(NamedTuple):
    """One of two compared runs.

    ranks, hosts  of its last start
    threads       BLAS threads of a rank; 0: its records do not say
    is_mixed      whether it was resumed in another layout
    logged        {step: (loss, gradient norm)}; None for a number that is not finite
    digests       {step: digests}
    saved         {step: checkpoint}
    last          the last step of a record
    """

    folder: Path
    config: Config
    ranks: int
    hosts: int
    threads: int
    is_mixed: bool
    logged: dict[int, tuple[float | None, float | None]]
    digests: dict[int, Digests]
    saved: dict[int, Path]
    last: int


def read(folder: Path) -> ComparedRun:
    """Read a run; ConfigError if there is none in the folder."""
    if not is_run(folder):
        raise ConfigError(f"There is no run in {folder}.", "Name the directories of two runs.")
    records = metrics_of(folder)
    starts = [record for record in records if record.get("event") in ("start", "resume")]
    start = starts[-1] if starts else {}
    stepped = [record for record in records if type(record.get("step")) is int]
    digests = {
        record["step"]: _digests(record) for record in stepped if record.get("event") == "digests"
    }
    return ComparedRun(
        folder,
        configuration(folder),
        _count(start.get("ranks")),
        _count(start.get("hosts")),
        _count(start.get("blas_threads"), 0),
        _is_mixed(starts),
        {
            record["step"]: (_number(record["loss"]), _number(record["grad_norm"]))
            for record in stepped
            if "event" not in record and "loss" in record and "grad_norm" in record
        },
        {step: of_step for step, of_step in digests.items() if of_step},
        {
            int(path.name.strip(".").split("-")[1].split(".")[0]): path
            for path in steps(folder / CHECKPOINTS)
        },
        max((record["step"] for record in stepped), default=0),
    )


def _is_mixed(starts: Sequence[Mapping[str, Any]]) -> bool:
    sizes = {(_count(start.get("ranks")), _count(start.get("hosts"))) for start in starts}
    changed = [start.get("changed") for start in starts]
    keys = [key for entry in changed if isinstance(entry, dict) for key in entry]
    return len(sizes) > 1 or any(key.startswith(HOW) for key in keys)


def _count(value: Any, otherwise: int = 1) -> int:
    return value if type(value) is int and value > 0 else otherwise


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _digests(record: Mapping[str, Any]) -> Digests | None:
    """Return the digests of a record; None if it is damaged."""
    tensors, ranks = record.get("tensors"), record.get("ranks")
    if not isinstance(tensors, dict) or not isinstance(ranks, list):
        return None
    return Digests(tensors, ranks)


def changed_keys(one: ComparedRun, other: ComparedRun) -> dict[str, tuple[Any, Any]]:
    """Return {key: the values of both runs} of all keys that differ, but for the directory.

    THREADS is among them.
    """
    first, second = one.config.flat(), other.config.flat()
    changed = {key: (first[key], second[key]) for key in first if first[key] != second[key]}
    if one.threads and other.threads and one.threads != other.threads:
        changed[THREADS] = one.threads, other.threads
    return {key: values for key, values in changed.items() if key != "run.out"}


def are_comparable_by_bits(one: ComparedRun, other: ComparedRun) -> bool:
    """Return whether equal runs of these configurations have equal bits."""
    if one.is_mixed or other.is_mixed or (one.ranks, one.hosts) != (other.ranks, other.hosts):
        return False
    return not any(key.startswith(HOW) for key in changed_keys(one, other))


def order(name: str) -> tuple[int, str]:
    """Return the sorting key of a buffer/tensor: gradients come first, optimizer state last."""
    buffer, _, tensor = name.partition("/")
    return ORDER.index(buffer) if buffer in ORDER else len(ORDER), tensor
