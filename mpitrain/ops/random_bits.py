"""Random bits of dropout: 16 bits for each element of a tensor, as a function of its number.

Element n of a tensor has bits 16 (n % 16) and up of a block of 256 bits, lowest first. The block is
Philox4x64-10 (Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3) of

    counter  (n // 16 + 1, step, 0, 0)
    key      (seed, number of the layer)

An element is dropped if its bits are below `threshold(rate)`. The bits depend on no layout, because
n counts elements of the whole tensor: all rows of the global batch, and all columns.

Attention numbers its probabilities by blocks of 4 queries and 4 keys, and these by strips of STRIP
keys. So a GPU's thread and NumPy both find the bits of a tile in few blocks.
"""

from typing import Any, NamedTuple

import numpy as np

LANES = 16
"""Elements of a block."""

STRIP = 64
"""Keys of a strip of attention's probabilities."""

LEVELS = 1 << 16
"""A rate is a multiple of 1 / LEVELS."""


class Key(NamedTuple):
    """The stream of a layer's random bits."""

    seed: int
    layer: int


def threshold(rate: float) -> int:
    """Return the number of bit patterns that drop an element: 1 to LEVELS - 1."""
    return min(max(round(rate * LEVELS), 1), LEVELS - 1)


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
