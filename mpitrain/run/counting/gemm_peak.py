"""The rate of large matrix products on this rank, measured once per machine and cached."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mpitrain.files import contents, write_whole
from mpitrain.machine import process
from mpitrain.machine.compiling import cache_of
from mpitrain.machine.process import processor
from mpitrain.ops.device import Device
from mpitrain.ops.host.product import mkl, put_product
from mpitrain.strict_json import validated

SIDES = {"cpu": 768, "cuda": 4096}
"""{kind of device: rows and columns of the measured matrices}; other kinds have no peak."""

BUDGET = 0.4
"""Seconds after which no further product starts."""

CHECK = 0.04
"""The same for the products that check a cached rate."""

BLOCK = 65_521
"""Random numbers in the matrices, which repeat them: a prime, so that rows differ."""

CACHE = "gemm-peak"


class _Peak(BaseModel):
    """The contents of a cached file.

    facts  everything that the rate depends on
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    facts: dict[str, str | int]
    flops_per_s: float = Field(gt=0)


def gemm_peak(device: Device, dtype: np.dtype, sharing: int, kernels: str) -> float | None:
    """Return the floating-point operations per second of products; None on a simulated device.

    The first call on a machine takes less than a second. Ranks of a host must call it at the same
    time. Then each measures with its own cores while the others load theirs, as in training. The
    result is cached in a folder that only this user may write. `_facts` lists its dependencies.
    Later calls measure a few products. A higher rate replaces the cached one, because the machine
    may have been busy before.

    dtype    of the matrices
    sharing  ranks on this GPU or, without one, on this host
    kernels  the products of a device: its device.gemm and device.tiles
    """
    if device.kind not in SIDES:
        return None
    facts = _facts(device, dtype, sharing, kernels)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    path = cache_of(CACHE) / f"{key}.json"
    cached, budget = 0.0, BUDGET
    with suppress(OSError, ValueError):
        peak = validated(_Peak, contents(path))
        if peak.facts == facts:
            cached, budget = peak.flops_per_s, CHECK
    rate = _measured(device, dtype, budget)
    if rate <= cached:
        return cached
    # A folder that is full or read-only costs a measurement per run.
    with suppress(OSError):
        write_whole(path, _Peak(facts=facts, flops_per_s=rate).model_dump_json() + "\n")
    return rate


def _facts(device: Device, dtype: np.dtype, sharing: int, kernels: str) -> dict[str, str | int]:
    return {
        "device": device.kernels.engine.name if device.kernels else processor().name,
        "dtype": dtype.name,
        "products": kernels if device.kernels else "MKL" if mkl() else f"NumPy {np.__version__}",
        "threads": " ".join(process.environment().get(n, "") for n in process.BLAS_VARIABLES),
        "cores": process.cores(),
        "ranks": sharing,
        "side": SIDES[device.kind],
        "random numbers": BLOCK,
    }


def _measured(device: Device, dtype: np.dtype, budget: float) -> float:
    """Return the rate of the fastest of several products, the last begun within the budget (s)."""
    side, arena = SIDES[device.kind], device.arena()
    # Equal numbers draw less power, and a GPU then runs faster than in training.
    block = np.random.default_rng(0).standard_normal(BLOCK, np.float32).astype(dtype)
    a, b = (device.backend.from_host(np.resize(block, (side, side)), arena) for _ in range(2))
    c = arena.take((side, side), dtype)
    run = _product(device, a, b, c, arena)
    run()
    device.backend.synchronize()
    best, end = float("inf"), time.perf_counter() + budget
    while (start := time.perf_counter()) < end:
        run()
        device.backend.synchronize()
        best = min(best, time.perf_counter() - start)
    return float(2 * side**3 / best)


def _product(device: Device, a: Any, b: Any, c: Any, arena: Any) -> Callable[[], None]:
    """Return the function that writes a b to c."""
    if device.kernels is None or device.multiply is None:
        return lambda: put_product(a, b, c, False, arena)
    kernels, multiply = device.kernels, device.multiply
    return lambda: multiply(kernels, arena, a, b, c)
