"""Compiles beforehand, without a GPU, the kernels that a GPU job loads; jobs/gpu/cubins.sh starts it.

python3 jobs/gpu/cubins.py FOLDER CAPABILITY

Code is found by its text, its options and NVRTC's version. Needs g++, too: the cases of the suite run in the simulator, to
show which kernels they launch.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compiled import Collector, collect

from mpitrain.kernels.cuda import Compiler
from mpitrain.kernels.loader import H100, Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.kernels.source import package_sources
from mpitrain.machine import process
from tests.cases.suite import SUITE
from tests.unit.kernels.nvrtc import NEWEST, Module


class Simulated(Collector):
    """An engine that notes what it loads, and runs it in the simulator."""

    takes_plain = False

    def __init__(self, device: Any):
        super().__init__(device)
        self._simulator = Simulator()
        self.multiply = self._simulator.multiply

    def load(self, source: Any, signature: Any, defines: dict[str, str]) -> Any:
        super().load(source, signature, defines)
        return self._simulator.load(source, signature, defines)


def compiler(folder: Path, capability: int) -> Compiler:
    core = SimpleNamespace(assemble_cupy_compiler_options=lambda options: (NEWEST.include,))
    runtime = SimpleNamespace(driverGetVersion=lambda: 99000)
    cuda = SimpleNamespace(nvrtc=Module(), runtime=runtime)
    cupy: Any = SimpleNamespace(cuda=cuda, _core=SimpleNamespace(core=core))
    return Compiler(cupy, capability, folder)


def wanted(device: Any) -> dict[tuple[str, tuple], str]:
    """All kernels of the job's parts and of the suite, by (source, macros)."""
    noting = Simulated(device)
    for group in dict.fromkeys(group for groups in SUITE.values() for group in groups):
        for case in group():
            case(Kernels(noting))
    return noting.found | of_the_job(device)


def of_the_job(device: Any) -> dict[tuple[str, tuple], str]:
    """The kernels of the job's parts, as on a machine with one large GPU: here there is none."""
    process.current_gpu = lambda: process.Gpu(1, free=80 << 30)
    return collect("cuda", device)


def compile_one(folder: Path, capability: int, stem: str, macros: tuple) -> str:
    return compiler(folder, capability).compile(package_sources()[stem], dict(macros)).name


def main(folder: Path, capability: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    device = SimpleNamespace(capability=capability, multiprocessors=132, multiprocessor=H100)
    with ProcessPoolExecutor(process.processors(), get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, folder, capability, *key) for key in wanted(device)]
        for number, job in enumerate(jobs, 1):
            print(f"{number} of {len(jobs)}: {job.result()}", flush=True)
    major, minor = Module().getVersion()
    print(f"{len(jobs)} modules by NVRTC {major}.{minor} in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
