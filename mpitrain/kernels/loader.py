"""Kernels by name: found in the sources, compiled on first use, checked and launched, on a GPU or in the simulator."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import Argument, argument_checks
from mpitrain.kernels.source import FOLDER, Signature, SourceFile, package_sources

MOST_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)

Dims = Sequence[int]


class Function(Protocol):
    """A compiled kernel. Arguments are checked; arrays come as `Argument`, scalars as NumPy scalars."""

    def __call__(self, grid: Dims, block: Dims, arguments: list[Any], shared: int) -> None:
        """Launch it on the current stream."""


class Engine(Protocol):
    """What compiles and runs kernels: `cuda.CudaEngine` or `simulator.machine.Simulator`."""

    capability: int
    """Compute capability times ten: 80 for sm_80."""

    multiprocessors: int
    """How many blocks run at a time where each needs a multiprocessor of its own."""

    @property
    def name(self) -> str:
        """The device, in words."""

    def load(self, source: SourceFile, signature: Signature, defines: dict[str, str]) -> Function:
        """Compile the source under the defines (or take it from a cache) and return one of its kernels."""

    def multiply(self, a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, accumulate: bool) -> None:
        """c = op(a) op(b), or added to it, by a library; sums in float32, of float64 in float64.

        a, b, c   (rows, columns), the last dim contiguous; stored transposed where so flagged; none may be empty
        """


class Kernels:
    """All kernels of one device.

    engine     what compiles and runs them
    folder     where the .cu files are
    launches   how many were started so far
    """

    def __init__(self, engine: Engine, folder: Path = FOLDER):
        self.engine = engine
        self.launches = 0
        self._sources = {name: source for source in package_sources(folder).values() for name in source.kernels}
        self._ready: dict[tuple, tuple[list, Function]] = {}

    def launch(self, name: str, grid: Dims, block: Dims, arguments: Sequence[Any], shared: int = 0,
               **defines: Any) -> None:
        """Start one kernel; with an empty grid do nothing.

        grid, block   blocks and threads, up to three numbers each
        arguments     arrays, None for an absent array, `fresh` or `strided` arrays, and numbers
        shared        bytes of dynamic shared memory
        defines       macros of the source: Element="float", TILE=64; each combination is compiled once
        raises        KernelError before the launch, if the arguments do not fit the kernel's signature
        """
        if not prod(grid):
            return
        key = (name, *defines.items())
        if key not in self._ready:
            self._ready[key] = self._load(name, {macro: str(value) for macro, value in defines.items()})
        checks, function = self._ready[key]
        if len(arguments) != len(checks):
            raise KernelError(f"{name} takes {len(checks)} arguments, but {len(arguments)} were passed.",
                              f"Its parameters: {self._parameters(name)}.")
        if not 0 < prod(block) <= MOST_THREADS:
            raise KernelError(
                f"{name}: a block of {tuple(block)} is {prod(block)} threads; 1 to {MOST_THREADS} are possible.",
                "Use a smaller block and a larger grid.")
        if any(count > most for count, most in zip(grid, MOST_BLOCKS, strict=False)):
            raise KernelError(f"{name}: a grid of {tuple(grid)} blocks is beyond {MOST_BLOCKS}.",
                              "Let each block do more, or split the arrays.")
        checked = [check(argument) for check, argument in zip(checks, arguments, strict=True)]
        function(grid, block, checked, shared)
        self.launches += 1

    def _load(self, name: str, defines: dict[str, str]) -> tuple[list, Function]:
        if name not in self._sources:
            raise KernelError(f"There is no kernel `{name}`.", f"There are: {', '.join(sorted(self._sources))}.")
        source = self._sources[name]
        signature = source.kernels[name]
        return argument_checks(signature, defines), self.engine.load(source, signature, defines)

    def _parameters(self, name: str) -> str:
        return ", ".join(parameter.name for parameter in self._sources[name].kernels[name].parameters)


__all__ = ["Argument", "Engine", "Function", "Kernels"]
