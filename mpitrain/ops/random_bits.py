"""Random bits of dropout: 16 bits for each element of a tensor, as a function of its number.

Element n of a tensor gets the (n % 16)-th 16 bits, lowest first, of a block of 256 bits. The block
is Philox4x64-10 (Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3) of

    counter  (n // 16 + 1, step, 0, 0)
    key      (seed, number of the layer)

An element is dropped if its bits are below `threshold(rate)`. The bits are the same in every
layout, because n counts the elements of the whole tensor. That is, all rows of the global batch,
and all columns.

Attention numbers its probabilities in blocks of 4 queries x 4 keys: `attention_number`. The blocks
of a head are numbered in strips of STRIP keys. So a tile needs few runs of blocks.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

LANES = 16
"""Elements of a block."""

STRIP = 64
"""Columns of a strip of attention's probability matrix, one column for each key."""

LEVELS = 1 << 16
"""A rate is a multiple of 1 / LEVELS."""


class Key(NamedTuple):
    """The stream of a layer's random bits."""

    seed: int
    layer: int


@cache
def threshold(rate: float) -> int:
    """Return the number of bit patterns that drop an element: 1 to LEVELS - 1."""
    return min(max(round(rate * LEVELS), 1), LEVELS - 1)


@cache
def scale(rate: float) -> float:
    """Return 1 / (1 - p), for the rate p of `threshold`."""
    return LEVELS / (LEVELS - threshold(rate))


class RandomBits:
    """The bits of elements in the order of their numbers, of one layer in one step, by NumPy's Philox.

    key  (seed, layer)
    """

    def __init__(self, key: Key, step: int):
        self._generator = np.random.Philox(key=np.array(key, np.uint64))
        self._state, self._step = self._generator.state, step

    def run(self, first: int, count: int) -> Any:
        """Return the bits of `count` elements from number `first` on, (count,) uint16."""
        start, skipped = divmod(first, LANES)
        # The generator counts up before it computes a block.
        self._state["state"]["counter"][:2] = start, self._step
        self._generator.state = self._state
        words = self._generator.random_raw(-(-(skipped + count) // 4))
        return words.astype("<u8", copy=False).view("<u2")[skipped : skipped + count]


def attention_number(head: Any, query: Any, key: Any, length: int) -> Any:
    """Return the number of a probability in the whole tensor; of integers or arrays of them.

    head    number of the head: sequence of the global batch x all heads + head
    length  T, queries and keys of a sequence
    """
    strips, groups = -(-length // STRIP), -(-length // 4)
    group = (head * strips + key // STRIP) * groups + query // 4
    return group * (STRIP * 4) + key % STRIP // 4 * LANES + query % 4 * 4 + key % 4


class AttentionMask:
    """The masks of a layer's attention in one step, tile by tile: 0 or 1 / (1 - rate).

    first   number of the first sequence's first head
    every   heads from one sequence to the next
    length  T, queries and keys of a sequence
    """

    def __init__(self, key: Key, step: int, first: int, every: int, rate: float, length: int):
        self._bits, self._first, self._every, self._length = (
            RandomBits(key, step),
            first,
            every,
            length,
        )
        self._least, self._most = np.uint16(threshold(rate)), scale(rate)

    def fill(self, sequence: int, head: int, queries: slice, keys: slice, out: Any) -> None:
        """Write the mask of a tile.    out: (Q, K)"""
        number, start = self._first + sequence * self._every + head, queries.start // 4
        groups, strips = (
            -(-queries.stop // 4) - start,
            range(keys.start // STRIP, -(-keys.stop // STRIP)),
        )
        words = np.empty((groups, 4, len(strips), LANES), "<u8")
        for index, strip in enumerate(strips):
            at = attention_number(number, 4 * start, strip * STRIP, self._length)
            run = self._bits.run(at, groups * STRIP * 4).view("<u8")
            words[:, :, index] = run.reshape(groups, LANES, 4).swapaxes(1, 2)
        bits = words.view("<u2").reshape(4 * groups, len(strips) * STRIP)
        row, column = queries.start - 4 * start, keys.start - strips.start * STRIP
        tile = bits[row : row + out.shape[0], column : column + out.shape[1]]
        np.greater_equal(tile, self._least, out=out)
        out *= self._most
