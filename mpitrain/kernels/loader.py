"""Kernels by name: `Kernels.launch` compiles one at its first use, checks the arguments, and starts
it on a GPU or in the simulator.
"""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.source import FOLDER, KernelParameter, Signature, SourceFile, package_sources

GRAIN = 8  # registers of a thread are allocated in multiples of this


class Multiprocessor(NamedTuple):
    """The limits of a multiprocessor, for all resident blocks together.

    shared    bytes of shared memory
    reserved  bytes of shared memory that each block takes in addition to its own
    """

    threads: int
    registers: int
    shared: int
    reserved: int
    blocks: int

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """Return the number of blocks that run at the same time; at least 1.

        threads    per block
        registers  per thread
        shared     bytes of shared memory per block
        """
        taken = -(-registers // GRAIN) * GRAIN * threads
        return max(
            1,
            min(
                self.threads // threads,
                self.registers // taken,
                self.shared // (shared + self.reserved),
                self.blocks,
            ),
        )


H100 = Multiprocessor(threads=2048, registers=65536, shared=228 << 10, reserved=1 << 10, blocks=32)
"""Compute capability 9.0: tilings are chosen for it where no device reports its limits."""


MOST_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)

Dims = Sequence[int]


class Function(Protocol):
    """A compiled kernel; its arguments have been checked.

    An engine with `takes_plain` gets the arguments unchanged: arrays, None, numbers. It raises
    struct.error or OverflowError for a number outside its type. Any other engine gets arrays as `Argument`, and
    numbers as NumPy scalars.
    """

    def __call__(self, grid: Dims, block: Dims, arguments: Sequence[Any], shared: int) -> None:
        """Launch the kernel on the current stream."""


class Engine(Protocol):
    """A compiler and runtime of kernels: `cuda.CudaEngine` or `simulator.machine.Simulator`."""

    capability: int
    """Compute capability times ten: 80 for sm_80."""

    multiprocessors: int
    """The number of multiprocessors."""

    multiprocessor: Multiprocessor
    """The limits of each multiprocessor."""

    takes_plain: bool
    """True if the engine needs only the addresses of arrays, so that functions take arguments
    unchanged.
    """

    @property
    def name(self) -> str:
        """The device's name."""

    @property
    def has_wgmma(self) -> bool:
        """True if warpgroups multiply, as on Hopper (sm_90a)."""

    def prepare(self, source: SourceFile, defines: dict[str, str], waits: bool) -> None:
        """Compile a source into the cache, for `load`.

        If another rank is compiling it, wait for that, or with `waits` False leave it.
        """

    def load(self, source: SourceFile, signature: Signature, defines: dict[str, str]) -> Function:
        """Return one kernel of a source, compiled with these macros or taken from a cache.

        raises  KernelError if the source does not compile
        """

    def tensor_map(self, array: Any, box_rows: int) -> Any:
        """Return an argument for a parameter `TensorMap`: an array, as the copy engine of Hopper copies it.

        array     (rows, columns) or (sequences, rows, columns) of 16 bits, not empty; its rows begin at
                  multiples of 16 bytes
        box_rows  rows of the boxes that are copied, at most 256; they have 64 columns
        """

    def multiply(
        self, a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, accumulate: bool
    ) -> None:
        """Compute c = op(a) op(b), or add it to c, by a library.

        a, b, c     (rows, columns), not empty, the last dim contiguous; an operand is stored
                    transposed where so flagged. Sums are float64 for float64, otherwise float32
        raises      ConfigError if the library is not installed
        """


class Macros:
    """The macros of a launch.

    The cache of launches compares Macros by identity, not by content. Make one object per set of
    macros, and reuse it.
    """

    __slots__ = ("defines",)

    def __init__(self, **defines: Any):
        self.defines = defines


class Ready(NamedTuple):
    """A cached launch: a kernel with the checks of its arguments.

    wants  for each parameter: the dtype of an array, or None; and whether its row stride may
           exceed the row length
    """

    wants: tuple[tuple[Any, bool], ...]
    checks: list[Callable[[Any], Any]]
    function: Function


class Kernels:
    """All kernels of one device.

    engine     compiles and runs them
    folder     the folder of the .cu files
    launches   number of launches so far
    plans      a cache for callers: the results that they computed from shapes
    expected   (kernel, macros) of launches to come, in their order, as keys
    """

    def __init__(self, engine: Engine, folder: Path = FOLDER):
        self.engine = engine
        self.launches = 0
        self.plans: dict[tuple, Any] = {}
        self.expected: dict[tuple[str, tuple[tuple[str, str], ...]], None] = {}
        self._takes_plain = engine.takes_plain
        self._sources = {
            name: source for source in package_sources(folder).values() for name in source.kernels
        }
        self._ready: dict[tuple, Ready] = {}

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Any],
        shared: int = 0,
        macros: Macros | None = None,
        fresh: str = "",
        strided: str = "",
        **defines: Any,
    ) -> None:
        """Start one kernel; an empty grid starts nothing.

        grid, block   blocks and threads, up to three numbers each
        arguments     arrays, None for an absent array, and numbers
        shared        bytes of dynamic shared memory
        macros        macros of the source, such as Element="float", TILE=64; each set is compiled
                      once. Or as `defines`
        fresh         names of outputs that the kernel writes completely before it reads any:
                      undefined before the launch
        strided       names of arrays with strides among the arguments: only their last dim must be
                      contiguous
        raises        KernelError before the launch, if the arguments do not fit the kernel's
                      signature
        """
        if 0 in grid:
            return
        ready = self._ready.get((name, block, macros or tuple(defines.items()), fresh, strided))
        if ready is None:
            ready = self._first(name, block, macros, fresh, strided, defines)
        elif (
            self._takes_plain
            and len(arguments) == len(ready.wants)
            and (len(grid) == 1 or max(grid) <= MOST_BLOCKS[1])
        ):
            try:
                for value, (dtype, may_skip) in zip(arguments, ready.wants, strict=True):
                    if (
                        dtype is not None
                        and value is not None
                        and (
                            value.dtype is not dtype
                            or not (
                                value.flags.c_contiguous
                                or (may_skip and value.strides[-1] == value.itemsize)
                            )
                        )
                    ):
                        break
                else:
                    ready.function(grid, block, arguments, shared)
                    self.launches += 1
                    return
            except (struct.error, OverflowError, AttributeError):
                pass  # the error came before the launch; the checks below report it in detail
        ready.function(grid, block, self._checked(name, grid, ready, arguments), shared)
        self.launches += 1

    def prepare(self, turn: int, ranks: int) -> None:
        """Compile the expected kernels, as one of several ranks that share a cache.

        Each rank begins elsewhere, and leaves out what others are compiling. Then it waits for
        these. So `ranks` ranks take 1 / ranks of the time, but not less than the longest source.
        """
        wanted = [(self._sources[name], dict(defines)) for name, defines in self.expected]
        begin = turn * len(wanted) // ranks
        for waits in (False, True):
            for source, defines in wanted[begin:] + wanted[:begin]:
                self.engine.prepare(source, defines, waits)

    def macros(self, **defines: Any) -> Macros:
        """Return Macros with these defines, always the same object, so that launches share one
        cache entry.
        """
        kept: Macros = self.plans.setdefault(("macros", *defines.items()), Macros(**defines))
        return kept

    def _checked(
        self, name: str, grid: tuple[int, ...], ready: Ready, arguments: Sequence[Any]
    ) -> list[Any]:
        if len(arguments) != len(ready.checks):
            raise KernelError(
                f"{name} takes {len(ready.checks)} arguments, but {len(arguments)} were passed.",
                f"Its parameters: {self._parameters(name)}.",
            )
        if any(count > most for count, most in zip(grid, MOST_BLOCKS, strict=False)):
            raise KernelError(
                f"{name}: a grid of {tuple(grid)} blocks is beyond {MOST_BLOCKS}.",
                "Let each block do more, or split the arrays.",
            )
        checked = [check(argument) for check, argument in zip(ready.checks, arguments, strict=True)]
        return (
            [argument.array if isinstance(argument, Argument) else argument for argument in checked]
            if self._takes_plain
            else checked
        )

    def _first(
        self,
        name: str,
        block: tuple[int, ...],
        macros: Macros | None,
        fresh: str,
        strided: str,
        defines: dict[str, Any],
    ) -> Ready:
        if name not in self._sources:
            raise KernelError(
                f"There is no kernel `{name}`.", f"There are: {', '.join(sorted(self._sources))}."
            )
        if not 0 < prod(block) <= MOST_THREADS:
            raise KernelError(
                f"{name}: a block of {tuple(block)} is {prod(block)} threads; 1 to {MOST_THREADS} are possible.",
                "Use a smaller block and a larger grid.",
            )
        source, words = (
            self._sources[name],
            {key: str(value) for key, value in (macros.defines if macros else defines).items()},
        )
        signature = source.kernels[name]
        checks, wants = argument_checks(signature, words, fresh.split(), strided.split())
        ready = Ready(wants, checks, self.engine.load(source, signature, words))
        self._ready[name, block, macros or tuple(defines.items()), fresh, strided] = ready
        return ready

    def _parameters(self, name: str) -> str:
        return ", ".join(
            parameter.name for parameter in self._sources[name].kernels[name].parameters
        )


C_TYPES = {
    "float": "float32",
    "double": "float64",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
}
"""The possible types of parameters, by their C++ names."""

LIKE_ELEMENT = ("Result", "Mirror")
"""Type macros that default to Element if a launch does not define them, as in element.cuh."""

ELEMENTS = {dtype: name for name, dtype in C_TYPES.items()}
"""The C++ name of a dtype: the value of the macro `Element`."""


@cache
def name_of(dtype: np.dtype) -> str:
    """Return the dtype's name, from a cache.

    NumPy builds the name anew at each access: for all arrays, that took a third of a launch.
    """
    return dtype.name


class TensorMap(NamedTuple):
    """An array, as the copy engine of Hopper copies it: in boxes of 64 columns, swizzled by 128 bytes.

    encoded  by the driver: 128 bytes, which the kernel gets by value; nothing in the simulator
    """

    array: Any
    box_rows: int
    encoded: bytes = b""


BOX_COLUMNS = 64  # of 16 bits: rows of 128 bytes


def map_pitches(array: Any) -> tuple[int, ...]:
    """Return the bytes from a row to the next, and of three dims from a sequence to the next.

    Where there is only one of them, no array has to say them.
    """
    *sequences, rows, columns = array.shape
    row = array.strides[-2] if rows > 1 else columns * array.itemsize
    if not sequences:
        return (row,)
    return row, array.strides[0] if sequences[0] > 1 else rows * row


class Argument(NamedTuple):
    """An array with properties that its dtype and shape do not show.

    fresh     the kernel writes every element before it reads any: the content is undefined before
              the launch
    strided   the kernel takes the strides as arguments: only the last dim of the array must be
              contiguous
    """

    array: Any
    fresh: bool = False
    strided: bool = False

    @property
    def dtype(self) -> None:
        """Return None: by this a cached launch recognises that the argument is no plain array."""


def _misfit(kernel: str, parameter: KernelParameter, wanted: str, value: Any) -> KernelError:
    if hasattr(value, "strides"):
        value = f"of {value.dtype.name}, shape {value.shape} and strides {value.strides}"
    else:
        value = repr(value)
    return KernelError(
        f"{kernel}: argument `{parameter.name}` must be {wanted}, but is {value}.",
        "Cast or copy it first, or split arrays with too many elements.",
    )


def _array_check(
    kernel: str, parameter: KernelParameter, dtype: str, fresh: bool, strided: bool
) -> Callable[[Any], Argument]:
    """Return a check of an array; if it is `strided`, rows may have gaps."""

    def check(value: Any) -> Argument:
        argument = value if isinstance(value, Argument) else Argument(value, fresh, strided)
        array = argument.array
        if array is not None and not (
            hasattr(array, "flags")
            and name_of(array.dtype) == dtype
            and (
                array.flags.c_contiguous
                or (argument.strided and array.strides[-1] == array.itemsize)
            )
        ):
            raise _misfit(kernel, parameter, f"a contiguous array of {dtype}", array)
        return argument

    return check


def _scalar_check(
    kernel: str, parameter: KernelParameter, dtype: str
) -> Callable[[Any], np.generic]:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        numbers: Any = (int, float, np.integer, np.floating)
        most: Any = float(np.finfo(kind).max)
        least = -most
        endless: tuple[float, ...] = (inf, -inf)
    else:
        numbers, endless = (int, np.integer), ()
        least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)

    def check(value: Any) -> np.generic:
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        if not (
            is_number and (least <= value <= most or value != value or value in endless)  # or NaN
        ):
            raise _misfit(kernel, parameter, f"a number of {dtype}", value)
        return kind.type(value)

    return check


def _map_check(kernel: str, parameter: KernelParameter) -> Callable[[Any], TensorMap]:
    def check(value: Any) -> TensorMap:
        if not isinstance(value, TensorMap):
            raise _misfit(kernel, parameter, "a tensor map of the engine", value)
        return value

    return check


def argument_checks(
    signature: Signature,
    defines: Mapping[str, Any],
    fresh: Collection[str] = (),
    strided: Collection[str] = (),
) -> tuple[list[Callable[[Any], Any]], tuple[tuple[Any, bool], ...]]:
    """Return one check per parameter, and the `wants` of `Ready`.

    A check returns the argument as the engine takes it, or raises KernelError.
    fresh, strided  names of parameters
    raises          KernelError if the kernel has no such array
    """
    checks: list[Callable[[Any], Any]] = []
    wants: list[tuple[Any, bool]] = []
    types = dict.fromkeys(LIKE_ELEMENT, defines.get("Element")) | dict(defines)
    for parameter in signature.parameters:
        name = str(types.get(parameter.type, parameter.type))
        if name == "TensorMap" and not parameter.is_pointer:
            checks.append(_map_check(signature.name, parameter))
            wants.append((None, False))
            continue
        if name not in C_TYPES:
            raise KernelError(
                f"{signature.name}: parameter `{parameter.name}` has the unknown type `{name}`.",
                f"Define it at the launch, or use one of {', '.join(C_TYPES)}.",
            )
        how = signature.name, parameter, C_TYPES[name]
        if parameter.is_pointer:
            checks.append(_array_check(*how, parameter.name in fresh, parameter.name in strided))
            wants.append((np.dtype(C_TYPES[name]), parameter.name in strided))
        else:
            checks.append(_scalar_check(*how))
            wants.append((None, False))
    arrays = [parameter.name for parameter in signature.parameters if parameter.is_pointer]
    if wrong := [name for name in (*fresh, *strided) if name not in arrays]:
        raise KernelError(
            f"{signature.name} has no array `{wrong[0]}`.", f"Its arrays: {', '.join(arrays)}."
        )
    return checks, tuple(wants)
