"""Compilation of kernels for the CPU: flags of the builds for g++ and for zig, and a cache of libraries.

fast      -O2 for this machine; memory errors show as page faults, missing barriers as wrong numbers
checked   -Og with the compiler's thread and undefined-behaviour checks; shadow.cpp implements their
          calls
counted   the same at -O1, whose loads and stores are those that a GPU would make
"""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Literal

from mpitrain.errors import say
from mpitrain.kernels.source import SourceFile
from mpitrain.machine import process
from mpitrain.machine.compiling import (
    compile_cpp,
    compiled_once,
    compiler,
    is_zig,
    processor_and_compiler,
)

HERE = Path(__file__).parent
WAY_OUT = "What NVRTC accepts and the compiler does not belongs into simulator/language.h."
RUNTIME = (
    "fibers.cpp",
    "schedule.cpp",
    "shadow.cpp",
    "transactions.cpp",
    "hopper.cpp",
    "launch.cpp",
)

COMMON = ("-std=c++20", "-fPIC", "-g1", "-w", f"-I{HERE}", "-fno-exceptions", "-fvisibility=hidden")
# Without the first flag, shared arrays of templates exist once per process, whichever library
# defines them. Contracted by clang, fused and separate calls would differ in their last bits.
GNU = ("-fno-gnu-unique", "-ffp-contract=fast")
ZIG = ("-nostdinc++", "-ffp-contract=off")
FAST = ("-O2", "-march=native", "-fno-math-errno", "-fno-trapping-math")
# A run of 16 bytes stays one access, as on a GPU.
CHECKED = (
    "-fno-tree-sra",
    "-fsanitize=thread,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
)
_UNDEFINED = "alignment,array-bounds,shift-base,shift-exponent,signed-integer-overflow,integer-divide-by-zero"
CHECKED_BY_ZIG = (
    "-O1",
    *("-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-opt-disable=sroa"),
    *("-fsanitize=thread", "-mllvm", "-tsan-instrument-read-before-write=1"),
    # By -Xclang, because zig would link its own answers to these checks.
    *("-Xclang", f"-fsanitize={_UNDEFINED}", "-Xclang", f"-fsanitize-recover={_UNDEFINED}"),
)
Build = Literal["fast", "checked", "counted"]
FLAGS: dict[Build, tuple[str, ...]] = {
    "fast": (*GNU, *FAST),
    "checked": (*GNU, "-Og", *CHECKED),
    "counted": (*GNU, "-O1", *CHECKED),
}
FLAGS_OF_ZIG: dict[Build, tuple[str, ...]] = {
    "fast": (*ZIG, *FAST),
    "checked": (*ZIG, *CHECKED_BY_ZIG),
    "counted": (*ZIG, *CHECKED_BY_ZIG),
}

# The tail of every kernel library. Shared memory is thread-local storage of the library; the
# dynamic array has the largest size of any device, for each block of a cluster.
_TAIL = """
__align__(16) thread_local unsigned char dynamic_shared[232448 * {cluster}];
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED SIMULATOR_OWN void* simulator_dynamic_shared() {{ return dynamic_shared; }}
"""
_ENTRY = """
EXPORTED SIMULATOR_OWN void simulator_call_{name}(void** arguments) {{ simulator::call(&{name}, arguments); }}
EXPORTED SIMULATOR_OWN int simulator_bound_{name}() {{ return {bound}; }}
EXPORTED SIMULATOR_OWN int simulator_cluster_{name}() {{ return {cluster}; }}
"""


@cache
def _own_files() -> str:
    return "\0".join(path.read_text() for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]))


@cache
def _say_that_it_compiles(folder: Path) -> None:
    if process.launched().rank == 0:
        say(
            f"Compiling kernels for cuda-sim with {Path(compiler()).name}, which takes up to a minute; they are kept in {folder}"
        )


def build_runtime(folder: Path) -> Path:
    """Return the library of the simulator itself; compile it if it is missing."""
    key = hashlib.sha256((_own_files() + processor_and_compiler()).encode()).hexdigest()[:16]
    sources = [str(HERE / name) for name in RUNTIME]
    flags = ["-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-Wl,-Bsymbolic"]

    def compile(part: Path) -> None:
        _say_that_it_compiles(folder)
        compile_cpp([*flags, *sources], part, "the runtime for the simulator", WAY_OUT)

    return compiled_once(folder / f"librun-{key}.so", "the simulator", compile)


def build_kernels(
    source: SourceFile, defines: dict[str, str], build: Build, capability: int, folder: Path
) -> Path:
    """Return the library of one source under one set of macros; compile it if it is missing."""
    runtime = build_runtime(folder)
    entries = [
        _ENTRY.format(name=kernel.name, bound=kernel.bound or 1024, cluster=kernel.cluster or 1)
        for kernel in source.kernels.values()
    ]
    # Compilers of C++ do not know CUDA's pragma. Without unrolling, a tile's accumulators stay in memory, and
    # products take 20 times as long.
    text = source.text
    if build == "fast":
        text = re.sub(r"#pragma unroll$", "#pragma GCC unroll 16", text, flags=re.MULTILINE)
    cluster = next((kernel.cluster for kernel in source.kernels.values() if kernel.cluster), 1)
    text += _TAIL.format(cluster=cluster) + "".join(entries)
    flags = [
        *COMMON,
        *(FLAGS_OF_ZIG if is_zig() else FLAGS)[build],
        f"-D__CUDA_ARCH__={capability}0",
        *(f"-D{macro}={value}" for macro, value in defines.items()),
    ]
    key = hashlib.sha256("\0".join([text, *flags, runtime.name]).encode()).hexdigest()[:16]
    what = f"{source.path.name} for the simulator"

    def compile(part: Path) -> None:
        _say_that_it_compiles(folder)
        code, compiled = part.with_name(source.path.name), part.with_name("kernels.o")
        code.write_text(text)
        include = ["-include", str(HERE / "language.h"), f"-I{HERE / 'include'}"]
        compile_cpp([*flags, *include, "-x", "c++", "-c", str(code)], compiled, what, WAY_OUT)
        # The link has no -fsanitize, so that shadow.cpp implements the checks instead of the
        # compiler's libraries.
        compile_cpp(
            [
                *("-O2", "-shared"),  # zig links its own checks into what is not optimized
                "-Wl,-Bsymbolic,--no-undefined",
                str(compiled),
                str(runtime),
                f"-Wl,-rpath,{folder}",
            ],
            part,
            what,
            WAY_OUT,
        )

    return compiled_once(folder / f"{source.path.stem}-{key}.so", source.path.name, compile)
