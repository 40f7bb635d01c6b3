"""Codes of 8 bits for the moments of an optimizer, with one scale for each block of 256 elements.

value = MAP[code] x scale, and the scale of a block is its largest magnitude. The maps are the
dynamic ones of bitsandbytes: seven decades, the upper ones with more codes. Two things differ:

-1 and 1 replace -0.993 and 0.993 in the signed map. The largest element of a block has one of them,
so decoded values have the same scale and codes again. Bitsandbytes has 1, but not -1.

In the unsigned map only 0 has code 0. A positive second moment never becomes 0.

Blocks whose largest magnitude is below TINY are 0.

source  Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, section 2
"""

from typing import Any, NamedTuple

import numpy as np

BLOCK = 256
"""Elements of a block."""
WIRE_BLOCK = 256
"""Elements that share one scale of the wire formats fp16 and int8, on the host and in kernels.

Chunks of quantized arrays are whole blocks.
"""
TINY = 2.0**-104
"""The smallest scale. Its product with the smallest code is still a normal float32 number."""
DECADES = 7


class Map(NamedTuple):
    """The values of all codes, ascending, and the bounds between them.

    values  (256,) float32
    bounds  (256,) float32; the code of x is the number of bounds below x; the last one is infinite
    lowest  (65536,) uint8: the code of the least float32 with these upper 16 bits. No two bounds
            have the same ones, so the code of x is this code or the next.
    """

    values: np.ndarray
    bounds: np.ndarray
    lowest: np.ndarray


def _positive(codes: int) -> np.ndarray:
    """Return the values above 0: 1, and `codes` x 2^i means in the i-th of seven decades."""
    values: list[float] = []
    for decade in range(DECADES):
        ends = np.linspace(0.1, 1, codes * 2**decade + 1)
        values += [*((ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade + 1 - DECADES))]
    return np.array(values)


def _map(values: np.ndarray, zero: int) -> Map:
    """Return the map of these values.

    zero  the code from which no positive number rounds down to 0; -1: there is none
    """
    values = values.astype(np.float32)
    bounds = np.append((values[1:] + values[:-1]) / np.float32(2), np.float32(np.inf))
    if zero >= 0:
        bounds[zero] = 0
    upper = np.arange(65536, dtype=np.uint32) << 16
    ends = np.stack([upper, upper | 0xFFFF]).view(np.float32)
    lowest = np.searchsorted(bounds, np.fmin(*np.nan_to_num(ends)))
    return Map(values, bounds, np.minimum(lowest, 255).astype(np.uint8))


def _signed() -> Map:
    """Return the map of numbers of either sign: 255 values, and 1 again as a code that is free."""
    positive = _positive(1)
    positive[-1] = 1
    return _map(np.concatenate([-positive[::-1], [0], positive, [1]]), -1)


SIGNED = _signed()
UNSIGNED = _map(np.concatenate([[0], _positive(2), [1]]), 0)


def block_count(count: int, lead: int) -> int:
    """Return the number of blocks of `count` elements; the first block lacks `lead` elements."""
    return -(-(count + lead) // BLOCK) if count else 0


def decode(codes: np.ndarray, scales: np.ndarray, lead: int, of: Map, dtype: Any) -> np.ndarray:
    """Return the values of codes, (count,) of a dtype.

    codes   (count,) uint8
    scales  of the blocks of these codes
    lead    elements that the first block lacks
    """
    element_scales = scales[(np.arange(len(codes)) + lead) // BLOCK]
    return of.values[codes].astype(dtype) * element_scales.astype(dtype)


def encode(values: np.ndarray, lead: int, of: Map) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest codes, and the scale of each block, float32.

    values  (count,), finite
    lead    elements that the first block lacks
    """
    starts = np.arange(-lead, len(values), BLOCK).clip(0)[: block_count(len(values), lead)]
    values = values.astype(np.float32)
    scales = np.maximum.reduceat(np.abs(values), starts) if len(values) else values[:0]
    scales[scales < TINY] = 0
    divisors = np.where(scales > 0, scales, np.float32(np.inf))
    ratio = values / divisors[(np.arange(len(values)) + lead) // BLOCK]
    return np.searchsorted(of.bounds[:-1], ratio).astype(np.uint8), scales
