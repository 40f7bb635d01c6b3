"""Part of the GPU job: everything that later parts launch is compiled into the cache, by up to 16 processes at once.

python3 jobs/gpu/compiled.py DEVICE [hopper]    what the table launches, or what the job for Hopper does

Which kernels these are, an engine finds out that compiles and launches nothing: what is measured later runs on it once. The
kernels of the suite compile when it runs, in as many processes.
"""

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
from table import emit, micro
from workload import HOPPER_WAYS, WAYS, all_products, config, multiply, multiply_ones, source

from mpitrain.errors import MpitrainError
from mpitrain.kernels.cuda import Compiler
from mpitrain.kernels.loader import Engine, Kernels, TensorMap
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.kernels.source import package_sources
from mpitrain.machine.backend import HostBackend
from mpitrain.machine.compiling import cache_of
from mpitrain.machine.process import processors
from mpitrain.ops.device import BACKENDS, KERNELS, device_for
from mpitrain.run.build import build
from mpitrain.tools.bench.kernels import operations as bench
from mpitrain.transport.threads import run_ranks
from tests.cases.products import hopper

PROCESSES = 16
HEAD_SIZED = {"cuda": (2, 64, 768, 12, 512)}
"""In the place of bench.SHAPES: as wide, so that heads are, but few rows, since the numbers are drawn here."""


class Collector:
    """An engine that notes what it should load."""

    name, takes_plain = "an engine that only notes", True

    def __init__(self, device: Engine):
        self.capability, self.found = device.capability, {}
        self.has_wgmma = device.has_wgmma
        self.multiprocessors, self.multiprocessor = device.multiprocessors, device.multiprocessor

    def load(self, source: Any, signature: Any, defines: dict[str, str]) -> Any:
        self.found[source.path.stem, tuple(defines.items())] = signature.name
        return lambda *arguments: None

    def prepare(self, *arguments: Any) -> None:
        pass

    def tensor_map(self, array: Any, box_rows: int) -> TensorMap:
        return TensorMap(array, box_rows)

    def multiply(self, *arguments: Any) -> None:
        pass


class Nowhere(HostBackend):
    """Arrays of the host that pass for those of a device."""


def collect(kind: str, device: Engine, ways: Iterable[str]) -> dict[tuple[str, tuple], str]:
    collector = Collector(device)
    kernels = Kernels(collector)
    for shape, way, name in all_products(kind, ways):
        multiply(kernels, HostBackend().arena(), shape, way, name)
    if "wgmma" in ways and device.has_wgmma:
        multiply_ones(kernels, kind)
        for case in hopper():
            with suppress(AssertionError):  # nothing has computed the results
                case(kernels)
    Nowhere.kind = kind
    BACKENDS[kind], KERNELS[kind] = Nowhere, lambda: kernels
    bench.SHAPES |= HEAD_SIZED
    bench.MOVED["cuda"] = 64
    for work in bench.works(device_for(kind), None):
        work.run()
    for way in ways:
        try:
            settings = config(kind, way, layers=1)
        except MpitrainError:  # which the part that trains says
            continue
        run_ranks(1, step, kind, settings)
    return collector.found


def step(transport: Any, kind: str, settings: Any) -> None:
    """One training step of a short model. Its numbers are whatever memory held, so that it may end early."""
    job = build(transport, settings, source=source(kind, settings))
    rows = job.data.batch(0, 0, settings.batch.size, range(settings.batch.size))
    try:
        job.trainer.step(0, *rows)
    except MpitrainError as error:
        print(f"a step on an engine that only notes: {error}", file=sys.stderr)


@cache
def simulator() -> Simulator:
    return Simulator()


def compile_one(kind: str, capability: int, stem: str, macros: tuple, kernel: str) -> str:
    """Compile it into the cache; what went wrong, or nothing. On a GPU nothing is loaded: so many processes want none of it."""
    found = package_sources()[stem]
    try:
        if kind == "cuda":
            import cupy

            Compiler(cupy, capability, cache_of("cuda")).compile(found, dict(macros))
        else:
            simulator().load(found, found.kernels[kernel], dict(macros))
    except MpitrainError as error:
        return str(error)
    return ""


def main(kind: str, *words: str) -> None:
    start = time.perf_counter()
    kernels = device_for(kind).kernels
    assert kernels is not None
    capability = kernels.engine.capability
    engine = kernels.engine
    found = collect(kind, engine, HOPPER_WAYS if words else WAYS)
    collected, processes = time.perf_counter() - start, min(PROCESSES, processors())
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = [
            (stem, macros, pool.submit(compile_one, kind, capability, stem, macros, kernel))
            for (stem, macros), kernel in found.items()
        ]
        wrong = [(stem, macros, said) for stem, macros, job in jobs if (said := job.result())]
    for stem, macros, said in wrong:
        emit(
            f"{stem} does not compile: {said.splitlines()[-1][:80]}", ok=False, macros=dict(macros)
        )
    emit(
        f"{len(found)} modules compiled by {processes} processes, found in {collected:.1f} s",
        micro(time.perf_counter() - start - collected),
        ok=bool(found),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
