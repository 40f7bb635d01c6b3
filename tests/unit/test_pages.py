"""What the pages about the house and about the tests say of folders and files is so."""

import re
from pathlib import Path

import pytest

from tests.unit.test_imports import FLOORS

HERE = Path(__file__).parents[2]
HOUSE, TESTS = HERE / "mpitrain" / "README.md", HERE / "tests" / "README.md"


def test_the_picture_of_the_house_shows_every_floor_from_the_roof_down():
    picture = HOUSE.read_text().split("```")[1]
    shown = re.findall(r"^ (\w+)  +\w", picture, re.M)
    assert [*reversed(shown)] == [floor for floor in FLOORS if floor != "__main__"]


def test_the_page_of_the_tests_lists_every_room_of_theirs():
    listed = re.findall(r"^\| `(\w+)/` \|", TESTS.read_text(), re.M)
    assert sorted(listed) == sorted(folder.parent.name for folder in TESTS.parent.glob("*/__init__.py"))


@pytest.mark.parametrize("page", (HOUSE, TESTS), ids=("house", "tests"))
def test_the_files_that_a_page_names_are_there(page):
    text = page.read_text()
    named = {*re.findall(r"`([\w.]+/[\w/.]*)`", text), *re.findall(r"`(\w+\.py)`", text), *re.findall(r"\]\(([^)#]+)\)", text)}
    assert len(named) > 10
    missing = {name for name in named if not any((folder / name).exists() for folder in (page.parent, HERE))}
    assert not missing
