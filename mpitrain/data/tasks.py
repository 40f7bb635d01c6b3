"""Multiple-choice tasks: a JSON object on each line of a file, for `mpitrain eval --tasks`."""

from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.errors import DataError
from mpitrain.files import reading_of, text_of
from mpitrain.strict_json import validated

EXAMPLE = 'Write {"context": TEXT, "choices": [TEXT, TEXT], "answer": INDEX} on each line.'


class Task(NamedTuple):
    """A question with several answers, one of which is right.

    line     number of its line in the file, from 1
    context  the text before each choice; may be empty
    choices  the answers; each begins right after the context, so a space between belongs to it
    answer   the index of the right choice, from 0
    """

    line: int
    context: str
    choices: list[str]
    answer: int


class _TaskLine(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    context: str
    choices: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    answer: int = Field(ge=0)


def read_tasks(path: Path) -> list[Task]:
    """Read a file of tasks; blank lines are skipped.

    raises  DataError if there is no task, or, with the number of the line, if a line is none
    """
    with reading_of(f"The tasks {path}", "Name a file of tasks.", DataError):
        lines = text_of(path).split(b"\n")
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = Task(number, **validated(_TaskLine, line).model_dump())
            if task.answer >= len(task.choices):
                raise ValueError(
                    f"its answer is {task.answer}, and its choices are 0 to {len(task.choices) - 1}"
                )
        except ValueError as error:
            raise DataError(
                f"Line {number} of {path} must be a task, but {error}.", EXAMPLE
            ) from None
        tasks.append(task)
    if not tasks:
        raise DataError(f"{path} must have a task, but has none.", EXAMPLE)
    return tasks
