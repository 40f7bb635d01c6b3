"""Compilation with g++ or zig into a folder of libraries that several ranks share."""

import fcntl
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from mpitrain.errors import KernelError
from mpitrain.kernels.cache import cache_of
from mpitrain.kernels.compiling import compiling
from mpitrain.machine.devices import compiler


def is_zig() -> bool:
    """Return whether the compiler is zig's clang instead of g++."""
    return Path(compiler()).name == "zig"


def _command() -> list[str]:
    """Zig compiles its C++ library once, into a cache."""
    if not is_zig():
        return [compiler()]
    return ["/usr/bin/env", f"ZIG_GLOBAL_CACHE_DIR={cache_of('zig')}", compiler(), "c++"]


@cache
def version() -> str:
    """Return the first line that the compiler says of itself.

    raises  ConfigError without a compiler
    """
    done = subprocess.run(
        [*_command(), "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    return f"{Path(compiler()).name}: {done.stdout.partition(chr(10))[0]}"


@cache
def processor_and_compiler() -> str:
    """Return the processor's features and the compiler's version: -march=native and the language
    level depend on them.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line for line in lines if line.startswith("flags")), "")
    return processor + version()


def compile_cpp(arguments: list[str], target: Path, what: str, way_out: str) -> None:
    """Run the compiler.

    The library gets its final name only when it is complete. So no other rank loads half of one.

    what, way_out  the subject and the way out of the error
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / target.name
        command = [*_command(), *arguments, "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(
                f"{Path(compiler()).name} cannot compile {what}:\n{done.stderr.strip()[:4000]}",
                way_out,
            )
        part.replace(target)


@contextmanager
def locked(target: Path, source: str) -> Iterator[None]:
    """Lock the library's file, so that only one rank of a host compiles it, where files can be
    locked.

    source  name for the observer of compilations
    """
    with compiling(source), target.with_suffix(".lock").open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
