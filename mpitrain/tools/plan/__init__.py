"""`mpitrain plan`: predictions about a job, counted without a run or computed from a short measurement."""

MOST_SHOWN = 256
"""Largest number of ranks or stages that are printed one by one."""


def several(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"
