"""Initial values of parameters: functions (generator, shape) -> float64 array, for
`Parameter.draw`.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable

import numpy as np

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(std: float) -> Draw:
    """Return a function that draws Gaussian initial values with mean 0 and standard deviation
    `std`.
    """
    return lambda generator, shape: generator.standard_normal(shape) * std


def zeros(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return all zeros; the generator is not used."""
    return np.zeros(shape)


def ones(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return all ones; the generator is not used."""
    return np.ones(shape)


def uniform(bound: float) -> Draw:
    """Return a function that draws uniform initial values from -`bound` to `bound`."""
    return lambda generator, shape: generator.uniform(-bound, bound, shape)
