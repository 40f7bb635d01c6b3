"""Rows of data: their order in an epoch, packing of sequences, and documents within a row.

B rows, T tokens of a row.
"""

from collections.abc import Sequence

import numpy as np

from mpitrain.data.source import DOCUMENT_END, IGNORED, PADDING, SECOND


class EpochOrder:
    """Permutations of `rows` rows, one for each (seed, epoch)."""

    def __init__(self, rows: int):
        self._rows = rows
        # The last (seed, epoch) that was shuffled, and the order of its rows.
        self._shuffled: tuple[tuple[int, int], np.ndarray] | None = None

    def chosen(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows at some positions, (B,) int64.

        positions  (B,) int64, counted from the first row of the first epoch
        """
        chosen = np.empty(len(positions), np.int64)
        for epoch in np.unique(positions // self._rows):
            mask = positions // self._rows == epoch
            chosen[mask] = self._order(seed, int(epoch))[positions[mask] % self._rows]
        return chosen

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of all rows of an epoch, (rows,) int64.

        A permutation costs time in proportion to all rows, so the last one is cached.
        """
        if self._shuffled is None or self._shuffled[0] != (seed, epoch):
            order = np.random.default_rng([seed, epoch]).permutation(self._rows)
            self._shuffled = (seed, epoch), order
        return self._shuffled[1]


def positions(step: int, size: int, rows: range, before: int | None) -> np.ndarray:
    """Return the positions of rows of a global batch among all samples since step 0.

    The arguments are those of `Source.batch`.
    """
    return (step * size if before is None else before) + np.arange(rows.start, rows.stop)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sequences into rows, and return the numbers of the sequences in each row.

    From the longest sequence to the shortest, each goes to the first row that has room for it. The
    number of rows is at most 11/9 x (the fewest possible) + 1 (first-fit decreasing, Johnson 1973).

    lengths   of the sequences, in tokens; above `capacity` they count as `capacity`
    capacity  tokens of a row
    """
    rows: list[list[int]] = [[] for _ in lengths]
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    # A binary tree of maxima: node k has the children 2 k and 2 k + 1. Leaf r is the number of
    # tokens that row r still has space for.
    room = [capacity] * (2 * leaves)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length, node = min(lengths[number], capacity), 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        rows[node - leaves].append(number)
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]


def without_ends(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets with IGNORED at the ends of documents, and where each document starts.

    targets  (B, T) integers; DOCUMENT_END at the last token of a document
    returns  (B, T) targets; and (B, T) int32, the index in the row of the first token of each
             token's document
    """
    is_end = targets == DOCUMENT_END
    starts = np.zeros(targets.shape, np.int32)
    starts[:, 1:] = np.where(is_end[:, :-1], np.arange(1, targets.shape[1], dtype=np.int32), 0)
    return np.where(is_end, IGNORED, targets), np.maximum.accumulate(starts, axis=1)


def without_padding(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows of texts as tokens, where each token's document starts, and the token types.

    The padding of a row is one document, of tokens 0.

    inputs   (B, T) int64, with PADDING and SECOND
    returns  three arrays (B, T); the last two are int32
    """
    is_text = inputs != PADDING
    starts = np.where(is_text, 0, is_text.sum(1, keepdims=True))
    tokens = np.where(is_text, inputs % SECOND, 0)
    return tokens, starts.astype(np.int32), (is_text & (inputs >= SECOND)).astype(np.int32)


class Shuffled:
    """A source whose rows to train on are shuffled anew in each epoch, by (seed, epoch)."""

    def __init__(self, rows: int):
        self._order = EpochOrder(rows)

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._rows(0, self._order.chosen(seed, positions(step, size, rows, before)))

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return self._rows(1, np.asarray(rows, np.int64))

    def _rows(self, part: int, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of rows by number.    part: 0 to train on, 1 held out"""
        raise NotImplementedError


def positions_of(starts: np.ndarray) -> np.ndarray:
    """Return the position of each token in its document, (B, T) int32.

    starts  (B, T), the second result of `without_ends`
    """
    return np.arange(starts.shape[1], dtype=np.int32) - starts
