"""Symbols as numbers: a cell of a buffer is a vector with a coefficient for each symbol.

The code under view adds and scales these vectors as any numbers. So `a0+a1` in a cell is proof
that the values of two ranks were added there, each once. Coefficients are exact in float64.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

import numpy as np

IN_FLIGHT = "~"
"""A cell whose elements a message is about to replace."""
MIXED = "?"
"""A cell whose repetitions differ: no linear form describes it."""
SHORT = 4
"""Summands of a group that are written one by one; longer groups are cut in the middle."""
LARGEST = 64
"""The largest denominator of a coefficient."""


class Symbols:
    """A basis: names of symbols, and the number of elements of a cell.

    size  elements of a vector, at least one for each symbol; a cell repeats the vector
    """

    def __init__(self, names: Sequence[str], size: int = 0):
        self.names, self.size = tuple(names), max(size, len(names))
        self._index = {name: number for number, name in enumerate(self.names)}

    def vector(self, name: str) -> np.ndarray:
        """Return the vector of a symbol, (size,) float64."""
        vector = np.zeros(self.size)
        vector[self._index[name]] = 1
        return vector

    def cell(self, name: str, count: int) -> np.ndarray:
        """Return `count` elements that repeat the vector of a symbol; `size` divides `count`."""
        return np.tile(self.vector(name), count // self.size)

    def read(self, cell: np.ndarray) -> str:
        """Return the contents of a cell as a sum of symbols."""
        vectors = np.asarray(cell).reshape(-1, self.size)
        if not len(vectors):
            return ""
        if np.isnan(vectors).any():
            return IN_FLIGHT
        if (vectors != vectors[0]).any() or vectors[0, len(self.names) :].any():
            return MIXED
        return written({n: float(c) for n, c in zip(self.names, vectors[0], strict=False) if c})

    def read_all(self, array: np.ndarray, cells: int) -> tuple[str, ...]:
        """Return the contents of the cells of an array, which they divide evenly."""
        return tuple(self.read(cell) for cell in np.split(np.asarray(array).reshape(-1), cells))


def written(terms: dict[str, float]) -> str:
    """Return a linear form as text: {a: 1, b: -0.5, c: -0.5} is a-(b+c)/2; 0 if it has no term."""
    form = ""
    keyed = [(Fraction(c).limit_denominator(LARGEST), name) for name, c in terms.items()]
    for value, group in groupby(keyed, lambda pair: pair[0]):
        names = [name for _, name in group]
        total = "+".join(names) if len(names) <= SHORT else f"{names[0]}+..+{names[-1]}"
        if len(names) > 1 and value != 1:
            total = f"({total})"
        times = f"{abs(value.numerator)}" if abs(value.numerator) > 1 else ""
        over = f"/{value.denominator}" if value.denominator > 1 else ""
        form += ("-" if value < 0 else "+") + times + total + over
    return form.removeprefix("+") or "0"
