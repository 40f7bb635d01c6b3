"""The k elements of largest magnitude: an exact, deterministic radix selection."""

from typing import Any

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Kernels, Macros
from mpitrain.ops.cuda.grids import POINTWISE

TYPES = Macros(Element="float", Sum="float")
DIGITS = (24, 16, 8, 0)  # the lowest bit of each digit of 8 bits, highest digit first


def top_k(kernels: Kernels, x: Any, k: int, arena: Any) -> tuple[Any, Any]:
    """Return (indices, values) of the k elements of largest magnitude, indices ascending.

    Of equal magnitudes the first ones are chosen. NaN is larger than any number.
    x       (n,) float32
    raises  KernelError from 2^31 elements on: indices and counts have 32 bits
    """
    if x.size >= 1 << 31:
        raise KernelError(
            f"Indices of 32 bits reach {(1 << 31) - 1} elements, but there are {x.size} to choose from.",
            "Choose from parts of the array.",
        )
    if not 0 <= k <= x.size:
        raise KernelError(f"Cannot choose {k} of {x.size} elements.", f"Choose 0 to {x.size}.")
    blocks = max(1, min(-(-x.size // 4096), 1024))
    if k == 0:
        return arena.take((0,), "int32"), arena.take((0,), "float32")
    indices, chosen = arena.take((k,), "int32"), arena.take((k,), "float32")
    state, counts = arena.take((2,), "uint32"), arena.take((256,), "uint32")
    places = arena.take((2, blocks), "int32")
    counts.fill(0)
    state[0], state[1] = 0, k
    for shift in DIGITS:
        kernels.launch(
            "count_digits", (blocks,), POINTWISE, (x.size, x, shift, state, counts), macros=TYPES
        )
        kernels.launch("choose_digit", (1,), POINTWISE, (shift, state, counts), macros=TYPES)
    kernels.launch(
        "count_chosen",
        (blocks,),
        POINTWISE,
        (x.size, x, state, places),
        macros=TYPES,
        fresh="places",
    )
    kernels.launch("place_chosen", (1,), (32,), (blocks, places), macros=TYPES)
    kernels.launch(
        "write_chosen",
        (blocks,),
        POINTWISE,
        (x.size, x, state, places, indices, chosen),
        macros=TYPES,
        fresh="indices values",
    )
    return indices, chosen
