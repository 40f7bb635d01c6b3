"""The table of all exercises."""

from mpitrain.tables import Table
from mpitrain.tools.textbook.exercises import layers, messages, schedule
from mpitrain.tools.textbook.exercises.exercise import Exercise

EXERCISES: Table[str, Exercise] = Table(
    {**messages.EXERCISES, **schedule.EXERCISES, **layers.EXERCISES}
)
"""Exercises by name. A new one needs a row in a file here, and the Korean of its texts."""
