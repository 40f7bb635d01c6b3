"""Utilisation of the arithmetic units: MFU and HFU, the fractions of the GEMM peak that are used.

MFU counts the FLOPs that the model needs, and HFU the FLOPs that the hardware executes. Recomputed
forwards are the difference (Korthikanti et al. 2022, arXiv:2205.05198).
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mpitrain.config import Config
from mpitrain.files import contents, write_whole
from mpitrain.machine import process
from mpitrain.machine.compiling import cache_of
from mpitrain.machine.process import processor
from mpitrain.models.table import MODELS
from mpitrain.ops.device import Device
from mpitrain.ops.host.product import multiplier, put_product
from mpitrain.parallel.grid import Axes
from mpitrain.pipeline.schedules import SERIAL, plan_of
from mpitrain.run.job import Job
from mpitrain.strict_json import validated


def utilisation(job: Job, sharing: int) -> Callable[[float], dict[str, float]]:
    """Return a function of a step's seconds: its `mfu` and `hfu`, or {} where there is no peak.

    All ranks of a host call this at the same time, because they may measure the peak.

    sharing  ranks on this GPU or, without one, on this host
    """
    trainer, config = job.trainer, job.trainer.config
    axes, device = trainer.job.axes, trainer.job.device
    dtype = device.half or trainer.storage.dtype
    kernels = f"{config.device.gemm} {config.device.tiles} {config.device.tensor_cores}"
    peak = gemm_peak(device, dtype, sharing, kernels)
    if peak is None:
        return lambda step_s: {}
    try:
        work = work_of(job, trainer.parameter_count)
    except Exception as error:
        from mpitrain.run.count.step import why_uncounted

        why_uncounted(error, job)
        return lambda step_s: {}
    every = peak * (axes.ranks - axes.servers)
    return lambda step_s: work.rates(step_s, every)


class StepFlops(NamedTuple):
    """Floating-point operations of a step of all ranks.

    model     those that the model needs
    hardware  those that are executed: recomputed forwards count again
    """

    model: float
    hardware: float

    def rates(self, step_s: float, peak: float) -> dict[str, float]:
        return {"mfu": self.model / step_s / peak, "hfu": self.hardware / step_s / peak}


def work_of(job: Job, parameters: int) -> StepFlops:
    """Return the FLOPs of a step: those of one row in the whole model, times the rows.

    What the model needs comes from its formula in `MODELS` (PaLM's for a GPT). Without a formula, or
    with recomputation, a step is counted.
    """
    kind, config = MODELS[job.config.model.kind], job.config
    needed, recomputed = kind.flops(config.model, parameters) if kind.flops else 0.0, 0
    if not kind.flops or config.memory.recompute != "none":
        from mpitrain.run.count.step import Counter

        counted = Counter(_alone(job)).step(0)
        recomputed = counted.recomputed
        needed = needed or counted.flops - recomputed
    return StepFlops(config.batch.size * needed, config.batch.size * (needed + recomputed))


def _alone(job: Job) -> Job:
    config: Config = job.config
    one_rank = {"dp": 1, "cp": 1, "tp": 1, "pp": 1, "sequence_parallel": False}
    updated = {
        "layout": config.layout.model_copy(update=one_rank),
        "batch": config.batch.model_copy(update={"size": 1, "micro_batches": 1}),
        "pipeline": config.pipeline.model_copy(update={"partition": ""}),
    }
    return replace(
        job, config=config.model_copy(update=updated), axes=Axes(), plan=plan_of(SERIAL, 1, 1)
    )


SIDES = {"cpu": 768, "cuda": 4096}
"""{kind of device: rows and columns of the measured matrices}; other kinds have no peak."""

BUDGET = 0.4
"""Seconds after which no further product starts."""

CHECK = 0.04
"""Seconds after which no further product starts, if the rate is cached and only checked."""

BLOCK = 65_521
"""Number of random numbers that fill the matrices in turn: a prime, so that rows differ."""

CACHE = "gemm-peak"


class _Peak(BaseModel):
    """The contents of a cached file; `facts` has everything that the rate depends on."""

    model_config = ConfigDict(strict=True, extra="forbid")

    facts: dict[str, str | int]
    flops_per_s: float = Field(gt=0)


def gemm_peak(device: Device, dtype: np.dtype, sharing: int, kernels: str) -> float | None:
    """Return the FLOPs per second of matrix products; None on a simulated device.

    The first call on a machine takes less than a second. Ranks of a host must call it at the same
    time: each measures with its own cores while the others load theirs, as in training. The result
    is cached; later calls measure a few products, and a higher rate replaces it.

    sharing  ranks on this GPU or, without one, on this host
    kernels  device.gemm, device.tiles and device.tensor_cores: the kernels on which the rate depends
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
        "products": kernels if device.kernels else f"{multiplier()} {np.__version__}",
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
    if device.kernels is None or device.multiply is None:
        return lambda: put_product(a, b, c, False, arena)
    kernels, multiply = device.kernels, device.multiply
    return lambda: multiply(kernels, arena, a, b, c)
