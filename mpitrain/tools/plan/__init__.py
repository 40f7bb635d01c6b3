"""`mpitrain plan`: predictions about a job, counted without a run or computed from a short measurement."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MOST_SHOWN = 256
"""Largest number of ranks or stages that are printed one by one."""


def several(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: plans have no cycles, and collections would walk them all."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
