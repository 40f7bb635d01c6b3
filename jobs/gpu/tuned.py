"""Part of the second GPU job: the best tiles for the products of GPT-2, in a table for `--tiles` and device.tiles.

python3 jobs/gpu/tuned.py DEVICE FILE    the table is written after each product
"""

import sys
from pathlib import Path

from result import emit, micro, wrong_words
from workload import DTYPES, PRODUCTS

from mpitrain.ops.cuda.tiles import write_tiles
from mpitrain.ops.device import device_for
from mpitrain.tools.bench.kernels.gemm import tune


def main(kind: str, path: Path) -> None:
    """A result for each product, as it is found."""
    device, measured = device_for(kind), []
    for shape, _ in PRODUCTS[kind]:
        for row in tune(device, [shape], DTYPES if kind == "cuda" else DTYPES[:1]):
            best = row.best
            measured.append(best)
            write_tiles(path, device.kernels.engine.name, measured)
            tile = "x".join(map(str, best.tiling.tile[:3])) + f"/{best.tiling.splits}"
            emit(
                f"{best.stored} {best.m}x{best.n}x{best.k} {best.elements}: {tile} of {row.tried} tiles, against the usual one"
                f"{wrong_words(row.wrong)}",
                micro(row.time_us / 1e6),
                micro(row.usual_us / 1e6),
                ratio=row.usual_us / row.time_us,
                ok=row.wrong == 0,
            )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
