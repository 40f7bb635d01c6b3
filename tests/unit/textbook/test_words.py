"""The texts of the textbook have a Korean each, with the same fields, and columns align."""

import ast
import string
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.tools.textbook.words import WORDS, language_of, padded, text, width

ROOM = Path(__file__).parents[3] / "mpitrain" / "tools" / "textbook"
CLI = ROOM.parent / "cli"


def fields(template):
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def written_texts():
    """The first argument of every call of `text` in the textbook and in the commands."""
    for path in [*ROOM.rglob("*.py"), *CLI.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "text"
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and "textbook" in path.read_text(encoding="utf-8")
            ):
                yield node.args[0].value


def test_every_text_that_the_code_writes_has_a_korean_text():
    assert not sorted({each for each in written_texts() if each not in WORDS})


def test_a_translation_is_korean_and_has_the_fields_of_its_text():
    for english, korean in WORDS.items():
        assert fields(english) == fields(korean), english
        assert korean.strip(), english


def test_fields_are_replaced_in_both_languages():
    assert text("rank", "en") == "rank"
    assert text("rank", "ko") == "랭크"


def test_an_unknown_language_is_refused():
    with pytest.raises(ConfigError, match="en or ko"):
        text("rank", "fr")


@pytest.mark.parametrize(
    ("locale", "language"),
    [("ko_KR.UTF-8", "ko"), ("ko", "ko"), ("en_US.UTF-8", "en"), ("C", "en"), ("", "en")],
)
def test_the_locale_chooses_the_language(locale, language):
    assert language_of(locale) == language


def test_hangul_takes_two_columns_and_padded_lines_align():
    assert width("랭크 0") == 6
    assert width("rank 0") == 6
    assert width("é") == width("e\u0301") == 1
    assert {width(padded(each, 12)) for each in ("랭크", "rank", "랭크 0:")} == {12}
