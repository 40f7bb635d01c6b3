"""Part of the GPU job: what the machine is, the first launch, and the rate of a copy.

python3 jobs/gpu/machine.py DEVICE
"""

import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import numpy as np
from result import emit, micro

from mpitrain.machine.process import processors
from mpitrain.ops.device import device_for
from mpitrain.ops.reference.layers import layer_norm
from mpitrain.tools.bench.kernels.operations import measure

WHEELS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}


def version(module: str) -> str:
    """What is installed, in words. An import of torch alone would take up to half a minute from a cold disk."""
    for name in WHEELS.get(module, (module,)):
        try:
            return f"{module} {installed(name)}"
        except PackageNotFoundError:
            continue
    return f"no {module}"


def described(kind: str) -> str:
    """The device and its driver."""
    if kind == "cuda" and shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        return done.stdout.strip().replace("\n", "; ") or "nvidia-smi says nothing"
    return kind


def main(kind: str) -> None:
    """Three results."""
    modules = ["numpy", "torch", *(["cupy"] if kind == "cuda" else [])]
    emit(
        f"{described(kind)}; {processors()} cores, Python {platform.python_version()}, {', '.join(map(version, modules))}"
    )
    start = time.perf_counter()
    device = device_for(kind)
    x = np.random.default_rng(0).standard_normal((64, 768)).astype(np.float32)
    gain, arena = device.backend.from_host(np.ones(768, np.float32)), device.arena()
    y = device.backend.to_host(
        device.ops.layer_norm(device.backend.from_host(x), gain, gain, 1e-5, arena)[0]
    )
    ones = np.ones(768, np.float32)
    truth = layer_norm(x, ones, ones, 1e-5, None)[0]
    emit(
        "the first launch, from nothing",
        micro(time.perf_counter() - start),
        ok=bool(np.abs(y - truth).max() < 1e-4),
    )
    copy = next(measure(device))
    emit("copy", f"{copy.rate:,.1f} GB/s", ok=copy.wrong == 0, rate=copy.rate)


if __name__ == "__main__":
    main(sys.argv[1])
