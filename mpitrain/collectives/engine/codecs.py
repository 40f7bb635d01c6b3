"""Wire formats: what an array of float32 becomes on its way.

    fp16           a float16 per element and a scale, a power of two, per block of 256: 11 bits of numbers of any magnitude
    bf16           half of every number: 2 bytes per element
    int8           a byte per element and a float32 scale per block of 256
    topk:R         the R-th part of the elements that is largest, 8 bytes each (index and value)
    powersgd:K     for each matrix (m, n) two factors of rank K, 4 K (m + n) bytes; the rest as it is

The last two send only what past sums do not predict. A rank remembers what it left out, and adds that to the next array
(error feedback). lossy.py binds reductions that use these formats.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.ops.cuda.wire import BLOCK

FP16_BYTES, INT8_BYTES = 4 + 2 * BLOCK, 4 + BLOCK
"""What a block becomes."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

CACHED = 128 * BLOCK
"""Elements that fp16 takes at a time, so that all its passes but the first find them in a cache."""

DEFAULTS = {"topk": 0.01, "powersgd": 4.0}
"""What a bare name means."""


class Wire(NamedTuple):
    """A parsed format: topk's part of the elements, powersgd's rank, 0 for the others."""

    name: str
    amount: float = 0.0


class Codec(NamedTuple):
    """A format that codes every block of elements alike.

    block_bytes  bytes that BLOCK elements become
    encode       (float32 array of whole blocks, uint8 array to fill)
    decode       (uint8 array, float32 array to fill)
    add          (uint8 array, float32 array to add to, float32 scratch like it)
    """

    block_bytes: int
    encode: Callable[[np.ndarray, np.ndarray], None]
    decode: Callable[[np.ndarray, np.ndarray], None]
    add: Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def parse_wire(text: str) -> Wire:
    """A format by its name, with or without an amount: "fp16", "topk:0.1", "powersgd:4". ConfigError if there is none."""
    name, _, amount = text.partition(":")
    try:
        value = float(amount) if amount else DEFAULTS.get(name, 0.0)
    except ValueError:
        value = -1.0
    if "_" in amount or not amount.isascii():  # Python would take 1_0 for 10
        value = -1.0
    valid = {
        "none": not amount,
        "fp16": not amount,
        "bf16": not amount,
        "int8": not amount,
        "topk": 0 < value <= 1,
        "powersgd": value >= 1 and value.is_integer(),
    }
    if not valid.get(name, False):
        raise ConfigError(
            f"wire is one of {', '.join(valid)}, topk with the part of the elements it sends (topk:0.01), "
            f"powersgd with its rank (powersgd:4), but it is {text!r}."
        )
    return Wire(name, value)


def _scaled(coded: np.ndarray, block_bytes: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """The two parts of coded blocks: their float32 scales (blocks, 1), and after them their numbers (blocks, BLOCK)."""
    end = 4 * (coded.size // block_bytes)
    return coded[:end].view(np.float32)[:, None], coded[end:].view(dtype).reshape(-1, BLOCK)


MAGNITUDE, EXPONENT, SIGN = (np.int32(mask) for mask in (0x7FFFFFFF, 0x7F800000, -0x80000000))
"""The bits of a float32."""

HIGHEST = np.int32(0x7F7FE000)
"""The bits of the largest float32 of 11 binary digits: rounding must not make infinity of what is larger."""


def _field(exponent: int, digits: int = 23) -> np.int32:
    """The bits of 2 to the power `exponent`: of a float32, or 13 to the right, where a float16 has them."""
    return np.int32(exponent + 127 << digits)


def _encode_fp16(values: np.ndarray, coded: np.ndarray) -> None:
    """Scales first, then the numbers: the largest of each block lies in [2^14, 2^15). A NaN for scale if one is not finite.

    What lies below 2^-14 then is subnormal, and NumPy's own conversion takes 25 times as long for it. Here all take alike:
    a sum with 2^13 times an element's own power of two rounds the element to 11 binary digits, where the sum ends.
    """
    scales, halves = _scaled(coded, FP16_BYTES, np.int16)
    blocks = values.reshape(-1, BLOCK)
    for start in range(0, len(blocks), CACHED // BLOCK):
        part = slice(start, start + CACHED // BLOCK)
        bits = blocks[part].view(np.int32)
        sizes = bits & MAGNITUDE
        largest = sizes.max(axis=1, keepdims=True)
        scale = np.maximum((largest & EXPONENT) - (14 << 23), _field(-126))
        np.minimum(sizes, HIGHEST, out=sizes)
        shares = sizes.view(np.float32)
        shares *= (2 * _field(0) - scale).view(np.float32)  # one over the scale
        powers = sizes & EXPONENT
        np.maximum(powers, _field(-14), out=powers)
        powers += 13 << 23
        shares += powers.view(np.float32)
        sizes -= powers
        powers >>= 13
        powers -= _field(-1, digits=10)
        sizes += powers
        np.right_shift(bits & SIGN, 16, out=powers)
        sizes |= powers
        halves[part] = sizes
        scales[part] = np.where(largest < EXPONENT, scale.view(np.float32), np.nan)


def _decode_fp16(coded: np.ndarray, values: np.ndarray) -> None:
    scales, halves = _scaled(coded, FP16_BYTES, np.int16)
    blocks = values.reshape(-1, BLOCK)
    for start in range(0, len(blocks), CACHED // BLOCK):
        part = slice(start, start + CACHED // BLOCK)
        sizes = blocks[part]
        bits = sizes.view(np.int32)
        bits[:] = halves[part]
        bits <<= 13
        signs = bits & SIGN
        bits &= 0x7FFF << 13
        bits += _field(-15)
        subnormal = 2 * sizes
        subnormal -= np.float32(2**-14)  # what such bits stand for; of others more than that
        np.minimum(sizes, subnormal, out=sizes)
        bits |= signs
        sizes *= scales[part]


def _cast(dtype: np.dtype) -> Codec:
    """Every element as another float type; what would be rounded up to infinity becomes it, and the step is skipped."""

    def encode(values: np.ndarray, coded: np.ndarray) -> None:
        coded.view(dtype)[:] = values

    def decode(coded: np.ndarray, values: np.ndarray) -> None:
        values[:] = coded.view(dtype)

    return Codec(BLOCK * dtype.itemsize, encode, decode, _adding(decode))


def _encode_int8(values: np.ndarray, coded: np.ndarray) -> None:
    """Scales first, then the bytes. A block with a number that is not finite decodes to such numbers again."""
    scales, numbers = _scaled(coded, INT8_BYTES, np.int8)
    blocks = values.reshape(-1, BLOCK)
    np.abs(blocks).max(axis=1, keepdims=True, out=scales)
    scales /= 127
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = blocks / np.where(scales > 0, scales, 1)
        numbers[:] = np.rint(shares, out=shares)
    scales[~np.isfinite(scales)] = np.nan


def _decode_int8(coded: np.ndarray, values: np.ndarray) -> None:
    scales, numbers = _scaled(coded, INT8_BYTES, np.int8)
    np.multiply(numbers, scales, out=values.reshape(-1, BLOCK))


def _adding(
    decode: Callable[[np.ndarray, np.ndarray], None],
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """The `add` of a codec."""

    def add(coded: np.ndarray, values: np.ndarray, scratch: np.ndarray) -> None:
        decode(coded, scratch)
        values += scratch

    return add


CODECS = {
    "fp16": Codec(FP16_BYTES, _encode_fp16, _decode_fp16, _adding(_decode_fp16)),
    "bf16": _cast(BFLOAT16),
    "int8": Codec(INT8_BYTES, _encode_int8, _decode_int8, _adding(_decode_int8)),
}
"""Formats that code block by block."""


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k elements of largest magnitude, ascending. NaN counts as the largest.

    A sample tells a magnitude that somewhat more than k elements reach; only those are searched for the k largest.
    """
    sizes = np.abs(values)
    candidates = None
    if values.size > 1 << 14:
        sample = sizes[:: values.size // 4096]
        rank = min(sample.size - 1, int(1.3 * k / values.size * sample.size) + 8)
        threshold = np.partition(sample, sample.size - 1 - rank)[sample.size - 1 - rank]
        candidates = np.flatnonzero(~(sizes < threshold))
    if candidates is None or candidates.size < k:
        candidates = np.arange(values.size)
    found = candidates[
        np.argpartition(sizes[candidates], candidates.size - k)[candidates.size - k :]
    ]
    found.sort()
    return found
