"""Arithmetic of collectives: adding, encoding and selecting elements, in NumPy or by our kernels.

Wire formats encode a float32 array for its messages:

    fp16           2 bytes per element and a scale, a power of two, per block of 256 elements:
                   11 significant bits at any magnitude
    bf16           bfloat16, 2 bytes per element
    int8           a byte per element and a float32 scale per block of 256 elements
    topk:R         the fraction R of the elements of largest magnitude, 8 bytes each (index, value)
    powersgd:K     for each matrix (m, n) two factors of rank K, 4 x K x (m + n) bytes;
                   elements outside matrices stay float32

topk and powersgd send only the difference between an array and a prediction from past sums. A rank
keeps the elements that it did not send, and adds them to the next array (error feedback).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpitrain.collectives.engine.executor import Combine, by_numpy
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Arena
from mpitrain.ops.codes import WIRE_BLOCK as BLOCK
from mpitrain.ops.device import Device

FP16_BYTES, INT8_BYTES = 4 + 2 * BLOCK, 4 + BLOCK  # of an encoded block

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

CACHED = 128 * BLOCK
"""Elements that fp16 processes at a time, so that all passes but the first hit the cache."""

DEFAULTS = {"topk": 0.01, "powersgd": 4.0}
"""{format: its amount, if the name comes without one}: a fraction of the elements, or a rank."""


class Wire(NamedTuple):
    """Parsed wire format.

    amount  topk: fraction of the elements; powersgd: rank; 0 for the other formats
    """

    name: str
    amount: float = 0.0


class Codec(NamedTuple):
    """Wire format that encodes every block of elements in the same way.

    block_bytes  bytes of an encoded block of BLOCK elements
    encode       (float32 array of whole blocks, uint8 array to fill)
    decode       (uint8 array, float32 array to fill)
    add          (uint8 array, float32 array to add to, float32 scratch of the same length)
    """

    block_bytes: int
    encode: Callable[[np.ndarray, np.ndarray], None]
    decode: Callable[[np.ndarray, np.ndarray], None]
    add: Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def parse_wire(text: str) -> Wire:
    """Parse a wire format with or without its amount: "fp16", "topk:0.1", "powersgd:4".

    raises  ConfigError for an unknown name or an invalid amount
    """
    name, _, amount = text.partition(":")
    try:
        value = float(amount) if amount else DEFAULTS.get(name, 0.0)
    except ValueError:
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
    """Return views of encoded blocks: float32 scales (blocks, 1), then numbers (blocks, BLOCK)."""
    end = 4 * (coded.size // block_bytes)
    return coded[:end].view(np.float32)[:, None], coded[end:].view(dtype).reshape(-1, BLOCK)


MAGNITUDE, EXPONENT, SIGN = (np.int32(mask) for mask in (0x7FFFFFFF, 0x7F800000, -0x80000000))
"""Masks of the fields of a float32."""

HIGHEST = np.int32(0x7F7FE000)
"""Bits of the largest float32 of 11 binary digits.

Larger magnitudes are clipped to it, because rounding would turn them into infinity.
"""


def _field(exponent: int, digits: int = 23) -> np.int32:
    """Return exponent + 127 in the exponent field of a float32; with 10 digits, of a float16."""
    return np.int32(exponent + 127 << digits)


def _encode_fp16(values: np.ndarray, coded: np.ndarray) -> None:
    """Encode blocks as scales, then float16 numbers.

    A block that is not finite gets NaN as its scale. Any other scale brings the block's largest
    number into [2^14, 2^15). Numbers below 2^-14 are then subnormal, and NumPy's own conversion
    takes 25 times as long for them. This function takes the same time for all numbers. To each
    number it adds 2^13 times the number's own power of two. The addition rounds the number to 11
    binary digits.
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
        shares *= (2 * _field(0) - scale).view(np.float32)  # this is 1 / scale
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
        # This is the value of a subnormal number; for all others it is at least the value.
        subnormal -= np.float32(2**-14)
        np.minimum(sizes, subnormal, out=sizes)
        bits |= signs
        sizes *= scales[part]


def _cast(dtype: np.dtype) -> Codec:
    """Return the codec that converts elements to `dtype`.

    An overflow becomes infinity, and the trainer skips the step.
    """

    def encode(values: np.ndarray, coded: np.ndarray) -> None:
        coded.view(dtype)[:] = values

    def decode(coded: np.ndarray, values: np.ndarray) -> None:
        values[:] = coded.view(dtype)

    return Codec(BLOCK * dtype.itemsize, encode, decode, _adding(decode))


def _encode_int8(values: np.ndarray, coded: np.ndarray) -> None:
    """Encode blocks as scales, then int8 numbers.

    A block with a number that is not finite decodes to numbers that are not finite.
    """
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
    def add(coded: np.ndarray, values: np.ndarray, scratch: np.ndarray) -> None:
        decode(coded, scratch)
        values += scratch

    return add


CODECS = {
    "fp16": Codec(FP16_BYTES, _encode_fp16, _decode_fp16, _adding(_decode_fp16)),
    "bf16": _cast(BFLOAT16),
    "int8": Codec(INT8_BYTES, _encode_int8, _decode_int8, _adding(_decode_int8)),
}
"""Formats that encode block by block."""


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k elements of largest magnitude, ascending.

    NaN counts as the largest. A sample yields a threshold that somewhat more than k elements reach.
    Only these elements are searched for the k largest.
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
    positions = candidates[
        np.argpartition(sizes[candidates], candidates.size - k)[candidates.size - k :]
    ]
    positions.sort()
    return positions


class Arithmetic(NamedTuple):
    """The computations within collectives, for arrays in one kind of memory.

    combining  (array, op) -> function that combines received elements into regions of that array
    codecs     {name of the wire format: codec for float32}
    largest    (values, k) -> positions of the k elements of largest magnitude, ascending
    """

    combining: Callable[[Any, str], Combine]
    codecs: dict[str, Codec]
    largest: Callable[[Any, int], Any]


HOST = Arithmetic(by_numpy, CODECS, largest)


def arithmetic_of(device: Device) -> Arithmetic:
    """Return the arithmetic for the arrays of a device: its kernels, or NumPy if it has none."""
    if device.kernels is None:
        return HOST
    # A separate arena, because one thread may reduce while another computes.
    return by_kernels(device.kernels, device.backend.holds, device.arena())


def by_kernels(kernels: Any, is_theirs: Callable[[Any], bool], arena: Arena) -> Arithmetic:
    """Return an arithmetic that uses our kernels for float arrays in their memory, else NumPy.

    is_theirs  (array) -> whether the kernels can reach its memory
    arena      scratch in the same memory
    """
    from mpitrain.ops.cuda import wire
    from mpitrain.ops.cuda.launches import FLOATS

    def combining(array: Any, op: str) -> Combine:
        ours = {"add": wire.add_into, "maximum": wire.maximum_into}
        if op not in ours or not is_theirs(array) or array.dtype.name not in FLOATS:
            return by_numpy(array, op)
        return partial(ours[op], kernels)

    def scaled(name: str, dtype: str, encode: Callable, decode: Callable) -> Codec:
        def parts(coded: Any) -> tuple[Any, Any]:
            scales = coded.size // CODECS[name].block_bytes * 4
            return coded[scales:].view(dtype), coded[:scales].view("float32")

        return CODECS[name]._replace(
            encode=lambda values, coded: encode(kernels, values, *parts(coded)),
            decode=lambda coded, values: decode(kernels, *parts(coded), values, accumulate=False),
            add=lambda coded, values, scratch: decode(
                kernels, *parts(coded), values, accumulate=True
            ),
        )

    codecs = {
        "fp16": scaled("fp16", "float16", wire.encode_fp16, wire.decode_fp16),
        "bf16": CODECS["bf16"]._replace(
            encode=lambda values, coded: wire.convert(kernels, values, coded.view(BFLOAT16)),
            decode=lambda coded, values: wire.convert(kernels, coded.view(BFLOAT16), values),
            add=lambda coded, values, scratch: wire.add_into(kernels, values, coded.view(BFLOAT16)),
        ),
        "int8": scaled("int8", "int8", wire.encode_int8, wire.decode_int8),
    }
    return Arithmetic(combining, codecs, lambda values, k: wire.top_k(kernels, values, k, arena)[0])
