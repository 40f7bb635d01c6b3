"""What the parts of a GPU job measure, by kind of device: tiny where only the way is to be shown."""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product as every
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpitrain.config import Config, parse, with_settings
from mpitrain.data import TokenSource
from mpitrain.machine.backend import HostBackend
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.layers import pitch
from mpitrain.ops.cuda.tiles import DEFAULT, HOPPER_TILES, MeasuredTiles, Tiling, read_tiles

VOCABULARY = 50257
"""Of GPT-2."""


class Products(NamedTuple):
    """Products of one shape: (M, K) times (K, N), of a linear layer."""

    shape: tuple[int, int, int]
    products: tuple[str, ...]


FORMS = ("NT", "NN", "TN")  # forward, input half, weight half
PRODUCTS = {
    # A cube; of 8 sequences of 1024 tokens the layers of GPT-2 124M, their gradients and its logits.
    "cuda": (
        Products((4096, 4096, 4096), FORMS),
        Products((8192, 3072, 768), ("NT", "NT+gelu")),
        Products((8192, 768, 3072), ("NT", "NN")),
        Products((3072, 768, 8192), ("TN", "TN+sums")),
        Products((8192, VOCABULARY, 768), ("NT",)),
        Products((8192, 768, VOCABULARY), ("NN",)),
        Products((VOCABULARY, 768, 8192), ("TN",)),
        Products((768, 768, 8192), ("TN",)),
        Products((8192, 2304, 768), ("NT",)),
    ),
    "cuda-sim": (Products((33, 20, 41), ("NT", "TN+sums")),),
}
WAYS = {"float32": "tiled", "3xtf32": "3xtf32", "bfloat16": "tiled"}
"""Ways to compute, and what device.gemm is for them; `3xtf32` computes with float32."""
HOPPER_WAYS = {"bfloat16": "tiled", "wgmma": "tiled", "library": "library", "auto": "auto"}
"""The ways that are compared on Hopper, likewise; all compute with bfloat16."""
STORED = {"3xtf32": "float32"} | dict.fromkeys(HOPPER_WAYS, "bfloat16")
MODELS = {
    "cuda": "model.layers=12 model.width=768 model.heads=12 model.context=1024 batch.size=8",
    "cuda-sim": "model.layers=1 model.width=32 model.heads=2 model.context=16 batch.size=2",
}
VOCABULARIES = {"cuda": VOCABULARY, "cuda-sim": 61}
GUARDED = {
    "cuda": (*every(HOPPER_TILES[:2], FORMS, (1, 2)),),
    "cuda-sim": ((HOPPER_TILES[1], "TN", 2),),
}
"""(tile, how operands are stored, splits) of products by warpgroups that must end and be right before others have their turn.

On a GPU a wrong wait has no end: these have each tile, form and kind of split of the job. In the simulator a wrong wait is an
error, and one product shows the way.
"""
STEPS = {"cuda": 10, "cuda-sim": 1}
"""Training steps of a block."""

BLOCKS = {"cuda": 5, "cuda-sim": 1}
"""Times that each side has its turn."""


def stored(way: str) -> str:
    """The dtype of a way to compute."""
    return STORED.get(way, way)


def table(way: str) -> MeasuredTiles:
    """The tiles in $TILES, or those of the cost model."""
    known = read_tiles(Path(os.environ["TILES"])) if os.environ.get("TILES") else DEFAULT
    if way not in ("3xtf32", "wgmma"):
        return known
    return MeasuredTiles(known.measured, way == "3xtf32", way == "wgmma")


def all_products(
    kind: str, ways: Iterable[str] = WAYS
) -> Iterator[tuple[tuple[int, int, int], str, str]]:
    for shape, products in PRODUCTS[kind]:
        for way in ways:
            for name in products:
                yield shape, way, name


def config(kind: str, way: str, layers: int = 0) -> Config:
    """A GPT trained by AdamW. layers: if not 0, fewer than it has.

    raises  ConfigError for what this version does not train
    """
    changes = [
        *MODELS[kind].split(),
        f"device.kind={kind}",
        f"precision.compute={stored(way)}",
        f"device.gemm={(WAYS | HOPPER_WAYS)[way]}",
        f"device.tensor_cores={'wgmma' if way == 'wgmma' else 'mma'}",
        "optimizer.clip=0",
        "run.steps=1000",
    ]
    if os.environ.get("TILES"):
        changes.append(f"device.tiles={os.environ['TILES']}")
    return parse(with_settings({}, [*changes, *([f"model.layers={layers}"] if layers else [])]))


def source(kind: str, settings: Config) -> TokenSource:
    context, vocabulary = settings.model.context, VOCABULARIES[kind]
    tokens = (
        np.random.default_rng(0).integers(vocabulary, size=100 * (context + 1)).astype(np.uint16)
    )
    return TokenSource(tokens, vocabulary, context, "random tokens")


def operands(
    shape: tuple[int, int, int], dtype: Any, name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a, b, c of a product, not filled; a and c with the pitch of `bench gemm`."""
    m, n, k = shape
    rows, columns = (k, m) if name[0] == "T" else (m, k)
    wide, step = ((each if name.endswith("+sums") else pitch(each)) for each in (columns, n))
    return (
        np.empty((rows, wide), dtype)[:, :columns],
        np.empty((n, k) if name[1] == "T" else (k, n), dtype),
        np.empty((m, step), dtype)[:, :n],
    )


def multiply(kernels: Any, arena: Any, shape: tuple[int, int, int], way: str, name: str) -> None:
    """Launch a product of PRODUCTS, ours and the library's, on operands that nobody has filled."""
    dtype = np.dtype(stored(way))
    a, b, c = operands(shape, dtype, name)
    extras: dict[str, Any] = {}
    if name.endswith("+gelu"):
        extras = {
            "bias": np.empty(shape[1], dtype),
            "activation": "gelu",
            "saved": operands(shape, dtype, name)[2],
        }
    elif name.endswith("+sums"):
        extras = {"row_sums": np.empty(shape[0], np.float32)}
    for one in (partial(product.gemm, table=table(way)), product.library):
        one(
            kernels,
            arena,
            a,
            b,
            c,
            transposed_a=name[0] == "T",
            transposed_b=name[1] == "T",
            **extras,
        )


def multiply_ones(kernels: Any, kind: str) -> int:
    """Make the products of GUARDED with ones, by two multiprocessors: each block, or pair, computes several tiles.

    returns  how many elements are wrong: each sum is the depth
    """
    depth, wrong, engine = 640, 0, kernels.engine
    multiprocessors, engine.multiprocessors = engine.multiprocessors, 2
    for tile, form, splits in GUARDED[kind]:
        shape = 4 * tile.TILE_M, tile.TILE_N, depth
        a, b, c = operands(shape, ml_dtypes.bfloat16, form)
        a[:], b[:] = 1, 1
        product.gemm(
            kernels,
            HostBackend().arena(),
            a,
            b,
            c,
            transposed_a=form[0] == "T",
            transposed_b=form[1] == "T",
            tiling=Tiling(tile, splits),
        )
        wrong += int((c != depth).sum())
    engine.multiprocessors = multiprocessors
    return wrong
