"""The result of a check as lines of text, and the results of a class as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence

from mpitrain.errors import visible
from mpitrain.tools.textbook.exercises.check import Checked
from mpitrain.tools.textbook.words import text

COLUMNS = ("file", "exercise", "verdict", "cases", "counterexample", "reason", "cost", "formula")


def lines(file: str, checked: Checked, language: str) -> Iterator[str]:
    """Yield the verdict, the smallest counterexample, and the cost with its formula."""
    exercise = checked.exercise
    verdict = text("right" if checked.is_right else "wrong", language)
    cases = text("{right} of {all} cases", language, right=checked.cases, all=len(exercise.cases))
    yield visible(f"{file}: {text('exercise', language)} {checked.name}: {verdict}, {cases}")
    if checked.case is not None:
        yield visible(f"  {checked.why(language)}")
        yield f"  {text('smallest counterexample', language)}: {checked.sizes(checked.case)}"
    if checked.cost:
        largest = exercise.cases[checked.cases - 1]
        yield (
            f"  {text(exercise.cost, language)}, {checked.sizes(largest)}: {checked.cost.counted:g}; "
            f"{text('formula', language)} {text(exercise.formula, language)} = {checked.cost.formula:g}"
        )


def row(file: str, checked: Checked, language: str) -> list[str]:
    """Return the row of a file for CSV, in the order of COLUMNS."""
    cost = checked.cost
    return [
        file,
        checked.name,
        "right" if checked.is_right else "wrong",
        f"{checked.cases}/{len(checked.exercise.cases)}",
        checked.sizes(checked.case) if checked.case is not None else "",
        checked.why(language),
        f"{cost.counted:g}" if cost else "",
        f"{cost.formula:g}" if cost else "",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerows([COLUMNS, *rows])
    return visible(written.getvalue())
