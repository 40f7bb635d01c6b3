"""Our matrix products, measured in turns with a library's, and the search for the fastest tiles."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.loader import Engine
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.layers import pitch
from mpitrain.ops.cuda.tiles import (
    DEFAULT,
    FLOAT_GAIN,
    FLOAT_TILES,
    HALVES,
    FastestTile,
    MeasuredTiles,
    Tiling,
    worth_measuring,
)
from mpitrain.ops.device import Device
from mpitrain.ops.host.product import put_product
from mpitrain.ops.reference.layers import linear_gelu
from mpitrain.tools.bench.kernels.operations import count_wrong, seconds
from mpitrain.tools.text_table import TextColumn, TextTable

Shape = tuple[int, int, int]
"""M, N, K: (M, K) times (K, N)."""
SHAPES = {
    "cpu": "256,512,1024,2048x1024x256",
    "cuda-sim": "32,65x33x40",
    # Two cubes come first. Then come layers for 16 sequences of 1024 tokens: from width 768 to 3072
    # and back, sharded over 2 ranks. The last two go from width 4096 to 16384 and back, over 8 ranks.
    "cuda": "4096,8192,16384x1536x768,16384x768x1536,16384x2048x4096,16384x4096x2048",
}
"""{kind of device: default of --shapes}."""
WRONG = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error of a correct element, relative to the reference's largest element."""
MOST_COMPARED = 256
"""Largest number of rows that are compared: evenly spaced ones and the last.

The host computes the reference, in float64, so it does not compute all rows.
"""
PERIOD = 1_048_573
"""Period of the operands' random numbers. It is a prime, so that all rows differ."""


class LayerProduct(NamedTuple):
    """One of the matrix products of a linear layer.

    stored    how the two operands are stored: N, or T for transposed
    epilogue  "gelu": bias and GELU, with saved pre-activation; "sums": bias gradient; "": nothing
    """

    stored: str
    epilogue: str = ""


PRODUCTS = {
    "NT": LayerProduct("NT"),
    "NN": LayerProduct("NN"),
    "TN": LayerProduct("TN"),
    "NT+gelu": LayerProduct("NT", "gelu"),
    "TN+sums": LayerProduct("TN", "sums"),
}
"""NT: forward. NN: input half of backward. TN: weight half. NT+gelu: forward with bias and GELU.
TN+sums: weight half and bias gradient."""


class GemmRow(NamedTuple):
    """Our product and the library's, measured in turns.

    The library's time includes our kernels for the epilogue.

    plan     our tiling in words; "" if none of our kernels ran
    percent  our rate in percent of the library's
    error    largest error, relative to the largest element of a float64 product
    wrong    number of wrong elements
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
    error: float
    wrong: int


class Tuned(NamedTuple):
    """The fastest tiling for a shape, beside the default one, which is used if no table has the shape.

    tried     number of tilings measured
    time_us   time of the fastest tiling
    usual_us  time of the default tiling
    wrong     number of wrong elements over all tilings
    """

    best: FastestTile
    tried: int
    time_us: float
    usual_us: float
    wrong: int


TABLE = TextTable(
    [
        TextColumn("product", "<8", "product"),
        TextColumn("M x N x K", "18", lambda row: f"{row.m} x {row.n} x {row.k}"),
        TextColumn("dtype", "8", "dtype"),
        TextColumn("tile", "<13", lambda row: row.plan or None, gap=2),
        TextColumn("time us", "10.1f", "time_us"),
        TextColumn("library us", "11.1f", "library_us"),
        TextColumn("GFLOP/s", "10.2f", "gflops"),
        TextColumn("percent", "8.1f", "percent"),
        TextColumn("error", "9.1e", "error"),
        TextColumn("#wrong", "7", "wrong"),
    ]
)
"""A line for each `GemmRow`."""
TUNED = TextTable(
    [
        TextColumn("stored", "<6", lambda row: row.best.stored),
        TextColumn("M x N x K", "18", lambda row: " x ".join(map(str, row.best[2:5]))),
        TextColumn("dtype", "8", lambda row: row.best.elements),
        TextColumn("best tile", "<14", lambda row: _tile(row.best.tiling), gap=2),
        TextColumn("time us", "10.1f", "time_us"),
        TextColumn("usual us", "10.1f", "usual_us"),
        # Of 3xTF32 or of the library, where --gemm auto compares them; else 0.
        TextColumn("gain", "6.2f", lambda row: row.best.gain or row.best.library),
        TextColumn("tried", "6", "tried"),
        TextColumn("#wrong", "7", "wrong"),
    ]
)
"""A line for each `Tuned`."""


def _tile(tiling: Tiling) -> str:
    return "x".join(map(str, tiling.tile[:3])) + f"/{tiling.splits}"


def parse_shapes(text: str) -> list[Shape]:
    """Return the shapes (M, N, K) of a text "MxNxK,..."; a single number N means NxNxN.

    raises  ConfigError for any other text
    """
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
    """Yield rows as they are measured. On the CPU, the product of our host backend is compared with NumPy's.

    raises  ConfigError for a dtype that the CPU does not multiply
    """
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
                wrong, error = case.compared()
                ours, theirs = seconds(device, *runs)
                m, n, k = shape
                plan = _planned(device, PRODUCTS[name], shape, dtype)
                times = 1e6 * ours, 1e6 * theirs, 2 * m * n * k / ours / 1e9, 100 * theirs / ours
                yield GemmRow(name, *shape, dtype, plan, *times, error, wrong)


def tune(device: Device, shapes: Sequence[Shape], dtypes: Sequence[str]) -> Iterator[Tuned]:
    """Yield the fastest tiling for each shape, dtype and layout of the operands.

    raises  ConfigError for the CPU, which has no tiles
    """
    if device.kernels is None:
        raise ConfigError(
            "Tiles belong to kernels, but --device is cpu.", "Use --device cuda or cuda-sim."
        )
    for shape in shapes:
        for dtype in dtypes:
            for ways in ("NT", "NN", "TN"):
                yield _fastest(device, device.kernels.engine, shape, dtype, ways)


def _fastest(device: Device, engine: Engine, shape: Shape, dtype: str, ways: str) -> Tuned:
    """Measure each tiling by itself, then the best and the default one in turns.

    Measuring these two in turns keeps noise from deciding between them. With device.gemm=auto, the
    best of 3xTF32 and the best of CUDA cores are compared, too, and 3xTF32 has to gain FLOAT_GAIN;
    in 16 bits the best and the library.
    """
    case, like = case_of(device, shape, dtype, LayerProduct(ways)), _like(dtype)
    table = _table(device)
    is_3xtf32, wgmma = table.is_3xtf32, table.wgmma and not any(dim % 8 for dim in shape)
    usual = MeasuredTiles((), is_3xtf32, wgmma).tiling(like, ways, (*shape, 1), engine)
    tilings = [usual, *worth_measuring(like, *shape, engine, is_3xtf32, wgmma)]
    if is_both := table.by_gain and dtype == "float32":
        tilings += worth_measuring(like, *shape, engine, True)
    runs = {tiling: case.by(partial(product.gemm, tiling=tiling)) for tiling in tilings}
    times: dict[Tiling, float] = {}
    wrong = 0
    for tiling, run in runs.items():
        run()
        device.backend.synchronize()
        wrong += case.compared()[0]
        (times[tiling],) = seconds(device, run)
    best, gain = min(times, key=times.__getitem__), 0.0
    if is_both:
        split = [tiling for tiling in times if tiling.tile in FLOAT_TILES]
        ours = [min(some, key=times.__getitem__) for some in (split, times.keys() - {*split})]
        by_tensor_cores, by_cuda_cores = seconds(device, *(runs[each] for each in ours))
        gain = by_cuda_cores / by_tensor_cores
        best = ours[gain < FLOAT_GAIN]
    fastest, usually = seconds(device, runs[best], runs[usual])
    if usually < fastest:
        best, fastest = usual, usually
    by_library = 0.0
    if table.by_gain and dtype in HALVES:
        own, of_library = seconds(device, runs[best], case.by(product.library))
        by_library = own / of_library
    return Tuned(
        FastestTile(dtype, ways, *shape, best, gain, by_library),
        len(times),
        1e6 * fastest,
        1e6 * usually,
        wrong,
    )


def _sides(device: Device) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two functions with the parameters of product.gemm: our product, the library's."""
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
    """Return the tiling of our product in words, or "" if a library multiplies, or may."""
    is_ours = isinstance(device.multiply, partial) and device.multiply.func is product.gemm
    if device.kernels is None or not is_ours:
        return ""
    tile, splits = _table(device).tiling(
        _like(dtype), what.stored, (*shape, 1), device.kernels.engine
    )
    return f"{tile.TILE_M}x{tile.TILE_N}x{tile.TILE_K}" + (f"/{splits}" if splits > 1 else "")


def _table(device: Device) -> MeasuredTiles:
    """Return the table that chooses the tiles of the device's products."""
    return device.multiply.keywords["table"] if isinstance(device.multiply, partial) else DEFAULT


def _like(dtype: str) -> np.ndarray:
    """Return an empty array of the dtype."""
    return np.empty(0, dtype)


class Case(NamedTuple):
    """A product of given operands.

    by        (multiply) -> function that computes the product with `multiply`, such as product.gemm
    compared  () -> (wrong elements, largest relative error) of the result of the last run
    """

    by: Callable[[Callable[..., None]], Callable[[], None]]
    compared: Callable[[], tuple[int, float]]


def case_of(device: Device, shape: Shape, dtype: str, what: LayerProduct) -> Case:
    """Return a product of random operands, with its check against a float64 reference.

    The elements of the product are near 1, where GELU is not linear. Only some rows are checked.
    With kernels, the rows of the first operand and of the result are as far apart in memory as
    those of logits in training; with the epilogue "sums" they are adjacent, because logits have no
    bias.
    """
    m, n, k = shape
    put, get, arena = device.backend.from_host, device.backend.to_host, device.arena()
    rows, columns = (k, m) if what.stored[0] == "T" else (m, k)
    has_pitch = device.kernels is not None and what.epilogue != "sums"
    wide, step = (pitch(each) if has_pitch else each for each in (columns, n))
    rng = np.random.default_rng(shape)
    padded = _drawn(rng, rows, wide, dtype)
    a, x = padded[:, :columns], put(padded)[:, :columns]
    b = _drawn(rng, *((n, k) if what.stored[1] == "T" else (k, n)), dtype, k**-0.5)
    bias = _drawn(rng, 1, n, dtype)[0]
    y, added = put(b), put(bias)
    z, kept = (device.backend.zeros(m * step, a.dtype).reshape(m, step)[:, :n] for _ in range(2))
    sums = device.backend.zeros(m, np.float32)
    extras = {
        "gelu": {"bias": added, "activation": "gelu", "saved": kept},
        "sums": {"row_sums": sums},
    }.get(what.epilogue, {})

    def by(multiply: Callable[..., None]) -> Callable[[], None]:
        return lambda: multiply(
            device.kernels,
            arena,
            x,
            y,
            z,
            transposed_a=what.stored[0] == "T",
            transposed_b=what.stored[1] == "T",
            **extras,
        )

    def compared() -> tuple[int, float]:
        left = a.T if what.stored[0] == "T" else a
        right = _float64(b if what.stored[1] == "T" else b.T)  # as a weight, (N, K)
        pairs = [
            pair for part in _compared(m) for pair in results(part, _float64(left[part]), right)
        ]
        count = sum(count_wrong(x, truth, WRONG[dtype]) for x, truth in pairs)
        error = max(np.abs(x - truth).max() / np.abs(truth).max() for x, truth in pairs)
        if what.epilogue == "sums":
            count += count_wrong(get(sums), _float64(left).sum(1), WRONG["float32"])
        return count, float(error)

    def results(
        part: slice, left: np.ndarray, right: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (result, truth) of some rows."""
        if what.epilogue == "gelu":
            truth, (_, before) = linear_gelu(left, right, _float64(bias), None)
            yield _float64(get(kept[part])), before
        else:
            truth = left @ right.T
        yield _float64(get(z[part])), truth

    return Case(by, compared)


def _drawn(
    rng: np.random.Generator, rows: int, columns: int, dtype: str, scale: float = 1.0
) -> np.ndarray:
    """Return random numbers, (rows, columns).

    To draw each number of a large array would take seconds, so some repeat.
    """
    drawn = rng.standard_normal(min(rows * columns, PERIOD), np.float32)
    return np.resize((drawn * np.float32(scale)).astype(dtype), (rows, columns))


def _compared(rows: int) -> tuple[slice, ...]:
    step = -(-rows // MOST_COMPARED)
    return (slice(None),) if step == 1 else (slice(None, None, step), slice(rows - 1, rows))


def _float64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)
