"""All-reduce in a wire format: all ranks end with the same bits, which are nearly the sum.

All sums are in float32. Formats quantize every element (quantized.py), send the largest elements
(topk.py), or send matrices as products of two factors (powersgd.py).
"""

import math
from collections.abc import Sequence

import numpy as np

from mpitrain.collectives.compression.matrices import Matrix
from mpitrain.collectives.compression.powersgd import PowerSgd
from mpitrain.collectives.compression.quantized import bind_coded
from mpitrain.collectives.compression.topk import TopK
from mpitrain.collectives.engine.agreement import agree
from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic
from mpitrain.collectives.engine.codecs import Wire
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.machine.backend import on_device
from mpitrain.transport.base import Transport


def bind_lossy(
    transport: Transport,
    array: np.ndarray,
    wire: Wire,
    matrices: Sequence[Matrix] = (),
    arithmetic: Arithmetic = HOST,
) -> Reduction:
    """Bind a sum of `array` over all ranks, in place, with messages in a wire format.

    array       float32, contiguous; of the same length on all ranks
    matrices    for powersgd: matrices within the array; empty: the array as one, nearly square
    arithmetic  encodes, adds and selects elements
    raises      CommError on every rank if arguments differ, if the array is not float32, or if a
                matrix exceeds the array; ConfigError on every rank if the array is in
                GPU memory, and the format has residuals, which must be in host memory
    """
    tag, _ = agree(
        transport,
        "lossy all-reduce",
        array,
        (wire.name,),
        wire.name,
        amount=wire.amount,
        matrices=len(matrices),
    )
    if array.dtype != np.float32:
        raise on_every_rank(
            CommError(
                f"rank {transport.rank}: wire format {wire.name} takes float32, but the array is {array.dtype}.",
                "Use wire none.",
            )
        )
    if wire.name in ("topk", "powersgd") and on_device(array):
        raise on_every_rank(
            ConfigError(
                f"Wire format {wire.name} keeps its residuals in host memory, but this array is in a GPU's.",
                "Use wire fp16, bf16, int8 or none, or device.kind cpu.",
            )
        )
    flat = array.reshape(-1)
    if wire.name == "topk":
        return TopK(transport, flat, math.ceil(wire.amount * flat.size), tag, arithmetic.largest)
    if wire.name == "powersgd":
        beyond = [matrix for matrix in matrices if not matrix.fits(flat.size)]
        if beyond:
            raise on_every_rank(
                CommError(
                    f"Matrices must be inside their array, but {beyond[0]} is not inside {flat.size} elements."
                )
            )
        return PowerSgd(transport, flat, int(wire.amount), matrices, tag)
    return bind_coded(transport, flat, arithmetic.codecs[wire.name], tag)
