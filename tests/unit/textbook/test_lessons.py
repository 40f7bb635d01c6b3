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
RUN = LESSONS[::2] if os.environ.get("MPITRAIN_TEST_LESSONS") == "all" else LESSONS[2:3]
"""The English lessons to run: all, or the one that trains. jobs/prove/lessons.sh runs all."""

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


@pytest.fixture(scope="module")
def classroom(tmp_path_factory):
    """The folder in which a class opens all lessons, one after another."""
    return tmp_path_factory.mktemp("classroom")


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_lesson_runs_twice_in_one_folder_and_its_exercise_is_judged(path, classroom):
    """First in English, then in Korean. The exercise as it stands is wrong, and with its solution right."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    name = exercise_of(path)
    solution = (SOLUTIONS / f"{name}.py").read_text()
    for language, right in (("en", "right"), ("ko", "맞음")):
        notebook = nbformat.read(path.with_name(path.name.replace(".en.", f".{language}.")), 4)
        for code in (f"%%writefile {name}.py\n{solution}", f'learn.check("{name}.py")'):
            notebook.cells.append(nbformat.v4.new_code_cell(code))
        wrong = nbformat.v4.new_code_cell(
            'learn.explain("rings")', metadata={"tags": ["raises-exception"]}
        )
        notebook.cells.append(wrong)
        client = nbclient.NotebookClient(
            notebook, timeout=SECONDS, resources={"metadata": {"path": str(classroom)}}
        )
        client.execute()
        shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
        assert not [one for each in shown for one in each if one.get("name") == "stderr"]
        errors = [one for each in shown for one in each if one.output_type == "error"]
        assert len(errors) == 1 + (name == "ring")
        for error in errors:  # a message, without a traceback
            assert "\n".join(error.traceback).split() == f"{error.ename}: {error.evalue}".split()
        assert all("rank 1 waits in send" in error.evalue for error in errors[:-1])
        begun, solved = (each[0]["data"]["text/plain"] for each in (shown[-4], shown[-2]))
        assert "NotImplementedError" in begun
        assert f": {right}," in solved, solved
