"""Part of the GPU job: the machine, and its kernels against a copy, a library and PyTorch.

python3 jobs/gpu/kernels.py DEVICE first         what the machine is, the first launch, and the rate of a copy
python3 jobs/gpu/kernels.py DEVICE attention     attention, against PyTorch's fused one; float32 also as 3xTF32
python3 jobs/gpu/kernels.py DEVICE memory        all other kernels of bench kernels, against a copy
python3 jobs/gpu/kernels.py DEVICE products      matrix products, against the library's

A result is printed as soon as it is measured.
"""

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from typing import Any

import numpy as np
from predicted import ATTENTION, GPUS, tiled
from table import emit, micro, wrong_words
from workload import all_products, stored, table

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.process import processors
from mpitrain.ops.cuda import product
from mpitrain.ops.device import device_for
from mpitrain.ops.reference.layers import layer_norm
from mpitrain.tools.bench.kernels.gemm import GemmRow
from mpitrain.tools.bench.kernels.gemm import measure as measure_products
from mpitrain.tools.bench.kernels.operations import OperationRow, attentions, measure, measured

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
    if kind == "cuda" and shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        return done.stdout.strip().replace("\n", "; ") or "nvidia-smi says nothing"
    return kind


def first(kind: str) -> None:
    """The machine, the first launch, and the rate of a copy."""
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


OF_A_COPY = 0.85
FORWARD, BACKWARD = 1.0, 0.7
"""Of PyTorch's attention, by the backend that the row names."""


def report_operation(row: OperationRow, copy: float, **more: Any) -> None:
    if row.unit == "GB/s":
        emit(
            f"{row.name} against a copy{wrong_words(row.wrong)}",
            f"{row.rate:,.1f} GB/s",
            f"{copy:,.1f} GB/s",
            ratio=row.rate / copy,
            required=OF_A_COPY,
            ok=row.wrong == 0,
        )
    elif row.name.startswith("attention"):
        has_peer = row.peer_us == row.peer_us
        backend = "flash attention" if "bfloat16" in row.name else "efficient attention"
        bound = {"required": BACKWARD if "back" in row.name else FORWARD} if has_peer else {}
        emit(
            f"{row.name} against PyTorch's {backend}{wrong_words(row.wrong)}",
            micro(row.time_us / 1e6),
            micro(row.peer_us / 1e6) if has_peer else "-",
            ratio=row.peer_us / row.time_us if has_peer else None,
            ok=row.wrong == 0,
            gflops=row.rate,
            **(bound | more),
        )
    else:
        emit(
            f"{row.name}{wrong_words(row.wrong)}",
            micro(row.time_us / 1e6),
            ok=row.wrong == 0,
            gflops=row.rate,
        )


def attention(kind: str) -> None:
    """Attention, against PyTorch's fused one."""
    device, peer = device_for(kind), None
    if find_spec("torch"):
        from mpitrain.tools.bench.training.torch_peer import TorchAttention as peer
    split = device_for(kind, "3xtf32")
    for row, backward in zip(
        measured(split, attentions(split, peer, ["float32"])), (False, True), strict=True
    ):
        seconds = row.rate * row.time_us * 1e3 / ATTENTION["3xtf32"][backward]
        named = row._replace(name=row.name.replace("float32", "3xtf32"))
        report_operation(named, 0.0, required=None, goal=1.0, predicted=micro(seconds))
    for row in measured(device, attentions(device, peer)):
        report_operation(row, 0.0)


def memory(kind: str) -> None:
    """All other kernels, against a copy."""
    device = device_for(kind)
    rows = measure(device, attends=False)
    copy = next(rows).rate
    for row in rows:
        report_operation(row, copy)


BOUNDS = {"float32": ("required", 0.9), "3xtf32": ("goal", 1.3), "bfloat16": ("goal", 0.7)}
"""Of the library's rate in float32 or bfloat16. On tensor cores it multiplies by wgmma, which ours have not."""
ERROR = 2e-6
"""The largest error of `3xtf32`, relative to the largest element."""
WORDS = {
    "NT+gelu": " + bias + GELU, against library and a kernel",
    "TN+sums": " + bias gradient, against library and kernels",
}


def report(row: GemmRow, used: dict[str, int], way: str) -> None:
    """One product. Where ours does more than a product, the library's time has kernels after it, and ours should be as fast."""
    bound, least = BOUNDS[way]
    limits: Any = {bound: 1.0 if "+" in row.product else least}
    words = WORDS.get(row.product, " against library") + wrong_words(row.wrong)
    taken = f"; {used['registers']} registers, {used['local_bytes']} bytes spilled" if used else ""
    emit(
        f"{row.product[:2]} {row.m}x{row.n}x{row.k} {way}{words}, tile {row.plan}{taken}, error {row.error:.1e}",
        micro(row.time_us / 1e6),
        micro(row.library_us / 1e6),
        ratio=row.library_us / row.time_us,
        predicted=micro(
            tiled(GPUS[0], row.product[:2], (row.m, row.n, row.k), row.dtype, table(way))[1]
        ),
        **limits,
        ok=row.wrong == 0 and (way != "3xtf32" or row.error <= ERROR),
        gflops=row.gflops,
        error=row.error,
        **used,
    )


class Noting:
    """An engine that remembers the product that it has loaded last."""

    def __init__(self, engine: Any):
        self._engine, self.product = engine, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, source: Any, signature: Any, defines: dict[str, str]) -> Any:
        launch = self._engine.load(source, signature, defines)
        if signature.name in ("gemm", "gemm_tensor"):
            self.product = launch
        return launch

    def used(self) -> dict[str, int]:
        return self.product.used() if hasattr(self.product, "used") else {}


def products(kind: str) -> None:
    """Matrix products, against the library's, and what their kernels take of a multiprocessor."""
    device = device_for(kind)
    assert device.kernels is not None
    for shape, way, name in all_products(kind):
        engine = Noting(device.kernels.engine)
        noting = device._replace(
            kernels=Kernels(engine), multiply=partial(product.gemm, table=table(way))
        )
        for row in measure_products(noting, [shape], [stored(way)], [name]):
            report(row, engine.used(), way)


PARTS: dict[str, Callable[[str], None]] = {
    "first": first,
    "attention": attention,
    "memory": memory,
    "products": products,
}

if __name__ == "__main__":
    kind, part = sys.argv[1:]
    PARTS[part](kind)
