"""The passes of passes.cpp, a library for float32 and one for float64, each built at first use on a
processor.
"""

import ctypes
import hashlib
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.errors import KernelError, MpitrainError, say
from mpitrain.files import contents, write_whole
from mpitrain.machine.backend import WithoutMemory
from mpitrain.machine.compiling import (
    NO_COMPILER,
    cache_of,
    compile_cpp,
    compiled_once,
    compiler,
    has_compiler,
    loaded,
    processor_and_compiler,
)
from mpitrain.ops.host.passes import NUMPY

SOURCE = Path(__file__).with_name("passes.cpp")
INSTEAD = "set device.passes to numpy, which rounds otherwise"
FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-nostdlib",  # zig would compile its C++ library first, for a minute
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
NUMBERS = {np.dtype("float32"): ctypes.c_float, np.dtype("float64"): ctypes.c_double}
"""The type of a number in C++, by dtype."""
ARRAY = ctypes.py_object
NOTHING = SimpleNamespace(**dict.fromkeys(vars(NUMPY), lambda *operands: True))
"""The passes for arrays without memory."""


REMEMBERED = 24 * 3600.0
"""Seconds for which no start tries again what the compiler refused. The reason may be a full disk."""
COMPILING = 300.0
"""Seconds in which the compiler must end. Then a run has not stalled yet (`run/watchdog.py`)."""


@cache
def library(dtype: np.dtype) -> ctypes.CDLL:
    """Return the library for float32 or float64; compile it if it is missing.

    raises  ConfigError without a compiler, KernelError if it refuses the source
    """
    compiler("device.passes compiled compiles C++", INSTEAD)
    number = NUMBERS[dtype]
    flags = [*FLAGS, f"-DREAL={number.__name__[2:]}", f"-DHEADER={object.__basicsize__}"]
    key = "\0".join([SOURCE.read_text(encoding="utf-8"), *flags, processor_and_compiler()])
    target = cache_of("passes") / f"passes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    refusal = target.with_suffix(".failed")
    way_out = (
        f"{INSTEAD.capitalize()}; remove {refusal} to try again; or set XDG_CACHE_HOME to a folder "
        "from which the system runs code."
    )
    compile = partial(_compile, flags=flags, number=number, refusal=refusal, way_out=way_out)
    return _bound(compiled_once(target, SOURCE.name, compile), number, way_out)


def _compile(part: Path, flags: list[str], number: type, refusal: Path, way_out: str) -> None:
    """Compile the library `part`, and keep the reason in the file `refusal` if that fails."""
    if reason := _recent(refusal):
        raise KernelError(reason, way_out)
    say(f"compiling {SOURCE.name}, once on a machine")
    try:
        compile_cpp([*flags, str(SOURCE)], part, SOURCE.name, way_out, COMPILING)
        _bound(part, number, way_out)
    except KernelError as error:
        with suppress(OSError):
            write_whole(refusal, error.law)
        raise


def _recent(refusal: Path) -> str:
    """Return the reason for which a rank or start has failed of late; "" if none has."""
    with suppress(OSError):
        if 0 <= time.time() - refusal.stat().st_mtime < REMEMBERED:
            return contents(refusal).decode(errors="replace")
    return ""


def _bound(path: Path, number: type, way_out: str) -> ctypes.CDLL:
    """Load the library, whose functions take this type of C; KernelError if it is none."""
    found = loaded(path, way_out)
    signatures: dict[str, list[Any]] = {
        "gelu": [number, number, *[ARRAY] * 4],
        "layer_norm": [number, *[ARRAY] * 6],
        "layer_norm_backward": [ARRAY] * 10,
        "weigh_block": [ctypes.c_int64, number, number, *[ARRAY] * 4],
        "block_backward": [ARRAY] * 4,
        "weigh_tile": [ctypes.c_int64, ctypes.c_int64, *[ARRAY] * 5],
        "tile_backward": [ctypes.c_int64, *[ARRAY] * 6],
    }
    try:
        ctypes.c_void_p.in_dll(found, "none").value = id(None)
        for name, types in signatures.items():
            getattr(found, name).argtypes, getattr(found, name).restype = types, None
    except (AttributeError, ValueError) as error:
        raise KernelError(f"{path} is no library of {SOURCE.name}: {error}.", way_out) from None
    found.weigh_block.restype = ctypes.c_int
    return found


def lacks(stored: str) -> str:
    """Return the reason for which this process has no library for parameters of this type, or "".

    stored  "float32" or "float64"
    """
    if not has_compiler():
        return NO_COMPILER
    try:
        library(np.dtype(stored))
    except MpitrainError as error:
        return f"{error.law.rstrip('.')}. {error.way_out}"
    return ""


def by_library(first: Any, *others: Any) -> Any:
    """Return the passes for these arrays: NumPy's, if an array has gaps or another type than a library.

    raises  ConfigError or KernelError if this machine cannot compile them
    """
    for one in (first, *others):
        if one is not None and not (one.dtype == first.dtype and one.flags.c_contiguous):
            return NUMPY
    if first.dtype not in NUMBERS:
        return NUMPY
    return NOTHING if isinstance(first, WithoutMemory) else library(first.dtype)
