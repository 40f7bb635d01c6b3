"""The texts of the textbook have a Korean each, with the same fields, and columns align."""

import ast
import re
import string
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.tools.textbook.words import korean, language_of, padded, text, width

PACKAGE = Path(__file__).parents[3] / "mpitrain"
SAID = (
    *(PACKAGE / "tools/textbook").rglob("*.py"),
    *(PACKAGE / "cli").rglob("*.py"),
    *(PACKAGE / "collectives/plans").glob("*.py"),
    *(PACKAGE / "pipeline").glob("*.py"),
    *(PACKAGE / "parallel").glob("mode*.py"),
)
"""Files whose texts are translated."""


def fields(template):
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def constants():
    """Every text in the files, and the first argument of every call that translates or is translated."""
    every, translated = set(), set()
    for path in SAID:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                every.add(node.value.replace("{0}", "(n-1)/n"))  # as formulas of ZeRO are filled
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                is_text = node.func.id in ("text", "Sentence", "Wrong")
                if is_text and isinstance(node.args[0], ast.Constant):
                    translated.add(node.args[0].value)
    return every, translated


def test_english_and_korean_have_the_same_texts():
    every, translated = constants()
    assert not translated - {*korean()}
    assert not {*korean()} - every


def test_a_translation_is_korean_and_has_the_fields_of_its_text():
    for english, translation in korean().items():
        assert fields(english) == fields(translation), english
        assert translation.strip(), english


def test_fields_are_replaced_in_both_languages():
    assert text("rank", "en") == "rank"
    assert text("rank", "ko") == "랭크"


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "랭크 0은"), (2, "랭크 2는"), (11, "랭크 11은"), (24, "랭크 24는")]
)
def test_a_particle_fits_the_number_before_it(rank, words):
    assert text("rank {rank} has returned", "ko", rank=rank) == f"{words} 반환했습니다"


def test_korean_has_one_style_and_one_word_for_a_thing():
    other = re.compile("매개변수|기울기|최적화기|집단 통신|유휴|(?<![니시])다(?=[.:\n]|$)")
    lessons = [path.read_text() for path in (PACKAGE.parent / "jobs/lessons").glob("*.ko.ipynb")]
    assert not [each for each in (*korean().values(), *lessons) if other.search(each)]
    single = re.compile(r"\{[^}]*\}([은는을를과와](?![(])|가(?=[ ,.])|이[면어거])")
    assert not [each for each in korean().values() if single.search(each)]


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
