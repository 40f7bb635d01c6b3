"""The result of a check as lines of text, and the results of a class as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence

from mpitrain.errors import visible
from mpitrain.tools.textbook.exercises.check import Checked
from mpitrain.tools.textbook.words import text

COLUMNS = ("file", "exercise", "verdict", "cases", "counterexample", "reason", "cost", "formula")


def lines(file: str, found: Checked, language: str) -> Iterator[str]:
    """Yield the verdict, the smallest counterexample, and the cost with its formula."""
    exercise = found.exercise
    verdict = text("right" if found.is_right else "wrong", language)
    cases = text("{right} of {all} cases", language, right=found.cases, all=len(exercise.cases))
    yield visible(f"{file}: {text('exercise', language)} {found.name}: {verdict}, {cases}")
    if found.case is not None:
        yield visible(f"  {found.why(language)}")
        yield f"  {text('smallest counterexample', language)}: {found.sizes(found.case)}"
    if found.cost:
        largest = exercise.cases[found.cases - 1]
        yield (
            f"  {text(exercise.cost, language)}, {found.sizes(largest)}: {found.cost.counted:g}; "
            f"{text('formula', language)} {text(exercise.formula, language)} = {found.cost.formula:g}"
        )


def row(file: str, found: Checked, language: str) -> list[str]:
    """Return the row of a file for CSV, in the order of COLUMNS."""
    cost = found.cost
    return [
        file,
        found.name,
        "right" if found.is_right else "wrong",
        f"{found.cases}/{len(found.exercise.cases)}",
        found.sizes(found.case) if found.case is not None else "",
        found.why(language),
        f"{cost.counted:g}" if cost else "",
        f"{cost.formula:g}" if cost else "",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerows([COLUMNS, *rows])
    return visible(written.getvalue())
