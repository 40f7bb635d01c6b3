"""How exact float32 products are on CUDA cores, as three products of TF32, and as one, in the simulator.

python3 jobs/prove/tf32.py    a line for each length K of sums in GPT-2: the largest errors, relative to the largest element

A block sums K alone, as those of large products do; `3xtf32` cuts sums at 8192.
"""

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.tiles import FLOAT_TILES, TILES, Tiling, fewest
from mpitrain.ops.reference.layers import split_tf32

kernels = Kernels(Simulator())
print(f"{'K':>6} {'tiled':>9} {'3xtf32':>9} {'TF32':>9}")
for k in (768, 3072, 8192, 50257):
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((64, k), (k, 64)))
    truth = a.astype(np.float64) @ b
    results = [split_tf32(a)[0].astype(np.float64) @ split_tf32(b)[0]]
    for tile in (FLOAT_TILES[2], TILES[2]):
        c = np.empty((64, 64), np.float32)
        product.gemm(kernels, Arena(), a, b, c, tiling=Tiling(tile, fewest(tile, k)))
        results.insert(0, c)
    errors = (np.abs(c - truth).max() / np.abs(truth).max() for c in results)
    print(f"{k:>6}", *(f"{error:9.1e}" for error in errors), flush=True)
