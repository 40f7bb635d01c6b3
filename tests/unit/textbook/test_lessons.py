"""Lessons: English and Korean have the same code, fill 40 minutes, and run as notebooks."""

import json
import os
import re
from pathlib import Path

import pytest

from mpitrain.tools.textbook.exercises.check import begun
from mpitrain.tools.textbook.exercises.table import EXERCISES
from tests.processes import SECONDS

ROOT = Path(__file__).parents[3]
LESSONS = sorted((ROOT / "jobs/lessons").glob("*.ipynb"))
RUN = LESSONS if os.environ.get("MPITRAIN_TEST_LESSONS") == "all" else LESSONS[:1]
"""The lessons to run. jobs/prove/lessons.sh runs all."""

SOLUTIONS = Path(__file__).parent / "solutions"

EXERCISE = re.compile(r"%%writefile (\w+)\.py\n")


def sources(path, kind):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def exercise_of(path):
    (name,) = (found[1] for code in sources(path, "code") if (found := EXERCISE.match(code)))
    return name


def test_each_exercise_ends_one_lesson():
    english = [exercise_of(path) for path in LESSONS if path.stem.endswith(".en")]
    assert sorted(english) == sorted(EXERCISES)
    for path in LESSONS:
        name = exercise_of(path)
        begin = f"%%writefile {name}.py\n{begun(name, EXERCISES[name])}"
        assert sources(path, "code")[-2:] == [begin.rstrip(), f'learn.check("{name}.py")']


@pytest.mark.parametrize("path", LESSONS[::2], ids=lambda path: path.stem)
def test_the_languages_of_a_lesson_differ_only_in_prose(path):
    korean = path.with_name(path.name.replace(".en.", ".ko."))
    setup, *codes = sources(path, "code")
    assert [setup.replace('"en"', '"ko"'), *codes] == sources(korean, "code")
    prose, prose_ko = sources(path, "markdown"), sources(korean, "markdown")
    assert len(prose) == len(prose_ko) and all(re.search("[가-힣]", text) for text in prose_ko)
    minutes, minutes_ko = (
        [int(n) for text in each for n in re.findall(rf"^## .*\((\d+){unit}\)$", text, re.M)]
        for each, unit in ((prose, " min"), (prose_ko, "분"))
    )
    assert minutes == minutes_ko and 30 <= sum(minutes) <= 35  # the rest is the exercise


def test_a_lesson_is_stored_without_results():
    for path in LESSONS:
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            assert not cell.get("outputs") and not cell.get("execution_count"), path


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_lesson_runs_and_its_exercise_is_judged(path, tmp_path):
    """The exercise as it stands is wrong, and with its solution right."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    name = exercise_of(path)
    solution = (SOLUTIONS / f"{name}.py").read_text()
    notebook = nbformat.read(path, as_version=4)
    for code in (f"%%writefile {name}.py\n{solution}", f'learn.check("{name}.py")'):
        notebook.cells.append(nbformat.v4.new_code_cell(code))
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert not [one for each in shown for one in each if one.get("name") == "stderr"]
    errors = [one for each in shown for one in each if one.output_type == "error"]
    assert len(errors) == (name == "ring")
    assert all("rank 1 waits in send" in error.evalue for error in errors)
    begun, solved = (each[0]["data"]["text/plain"] for each in (shown[-3], shown[-1]))
    assert "NotImplementedError" in begun
    right = "right" if path.stem.endswith(".en") else "맞음"
    assert f": {right}," in solved, solved
