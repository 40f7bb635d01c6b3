"""The data of `explain`: a topic, and the explanation recorded from it, which every renderer draws.

A topic is recorded from the package's own code. The explanation has texts, frames, counted bytes
with their formulas, and the lines of source that ran. Its texts are English: strings, or
`Sentence`s with values. A renderer translates them.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.machine.compiling import has_compiler
from mpitrain.tools.textbook.explain.links import Link
from mpitrain.tools.words import korean

ROOT = Path(__file__).parents[4]
"""The folder of the package: sources are named relative to it."""

UNDER_WAY = "→"
"""Follows the contents of a cell whose messages are on their way."""

MOST_RANKS = 8
"""Largest number of ranks: more do not fit on a screen."""


class Frame(NamedTuple):
    """The buffers of all ranks at one moment.

    title     the step that has just ended
    cells     contents, (rows, columns); empty: the rank stores nothing there
    messages  (source, target, column) of the messages of this step; column -1: of no single one
    sent      by row: bytes sent since the start; empty: the topic does not count them
    seconds   of the step, on the slowest rank; None: not measured
    """

    title: str
    cells: tuple[tuple[str, ...], ...]
    messages: tuple[tuple[int, int, int], ...] = ()
    sent: tuple[int, ...] = ()
    seconds: float | None = None

    def changed(self, before: "Frame | None") -> frozenset[tuple[int, int]]:
        if before is None:
            return frozenset()
        return frozenset(
            (row, column)
            for row, cells in enumerate(self.cells)
            for column, cell in enumerate(cells)
            if cell.rstrip(UNDER_WAY) != before.cells[row][column].rstrip(UNDER_WAY)
        )


class CutMatrix(NamedTuple):
    """A matrix to draw, and the parts into which it is cut.

    sign   between it and the matrix to its left
    name   with its size
    shape  (rows, columns)
    parts  (first row, first column, rows, columns, label, number of the colour)
    """

    sign: str
    name: str
    shape: tuple[int, int]
    parts: Sequence[tuple[int, int, int, int, str, int]]


class CountedFormula(NamedTuple):
    """A number that was counted in the run, beside its formula.

    name     of the number
    counted  in the run
    words    the formula
    value    of the formula, for this run
    """

    name: str
    counted: float
    words: str
    value: float

    @property
    def agrees(self) -> bool:
        return abs(self.counted - self.value) <= 1e-9 * max(1.0, abs(self.value))


class SourceLines(NamedTuple):
    """Lines of source: the object's name, its file within the package, and the first line."""

    name: str
    file: str
    line: int

    @classmethod
    def of(cls, source: Any) -> "SourceLines":
        file = Path(inspect.getsourcefile(source) or "")
        return cls(
            source.__qualname__,
            file.relative_to(ROOT).as_posix(),
            inspect.getsourcelines(source)[1],
        )


class Columns(NamedTuple):
    heading: str
    names: tuple[str, ...]

    def named(self, language: str) -> tuple[str, ...]:
        """Return the names of the columns; names that are words are translated."""
        return tuple(korean().get(n, n) for n in self.names) if language == "ko" else self.names


class Explanation(NamedTuple):
    """A recorded topic.

    sentences  the idea, a sentence each
    legend     what the contents of a cell mean
    rows       label of each row
    columns    groups of columns
    frames     in order of time; the first one is the start
    formulas   counted numbers, each with its formula
    sources    lines that ran
    command    shell command that shows the same in a real run
    laws       tests that prove it
    charted    whether the chart shows all that the frames do: pictures are the chart alone
    title      of the topic
    products   (title, matrices) of products to draw
    chart      draws what `plan all-reduce` or `plan schedule` draws, and returns the files
    """

    sentences: Sequence[str]
    legend: str
    rows: Sequence[str]
    columns: Sequence[Columns]
    frames: Sequence[Frame]
    formulas: Sequence[CountedFormula]
    sources: Sequence[SourceLines]
    command: str
    laws: Sequence[str]
    charted: bool = False
    title: str = ""
    products: Sequence[tuple[str, Sequence[CutMatrix]]] = ()
    chart: Callable[[Path], list[Path]] | None = None

    @property
    def stills(self) -> range:
        """The numbers of the frames that are pictures."""
        return range(0 if self.charted else len(self.frames))


class TopicSetting(NamedTuple):
    """The setting of a recording.

    ranks  number of ranks, each a thread
    link   speed of every rank's link; None: as fast as memory
    """

    ranks: int
    link: Link | None = None


class Topic(NamedTuple):
    """A row of the table of topics.

    title     one line
    record    (setting) -> the explanation without its title, recorded from a run on threads
    ranks     default number of ranks
    least     smallest number of ranks
    most      largest number of ranks
    timed     whether its frames have seconds, so that slow links show
    compiled  whether it compiles kernels for the simulator, which needs a compiler
    """

    title: str
    record: Callable[[TopicSetting], Explanation]
    ranks: int = 4
    least: int = 1
    most: int = MOST_RANKS
    timed: bool = False
    compiled: bool = False

    @property
    def runs_here(self) -> bool:
        return not self.compiled or has_compiler()

    def setting(
        self, name: str, ranks: int | None = None, link: Link | None = None
    ) -> TopicSetting:
        """Return the setting for a number of ranks; None: the default number.

        raises  ConfigError if the topic cannot be recorded on so many
        """
        count = self.ranks if ranks is None else ranks
        if count not in range(self.least, self.most + 1):
            raise ConfigError(
                f"{name} has {self.least} to {self.most} ranks, but --ranks is {count}.",
                f"Set --ranks to {self.ranks}.",
            )
        if link and not self.timed:
            raise ConfigError(
                f"Slow links show in topics that measure time, but {name} measures none.",
                "Leave out --link, or choose ring, star or a mode of replication.",
            )
        return TopicSetting(count, link)

    def explained(self, setting: TopicSetting) -> Explanation:
        return self.record(setting)._replace(title=self.title)
