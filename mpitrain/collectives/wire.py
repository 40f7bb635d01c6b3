"""Wire formats: what an array of float32 becomes on its way.

    fp16, bf16     half of every number: 2 bytes per element
    int8           a byte per element and a float32 scale per block of 256
    topk:R         the R-th part of the elements that is largest, 8 bytes each (index and value)
    powersgd:K     for each matrix (m, n) two factors of rank K, 4 K (m + n) bytes; the rest as it is

The last two send only what past sums do not predict, and what they leave out is remembered and added to the next array (error
feedback). lossy.py reduces with them, and cuts long matrices into tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError

BLOCK = 256
"""Elements that share one scale of int8; chunks of coded arrays are whole blocks."""

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
    valid = {"none": not amount, "fp16": not amount, "bf16": not amount, "int8": not amount,
             "topk": 0 < value <= 1, "powersgd": value >= 1 and value.is_integer()}
    if not valid.get(name, False):
        raise ConfigError(f"wire is one of {', '.join(valid)}, topk with the part of the elements it sends (topk:0.01), "
                          f"powersgd with its rank (powersgd:4), but it is {text!r}.")
    return Wire(name, value)


def _cast(dtype: np.dtype) -> Codec:
    """Every element as another float type; what is too large for it becomes infinite, and the step is skipped."""
    def encode(values: np.ndarray, coded: np.ndarray) -> None:
        with np.errstate(over="ignore"):
            coded.view(dtype)[:] = values

    def decode(coded: np.ndarray, values: np.ndarray) -> None:
        values[:] = coded.view(dtype)

    def add(coded: np.ndarray, values: np.ndarray, scratch: np.ndarray) -> None:
        decode(coded, scratch)
        values += scratch

    return Codec(BLOCK * dtype.itemsize, encode, decode, add)


def _encode_int8(values: np.ndarray, coded: np.ndarray) -> None:
    """Scales first, then the bytes. A block with a number that is not finite decodes to such numbers again."""
    blocks = values.reshape(-1, BLOCK)
    scales = coded[:4 * len(blocks)].view(np.float32)
    np.abs(blocks).max(axis=1, out=scales)
    scales /= 127
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = blocks / np.where(scales > 0, scales, 1)[:, None]
        coded[4 * len(blocks):].view(np.int8).reshape(blocks.shape)[:] = np.rint(shares, out=shares)
    scales[~np.isfinite(scales)] = np.nan


def _decode_int8(coded: np.ndarray, values: np.ndarray) -> None:
    blocks = values.reshape(-1, BLOCK)
    scales = coded[:4 * len(blocks)].view(np.float32)
    np.multiply(coded[4 * len(blocks):].view(np.int8).reshape(blocks.shape), scales[:, None], out=blocks)


def _add_int8(coded: np.ndarray, values: np.ndarray, scratch: np.ndarray) -> None:
    _decode_int8(coded, scratch)
    values += scratch


CODECS = {
    "fp16": _cast(np.dtype(np.float16)),
    "bf16": _cast(np.dtype(ml_dtypes.bfloat16)),
    "int8": Codec(BLOCK + 4, _encode_int8, _decode_int8, _add_int8),
}
"""Formats that code block by block."""


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k elements of largest magnitude, ascending. NaN counts as the largest.

    A sample tells a magnitude that somewhat more than k elements reach, so that only those are sorted out.
    """
    sizes = np.abs(values)
    candidates = None
    if values.size > 1 << 14:
        sample = sizes[::values.size // 4096]
        rank = min(sample.size - 1, int(1.3 * k / values.size * sample.size) + 8)
        threshold = np.partition(sample, sample.size - 1 - rank)[sample.size - 1 - rank]
        candidates = np.flatnonzero(~(sizes < threshold))
    if candidates is None or candidates.size < k:
        candidates = np.arange(values.size)
    found = candidates[np.argpartition(sizes[candidates], candidates.size - k)[candidates.size - k:]]
    found.sort()
    return found
