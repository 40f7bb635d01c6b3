"""The bytes that a rank sends to sum gradients in a wire format, bucket by bucket."""

import math
from collections.abc import Sequence

from mpitrain.collectives.compression import LANE, square, tiles
from mpitrain.collectives.engine.arithmetic import BLOCK, CODECS, Wire
from mpitrain.layers.flat import Bucket, Entry, Storage
from mpitrain.parallel.mode import sent_in_ring

WORDS = {
    **dict.fromkeys(CODECS, "2 (d-1)/d S in the wire format, in blocks of 256 numbers"),
    "topk": "(d-1) times 8 bytes for each number that a replica chooses",
    "powersgd": "2 (d-1)/d of all factors, and of the numbers outside matrices",
}
"""{wire format: its formula in words}."""
SINGLE = 4
"""Bytes of a float32."""


def in_format(storage: Storage, buckets: Sequence[Bucket], wire: Wire, rank: int, d: int) -> int:
    """Return the bytes that a replica sends in a step to sum its buckets.

    A bucket of tensors that other ranks of the replica store, too, travels as float32.

    rank, d  of the replica, and the number of replicas
    """
    total = 0
    for bucket in buckets:
        count = bucket.stop - bucket.start
        if bucket.holders:
            total += SINGLE * sent_in_ring(rank, d, count)
        elif wire.name == "topk":
            total += (d - 1) * 2 * SINGLE * math.ceil(wire.amount * count)
        elif wire.name == "powersgd":
            own = [e for e in storage.entries if bucket.start <= e.start < bucket.stop]
            total += SINGLE * sum(
                sent_in_ring(rank, d, elements)
                for elements in _factors(own, count, int(wire.amount))
            )
        else:
            total += _in_blocks(count, d) * CODECS[wire.name].block_bytes
    return total


def _in_blocks(count: int, d: int) -> int:
    """Return the blocks that a replica sends: 2 (d - 1) chunks, each rounded up to blocks.

    The last chain of a long bucket is shorter than the others.
    """
    chains, rest = divmod(count, d * LANE)
    return 2 * (d - 1) * (chains * (LANE // BLOCK) + -(-rest // (d * BLOCK)))


def _factors(entries: Sequence[Entry], count: int, k: int) -> tuple[int, int]:
    """Return the elements of both messages of a bucket by PowerSGD, with factors of rank k.

    The first one has the left factors, and the second the right factors and all other elements.
    """
    shapes = [entry.parameter.local_shape for entry in entries]
    matrices = [m for shape in shapes if len(shape) == 2 for m in tiles(0, *shape)]
    every = matrices or [square(count)]
    coded = [m for m in every if k * (m.rows + m.columns) < m.rows * m.columns]
    outside = count - sum(m.rows * m.columns for m in coded)
    return k * sum(m.rows for m in coded), k * sum(m.columns for m in coded) + outside
