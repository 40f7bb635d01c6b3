"""What the pages say of folders, files, commands, keys and headings is so."""

import re
import shlex
from itertools import groupby, takewhile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mpitrain.cli import WORDS, commands
from mpitrain.config import keys, with_settings
from mpitrain.pipeline.schedules import SCHEDULES, STREAMS
from mpitrain.run.choices import parse
from tests.rows import tables
from tests.unit.house.test_imports import ENGINE, PACKAGE, SOURCES, TOOLS, imported_names

HERE = Path(__file__).parents[3]
HOUSE, TESTS = HERE / "mpitrain" / "README.md", HERE / "tests" / "README.md"
COMING_FROM = HERE / "mpitrain" / "COMING_FROM.md"
PAGES = [
    HERE / "README.md",
    TESTS,
    COMING_FROM,
    *(
        HERE / "mpitrain" / "run" / f"{name}.md"
        for name in ("FAILURES", "WRONG", "MEMORY", "EXTENDING")
    ),
    *sorted((HERE / "mpitrain").rglob("README.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
every_page = pytest.mark.parametrize(
    "page",
    PAGES,
    ids=[
        str((page.parent if page.name == "README.md" else page).relative_to(HERE)) for page in PAGES
    ],
)


def test_the_picture_of_the_house_shows_every_floor_from_the_roof_down():
    engine, tools = (re.findall(r"^ (\w+)  +\w", picture, re.M) for picture in pictures())
    assert ([*reversed(engine)], [*reversed(tools)]) == (ENGINE, [*TOOLS, "learn", "cli"])
    section = HOUSE.read_text().partition("## Seven boxes")[2].partition("\n## ")[0]
    boxes = re.findall(r"^\| (\w+) \|", section, re.M)[1:]
    below = re.findall(r"^ -+ (\w+)$", "".join(pictures()), re.M)
    assert boxes == [below[-1], *below[:-1]] and len(boxes) == 7


def pictures():
    """The engine, and the tools above it."""
    return HOUSE.read_text().split("```")[1:4:2]


@pytest.mark.slow
def test_sub_rooms_of_the_picture_import_only_from_those_below_them():
    floors = dict(re.findall(r"^ (\w+)  .*\n {15}(.*)$", "".join(pictures()), re.M))
    for name, line in floors.items():
        floor = f"tools/{name}" if name in TOOLS else name
        levels = [re.findall(r"[\w]+", level.split("(")[0]) for level in line.split("/")]
        height = {name: -number for number, names in enumerate(levels) for name in names}
        assert {path.parent.name for path in (PACKAGE / floor).glob("*/__init__.py")} <= set(height)
        for source in SOURCES:
            own = source.removeprefix(f"{floor}/").split("/")[0].removesuffix(".py")
            if not source.startswith(f"{floor}/") or own not in height:
                continue
            for name in imported_names(source):
                if name.startswith(f"mpitrain.{floor.replace('/', '.')}."):
                    other = name.split(".")[2 + floor.count("/")]
                    is_lower = other in (own, *(n for n in height if height[n] < height[own]))
                    assert is_lower or other not in height, f"{source} imports {name}"
    assert len(floors) > 4


def test_the_glossary_has_at_most_40_terms_that_the_code_or_the_pages_use():
    text = (PACKAGE / "GLOSSARY.md").read_text()
    terms = re.findall(r"^\| (.*?) \| .* \| .* \|$", text, re.M)[2:]
    assert 20 < len(terms) <= 40
    used = joined("".join(path.read_text() for path in [*PACKAGE.rglob("*.py"), *PAGES]))
    words = ", ".join(re.sub(r"\(.*?\)", "", term) for term in terms).split(", ")
    assert not [word for word in words if joined(word) not in used]


def joined(text):
    """The letters and digits alone: `dense_steps`, DenseSteps and dense steps are one term."""
    return re.sub(r"[\W_]+", "", text).lower()


def test_the_page_of_the_tests_lists_every_room_of_theirs():
    listed = re.findall(r"^\| `(\w+)/` \|", TESTS.read_text(), re.M)
    assert sorted(listed) == sorted(
        folder.parent.name for folder in TESTS.parent.glob("*/__init__.py")
    )


def test_the_readme_says_why_and_starts_three_readers_in_180_lines():
    lines = (HERE / "README.md").read_text().splitlines()
    text = "\n".join(lines)
    assert len(lines) <= 180
    assert "wheels" in text[: text.index("```")] and "![" in text[: text.index("\n## ")]
    blocks = FENCE.findall(text)
    assert len(blocks[2][1].strip().splitlines()) == 3, "a PyTorch program, an own text, a lesson"


def test_the_page_of_pipelines_lists_every_schedule():
    text = (HERE / "mpitrain" / "pipeline" / "README.md").read_text()
    assert re.findall(r"^\| `([\w-]+)`(?:[^|]*\|){3} [\d.]+% \| [\d.]+ \|$", text, re.M) == list(
        SCHEDULES
    )
    assert all(f"`{name}`" in text for name in STREAMS)


def test_the_page_of_the_house_lists_the_table_of_every_kind_with_its_file():
    section = HOUSE.read_text().partition("## What to touch")[2].partition("\n## ")[0]
    named = {*re.findall(r"`([\w/.]+)`", section)}
    for table in tables():
        module, _, name = table.removeprefix("mpitrain.").rpartition(".")
        assert {name, f"{module.replace('.', '/')}.py"} <= named


@pytest.mark.parametrize("page", (HOUSE, TESTS), ids=("house", "tests"))
def test_the_files_that_a_page_names_are_there(page):
    text = page.read_text()
    named = {*re.findall(r"`([\w.]+/[\w/.]*)`", text), *re.findall(r"`(\w+\.py)`", text)}
    assert len(named) > 10
    missing = {
        name
        for name in named
        if not any((folder / name).exists() for folder in (page.parent, HERE))
    }
    assert not missing


@every_page
def test_links_of_a_page_lead_to_a_file_and_to_a_heading_in_it(page):
    links = re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", page.read_text())
    assert links or page == TESTS
    for name, heading in links:
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not heading or heading in headings(target), (name, heading)


def headings(page):
    """As links name them."""
    lines = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines]


@every_page
def test_tests_and_jobs_that_a_page_names_are_there(page):
    named = re.findall(r"(?<![\w/.])(?:tests|jobs)/[\w./*-]*\w", page.read_text())
    assert all(any(HERE.glob(name)) for name in named), named


@every_page
def test_a_command_on_a_page_has_the_options_and_settings_that_it_takes(
    page, monkeypatch, tmp_path
):
    read = []
    monkeypatch.chdir(tmp_path)
    Path("own.py").touch()  # The user's own, which settings may name.
    monkeypatch.setattr(
        click.Command, "invoke", lambda self, context: read.append(context.params)
    )  # and does nothing
    # A page may name a folder of initial parameters, which is not there.
    monkeypatch.setattr("mpitrain.run.model_keys.with_keys_of_folder", lambda tables: tables)
    for words in commands_on(page):
        while words:
            read.clear()
            done = CliRunner().invoke(commands, words)
            assert done.exit_code == 0, (words, done.output)
            found = read[-1] if read else {}
            parse(with_settings({}, [*found.get("settings", ()), *found.get("others", ())]))
            words = list(
                found.get("arguments", ())
            )  # of `launch`: the command that it runs, or a program of the user's
            words = [] if words[:1] == ["python"] else words


def commands_on(page):
    """The words behind `mpitrain` of each command in a block, and of each in a sentence that is given an option."""
    text = page.read_text()
    for language, block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        for line in {"bash": lines, "": [line[2:] for line in lines if line.startswith("$ ")]}.get(
            language, ()
        ):
            for _, group in groupby(shlex.split(line, comments=True), "&&".__eq__):
                words = list(takewhile(lambda word: word not in (">", "|"), group))
                called = [
                    place for place, word in enumerate(words) if Path(word).name == "mpitrain"
                ]
                yield from [words[called[0] + 1 :]] if called else []
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        words = shlex.split(code) if code.split()[0] in ("mpitrain", *WORDS) else []
        if any(word.startswith("-") for word in words):
            yield words[words[0] == "mpitrain" :]


@every_page
def test_configuration_keys_that_a_page_names_are_there(page):
    names = {key.name for key in keys()}
    sections = {name.partition(".")[0] for name in names}
    for code in re.findall(r"`(\w+\.\w+)(?:=[^`]*)?`", page.read_text()):
        assert (
            code in names
            or code.partition(".")[0] not in sections
            or (HERE / "mpitrain" / code).exists()
        ), code


def test_our_side_of_the_page_for_users_of_other_systems_exists():
    """Each key accepts all of its values, and each option of `train` sets a key."""
    options = {
        name for option in commands.get_command(None, "train").params for name in option.opts
    }
    keys_named = 0
    for theirs, ours in re.findall(r"^\| (.*?) \| (.*) \|$", COMING_FROM.read_text(), re.M):
        codes = re.findall(r"`([^`]+)`", ours)
        settings = [
            code for code in codes if re.fullmatch(r"\w+\.\w+=\S+", code) and "FILE" not in code
        ]
        for code in codes:
            if found := re.fullmatch(r"(\w+\.\w+)=(\S+)", code):
                keys_named += 1
                assert found[1] in {key.name for key in keys()}, (theirs, code)
                if code in settings:  # The last one wins, and others of the row may be needed.
                    parse(with_settings({}, [*settings, code]))
            elif code.startswith("--"):
                assert code in options, (theirs, code)
    assert keys_named > 20
