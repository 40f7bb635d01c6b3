"""Operations of an all-reduce on chunks in their wire format: sums, maxima, and (de)compression.

`top_k` is an exact, deterministic radix selection.
"""

from functools import partial
from typing import Any

from mpitrain.kernels.loader import Kernels, Macros
from mpitrain.ops.codes import WIRE_BLOCK as BLOCK
from mpitrain.ops.cuda.launches import POINTWISE, ByDtypes, blocks, c_type, element, pointwise


def _wire(y: Any, x: Any) -> dict[str, Any]:
    """Return the macros of wire.cu: Element is the wire format, Result the reduced type."""
    return element(y) | {"Element": c_type(x), "Result": c_type(y), "BLOCK": BLOCK}


WIRE = ByDtypes(_wire)
"""Macros by the dtypes of (the reduced array, the array in wire format)."""

CONVERTED = ByDtypes(lambda x, y: element(x) | {"Result": c_type(y)})
"""Macros of convert.cu by the dtypes of (the input, the output)."""

SELECTED = Macros(Element="float", Sum="float")
DIGITS = (24, 16, 8, 0)  # the lowest bit of each digit of 8 bits, highest digit first


def add_into(kernels: Kernels, y: Any, x: Any) -> None:
    """Compute y += x, where x may have a shorter format."""
    macros = WIRE[y.dtype, x.dtype]
    pointwise(kernels, "add_into", (y.size, y, x), macros)


def maximum_into(kernels: Kernels, y: Any, x: Any) -> None:
    """Write the larger of y and x to y, element by element; a NaN stays."""
    macros = WIRE[y.dtype, x.dtype]
    pointwise(kernels, "maximum_into", (y.size, y, x), macros)


def convert(kernels: Kernels, x: Any, y: Any) -> None:
    """Write x to y, in y's element type."""
    macros = CONVERTED[x.dtype, y.dtype]
    pointwise(kernels, "convert", (x.size, x, y), macros, fresh="y")


def _encode(name: str, kernels: Kernels, x: Any, q: Any, scales: Any) -> None:
    """Encode x as numbers q, with one float32 scale per BLOCK of them; of fp16 a power of two."""
    kernels.launch(
        name,
        (-(-scales.size // 8),),
        POINTWISE,
        (x.size, x, q, scales),
        macros=WIRE[x.dtype, x.dtype],
        fresh="q scales",
    )


def _decode(name: str, kernels: Kernels, q: Any, scales: Any, y: Any, accumulate: bool) -> None:
    """Write or add the decoded numbers to y."""
    kernels.launch(
        name,
        blocks(y.size, 16 // y.itemsize),
        POINTWISE,
        (y.size, int(accumulate), q, scales, y),
        macros=WIRE[y.dtype, y.dtype],
        fresh="" if accumulate else "y",
    )


encode_int8, encode_fp16 = partial(_encode, "encode_int8"), partial(_encode, "encode_fp16")
decode_int8, decode_fp16 = partial(_decode, "decode_int8"), partial(_decode, "decode_fp16")


def top_k(kernels: Kernels, x: Any, k: int, arena: Any) -> tuple[Any, Any]:
    """Return (indices, values) of the k elements of largest magnitude, indices ascending.

    Of equal magnitudes the first ones are chosen. NaN is larger than any number.
    x  (n,) float32, with fewer than 2^31 elements: indices and counts have 32 bits
    """
    parts = max(1, min(-(-x.size // 4096), 1024))
    if k == 0:
        return arena.take((0,), "int32"), arena.take((0,), "float32")
    indices, chosen = arena.take((k,), "int32"), arena.take((k,), "float32")
    state, counts = arena.take((2,), "uint32"), arena.take((256,), "uint32")
    places = arena.take((2, parts), "int32")
    counts.fill(0)
    state[0], state[1] = 0, k
    for shift in DIGITS:
        kernels.launch(
            "count_digits", (parts,), POINTWISE, (x.size, x, shift, state, counts), macros=SELECTED
        )
        kernels.launch("choose_digit", (1,), POINTWISE, (shift, state, counts), macros=SELECTED)
    kernels.launch(
        "count_chosen",
        (parts,),
        POINTWISE,
        (x.size, x, state, places),
        macros=SELECTED,
        fresh="places",
    )
    kernels.launch("place_chosen", (1,), (32,), (parts, places), macros=SELECTED)
    kernels.launch(
        "write_chosen",
        (parts,),
        POINTWISE,
        (x.size, x, state, places, indices, chosen),
        macros=SELECTED,
        fresh="indices values",
    )
    return indices, chosen
