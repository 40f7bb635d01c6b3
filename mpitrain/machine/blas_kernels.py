"""The kernels of NumPy's OpenBLAS: those for AVX2 where they multiply faster than those for AVX-512.

OpenBLAS reads OPENBLAS_CORETYPE once, when NumPy is imported. So everything here works before that,
and child processes measure.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from string import ascii_letters
from typing import NamedTuple
from zlib import crc32

from mpitrain.errors import say
from mpitrain.files import contents, write_whole
from mpitrain.machine import process
from mpitrain.machine.compiling import locked, shared_cache_of

AVX2 = "Haswell"
"""OpenBLAS's name of its kernels for AVX2."""
MARGIN = 1.03
"""Smallest gain for which kernels are chosen, and largest ratio of the two fastest children of a kind."""
PAIRS, SAMPLED, SECONDS = 3, 0.7, 20.0
"""Children of each kind, seconds of processor time of a child, and its time limit in seconds.

Other guests of a virtual machine's processor double the time of most products, but of few in so long.
"""
SHAPES = ((512, 256, 768), (512, 256, 1024), (512, 1024, 256))
"""(M, K, N) of three linear layers of the default GPT, for 4 sequences."""


class Measured(NamedTuple):
    """The kernels that this machine should use; serialisable as JSON.

    kernels  value of OPENBLAS_CORETYPE; empty: OpenBLAS's own choice
    gain     rate of the kernels for AVX2 over that of OpenBLAS's own; 0: the machine was too busy
    """

    kernels: str
    gain: float

    def __str__(self) -> str:
        if not self.gain:
            return "OpenBLAS's own: the machine was too busy to compare them"
        whose = "those for AVX2" if self.kernels else "OpenBLAS's own: those for AVX2"
        return f"{whose}, {self.gain:.2f} times as fast as its choice"


def choose(recorded: Callable[[], str | None] = lambda: None) -> None:
    """Choose the kernels, before NumPy is imported; a user's OPENBLAS_CORETYPE or MKL stays.

    The first start on a machine measures, which takes some seconds.
    recorded  returns the kernels with which a run began on such a processor, or None
    """
    if is_choice() and (kernels := _of(recorded)):
        process.choose_blas_kernels(kernels)


def _of(recorded: Callable[[], str | None]) -> str:
    kernels = recorded()
    return measured().kernels if kernels is None else kernels


def is_choice() -> bool:
    """Return whether a processor with AVX-512 multiplies by NumPy's BLAS, and the user has not chosen."""
    has_choice = not process.blas_kernels() and "avx512f" in process.processor().features
    return has_choice and not _version("mkl")


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
    if not (folder := shared_cache_of("blas-kernels")):
        return Measured("", 0)  # Each rank would measure at every start.
    facts = f"{_processor()} NumPy {_version('numpy')}"
    path = folder / f"{crc32(facts.encode()):08x}.json"
    with suppress(OSError), locked(path, "kernels of OpenBLAS"):
        if not anew:
            with suppress(OSError, ValueError, TypeError):
                kernels, gain = json.loads(contents(path))
                if kernels in ("", AVX2):
                    return Measured(kernels, float(gain))
            say("measuring the kernels of OpenBLAS, once")
        result = _compared([(_child(""), _child(AVX2)) for _ in range(PAIRS)])
        write_whole(path, json.dumps(result) + "\n")
        return result
    return Measured("", 0)


def _compared(pairs: list[tuple[float, float]]) -> Measured:
    """Judge the seconds of (own kernels, those for AVX2), measured in turns."""
    (own, second), (other, its_second) = (sorted(kind)[:2] for kind in zip(*pairs, strict=True))
    if not (second < MARGIN * own and its_second < MARGIN * other):
        return Measured("", 0)
    gain = own / other
    return Measured(AVX2 if gain >= MARGIN else "", round(gain, 3))


def _child(kernels: str) -> float:
    """Return the processor's seconds of the products in a child; infinity if it fails."""
    environment = process.environment_of_one()
    environment.pop(process.OPENBLAS_KERNELS, None)
    environment |= {process.OPENBLAS_KERNELS: kernels} if kernels else {}
    command = (sys.executable, "-m", "mpitrain.machine.blas_kernels")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS)
        return float(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return float("inf")


def seconds() -> float:
    """Return the processor's seconds of the fastest turn of products within `SAMPLED`."""
    import numpy as np

    operands = [(np.ones((m, k), "f4"), np.ones((k, n), "f4")) for m, k, n in SHAPES]
    fastest, until = float("inf"), time.process_time() + SAMPLED
    while (start := time.process_time()) < until:
        for a, b in operands:
            a @ b
        fastest = min(fastest, time.process_time() - start)
    return fastest


def in_use() -> tuple[str, str]:
    """Return the processor, and the kernels that OpenBLAS was told to use on it or ""."""
    return _processor(), process.blas_kernels()


def _processor() -> str:
    name, _, features = process.processor()  # Virtual machines may have a name like AMD EPYC.
    return f"{name} {crc32(' '.join(sorted(features)).encode()):08x}"


def recorded_in(metrics: Path) -> str | None:
    """Return the kernels with which a run began, from its metrics; None on another processor."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        start = json.loads(contents(metrics).partition(b"\n")[0])
        name, kernels = start["blas_kernels"]
        if name == _processor() and not kernels.strip(ascii_letters):
            return kernels
    return None


if __name__ == "__main__":
    print(seconds())
