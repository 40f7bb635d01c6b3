"""`mpitrain.learn`: explanations, claims and exercises that show themselves in a notebook's cell."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from mpitrain.errors import ConfigError

Row = TypeVar("Row")

language = "en"
"""The language of what is shown: en or ko. A notebook sets it: `learn.language = "ko"`."""

COLUMNS = 100
"""Width of a text, in characters."""


def row_of(table: Mapping[str, Row], kind: str, name: str) -> Row:
    """Return the row of a table; ConfigError if no row has this name."""
    if name not in table:
        raise ConfigError(
            f"The name of the {kind} is one of {', '.join(table)}, but this is {name!r}.",
            "Name one of these.",
        )
    return table[name]


class Shown:
    """A text that a notebook shows as a page, if it has one.

    page  HTML that needs no other file; empty: the text is shown as it is
    """

    def __init__(self, lines: list[str], page: str = "", height: int = 0):
        self._lines, self._page, self._height = lines, page, height

    def __repr__(self) -> str:
        return "\n".join(self._lines)

    def _repr_html_(self) -> str | None:
        if not self._page:
            return None
        # In a frame of its own the page's style and names change nothing else.
        page = html.escape(self._page)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {self._height}px; border: 0"></iframe>'


def explain(topic: str, ranks: int | None = None, link: str = "") -> Shown:
    """Show how a method works, step by step, as `mpitrain learn explain`.

    link    the speed of slow links, such as "200Mbit,1ms"; empty: none
    raises  ConfigError if the topic is unknown, or not for so many ranks
    """
    from mpitrain.tools.textbook.explain import page, terminal
    from mpitrain.tools.textbook.explain.links import parse_link
    from mpitrain.tools.textbook.explain.topics import TOPICS

    row = row_of(TOPICS, "topic", topic)
    found = row.explained(row.setting(topic, ranks, parse_link(link) if link else None))
    frames = [line for of in terminal.frames(found, language, COLUMNS) for line in of]
    lines = [*terminal.heading(found, language), *frames, *terminal.ending(found, language)]
    return Shown(lines, page.whole(found, language), 330 + 26 * (len(found.rows) + 8))


def claims(*names: str) -> Shown:
    """Measure sentences of textbooks, all of them or some, as `mpitrain learn claims`.

    raises  ConfigError if a name is unknown
    """
    from mpitrain.tools.textbook.claims.claim import judge
    from mpitrain.tools.textbook.claims.report import lines, page, summary
    from mpitrain.tools.textbook.claims.table import CLAIMS

    rows_of = {name: row_of(CLAIMS, "claim", name) for name in names or CLAIMS}
    judged = [judge(name, claim) for name, claim in rows_of.items()]
    said = [line for each in judged for line in (*lines(each, language), "")]
    rows = sum(len(each.findings) + 6 for each in judged)
    return Shown([*said, summary(judged, language)], page(judged, language), 120 + 30 * rows)


def exercise(name: str) -> Shown:
    """Show the statement of an exercise, and the function to complete."""
    from mpitrain.tools.textbook.exercises.check import skeleton
    from mpitrain.tools.textbook.exercises.table import EXERCISES

    row = row_of(EXERCISES, "exercise", name)
    return Shown(skeleton(name, row, language).splitlines())


def check(file: str) -> Shown:
    """Check the solution of an exercise in a file, as `mpitrain learn check`."""
    from mpitrain.tools.textbook.exercises.check import check_file, lines

    return Shown([*lines(file, check_file(Path(file)), language)])
