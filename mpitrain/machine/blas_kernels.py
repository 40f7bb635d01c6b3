"""What multiplies matrices: NumPy's OpenBLAS with its own kernels, with those for AVX2, or Intel's MKL.

The others are chosen where they are measured to be faster. OpenBLAS reads OPENBLAS_CORETYPE once,
when NumPy is imported. So everything here works before that, and child processes measure.
"""

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple
from zlib import crc32

from mpitrain.errors import say
from mpitrain.files import check_room, contents, write_whole
from mpitrain.machine import process
from mpitrain.machine.compiling import locked, shared_cache_of
from mpitrain.machine.process import MKL

AVX2 = "Haswell"
"""OpenBLAS's name of its kernels for AVX2."""
NAMES = {"": "OpenBLAS's own choice of kernels", AVX2: "its kernels for AVX2", MKL: MKL}
MARGIN = 1.03
"""Smallest gain for which others are chosen, and largest ratio of the two fastest children of a kind."""
TURNS, SAMPLED, SECONDS = 3, 0.7, 20.0
"""Children of each kind, seconds of processor time of a child, and its time limit in seconds.

Other guests of a virtual machine's processor double the time of most products, but of few in so long.
"""
SHAPES = ((512, 256, 768), (512, 256, 1024), (512, 1024, 256))
"""(M, K, N) of three linear layers of the default GPT, for 4 sequences."""


class Measured(NamedTuple):
    """What should multiply on this machine; serialisable as JSON.

    kernels  as of `process.blas_kernels`
    gains    {kernels: rate over that of OpenBLAS's own choice}; empty if nothing is known
    reason   why nothing is known
    """

    kernels: str
    gains: dict[str, float]
    reason: str = ""

    def __str__(self) -> str:
        own = f"NumPy's BLAS by {NAMES[self.kernels]}" if self.kernels != MKL else MKL
        if not self.gains:
            return f"{own}: {self.reason}"
        rates = [f"{NAMES[kernels]} {gain:.2f}" for kernels, gain in self.gains.items()]
        return f"{own}; rates over OpenBLAS's own choice of kernels: {', '.join(rates)}"


def choose(recorded: Callable[[], str | None] = lambda: None) -> None:
    """Choose what multiplies, before NumPy is imported; the choice of a user stays.

    The first start on a machine measures, which takes some seconds. All ranks of a host read one result.
    recorded  returns the kernels with which a run began on such a processor, or None
    """
    if not (others := _candidates()):
        return
    kernels = recorded()
    if kernels is None or (kernels == MKL and MKL not in others):
        kernels = measured().kernels
    process.choose_blas_kernels(kernels)


def is_choice() -> bool:
    return bool(_candidates())


def _candidates() -> list[str]:
    """Return what may multiply faster than OpenBLAS with its own kernels; nothing if a user has chosen."""
    if process.has_chosen_blas():
        return []
    has_avx512 = "avx512f" in process.processor().features
    return [AVX2] * has_avx512 + [MKL] * bool(mkl_file())


def mkl_file() -> Path | None:
    """Return the file of MKL's library, if it is installed as a package."""
    from importlib.metadata import PackageNotFoundError, files

    with suppress(PackageNotFoundError):
        for file in files("mkl") or ():
            if file.name.startswith("libmkl_rt.so"):
                return Path(str(file.locate())).resolve()
    return None


def _version(package: str) -> str:
    """Return the version of an installed package, or ""."""
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def measured(anew: bool = False) -> Measured:
    """Return the result of the measurement on this machine, from the cache if there is one.

    anew  measure in any case
    """
    candidates = _candidates()
    if not (folder := shared_cache_of("blas-kernels")):
        # Each rank would measure at every start, and might choose otherwise.
        return Measured("", {}, "no folder keeps a measurement")
    facts = f"{process.processor().label} NumPy {_version('numpy')} {_version('mkl')} {' '.join(candidates)}"
    path = folder / f"{crc32(facts.encode()):08x}.json"
    try:
        with locked(path, "matrix products"):
            if not anew and (result := _cached(path, candidates)):
                return result
            check_room(path)
            say("measuring matrix products, once on a machine")
            kinds = ["", *candidates]
            result = _compared(
                [{kernels: _child(kernels) for kernels in kinds} for _ in range(TURNS)]
            )
            write_whole(path, json.dumps(result) + "\n")
            return result
    except OSError as error:
        reason = f"{error.filename or path} keeps no measurement: {error.strerror or error}"
        return Measured("", {}, reason)


def _cached(path: Path, candidates: list[str]) -> Measured | None:
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        kernels, gains, reason = json.loads(contents(path))
        if kernels in ("", *candidates) and gains.keys() <= {*candidates}:
            return Measured(kernels, {key: float(gain) for key, gain in gains.items()}, str(reason))
    return None


def _compared(turns: Sequence[dict[str, tuple[float, float]]]) -> Measured:
    """Judge the (seconds of the processor, seconds) of each kind of kernels in each turn.

    The processor's seconds are less disturbed. But MKL may use fewer threads, which only time shows.
    """
    by_work, by_time = (
        _gains({kernels: sorted(turn[kernels][clock] for turn in turns) for kernels in turns[0]})
        for clock in (0, 1)
    )
    gains = {
        kernels: min(gain, by_time[kernels]) if kernels == MKL else gain
        for kernels, gain in by_work.items()
        if kernels != MKL or MKL in by_time
    }
    if not gains:
        return Measured("", {}, "the machine was too busy to compare with others")
    best = max(gains, key=gains.__getitem__)
    return Measured(best if gains[best] >= MARGIN else "", gains)


def _gains(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return {kernels: rate over that of OpenBLAS's own choice} where the two fastest of a kind agree."""
    fastest = {kernels: one for kernels, (one, two, *_) in seconds.items() if two < MARGIN * one}
    own = fastest.pop("", None)
    return {kernels: round(own / each, 3) for kernels, each in fastest.items()} if own else {}


def _child(kernels: str) -> tuple[float, float]:
    """Return the processor's seconds and the seconds of the products in a child; infinity if it fails."""
    environment = process.environment_with_blas(kernels, process.environment_of_one())
    command = (sys.executable, "-m", "mpitrain.machine.blas_kernels")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS)
        work, wall = map(float, done.stdout.split())
        return work, wall
    except (subprocess.TimeoutExpired, ValueError):
        return float("inf"), float("inf")


def seconds() -> tuple[float, float]:
    """Return the least processor's seconds and the least seconds of a turn of products within `SAMPLED`."""
    import numpy as np

    operands = [
        (np.ones((m, k), "f4"), np.ones((k, n), "f4"), np.empty((m, n), "f4")) for m, k, n in SHAPES
    ]
    multiply = _mkl_product() if process.blas_kernels() == MKL else np.matmul
    work = wall = float("inf")
    until = time.process_time() + SAMPLED
    while (start := time.process_time()) < until:
        begun = time.perf_counter()
        for a, b, out in operands:
            multiply(a, b, out)
        wall = min(wall, time.perf_counter() - begun)
        work = min(work, time.process_time() - start)
    return work, wall


def _mkl_product() -> Callable[..., object]:
    """Return MKL's product of contiguous float32 matrices."""
    product = ctypes.CDLL(str(mkl_file())).cblas_sgemm
    matrix: list[Any] = [ctypes.c_void_p, ctypes.c_int]
    product.argtypes = [
        *[ctypes.c_int] * 6,
        ctypes.c_float,
        *matrix,
        *matrix,
        ctypes.c_float,
        *matrix,
    ]

    def multiply(a: Any, b: Any, out: Any) -> None:
        (m, k), n = a.shape, b.shape[1]
        addresses = a.ctypes.data, b.ctypes.data, out.ctypes.data
        row_major, as_it_is = 101, 111  # constants of the CBLAS interface
        sizes = row_major, as_it_is, as_it_is, m, n, k
        product(*sizes, 1, addresses[0], k, addresses[1], n, 0, addresses[2], n)

    return multiply


def recorded_in(metrics: Path) -> str | None:
    """Return the kernels with which a run began, from its metrics; None on another processor."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        start = json.loads(contents(metrics).partition(b"\n")[0])
        name, kernels = start["blas_kernels"]
        if name == process.processor().label and not kernels.strip(ascii_letters):
            return kernels
    return None


if __name__ == "__main__":
    print(*seconds())
