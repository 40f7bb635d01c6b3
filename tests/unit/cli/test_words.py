"""The texts of commands have a Korean each, with the same fields, and columns align."""

import ast
import re
import string
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import ConfigError, Sentence
from mpitrain.tools.words import korean, language_of, padded, said, text, to_fit, width

PACKAGE = Path(__file__).parents[3] / "mpitrain"
SAID = [
    path
    for room in ("tools", "cli", "collectives", "pipeline", "parallel", "run", "trace", "models")
    for path in (PACKAGE / room).rglob("*.py")
]
"""Files whose texts are translated."""


def fields(template):
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def constants():
    """The texts in the files, and the first argument of every call that translates or is translated."""
    every, translated = set(), set()
    for path in SAID:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                every.add(node.value.replace("{0}", "(n-1)/n"))  # as formulas of ZeRO are filled
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                is_text = node.func.id in ("text", "Sentence", "Wrong")
                if is_text and isinstance(node.args[0], ast.Constant):
                    translated.add(node.args[0].value)
    return "\n".join(every), translated


@pytest.mark.slow
def test_english_and_korean_have_the_same_texts():
    every, translated = constants()
    assert not translated - {*korean()}
    words = {
        word for key in korean() for word in re.findall("[A-Za-z]+", re.sub(r"\{.*?\}", "", key))
    }
    assert not [word for word in words if word not in every]


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
    explained = [re.sub(r"\([^)]*\)", "", each) for each in lessons]  # as 파라미터(매개변수)
    assert not [each for each in (*korean().values(), *explained) if other.search(each)]
    single = re.compile(r"\{[^}]*\}([은는을를과와](?![(])|가(?=[ ,.])|이[면어거])")
    assert not [each for each in korean().values() if single.search(each)]


PLANS = """schedule --schedule gpipe --stages 3 --micro-batches 3 --saved-mb 2
schedule --schedule async --stages 3 --micro-batches 3
schedule --whole-backward
schedule --stages 300
checkpoints --days 30 --ranks 64 --pause 2 --step 0.5
allreduce --algorithm star --ranks 3 --bytes 1M
allreduce --ranks 40 --algorithm halving-doubling --hosts 5
allreduce --ranks 512 --hosts 8
all-gather --ranks 5 --algorithm bruck
memory --pp 2 --set memory.recompute=unit --set run.on_spike=back"""
NAMES = re.compile(
    r"`.*?`|--[\w-]+(=\S+)?|[\w.]+[._=][\w.=]+|\d+\.?\d*e[+-]\d+|mpitrain launch.*|ceil|float32"
    r"|[GMk]?B\b|GFLOP|\b(train|gpipe|async|1f1b|star|bruck|ring|tree|shared|hierarchical|zero|naive"
    r"|halving-doubling|recursive-doubling|Daly|Young|mlp|gpt|cpu|all)\b"
)
"""Names, which are the same in each language."""


@pytest.mark.parametrize("command", PLANS.splitlines())
@pytest.mark.slow
def test_a_plan_in_korean_has_no_english(command):
    done = CliRunner().invoke(commands, ["plan", *command.split(), "--language", "ko"])
    assert done.exit_code == 0, done.output
    assert re.search("[가-힣]", done.output)
    assert not re.findall("[A-Za-z]{3,}", NAMES.sub("", done.output)), done.output


def test_a_row_of_a_printed_table_keeps_its_columns():
    rows = ["mode      workers   step ms samples/s", "ring            2     101.3     315.7"]
    heading, row = (said(each, "ko") for each in rows)
    assert row == rows[1] and [each for each in rows if said(each, "en") == each] == rows
    assert [width(heading[: at.end()]) for at in re.finditer("커|ms|/s", heading)] == [17, 27, 37]
    heading = said("recompute step time computing", "ko")
    assert [width(heading[: at.end()]) for at in re.finditer("시간|계산$", heading)] == [19, 29]
    lines = [said(f"{mode:10} sends (n-1) S", "ko") for mode in ("star", "gossip")]
    assert {line.index(":") for line in lines} == {13}
    waits = "rank 0 on a has waited for rank 1 for 3 s"
    circle = said(f"Ranks wait for each other in a circle: {waits}; {waits}.", "ko")
    assert circle.count("a의 랭크 0: 랭크 1을 3초") == 2
    assert said("  from 9 batches of 8 rows, each also in batches of 4", "ko").startswith("  8행")


def test_an_unknown_language_is_refused():
    with pytest.raises(ConfigError, match="en or ko"):
        text("rank", "fr")


@pytest.mark.parametrize(
    ("locale", "language"),
    [("ko_KR.UTF-8", "ko"), ("ko", "ko"), ("en_US.UTF-8", "en"), ("C", "en"), ("", "en")],
)
def test_the_locale_chooses_the_language(locale, language):
    assert language_of(locale) == language


@pytest.mark.parametrize(
    ("law", "n", "words"),
    [
        ("{n} ranks, {n} micro-batches", 1, "1 rank, 1 micro-batch"),
        ("worker 0: {n} other updates", 1, "worker 0: 1 other update"),
        ("{n} ranks", 11, "11 ranks"),
        ("rank {n} updates at 0.{n} steps", 1, "rank 1 updates at 0.1 steps"),
    ],
)
def test_a_noun_behind_one_is_singular(law, n, words):
    assert text(law, "en", n=n) == str(Sentence(law, n=n)) == words


def test_a_line_too_wide_for_a_terminal_is_wrapped_below_its_second_cell():
    line = "    2 ranks  0.5  true   bytes of the ring 32"
    assert to_fit(line, 0) == to_fit(line, len(line)) == [line]
    assert to_fit(line, 40) == ["    2 ranks  0.5  true   bytes of the", 13 * " " + "ring 32"]
    assert to_fit("  published in: a b", 17) == ["  published in: a", "    b"]


def test_hangul_takes_two_columns_and_padded_lines_align():
    assert width("랭크 0") == 6
    assert width("rank 0") == 6
    assert width("é") == width("e\u0301") == 1
    assert {width(padded(each, 12)) for each in ("랭크", "rank", "랭크 0:")} == {12}
