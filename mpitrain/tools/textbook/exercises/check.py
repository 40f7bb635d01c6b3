"""Exercises for students: the file to begin with, the check of a solution, and the report on it.

A check runs the file in a child process, and judges each answer by the laws of the exercise.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from mpitrain.collectives.plans.checked import Wrong
from mpitrain.errors import ConfigError, visible
from mpitrain.files import reading, without_byte_order_mark
from mpitrain.tools.textbook.exercises import answers as asked
from mpitrain.tools.textbook.exercises.child import answers
from mpitrain.tools.textbook.exercises.table import EXERCISES, AnswerCost, Case, Exercise
from mpitrain.tools.words import text

MARK = re.compile(rb"""^(?:\xef\xbb\xbf)?EXERCISE *= *(["'])([a-z0-9]+)\1""", re.MULTILINE)
"""The line that names the exercise; an editor may have put a byte order mark before it."""
LARGEST = 1_000_000
"""Largest size of a file, in bytes."""
LONGEST = 20_000
"""Largest number of characters of an answer; right ones have at most a quarter."""
COLUMNS = ("file", "exercise", "verdict", "cases", "counterexample", "reason", "cost", "formula")


def skeleton(name: str, exercise: Exercise, language: str) -> str:
    statement = text(exercise.statement, language)
    check = text("Check it with: mpitrain learn check FILE", language)
    cost = text(
        "{cost}: at most {formula}",
        language,
        cost=text(exercise.cost, language),
        formula=text(exercise.formula, language),
    )
    example = text("Example of two ranks:", language) + "\n" + indent(exercise.example, "    ")
    return f'"""{statement}\n\n{example}\n\n{cost}\n{check}\n"""\n\n{begun(name, exercise)}'


def begun(name: str, exercise: Exercise) -> str:
    """Return the code that a student completes."""
    head = f'EXERCISE = "{name}"\n\n\ndef {exercise.function}({exercise.arguments}):\n'
    if exercise.way == "values":
        return f"{head}    raise NotImplementedError\n"
    body = '    raise NotImplementedError\n    total = yield "all-reduce", np.zeros(1)\n'
    return f"import numpy as np\n\n{head}{body}"


class Checked(NamedTuple):
    """The result of a check.

    name    of the exercise
    cases   number of cases that are right
    case    the smallest case that is wrong; None if all are right
    reason  the law that this case breaks, or another problem
    cost    of the largest case that is right
    """

    name: str
    exercise: Exercise
    cases: int
    case: Case | None
    reason: Wrong | None
    cost: AnswerCost | None

    @property
    def is_right(self) -> bool:
        return self.reason is None

    def why(self, language: str) -> str:
        if self.reason is None:
            return ""
        return text(self.reason.sentence, language)

    def sizes(self, case: Case) -> str:
        return ", ".join(
            f"{name} {size}" for name, size in zip(self.exercise.sizes, case, strict=True)
        )


def check_file(path: Path) -> Checked:
    """Check a solution.

    raises  ConfigError if the file cannot be read, or does not name its exercise
    """
    try:
        with reading(path) as file:
            code = without_byte_order_mark(file.read(LARGEST + 1))
    except OSError as error:
        raise ConfigError(
            f"The file {path} cannot be read: {error.strerror or error}.",
            "Name a file that `mpitrain learn exercise` wrote.",
        ) from None
    if len(code) > LARGEST:
        raise ConfigError(
            f"A solution has at most {LARGEST:,} bytes, but {path} has more.",
            "Name a file that `mpitrain learn exercise` wrote.",
        )
    marked = MARK.search(code)
    name = marked[2].decode() if marked else ""
    if name not in EXERCISES:
        raise ConfigError(
            f'A solution has a line EXERCISE = "...", one of {", ".join(EXERCISES)}, but {path} '
            + (f"has {name!r}." if name else "has none."),
            "Begin with the file of `mpitrain learn exercise NAME --out FILE`.",
        )
    return judged(name, EXERCISES[name], str(path), code)


def judged(name: str, exercise: Exercise, path: str, code: bytes) -> Checked:
    """Run the code on all cases in one child; judge the answers, the smallest case first."""
    replies = answers(
        path,
        code,
        f"{asked.__name__}:{exercise.way}",
        exercise.function,
        [exercise.calls(case) for case in exercise.cases],
    )
    cost: AnswerCost | None = None
    for number, case in enumerate(exercise.cases):
        try:
            answer = replies.answer(number)
            if len(repr(answer)) > LONGEST:
                raise Wrong("the answer has more than {most} characters", most=LONGEST)
            cost = exercise.judge(case, answer)
        except Wrong as wrong:
            return Checked(name, exercise, number, case, wrong, cost)
    return Checked(name, exercise, len(exercise.cases), None, None, cost)


def lines(file: str, checked: Checked, language: str) -> Iterator[str]:
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
