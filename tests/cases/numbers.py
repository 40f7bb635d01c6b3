"""Numbers for the cases: drawn in float64, stored in any element type, compared with a truth in float64."""

from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "3xtf32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""By dtype; `3xtf32` is float32 whose products are three of TF32."""


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Standard normal numbers in float64."""
    return np.random.default_rng(seed).standard_normal(shape)


def stored(x: np.ndarray, dtype: str, shifted: bool = False) -> np.ndarray:
    """The numbers in a dtype. `shifted` starts one element off any alignment."""
    flat = np.empty(x.size + 1, "float32" if dtype == "3xtf32" else dtype)[int(shifted) :][: x.size]
    flat[...] = np.ravel(x)
    return flat.reshape(x.shape)


def values(x: Any) -> np.ndarray:
    """What is stored, in float64."""
    return np.asarray(x).astype(np.float64)


def assert_close(
    mine: Any, truth: Any, dtype: str = "float32", what: str = "", size: float = 0.0
) -> None:
    """Largest difference relative to the largest truth, or to `size` where terms of that size cancel; a NaN fails."""
    mine, truth = values(mine), np.asarray(truth, np.float64)
    assert mine.shape == truth.shape, f"{what}: {mine.shape} for {truth.shape}"
    scale = max(np.abs(truth).max(initial=0), size, 1e-3)
    error = np.abs(mine - truth).max(initial=0) / scale
    assert error <= TOLERANCE[dtype], f"{what}: off by {error:.2g}"
