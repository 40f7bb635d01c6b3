"""The library of passes.cpp: built once per processor and compiler, loaded once per process."""

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from mpitrain.kernels.cache import cache_of
from mpitrain.kernels.cpp import compile_cpp, locked, processor_and_compiler
from mpitrain.machine.devices import compiler

SOURCE = Path(__file__).with_name("passes.cpp")
INSTEAD = "set device.passes to numpy"
FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
SIZE, ARRAY, NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
SIGNATURES: dict[str, list[Any]] = {
    "gelu": [SIZE, SIZE, *[ARRAY] * 3, NUMBER, NUMBER],
    "layer_norm": [SIZE, SIZE, *[ARRAY] * 3, NUMBER, *[ARRAY] * 3],
    "layer_norm_backward": [SIZE, SIZE, *[ARRAY] * 9],
}


@cache
def library() -> ctypes.CDLL:
    """Return the library; compile it if it is missing.

    raises  ConfigError without a compiler, KernelError if it refuses the source
    """
    compiler("device.passes compiled compiles C++", INSTEAD)
    folder = cache_of("passes")
    key = "\0".join([SOURCE.read_text(encoding="utf-8"), *FLAGS, processor_and_compiler()])
    target = folder / f"passes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with locked(target, SOURCE.name):
            if not target.exists():
                way_out = f"{INSTEAD.capitalize()}, or install another compiler."
                compile_cpp([*FLAGS, str(SOURCE)], target, SOURCE.name, way_out)
    passes = ctypes.CDLL(str(target))
    for name, types in SIGNATURES.items():
        getattr(passes, name).argtypes, getattr(passes, name).restype = types, None
    return passes
