"""Compilation of kernels for the CPU: g++ flags of the two builds, and a cache of libraries.

fast      -O2 for this machine; memory errors show as page faults, missing barriers as wrong numbers
checked   -O1 with the compiler's thread and undefined-behaviour checks; shadow.cpp implements their
          calls
"""

import fcntl
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from mpitrain.errors import KernelError
from mpitrain.kernels.source import SourceFile
from mpitrain.machine import process
from mpitrain.machine.devices import compiler

HERE = Path(__file__).parent
RUNTIME = ("fibers.cpp", "schedule.cpp", "shadow.cpp", "launch.cpp")

COMMON = (
    "-std=c++20",
    "-fPIC",
    "-g1",
    "-w",
    f"-I{HERE}",
    "-ffp-contract=fast",
    "-fno-exceptions",
    # Without this flag, shared arrays of templates exist once per process, whichever library
    # defines them.
    "-fno-gnu-unique",
    "-fvisibility=hidden",
)
FAST = ("-O2", "-march=native", "-fno-math-errno", "-fno-trapping-math")
CHECKED = (
    "-O1",
    "-fsanitize=thread,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
)

# The tail of every kernel library. Shared memory is thread-local storage of the library; the
# dynamic array has the largest size of any device.
_TAIL = """
__align__(16) thread_local unsigned char dynamic_shared[232448];
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED SIMULATOR_OWN void* simulator_dynamic_shared() { return dynamic_shared; }
"""
_ENTRY = """
EXPORTED SIMULATOR_OWN void simulator_call_{name}(void** arguments) {{ simulator::call(&{name}, arguments); }}
EXPORTED SIMULATOR_OWN int simulator_bound_{name}() {{ return {bound}; }}
"""


@cache
def _machine() -> str:
    """Return the processor's features and the compiler's version: -march=native and the language
    level depend on them.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line for line in lines if line.startswith("flags")), "")
    version = subprocess.run(
        [compiler(), "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    return processor + version.stdout


@cache
def _own_files() -> str:
    return "\0".join(path.read_text() for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]))


def _compile(arguments: list[str], target: Path, what: str) -> None:
    """Run g++.

    The library gets its final name only when it is complete. So no other rank loads half of one.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / target.name
        done = subprocess.run(
            [compiler(), *arguments, "-o", str(part)], capture_output=True, text=True
        )
        if done.returncode:
            raise KernelError(
                f"g++ cannot compile {what} for the simulator:\n{done.stderr.strip()[:4000]}",
                "What NVRTC accepts and g++ does not belongs into simulator/language.h.",
            )
        part.replace(target)


@cache
def _say_that_it_compiles(folder: Path) -> None:
    """Print one line on rank 0 before the first compilation, which may take a minute."""
    if process.launched().rank == 0:
        print(
            f"Compiling kernels for cuda-sim with g++, which takes up to a minute; they are kept in {folder}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Lock the library's file, so that only one rank of a host compiles it, where files can be
    locked.
    """
    with target.with_suffix(".lock").open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_runtime(folder: Path) -> Path:
    """Return the library of the simulator itself; compile it if it is missing."""
    key = hashlib.sha256((_own_files() + _machine()).encode()).hexdigest()[:16]
    target = folder / f"librun-{key}.so"
    if target.exists():
        return target
    _say_that_it_compiles(folder)
    with _alone(target):
        if not target.exists():
            sources = [str(HERE / name) for name in RUNTIME]
            _compile(
                ["-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-Wl,-Bsymbolic", *sources],
                target,
                "the runtime",
            )
    return target


def build_kernels(
    source: SourceFile, defines: dict[str, str], checked: bool, capability: int, folder: Path
) -> Path:
    """Return the library of one source under one set of macros; compile it if it is missing."""
    runtime = build_runtime(folder)
    entries = [
        _ENTRY.format(name=kernel.name, bound=kernel.bound or 1024)
        for kernel in source.kernels.values()
    ]
    # g++ does not know CUDA's pragma. Without unrolling, a tile's accumulators stay in memory, and
    # products take 20 times as long.
    text = (
        source.text
        if checked
        else re.sub(r"#pragma unroll$", "#pragma GCC unroll 16", source.text, flags=re.MULTILINE)
    )
    text += _TAIL + "".join(entries)
    flags = [
        *COMMON,
        *(CHECKED if checked else FAST),
        f"-D__CUDA_ARCH__={capability}0",
        *(f"-D{macro}={value}" for macro, value in defines.items()),
    ]
    key = hashlib.sha256("\0".join([text, *flags, runtime.name]).encode()).hexdigest()[:16]
    target = folder / f"{source.path.stem}-{key}.so"
    if target.exists():
        return target
    _say_that_it_compiles(folder)
    with _alone(target), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if target.exists():
            return target
        code, compiled = Path(scratch) / source.path.name, Path(scratch) / "kernels.o"
        code.write_text(text)
        include = ["-include", str(HERE / "language.h"), f"-I{HERE / 'include'}"]
        _compile([*flags, *include, "-x", "c++", "-c", str(code)], compiled, source.path.name)
        # The link has no -fsanitize, so that shadow.cpp implements the checks instead of the
        # compiler's libraries.
        _compile(
            [
                "-shared",
                "-Wl,-Bsymbolic,--no-undefined",
                str(compiled),
                str(runtime),
                f"-Wl,-rpath,{folder}",
            ],
            target,
            source.path.name,
        )
    return target
