"""An explanation: the data that every renderer draws.

A topic is recorded once, from the package's own code. An explanation holds texts, frames, counted
bytes with their formulas, and the lines of source that ran.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.tools.textbook.words import WORDS, text

ROOT = Path(__file__).parents[4]
"""The folder of the package: sources are named relative to it."""

UNDER_WAY = "→"
"""Follows the contents of a cell whose messages are on their way."""


@dataclass(frozen=True)
class Text:
    """A text in English, with the values of its fields; `into` returns it in a language."""

    english: str
    values: Mapping[str, object] = field(default_factory=dict)

    def into(self, language: str) -> str:
        """Return the text in a language; a value that is a Text is translated as well."""
        return text(
            self.english,
            language,
            **{
                name: value.into(language) if isinstance(value, Text) else value
                for name, value in self.values.items()
            },
        )


def sentence(english: str, **values: object) -> Text:
    """Return a text with these values in place of its fields."""
    return Text(english, values)


class FrameMessage(NamedTuple):
    """A message of a frame.

    source, target  numbers of rows
    nbytes          its payload
    """

    source: int
    target: int
    nbytes: int


class Frame(NamedTuple):
    """The buffers of all ranks at one moment.

    title     of the step that has just ended
    cells     (rows, columns) contents; empty: the rank stores nothing there
    messages  that the step sent
    sent      bytes that each row has sent since the start; empty: not counted in this topic
    seconds   of the step, on the slowest rank; None: not measured
    """

    title: Text
    cells: tuple[tuple[str, ...], ...]
    messages: tuple[FrameMessage, ...] = ()
    sent: tuple[int, ...] = ()
    seconds: float | None = None

    def changed(self, before: "Frame | None") -> frozenset[tuple[int, int]]:
        """Return the (row, column) of cells that differ from those of the frame before."""
        if before is None:
            return frozenset()
        return frozenset(
            (row, column)
            for row, cells in enumerate(self.cells)
            for column, cell in enumerate(cells)
            if cell.rstrip(UNDER_WAY) != before.cells[row][column].rstrip(UNDER_WAY)
        )


class CountedFormula(NamedTuple):
    """A counted number with its formula.

    name      of the number
    counted   in the run
    words     the formula
    value     of the formula, with the numbers of this run
    """

    name: Text
    counted: float
    words: str
    value: float

    @property
    def agrees(self) -> bool:
        return abs(self.counted - self.value) <= 1e-9 * max(1.0, abs(self.value))


class SourceLines(NamedTuple):
    """Lines of source: the object's name, its file within the package, and its first line."""

    name: str
    file: str
    line: int

    @classmethod
    def of(cls, source: Any) -> "SourceLines":
        """Return the source of a function or class, as `inspect` finds it."""
        file = Path(inspect.getsourcefile(source) or "")
        return cls(
            source.__qualname__,
            file.relative_to(ROOT).as_posix(),
            inspect.getsourcelines(source)[1],
        )


class Columns(NamedTuple):
    """A group of columns under one heading."""

    heading: Text
    names: tuple[str, ...]

    def named(self, language: str) -> tuple[str, ...]:
        """Return the names of the columns; names that are words are translated."""
        return tuple(text(name, language) if name in WORDS else name for name in self.names)


class Explanation(NamedTuple):
    """A recorded topic.

    name       of the topic
    title      one line
    sentences  the idea, a sentence each
    legend     the meaning of a cell's contents
    rows       label of each row
    columns    groups of columns
    frames     in order of time; the first one is the start
    formulas   counted numbers, each with its formula
    sources    lines that ran
    command    that shows the same in a real run
    laws       tests that prove it
    pictured   indices of the frames in a picture; empty: all
    """

    name: str
    title: Text
    sentences: Sequence[Text]
    legend: Text
    rows: Sequence[Text]
    columns: Sequence[Columns]
    frames: Sequence[Frame]
    formulas: Sequence[CountedFormula]
    sources: Sequence[SourceLines]
    command: str
    laws: Sequence[str]
    pictured: Sequence[int] = ()

    @property
    def drawn(self) -> list[tuple[int, Frame]]:
        """The frames of a picture, each with its number."""
        chosen = self.pictured or range(len(self.frames))
        return [(number % len(self.frames), self.frames[number]) for number in chosen]
