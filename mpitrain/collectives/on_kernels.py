"""The arithmetic of collectives by our own kernels, where the array lies: no element goes to the host to be added."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain.arena import Arena
from mpitrain.backend import Backend
from mpitrain.collectives.arithmetic import HOST, Arithmetic, Combine, by_numpy
from mpitrain.collectives.wire import CODECS, Codec
from mpitrain.kernels.engines import KINDS, kernels_for
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda import top_k, wire


def arithmetic_of(backend: Backend, arena: Arena) -> Arithmetic:
    """What adds and codes the arrays of a backend: our kernels, where they compute everything else too."""
    if backend.kind not in KINDS:
        return HOST
    return by_kernels(kernels_for(backend.kind), backend.holds, arena)


def by_kernels(kernels: Kernels, is_theirs: Callable[[Any], bool], arena: Arena) -> Arithmetic:
    """Our kernels, for the float arrays that are theirs; everything else as on the host.

    is_theirs  whether an array lies where the kernels can reach it
    arena      of the same memory: scratch
    """
    def combining(array: Any, op: str) -> Combine:
        if not is_theirs(array) or array.dtype.name not in ("float32", "float64", "float16"):
            return by_numpy(array, op)
        return partial({"add": wire.add_into, "maximum": wire.maximum_into}[op], kernels)

    def cast(name: str) -> Codec:
        def encode(values: Any, coded: Any) -> None:
            wire.convert(kernels, values, coded.view(name))

        def decode(coded: Any, values: Any) -> None:
            wire.convert(kernels, coded.view(name), values)

        def add(coded: Any, values: Any, scratch: Any) -> None:
            wire.add_into(kernels, values, coded.view(name))

        return CODECS["fp16"]._replace(encode=encode, decode=decode, add=add)

    def int8() -> Codec:
        def parts(coded: Any) -> tuple[Any, Any]:
            scales = coded.size // CODECS["int8"].block_bytes * 4
            return coded[scales:].view("int8"), coded[:scales].view("float32")

        return CODECS["int8"]._replace(
            encode=lambda values, coded: wire.encode_int8(kernels, values, *parts(coded)),
            decode=lambda coded, values: wire.decode_int8(kernels, *parts(coded), values, accumulate=False),
            add=lambda coded, values, scratch: wire.decode_int8(kernels, *parts(coded), values, accumulate=True))

    def chosen(values: Any, k: int) -> Any:
        return top_k.top_k(kernels, values, k, arena)[0]

    # bfloat16 is uint16 to a kernel: CuPy has no name for it.
    return Arithmetic(combining, {"fp16": cast("float16"), "bf16": cast("uint16"), "int8": int8()}, chosen)
