"""Checks a student's file: runs it in a child, and judges each answer by the laws."""

import re
from pathlib import Path
from typing import NamedTuple

from mpitrain.collectives.plans.own_file import Wrong, answers, from_json
from mpitrain.errors import ConfigError
from mpitrain.files import reading
from mpitrain.tools.textbook.exercises import answers as asked
from mpitrain.tools.textbook.exercises.exercise import AnswerCost, Case, Exercise
from mpitrain.tools.textbook.exercises.table import EXERCISES
from mpitrain.tools.textbook.words import text

MARK = re.compile(rb"""^(?:\xef\xbb\xbf)?EXERCISE *= *(["'])([a-z0-9]+)\1""", re.MULTILINE)
"""The line that names the exercise; an editor may have put a byte order mark before it."""
LARGEST = 1_000_000
"""Largest size of a file, in bytes."""
LONGEST = 20_000
"""Largest number of characters of an answer; right ones have at most a quarter."""


class Checked(NamedTuple):
    """Result of a check.

    name    of the exercise
    cases   number of cases that are right
    case    the smallest counterexample; None if the file is right
    reason  the law that it breaks, or the problem
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
        """Return the reason in a language."""
        if self.reason is None:
            return ""
        return text(self.reason.sentence, language)

    def sizes(self, case: Case) -> str:
        """Return the numbers of a case with their names."""
        return ", ".join(
            f"{name} {size}" for name, size in zip(self.exercise.sizes, case, strict=True)
        )


def check(path: Path) -> Checked:
    """Check a file.

    raises  ConfigError if it cannot be read, or does not name its exercise
    """
    try:
        with reading(path) as file:
            code = file.read(LARGEST + 1)
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
    """Run the code on all cases in one child, and judge the answers from the smallest case on."""
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
            if number >= len(replies.results):
                raise replies.reason()
            answer = replies.results[number]
            if len(repr(answer)) > LONGEST:
                raise Wrong("the answer has more than {most} characters", most=LONGEST)
            if "problem" in answer:
                problem = from_json(answer["problem"])
                raise Wrong(problem.law, **problem.values)
            cost = exercise.judge(case, answer)
        except Wrong as wrong:
            return Checked(name, exercise, number, case, wrong, cost)
    return Checked(name, exercise, len(exercise.cases), None, None, cost)
