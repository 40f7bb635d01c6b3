"""Comparison of two runs: the first step at which they differ, bit for bit or within a tolerance."""

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.files import reading
from mpitrain.formats.safetensors_files import Located, located, read_into
from mpitrain.formats.tensors import StoredTensor
from mpitrain.run.checkpoint.loading import parameters
from mpitrain.run.checkpoint.manifest import read_manifest, steps, verify
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
"""Prefixes of keys that change the order of sums: if one differs, bits are not compared."""
THREADS = "BLAS threads"
"""Name of a rank's number of BLAS threads, on which the bits of matrix products depend."""
ORDER = (GRADIENT, PARAMETERS)
"""The order in which a step writes buffers; optimizer state comes last."""


class Digests(NamedTuple):
    """The digests that a run recorded at one step.

    tensors  {buffer/tensor: digest over all ranks}
    ranks    by rank: digest of all that it stores
    """

    tensors: Mapping[str, str]
    ranks: list[str]


class ComparedRun(NamedTuple):
    """One of two compared runs, as its directory describes it.

    ranks, hosts  numbers of them in its last start
    threads       BLAS threads of a rank; 0: the records do not say
    is_mixed      whether it was resumed in another layout
    logged        {step: (loss, gradient norm)}; None for a number that is not finite
    digests       {step: digests}
    saved         {step: checkpoint}
    last          the last step with a record
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


def read_run(folder: Path) -> ComparedRun:
    """Read a run directory; ConfigError if it has no run."""
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
    """Return {key: the values of both runs} of the keys that differ, run.dir apart.

    The number of BLAS threads counts as a key, THREADS.
    """
    first, second = one.config.flat(), other.config.flat()
    changed = {key: (first[key], second[key]) for key in first if first[key] != second[key]}
    if one.threads and other.threads and one.threads != other.threads:
        changed[THREADS] = one.threads, other.threads
    return {key: values for key, values in changed.items() if key != "run.out"}


def are_comparable_by_bits(one: ComparedRun, other: ComparedRun) -> bool:
    """Return whether equal trainings with these configurations have equal bits."""
    if one.is_mixed or other.is_mixed or (one.ranks, one.hosts) != (other.ranks, other.hosts):
        return False
    return not any(key.startswith(HOW) for key in changed_keys(one, other))


def order(name: str) -> tuple[int, str]:
    """Return the sorting key of a name buffer/tensor: gradients are first, optimizer state is last."""
    buffer, _, tensor = name.partition("/")
    return ORDER.index(buffer) if buffer in ORDER else len(ORDER), tensor


CHUNK = 1 << 20
"""Number of elements of a tensor that are read at once, with their random signs."""


class Apart(NamedTuple):
    """A tensor that differs between two checkpoints.

    name      buffer/tensor
    elements  number of elements that differ; -1: one run lacks the tensor, or has another shape
    of        number of all its elements
    most      largest absolute difference
    """

    name: str
    elements: int
    of: int
    most: float


class TensorSums(NamedTuple):
    """Three numbers of a tensor, in float64: sum, 2-norm, and projection on random signs.

    If one element differs by x, the projection differs by x or -x.
    """

    sum: float
    norm: float
    projection: float


class Beyond(NamedTuple):
    """A tensor of which two runs differ by more than the tolerance.

    measure  which of the numbers in TensorSums differs most
    apart    the difference of this number, relative to the norm of the tensor
    """

    name: str
    measure: str
    apart: float


def different_bits(one: Path, other: Path) -> list[Apart]:
    """Compare all parameters and state in two checkpoints of one layout, bit for bit.

    raises  CheckpointError if one of them is damaged
    """
    first, second = _stored(one), _stored(other)
    differing = [Apart(name, -1, 0, math.inf) for name in sorted(first.keys() ^ second.keys())]
    for name in sorted(first.keys() & second.keys(), key=order):
        left, right = _read(first[name]), _read(second[name])
        if first[name].shape != second[name].shape or left.dtype != right.dtype:
            differing.append(Apart(name, -1, left.size, math.inf))
        elif left.tobytes() != right.tobytes():
            bits = f"u{left.dtype.itemsize}"
            differ = left.view(bits) != right.view(bits)
            with np.errstate(invalid="ignore", over="ignore"):
                most = np.abs(left.astype(np.float64) - right.astype(np.float64)).max()
            differing.append(Apart(name, int(differ.sum()), left.size, float(most)))
    return differing


def _stored(path: Path) -> dict[str, Located]:
    """Return {its file and key: location} of each array in a verified checkpoint."""
    manifest = read_manifest(path)
    verify(path, manifest, 0, 1)
    arrays = {f"{PARAMETERS}/{name}": tensor.located for name, tensor in parameters(path).items()}
    try:
        tensors = {
            file: located(path / file)[1] for file in {piece.file for piece in manifest.stored}
        }
        for piece in manifest.stored:
            name = f"{piece.name}/{piece.part.tensor}"
            # Several files may have regions of one tensor.
            name += f" in {piece.file}, {piece.key}" if name in arrays else ""
            arrays[name] = tensors[piece.file][piece.key]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}.", "Compare runs with whole checkpoints."
        ) from None
    return arrays


def _read(located: Located) -> np.ndarray:
    """Return a tensor, 1-D, in the dtype of the file."""
    array = np.empty(math.prod(located.shape), located.numpy)
    with reading(located.file) as file:
        read_into(file.fileno(), array, located.start)
    return array


def beyond(one: Path, other: Path, tolerance: float, skips_keys: bool) -> tuple[list[Beyond], int]:
    """Compare the parameters of two checkpoints of any layouts by the TensorSums of each.

    tolerance   of a difference, relative to the 2-norm of the tensor; sums may differ by sqrt(size)
                times as much
    skips_keys  whether to leave out the biases of keys, whose gradient is only rounding error
    returns     the tensors that differ by more, the farthest first; the number of compared tensors
    """
    for path in (one, other):
        verify(path, read_manifest(path), 0, 1)
    first, second = parameters(one), parameters(other)
    exceeding = [Beyond(name, "shape", math.inf) for name in first.keys() ^ second.keys()]
    for name in sorted(first.keys() & second.keys()):
        left, right = _flat(first[name], name, skips_keys), _flat(second[name], name, skips_keys)
        if left.shape != right.shape:
            exceeding.append(Beyond(name, "shape", math.inf))
            continue
        a, b = sums_of(left, name), sums_of(right, name)
        scale = max(a.norm, b.norm) or 1.0
        gaps = {
            "sum": abs(a.sum - b.sum) / (scale * math.sqrt(max(1, left.size))),
            "norm": abs(a.norm - b.norm) / scale,
            "projection": abs(a.projection - b.projection) / scale,
        }
        worst = max(gaps, key=lambda key: (not math.isfinite(gaps[key]), gaps[key]))
        if not gaps[worst] <= tolerance:
            exceeding.append(Beyond(name, worst, gaps[worst]))
    return sorted(exceeding, key=lambda tensor: -tensor.apart), len(first)


def _flat(stored: StoredTensor, name: str, skips_keys: bool) -> np.ndarray:
    """Return the elements of a tensor, 1-D; without biases of keys if these are left out."""
    array = _read(stored.located)
    if skips_keys and name.endswith("qkv.bias") and array.size % 3 == 0:
        return np.delete(array.reshape(3, -1), 1, 0).reshape(-1)
    return array


def sums_of(array: np.ndarray, name: str) -> TensorSums:
    """Return the TensorSums of a tensor.

    array  1-D
    name   determines the random signs
    """
    total, squares, projection = 0.0, 0.0, 0.0
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    for values in _chunks(array):
        signs = 1.0 - 2.0 * draw.integers(0, 2, len(values))
        total += float(values.sum())
        squares += float(values @ values)
        projection += float(values @ signs)
    return TensorSums(total, math.sqrt(squares), projection)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), CHUNK):
        yield array[start : start + CHUNK].astype(np.float64)


TOLERANCES = {"sgd": 1e-5, "momentum": 1e-5}
"""Relative tolerance of losses in float32 between layouts, by rule; any other rule has FLOAT32."""

FLOAT32, FLOAT64 = 1e-4, 1e-9


class Unequal(NamedTuple):
    """The first record of one kind that differs between two runs.

    logged   (loss, gradient norm) of both runs; None: not finite
    tensors  those whose digests differ, in the order of a step
    ranks    those whose digests differ
    apart    tensors of a checkpoint that differ
    """

    step: int
    logged: tuple[Any, Any] | None = None
    tensors: Sequence[str] = ()
    ranks: Sequence[int] = ()
    apart: Sequence[Apart] = ()


class Bits(NamedTuple):
    """The comparison of two runs of one layout, bit for bit.

    unequal  {kind of record: the first one that differs}; kinds are logged, digests and checkpoint
    equal    the last earlier step at which the whole state is known to be equal; -1: none
    last     the last step with a record of both runs
    common   number of records that both runs have
    """

    unequal: dict[str, Unequal]
    equal: int
    last: int
    common: int

    @property
    def first(self) -> int | None:
        """The first step at which the runs differ; None if all common records are equal."""
        return min((difference.step for difference in self.unequal.values()), default=None)


def compare_bits(one: ComparedRun, other: ComparedRun) -> Bits:
    """Compare all records that two runs of one layout have in common, in the order of steps.

    raises  ConfigError if they have none; CheckpointError for a damaged checkpoint
    """
    every = sorted(_shared(one, other))
    if not every:
        raise nothing_common(one, other)
    equal, unequal = -1, dict[str, Unequal]()
    for step, _, kind in every:
        if kind in unequal:
            continue
        if difference := _compared(kind, step, one, other):
            unequal[kind] = difference
        elif not unequal and kind != "logged":
            equal = step
    return Bits(unequal, equal, every[-1][0], len(every))


def _compared(kind: str, step: int, one: ComparedRun, other: ComparedRun) -> Unequal | None:
    if kind == "checkpoint":
        apart = different_bits(one.saved[step], other.saved[step])
        return Unequal(step, apart=apart) if apart else None
    left, right = getattr(one, kind)[step], getattr(other, kind)[step]
    if left == right:
        return None
    if kind == "logged":
        return Unequal(step, logged=(left, right))
    names = {*left.tensors, *right.tensors}
    tensors = [name for name in names if left.tensors.get(name) != right.tensors.get(name)]
    pairs = enumerate(zip(left.ranks, right.ranks, strict=False))
    ranks = [rank for rank, (first, second) in pairs if first != second]
    return Unequal(step, tensors=sorted(tensors, key=order), ranks=ranks)


def _shared(one: ComparedRun, other: ComparedRun) -> Iterator[tuple[int, int, str]]:
    """Yield (step, order within the step, kind) of each record that both runs have."""
    yield from ((step, 0, "logged") for step in one.logged.keys() & other.logged.keys())
    yield from ((step, 1, "digests") for step in one.digests.keys() & other.digests.keys())
    yield from ((step, 2, "checkpoint") for step in one.saved.keys() & other.saved.keys())


def start_of_replay(first: int, one: ComparedRun, other: ComparedRun) -> int:
    """Return the step of the last common checkpoint before a difference; 0: the initial parameters.

    Both runs have this checkpoint, and it is equal: otherwise it would be the first difference.
    """
    common = one.saved.keys() & other.saved.keys()
    return max((step for step in common if step < first), default=0)


def nothing_common(one: ComparedRun, other: ComparedRun) -> ConfigError:
    return ConfigError(
        f"diff compares steps that both runs recorded, but {one.folder} ends at step {one.last}, "
        f"{other.folder} at step {other.last}, and they have none in common.",
        "Let them run, with equal run.log_every or checkpoint.every.",
    )


def tolerance(config: Config) -> float:
    """Return the relative tolerance between equal trainings in two layouts.

    It is the tolerance for losses over 20 steps. There is none for mixed precision.

    raises  ConfigError in mixed precision
    """
    if config.precision.is_half:
        raise ConfigError(
            "Runs of two layouts are compared in float32 or float64, but precision.compute is "
            f"{config.precision.compute}.",
            "Compare runs of one layout, or train both in float32.",
        )
    if config.precision.stored == "float64":
        return FLOAT64
    return TOLERANCES.get(config.optimizer.name, FLOAT32)


def compare_numbers(
    one: ComparedRun, other: ComparedRun, limit: float
) -> tuple[tuple[int, str, float, float] | None, list[tuple[int, list[Beyond], int]]]:
    """Compare two runs of different layouts, within a relative tolerance.

    returns  what `first_beyond` returns; then for each common checkpoint: its step, the tensors
             beyond the tolerance, and the number of all tensors
    raises   as `compare_bits`
    """
    steps = sorted(one.saved.keys() & other.saved.keys())
    if not steps and not one.logged.keys() & other.logged.keys():
        raise nothing_common(one, other)
    # AdamW and Lion make a step of the rounding that is the gradient of key biases.
    skips_keys = limit == FLOAT32
    compared = [
        (step, *beyond(one.saved[step], other.saved[step], limit, skips_keys)) for step in steps
    ]
    return first_beyond(one, other, limit), compared


def first_beyond(
    one: ComparedRun, other: ComparedRun, limit: float
) -> tuple[int, str, float, float] | None:
    """Return the first logged number that differs by more than a tolerance: (step, name, both values).

    None if there is none.
    """
    for step in sorted(one.logged.keys() & other.logged.keys()):
        pairs = zip(("loss", "grad_norm"), one.logged[step], other.logged[step], strict=True)
        for name, left, right in pairs:
            a, b = (math.nan if value is None else value for value in (left, right))
            if left is None and right is None:
                continue
            # Gradient norms are sums of squares: law 6 bounds them in float64 alone.
            bound = limit if name == "loss" or limit == FLOAT64 else 10 * limit
            if not abs(a - b) <= bound * max(abs(a), abs(b)):
                return step, name, a, b
    return None


SHOWN = 8
"""Largest number of tensors in the list."""


def keys_that_differ(one: ComparedRun, other: ComparedRun) -> Iterator[str]:
    changed = changed_keys(one, other)
    for key, values in changed.items():
        left, right = (json.dumps(value, default=str) for value in values)
        yield f"{key}: {left} and {right}"
    if not changed:
        yield "The configurations are equal."


def lines_of_bits(comparison: Bits, one: ComparedRun, other: ComparedRun) -> Iterator[str]:
    high, unequal = comparison.first, comparison.unequal
    if high is None:
        yield f"All {comparison.common} common records up to step {comparison.last} are equal, bit for bit."
        if one.last != other.last:
            yield f"One run goes on to step {max(one.last, other.last)}."
        return
    low = max(0, comparison.equal) + 1
    where = f"step {high}" if low >= high else f"steps {low} to {high}"
    since = (
        f"after step {comparison.equal} their states were equal"
        if comparison.equal >= 0
        else "no earlier step has digests or a checkpoint of both"
    )
    yield f"The runs first differ in {where}: {since}."
    if logged := unequal.get("logged"):
        assert logged.logged
        for name, left, right in zip(("loss", "gradient norm"), *logged.logged, strict=True):
            if left != right:
                yield f"  step {logged.step}: {name} {left!r} and {right!r}"
    if digests := unequal.get("digests"):
        ranks = ", ".join(map(str, digests.ranks))
        yield f"  step {digests.step}: digests on rank(s) {ranks} of {some_of(digests.tensors)}"
    if saved := unequal.get("checkpoint"):
        yield f"  checkpoint of step {saved.step}: {len(saved.apart)} tensor(s) differ"
        yield from map(_apart, saved.apart[:SHOWN])


def some_of(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def _apart(tensor: Apart) -> str:
    if tensor.elements < 0:
        return f"    {tensor.name}: another shape, or only in one run"
    return f"    {tensor.name}: {tensor.elements} of {tensor.of} elements, at most {tensor.most:.3g} apart"


def lines_of_numbers(
    limit: float,
    logged: tuple[int, str, float, float] | None,
    compared: Sequence[tuple[int, list[Beyond], int]],
) -> Iterator[str]:
    """Yield the lines of a comparison of two layouts.

    limit     the tolerance
    logged    the first number beyond it, as `first_beyond` returns it
    compared  by common checkpoint: (step, tensors beyond the tolerance, number of compared tensors)
    """
    yield (
        f"The work is divided in another way, so rounding differs: tolerance {limit:g}, relative, a law for the "
        "losses of 20 steps."
    )
    if logged:
        step, name, left, right = logged
        yield f"  step {step}: {name} {left!r} and {right!r}"
    else:
        yield "  All common losses and gradient norms are within it."
    for step, tensors, of in compared:
        yield f"  checkpoint of step {step}: {len(tensors)} of {of} tensors beyond it, by sum, norm and projection"
        for tensor in tensors[:SHOWN]:
            yield f"    {tensor.name}: {tensor.measure} {tensor.apart:.3g} apart"
