"""How parameters begin: functions (generator, shape) -> float64 array, as `Parameter.draw` wants them."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable

import numpy as np

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(std: float) -> Draw:
    """Gaussian initial values with mean 0 and this standard deviation."""
    return lambda generator, shape: generator.standard_normal(shape) * std


def zeros(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All 0; the generator is not used."""
    return np.zeros(shape)


def ones(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All 1; the generator is not used."""
    return np.ones(shape)
