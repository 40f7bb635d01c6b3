"""Rates of matrix products on a host, by NumPy's BLAS and by MKL in turns; samples of product and memory rates."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpitrain.machine.blas_kernels import SHAPES
from mpitrain.ops.host.product import installed_mkl, put_in_place
from mpitrain.tools.bench.turns import take_turns

TURNS = 15
"""Measured turns of each library after one for warm-up; the fastest counts."""
SIDE = 384
"""M, K and N of the matrix product."""
COPIED = 32 << 20
"""Bytes that one copy reads. Another 32 MiB are written; together they exceed most caches."""
SAMPLE_SECONDS = 0.2
"""Shortest sample, in seconds. A limit on processor time acts within 0.1 s, so a sample shows it."""
Sampler = Callable[[], tuple[float, float]]
"""Returns one sample: operations per second, and bytes per second."""


def rates() -> dict[str, float]:
    """Return {library: float32 operations per second} of NumPy and, if installed, MKL."""
    flops = sum(2 * m * k * n for m, k, n in SHAPES)
    return {name: flops / each for name, each in seconds().items()}


def seconds() -> dict[str, float]:
    """Return {library: seconds of its fastest turn} of NumPy and, if installed, MKL."""
    libraries: dict[str, Callable[..., Any]] = {"NumPy": lambda a, b, out: np.matmul(a, b, out=out)}
    if products := installed_mkl():
        libraries["MKL"] = lambda a, b, out: put_in_place(a, b, out, False, products)
    ones = [
        (np.ones((m, k), np.float32), np.ones((k, n), np.float32), np.empty((m, n), np.float32))
        for m, k, n in SHAPES
    ]

    def side(multiply: Callable[..., Any], block: int) -> float:
        start = time.perf_counter()
        for operands in ones:
            multiply(*operands)
        return time.perf_counter() - start

    sides = [partial(side, multiply) for multiply in libraries.values()]
    return {
        name: min(times) for name, times in zip(libraries, take_turns(sides, TURNS, 1), strict=True)
    }


def described(rates: dict[str, float], is_by_mkl: bool, gains_from_mkl: bool) -> str:
    """Describe the library that multiplies and its rate, and the other one if it is installed.

    rates           {library: float32 operations per second}
    is_by_mkl       whether MKL multiplies in a run
    gains_from_mkl  whether MKL, if installed, would be faster on this processor
    """
    texts = {name: f"{rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items()}
    if "MKL" not in rates:
        advice = "; MKL is faster on this processor: pip install 'mpitrain[mkl]'" * gains_from_mkl
        return f"by NumPy's BLAS, {texts['NumPy']}{advice}"
    ratio = f"MKL is {rates['MKL'] / rates['NumPy']:.2f} times as fast"
    if is_by_mkl:
        return f"by MKL, {texts['MKL']}; NumPy's BLAS {texts['NumPy']}: {ratio}"
    return f"by NumPy's BLAS, {texts['NumPy']}; MKL {texts['MKL']}: {ratio}"


def sampler(
    seconds: float = SAMPLE_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Sampler:
    """Allocate operands once; return a function that measures one sample of the rates."""
    a, b = np.ones((SIDE, SIDE), np.float32), np.ones((SIDE, SIDE), np.float32)
    c = np.empty_like(a)
    source, target = np.ones(COPIED, np.uint8), np.empty(COPIED, np.uint8)

    def rate(run: Callable[[], object], amount: int) -> float:
        """Repeat `run`, which does `amount` of work, for some time; return the work per second."""
        start, runs = clock(), 0
        while (spent := clock() - start) < seconds or not runs:
            run()
            runs += 1
        return runs * amount / max(spent, 1e-9)

    def sample() -> tuple[float, float]:
        return (
            rate(lambda: np.matmul(a, b, out=c), 2 * SIDE**3),
            rate(lambda: np.copyto(target, source), 2 * COPIED),
        )

    return sample
