"""The order of an epoch: each row once, permuted by (seed, epoch), in any layout the same."""

import numpy as np


class EpochOrder:
    """Permutations of `rows` rows, one for each (seed, epoch)."""

    def __init__(self, rows: int):
        self._rows = rows
        # The last (seed, epoch) that was shuffled, and the order of its rows.
        self._shuffled: tuple[tuple[int, int], np.ndarray] | None = None

    def chosen(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows at these positions, counted from the first epoch on.

        positions, result: (B,) int64
        """
        chosen = np.empty(len(positions), np.int64)
        for epoch in np.unique(positions // self._rows):
            mask = positions // self._rows == epoch
            chosen[mask] = self._order(seed, int(epoch))[positions[mask] % self._rows]
        return chosen

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of all rows of an epoch, (rows,) int64.

        A permutation costs time in proportion to all rows, so the last one is cached."""
        if self._shuffled is None or self._shuffled[0] != (seed, epoch):
            order = np.random.default_rng([seed, epoch]).permutation(self._rows)
            self._shuffled = (seed, epoch), order
        return self._shuffled[1]


def positions(step: int, size: int, rows: range, before: int | None) -> np.ndarray:
    """Return the positions of rows of a global batch among all samples since step 0, as `batch`."""
    return (step * size if before is None else before) + np.arange(rows.start, rows.stop)
