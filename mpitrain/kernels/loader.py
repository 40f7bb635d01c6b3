"""Kernels by name: found in the sources, compiled on first use, checked and launched, on a GPU or in the simulator."""

import struct
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import Argument, argument_checks
from mpitrain.kernels.multiprocessor import Multiprocessor
from mpitrain.kernels.source import FOLDER, Signature, SourceFile, package_sources

MOST_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)

Dims = Sequence[int]


class Function(Protocol):
    """A compiled kernel. Arguments are checked.

    To an engine that takes them plain they come as the launch has them: arrays, None, numbers; a number beyond its type is a
    struct.error. To any other, arrays come as `Argument`, and numbers as NumPy scalars.
    """

    def __call__(self, grid: Dims, block: Dims, arguments: Sequence[Any], shared: int) -> None:
        """Launch it on the current stream."""


class Engine(Protocol):
    """What compiles and runs kernels: `cuda.CudaEngine` or `simulator.machine.Simulator`."""

    capability: int
    """Compute capability times ten: 80 for sm_80."""

    multiprocessors: int
    """How many blocks run at a time where each needs a multiprocessor of its own."""

    multiprocessor: Multiprocessor
    """What each has room for."""

    takes_plain: bool
    """Whether its functions take arguments as they are: one that looks at nothing but addresses."""

    @property
    def name(self) -> str:
        """The device, in words."""

    def load(self, source: SourceFile, signature: Signature, defines: dict[str, str]) -> Function:
        """Compile the source under the defines (or take it from a cache) and return one of its kernels."""

    def multiply(
        self, a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, accumulate: bool
    ) -> None:
        """c = op(a) op(b), or added to it, by a library; sums in float32, of float64 in float64.

        a, b, c   (rows, columns), the last dim contiguous; stored transposed where so flagged; none may be empty
        """


class Macros:
    """The macros of a launch. A launch is found again by the object, not by what is in it: make one for each set, and keep it."""

    __slots__ = ("defines",)

    def __init__(self, **defines: Any):
        self.defines = defines


class Ready(NamedTuple):
    """A kernel that has been launched before.

    wants  of each parameter: the dtype of an array, or None; and whether its rows may lie apart
    """

    wants: tuple[tuple[Any, bool], ...]
    checks: list[Callable[[Any], Any]]
    function: Function


class Kernels:
    """All kernels of one device.

    engine     what compiles and runs them
    folder     where the .cu files are
    launches   how many were started so far
    plans      what those who launch have worked out from shapes, to be found again
    """

    def __init__(self, engine: Engine, folder: Path = FOLDER):
        self.engine = engine
        self.launches = 0
        self.plans: dict[tuple, Any] = {}
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
        """Start one kernel; with an empty grid do nothing.

        grid, block   blocks and threads, up to three numbers each
        arguments     arrays, None for an absent array, and numbers
        shared        bytes of dynamic shared memory
        macros        of the source: Element="float", TILE=64; each set is compiled once. Or as `defines`
        fresh         names of outputs that the kernel writes whole before it reads any: undefined before the launch
        strided       names of arrays of which the kernel is told the strides: only their last dim need be contiguous
        raises        KernelError before the launch, if the arguments do not fit the kernel's signature
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
            except (struct.error, AttributeError):
                pass  # before the launch: the checks say more
        ready.function(grid, block, self._checked(name, grid, ready, arguments), shared)
        self.launches += 1

    def macros(self, **defines: Any) -> Macros:
        """Macros with these defines, always the same object: many shapes are launched with one set."""
        kept: Macros = self.plans.setdefault(("macros", *defines.items()), Macros(**defines))
        return kept

    def _checked(
        self, name: str, grid: tuple[int, ...], ready: Ready, arguments: Sequence[Any]
    ) -> list[Any]:
        """The arguments as the engine takes them, each of which has been looked at."""
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
            [each.array if isinstance(each, Argument) else each for each in checked]
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
        """Load a kernel, and see what can be seen of a launch before its arguments."""
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


__all__ = ["Argument", "Engine", "Function", "Kernels", "Macros"]
