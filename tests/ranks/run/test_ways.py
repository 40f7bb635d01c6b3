"""The eight ways of mpitrain/README.md: a real run visits their functions in order, and no other file but leaves."""

import re
import sys
from pathlib import Path

import pytest

import mpitrain

PACKAGE = Path(mpitrain.__file__).parent
PAGE = PACKAGE / "README.md"
SECTION = re.search(r"^## Eight ways$(.*?)^## ", PAGE.read_text(), re.M | re.S).group(1)
# | question | `function` in `file`, `function` in `file`, ... |
WAYS = {
    question: re.findall(r"`([\w.<>]+)` in `([\w/]+\.py)`", way)
    for question, way in re.findall(r"^\| ([^|]+\?) \| (.*) \|$", SECTION, re.M)
}
# | `file or folder/` | why a way may pass it |
LEAVES = re.findall(r"^\| `([\w/.]+)` \| ", SECTION, re.M)


def calls_of(function, *arguments):
    """Run a function, and return its calls in the package as (function, file), in their order."""
    calls = []

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            calls.append((frame.f_code.co_qualname, path.relative_to(PACKAGE).as_posix()))

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls


# {question: a function that makes the run, and returns its calls}. Its number is the most files that the way may have.
RUNS = {}


def test_the_page_and_the_runs_have_the_same_ways():
    assert list(WAYS) == list(RUNS)


@pytest.mark.parametrize("question", WAYS)
def test_a_way_visits_its_functions_in_order_and_no_other_file(question):
    way, (most, run) = WAYS[question], RUNS[question]
    calls = run()
    first = end = calls.index(way[0])
    for step in way[1:]:
        assert step in calls[end:], f"{step} does not come after {calls[end]}"
        end = calls.index(step, end)
    files = {path for _, path in way}
    others = {
        path
        for _, path in calls[first : end + 1]
        if path not in files and not path.startswith(tuple(LEAVES))
    }
    assert not others
    assert len(files) <= most
