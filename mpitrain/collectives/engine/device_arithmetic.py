"""Arithmetic of collectives by our own kernels, in the memory of the array.

No element goes to the host to be added.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic, Combine, by_numpy
from mpitrain.collectives.engine.codecs import BFLOAT16, CODECS, Codec
from mpitrain.machine.arena import Arena
from mpitrain.ops.device import Device


def arithmetic_of(device: Device) -> Arithmetic:
    """Return the arithmetic for the arrays of a device: its kernels, or NumPy if it has none.

    The scratch comes from a separate arena, because one thread may reduce while another computes.
    """
    if device.kernels is None:
        return HOST
    return by_kernels(device.kernels, device.backend.holds, device.arena())


def by_kernels(kernels: Any, is_theirs: Callable[[Any], bool], arena: Arena) -> Arithmetic:
    """Return an arithmetic that uses our kernels for float arrays in their memory, else NumPy.

    is_theirs  whether an array is in memory that the kernels can reach
    arena      scratch in the same memory
    """
    from mpitrain.ops.cuda import wire
    from mpitrain.ops.cuda.launches import FLOATS

    def combining(array: Any, op: str) -> Combine:
        if not is_theirs(array) or array.dtype.name not in FLOATS:
            return by_numpy(array, op)
        return partial({"add": wire.add_into, "maximum": wire.maximum_into}[op], kernels)

    def bf16() -> Codec:
        return CODECS["bf16"]._replace(
            encode=lambda values, coded: wire.convert(kernels, values, coded.view(BFLOAT16)),
            decode=lambda coded, values: wire.convert(kernels, coded.view(BFLOAT16), values),
            add=lambda coded, values, scratch: wire.add_into(kernels, values, coded.view(BFLOAT16)),
        )

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

    def chosen(values: Any, k: int) -> Any:
        return wire.top_k(kernels, values, k, arena)[0]

    codecs = {
        "fp16": scaled("fp16", "float16", wire.encode_fp16, wire.decode_fp16),
        "bf16": bf16(),
        "int8": scaled("int8", "int8", wire.encode_int8, wire.decode_int8),
    }
    return Arithmetic(combining, codecs, chosen)
