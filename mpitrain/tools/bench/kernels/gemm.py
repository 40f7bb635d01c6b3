"""Our matrix products, measured in turns with the library's, and the search for the best tiles."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.loader import Engine
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.tiles import DEFAULT, FastestTile, Tiling, worth_measuring
from mpitrain.ops.device import Device
from mpitrain.ops.host.product import put_product
from mpitrain.tools.bench.kernels.gemm_case import PRODUCTS, LayerProduct, Shape, case_of
from mpitrain.tools.bench.kernels.timing import seconds
from mpitrain.tools.bench.kernels.work import stored

SHAPES = {
    "cpu": "256,512,1024,2048x1024x256",
    "cuda-sim": "32,65x33x40",
    # Two cubes come first. Then come layers for 16 sequences of 1024 tokens: from width 768 to 3072
    # and back, sharded over 2 ranks. The last two go from width 4096 to 16384 and back, over 8 ranks.
    "cuda": "4096,8192,16384x1536x768,16384x768x1536,16384x2048x4096,16384x4096x2048",
}
"""{kind of device: default of --shapes}."""


class GemmRow(NamedTuple):
    """One measurement of our product and of the library's, with its kernels for the epilogue.

    plan     tiling in words; "" if no kernel of ours ran
    percent  our rate, relative to the library's
    wrong    wrong elements
    """

    product: str
    m: int
    n: int
    k: int
    dtype: str
    plan: str
    time_us: float
    library_us: float
    gflops: float
    percent: float
    wrong: int


class Tuned(NamedTuple):
    """The fastest tiling for a shape, and the default tiling, which is used without a table.

    tried     number of tilings measured
    time_us   time of the fastest tiling
    usual_us  time of the default tiling
    wrong     wrong elements over all tilings
    """

    best: FastestTile
    tried: int
    time_us: float
    usual_us: float
    wrong: int


def parse_shapes(text: str) -> list[Shape]:
    """Parse shapes MxNxK,...; a single number N means NxNxN. ConfigError for other texts."""
    shapes: list[Shape] = []
    for part in text.split(","):
        dims = part.strip().split("x")
        if len(dims) not in (1, 3) or not all(
            re.fullmatch("[0-9]{1,6}", dim) and int(dim) > 0 for dim in dims
        ):
            raise ConfigError(
                f"A shape is MxNxK or N, in whole numbers from 1 to 999999, but it is {part!r}.",
                "For example: --shapes 4096,8192x1536x768",
            )
        m, n, k = (int(dim) for dim in (dims * 3)[:3])
        shapes.append((m, n, k))
    return shapes


def measure(
    device: Device, shapes: Sequence[Shape], dtypes: Sequence[str], products: Sequence[str]
) -> Iterator[GemmRow]:
    """Yield rows as they are measured. On the CPU, the host backend is compared with NumPy."""
    if device.kernels is None:
        products = [name for name in products if not PRODUCTS[name].epilogue]
        if set(dtypes) != {"float32"}:
            raise ConfigError(
                f"On the CPU float32 is multiplied, not {', '.join(dtypes)}.",
                "Use --dtype float32, or another --device.",
            )
    for shape in shapes:
        for dtype in dtypes:
            for name in products:
                case = case_of(device, shape, dtype, PRODUCTS[name])
                runs = [case.by(multiply) for multiply in _sides(device)]
                runs[0]()
                device.backend.synchronize()
                wrong = case.wrong()
                ours, theirs = seconds(device, *runs)
                m, n, k = shape
                yield GemmRow(
                    name,
                    *shape,
                    dtype,
                    _planned(device, PRODUCTS[name], shape, dtype),
                    1e6 * ours,
                    1e6 * theirs,
                    2 * m * n * k / ours / 1e9,
                    100 * theirs / ours,
                    wrong,
                )


def tune(device: Device, shapes: Sequence[Shape], dtypes: Sequence[str]) -> Iterator[Tuned]:
    """Yield the fastest tiling for each shape, dtype and layout; ConfigError for the CPU."""
    if device.kernels is None:
        raise ConfigError(
            "Tiles belong to kernels, but --device is cpu.", "Use --device cuda or cuda-sim."
        )
    for shape in shapes:
        for dtype in dtypes:
            for ways in ("NT", "NN", "TN"):
                yield _fastest(device, device.kernels.engine, shape, dtype, ways)


def _fastest(device: Device, engine: Engine, shape: Shape, dtype: str, ways: str) -> Tuned:
    """Measure every tiling alone, then the best and the default one in turns.

    The second measurement keeps noise from deciding between these two.
    """
    case, like = case_of(device, shape, dtype, LayerProduct(ways)), _like(dtype)
    usual = DEFAULT.tiling(like, ways, (*shape, 1), engine)
    tilings = [usual, *worth_measuring(like, *shape, engine)]
    runs = {tiling: case.by(partial(product.gemm, tiling=tiling)) for tiling in tilings}
    times: dict[Tiling, float] = {}
    wrong = 0
    for tiling, run in runs.items():
        run()
        device.backend.synchronize()
        wrong += case.wrong()
        (times[tiling],) = seconds(device, run)
    best = min(times, key=times.__getitem__)
    fastest, usually = seconds(device, runs[best], runs[usual])
    if usually < fastest:
        best, fastest = usual, usually
    return Tuned(
        FastestTile(dtype, ways, *shape, best), len(times), 1e6 * fastest, 1e6 * usually, wrong
    )


def _sides(device: Device) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two functions with the arguments of product.gemm: our product and the library's."""
    if device.multiply is not None:
        return device.multiply, product.library

    def operands(
        a: Any, b: Any, transposed_a: bool = False, transposed_b: bool = False
    ) -> tuple[Any, Any]:
        return a.T if transposed_a else a, b.T if transposed_b else b

    return (
        lambda kernels, arena, a, b, c, **ways: put_product(
            *operands(a, b, **ways), c, False, arena
        ),
        lambda kernels, arena, a, b, c, **ways: np.matmul(*operands(a, b, **ways), out=c),
    )


def _planned(device: Device, what: LayerProduct, shape: Shape, dtype: str) -> str:
    """Return the tiling of our product in words, or "" if a library multiplies."""
    if device.kernels is None or not isinstance(device.multiply, partial):
        return ""
    table = device.multiply.keywords["table"]
    tile, splits = table.tiling(_like(dtype), what.stored, (*shape, 1), device.kernels.engine)
    return f"{tile.TILE_M}x{tile.TILE_N}x{tile.TILE_K}" + (f"/{splits}" if splits > 1 else "")


def _like(dtype: str) -> np.ndarray:
    """Return an empty array with the dtype in which operands of this dtype are stored."""
    return stored(np.empty(0, np.float32), dtype)
