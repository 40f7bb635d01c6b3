"""Part of the GPU job: matrix products against the library's, and what their kernels take of a multiprocessor.

python3 jobs/gpu/products.py DEVICE
"""

import sys
from functools import partial
from typing import Any

from predicted import GPUS, tiled
from result import emit, micro, wrong_words
from workload import all_products, table

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda import product
from mpitrain.ops.device import device_for
from mpitrain.tools.bench.kernels.gemm import Row, measure

BOUNDS = {"float32": ("required", 0.9), "bfloat16": ("goal", 0.7)}
"""Of the library's rate. On tensor cores it multiplies by wgmma, which ours have not."""
WORDS = {
    "NT+gelu": " + bias + GELU, against library and a kernel",
    "TN+sums": " + bias gradient, against library and kernels",
}


def report(row: Row, used: dict[str, int]) -> None:
    """One product. Where ours does more than a product, the library's time has kernels after it, and ours should be as fast."""
    bound, least = BOUNDS[row.dtype]
    limits: Any = {bound: 1.0 if "+" in row.product else least}
    words = WORDS.get(row.product, " against library") + wrong_words(row.wrong)
    taken = f"; {used['registers']} registers, {used['local_bytes']} bytes spilled" if used else ""
    emit(
        f"{row.product[:2]} {row.m}x{row.n}x{row.k} {row.dtype}{words}, tile {row.plan}{taken}",
        micro(row.time_us / 1e6),
        micro(row.library_us / 1e6),
        ratio=row.library_us / row.time_us,
        predicted=micro(
            tiled(GPUS[0], row.product[:2], (row.m, row.n, row.k), row.dtype, table())[1]
        ),
        **limits,
        ok=row.wrong == 0,
        gflops=row.gflops,
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
        """What a thread of it takes, where an engine tells."""
        return self.product.used() if hasattr(self.product, "used") else {}


def main(kind: str) -> None:
    """A result for each, as it is measured."""
    device = device_for(kind)
    assert device.kernels is not None
    for shape, dtype, name in all_products(kind):
        engine = Noting(device.kernels.engine)
        noting = device._replace(
            kernels=Kernels(engine), multiply=partial(product.gemm, table=table())
        )
        for row in measure(noting, [shape], [dtype], [name]):
            report(row, engine.used())


if __name__ == "__main__":
    main(sys.argv[1])
