"""What launches share: the kernels of a device and its product, numbers that change between steps,
macros of element types, blocks and threads, and sums in a fixed order.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import ELEMENTS, Kernels, Macros, name_of
from mpitrain.machine.backend import Backend, address


class Typed(Macros):
    """Macros that follow from the dtypes of arrays.

    run  RUN of element.cuh: the number of elements of each array that a thread takes at a time
    """

    __slots__ = ("run",)

    def __init__(self, arrays: Sequence[Any], defines: Mapping[str, Any]):
        super().__init__(**defines)
        self.run = 8 if any(array.itemsize == 2 for array in arrays) else 4


class Kind(NamedTuple):
    """The macros and the dtype of sums of one float dtype, cached in `KINDS`.

    sums    dtype of sums over elements of this dtype
    macros  Element and Sum of element.cuh
    """

    sums: np.dtype
    macros: Typed


class Kinds(dict):
    def __missing__(self, dtype: np.dtype) -> Kind:
        like = np.empty(0, dtype)
        kind = self[dtype] = Kind(np.dtype(sum_type(like)), Typed([like], element(like)))
        return kind


KINDS = Kinds()


class ByDtypes(dict):
    """A cache of macros by the dtypes of some arrays; `make` builds missing entries from empty
    arrays.
    """

    def __init__(self, make: Callable[..., dict[str, Any]]):
        super().__init__()
        self._make = make

    def __missing__(self, dtypes: tuple[np.dtype, ...]) -> Typed:
        likes = [np.empty(0, dtype) for dtype in dtypes]
        typed = self[dtypes] = Typed(likes, self._make(*likes))
        return typed


class GroupRuns(NamedTuple):
    """The parameter groups of R runs of a flat buffer, as an argument of kernels.

    table   (1 + 2 R,) int64: R, the start of each run, the group of each run; None: one group
    groups  (factor of the learning rate, weight decay) of each group
    """

    table: Any
    groups: tuple[tuple[float, float], ...]


class LaunchNumbers:
    """Small arrays in the memory of a backend: the numbers of a launch that change between steps,
    such as the learning rate.

    There is one array for each operation and dtype. It is written again only if its numbers change.
    A launch that is still queued reads the old numbers, because copies and launches follow the
    order of the stream.
    """

    def __init__(self, backend: Backend):
        self._constant: Any = None
        self._backend = backend
        self._arrays = dict[tuple[np.dtype, Hashable], tuple[Any, tuple[float, ...]]]()
        self._kept = dict[Hashable, Any]()

    def kept(self, key: Hashable, made: Callable[[], np.ndarray]) -> Any:
        """Return an array that never changes, copied to the memory of the backend at the first call."""
        if key not in self._kept:
            self._kept[key] = self._backend.from_host(made())
        return self._kept[key]

    def of(self, like: Any, *values: float, of: Hashable = "") -> Any:
        """Return an array of these values, in the dtype that sums elements like those of `like`.

        of  name of the operation, if it alternates with others that take numbers: each then has an
            array of its own, and does not overwrite another's
        """
        key = KINDS[like.dtype].sums, of
        entry = self._arrays.get(key)
        return entry[0] if entry and entry[1] == values else self._write(key, values)

    def _write(self, key: tuple[np.dtype, Hashable], values: tuple[float, ...]) -> Any:
        if key not in self._arrays:
            self._arrays[key] = self._backend.zeros(max(4, len(values)), key[0]), ()
        array, _ = self._arrays[key]
        padding = [0] * (array.size - len(values))
        self._backend.put(array, np.array([*values, *padding], key[0]))
        self._arrays[key] = array, values
        return array

    def rates(
        self,
        like: Any,
        lr: float,
        weight_decay: Any,
        scale: float,
        first: float = 1.0,
        second: float = 1.0,
    ) -> tuple[Any, Any]:
        """Return two arguments of the kernel of an element-wise step: the table of `GroupRuns` or
        None, and the array of scale, two corrections, and (learning rate, weight decay) of each group.

        first, second  corrections of the moments; a kernel reads the groups from number 3 on
        weight_decay   a number, or `GroupRuns`, whose factors multiply lr
        """
        if isinstance(weight_decay, GroupRuns):
            table, groups = weight_decay
            rates = [each for factor, decay in groups for each in (lr * factor, decay)]
            values = scale, first, second, *rates
        else:
            table, groups, values = None, weight_decay, (scale, first, second, lr, weight_decay)
        key = KINDS[like.dtype].sums, groups
        entry = self._arrays.get(key)
        return table, entry[0] if entry and entry[1] == values else self._write(key, values)

    def runs(self, runs: Sequence[Any]) -> GroupRuns:
        """Copy the starts and groups of ascending runs to the memory of the backend."""
        of_run = [(run.lr, run.weight_decay) for run in runs]
        groups = {rates: index for index, rates in enumerate(dict.fromkeys(of_run))}
        starts = [run.start - runs[0].start for run in runs]
        table = [len(runs), *starts, *(groups[rates] for rates in of_run)]
        is_one = len(groups) == 1
        return GroupRuns(
            None if is_one else self._backend.from_host(np.array(table, np.int64)), tuple(groups)
        )

    def integer(self, value: int) -> Any:
        """Return the array of one integer of 64 bits, such as the step of a random mask."""
        key = np.dtype(np.int64), ""
        entry = self._arrays.get(key)
        return entry[0] if entry and entry[1] == (value,) else self._write(key, (value,))

    def constant(self, values: np.ndarray) -> Any:
        """Return an array of these float32 values; every call must pass the same values."""
        if self._constant is None:
            self._constant = self._backend.zeros(values.size, values.dtype)
            self._backend.put(self._constant, values)
        return self._constant


class Launcher:
    """The first argument of a body on kernels: the kernels of a device, as `Kernels`, and beside them

    multiply      the matrix product that device.gemm chooses, one of product.py without its `kernels`
    tiles         the table that this product takes its tiles from; None: the default
    numbers       the `LaunchNumbers` of these operations
    tensor_cores  as device.tensor_cores: by what attention multiplies
    """

    def __init__(
        self, kernels: Any, multiply: Callable[..., None], backend: Backend, tensor_cores: str
    ):
        self.engine, self.plans = kernels.engine, kernels.plans
        self.launch, self.macros = kernels.launch, kernels.macros
        self.multiply, self.numbers = partial(multiply, kernels), LaunchNumbers(backend)
        self.tensor_cores = tensor_cores
        self.tiles: Any = self.multiply.keywords.get("table")


FLOATS = ("float32", "float64", "float16", "bfloat16")
INDICES = ("int32", "int64")


def c_type(array: Any) -> str:
    """Return the C++ name of a float array's elements."""
    name = name_of(array.dtype)
    if name not in FLOATS:
        raise KernelError(
            f"Kernels compute with {', '.join(FLOATS)}, not with {name}.", "Cast the array first."
        )
    return ELEMENTS[name]


def sum_type(array: Any) -> str:
    """Return the dtype of sums over this array's elements: float64 for float64, else float32."""
    return "float64" if name_of(array.dtype) == "float64" else "float32"


def element(array: Any) -> dict[str, Any]:
    """Return the macros Element and Sum of element.cuh."""
    return {"Element": c_type(array), "Sum": ELEMENTS[sum_type(array)]}


def result(array: Any, like: Any) -> dict[str, Any]:
    """Return the macro Result of element.cuh, if `array` is stored in another dtype than `like`.

    Kernels compute with the dtype of `like`.
    """
    return {} if array.dtype == like.dtype else {"Result": c_type(array)}


def in_chunks(*arrays: Any) -> int:
    """Return CHUNKED: 1 if all rows of all arrays begin at multiples of 16 bytes, otherwise 0.

    With 1, a kernel copies 16 bytes at a time.
    """
    return int(
        all(
            address(array) % 16 == 0 and not any(step % 16 for step in array.strides[:-1])
            for array in arrays
        )
    )


def index(array: Any) -> dict[str, Any]:
    if name_of(array.dtype) not in INDICES:
        raise KernelError(
            f"Tokens and targets are {' or '.join(INDICES)}, not {array.dtype.name}.",
            "Cast them first.",
        )
    return {"Index": ELEMENTS[name_of(array.dtype)]}


INDEXED = ByDtypes(lambda x, indices: element(x) | index(indices))
"""Macros by the dtypes of (the array that a kernel computes with, tokens or targets)."""


POINTWISE = (256,)  # threads per block of element-wise kernels
ROWS = (128,)  # threads per block of kernels with one warp per row: four rows a block
# Threads per block of kernels with one block per row, for long rows. They have enough loads in
# flight for the full memory bandwidth.
WIDE_ROWS = (1024,)
MOST_BLOCKS = 2048  # blocks of a kernel that loops over its data: enough to fill any GPU

# Bytes of shared memory per block, by compute capability.
# A device uses the largest entry that is not above its own capability.
SHARED = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    120: 99 << 10,
}

# shared memory, in bytes, that a kernel may need in addition to the rows it stores there
SCRATCH = 2 << 10


def most_shared(kernels: Kernels) -> int:
    """Return the bytes of shared memory that a block may have on this device."""
    return shared_of(kernels.engine.capability)


@cache
def shared_of(capability: int) -> int:
    """Return the bytes of shared memory that a block may have at a compute capability."""
    return SHARED[max((known for known in SHARED if known <= capability), default=min(SHARED))]


def blocks(count: int, each: int = 1) -> tuple[int]:
    """Return a grid for `count` elements, `each` elements per thread at a time; (0,) for none."""
    return (min(-(-count // (each * POINTWISE[0])), MOST_BLOCKS),)


def row_blocks(rows: int) -> tuple[int]:
    """Return a grid with one warp per row."""
    return (-(-rows // 4),)


def pointwise(
    kernels: Kernels, name: str, arguments: tuple, macros: Typed, fresh: str = ""
) -> None:
    """Launch an element-wise kernel; its first argument is the number of elements."""
    grid = blocks(arguments[0], macros.run)
    kernels.launch(name, grid, POINTWISE, arguments, macros=macros, fresh=fresh)


def by_rows(kernels: Kernels, name: str, arguments: tuple, macros: Macros, fresh: str = "") -> None:
    """Launch a kernel with one warp per row; its first argument is the number of rows."""
    grid = row_blocks(arguments[0])
    kernels.launch(name, grid, ROWS, arguments, macros=macros, fresh=fresh)


def parts(rows: int, across: int) -> int:
    """Return the number of parts of rows in a sum down columns: enough to fill a GPU.

    There are at most rows / 64 parts, rounded up.
    across  blocks across the columns
    """
    return max(1, min(-(-rows // 64), 1024 // max(1, across)))


# Threads of the kernels that sum down columns: 8 across, each with several columns, and 32 rows at
# a time.
COLUMNS = (8, 32)


def add_parts(kernels: Kernels, sums: Any, out: Any, scale: float, other: Any = None) -> None:
    """Compute out = scale out + the sum of the rows of `sums`.

    sums   (P, N) in the dtype of sums; with `other`: (2, P, N)
    other  (N,), receives the sum of sums[1]; None: out is the only result
    """
    macros = KINDS[out.dtype].macros
    across = -(-out.size // (8 * macros.run))
    kernels.launch(
        "add_parts",
        (across,) if other is None else (across, 2),
        COLUMNS,
        (sums.shape[-2], out.size, sums, float(scale), out, other),
        macros=macros,
        fresh="" if scale else "y other",
    )


def sum_rows(kernels: Kernels, x: Any, out: Any, scale: float, arena: Any) -> None:
    """Compute out = scale out + the sum of x over its rows.    x: (M, N); out: (N,)"""
    rows, columns = x.shape
    kind = KINDS[x.dtype]
    across = -(-columns // (8 * kind.macros.run))
    sums = arena.take((parts(rows, across), columns), kind.sums)
    kernels.launch(
        "column_sums",
        (across, len(sums)),
        COLUMNS,
        (rows, columns, x, sums),
        macros=kind.macros,
        fresh="parts",
    )
    add_parts(kernels, sums, out, scale)


def total(kernels: Kernels, partial: Any, arena: Any) -> Any:
    """Return the sum of each row, (rows,) float64, of a float64 array (rows, count)."""
    rows, count = partial.shape
    result = arena.take((rows,), "float64")
    kernels.launch(
        "total",
        (1, rows),
        POINTWISE,
        (count, partial, result),
        macros=KINDS[partial.dtype].macros,
        fresh="result",
    )
    return result


def sum_all(kernels: Kernels, x: Any, arena: Any) -> Any:
    """Return the sum of a flat array, as a float64 array without dims."""
    partial = arena.take((1, max(blocks(x.size, KINDS[x.dtype].macros.run)[0], 1)), "float64")
    kernels.launch(
        "sum_parts",
        (partial.size,),
        POINTWISE,
        (x.size, x, partial),
        macros=KINDS[x.dtype].macros,
        fresh="parts",
    )
    return total(kernels, partial, arena).reshape(())
