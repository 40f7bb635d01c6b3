"""The table of `mpitrain compare`: which modes there are, what their formulas say, what is refused, what is printed."""

import json
import math
import re

import pytest

from mpitrain.bench.collectives.table import write_json
from mpitrain.bench.training.compare import (
    COLUMNS,
    Row,
    footer,
    formula_of,
    heading,
    jobs,
    line,
    plot,
    settings_by_mode,
    usual,
)
from mpitrain.collectives.selection.table import choices
from mpitrain.errors import ConfigError
from mpitrain.parallel.modes import MODES
from mpitrain.parallel.traffic import LETTERS
from tests.messages import bench as says


def row(mode, **changes):
    curve = [(0.5, 2.0), (1.0, 1.7)]
    base = Row(
        mode,
        2,
        0.25,
        16.0,
        0.05,
        [1000.0, 3000.0],
        3000,
        [4_000_000, 2_000_000],
        0,
        0,
        1.5,
        curve,
        2.0,
    )
    return base._replace(**changes)


def test_every_all_reduce_and_every_mode_of_the_package_has_a_word():
    found = {
        (config.replication.mode, config.replication.zero)
        for config in jobs(list(settings_by_mode()), [], "aabb").values()
    }
    rows = {(name, stage) for name, mode in MODES.items() for stage in (0, *mode.stages)}
    assert found == rows and {*choices("allreduce"), *usual()} <= set(settings_by_mode())


def test_a_mode_is_stronger_than_a_setting_of_all_and_nothing_else_differs():
    found = jobs(["star", "zero1"], ["replication.algorithm=tree", "batch.size=6"], "aa")
    star, zero = (config.flat() for config in found.values())
    assert {key: (star[key], zero[key]) for key in star if star[key] != zero[key]} == {
        "replication.algorithm": ("star", "ring"),
        "replication.zero": (0, 1),
    }
    assert star["batch.size"] == 6


@pytest.mark.parametrize(
    "words, settings, hosts, said",
    [
        (["ring", "rong"], [], "aa", "--modes names 'rong'"),
        (["zero1-host"], [], "aba", "there are 2 on a, 1 on b"),
        (["ring"], [], "a", "one rank sends nothing"),
        (["ring"], ["layout.dp=4"], "aa", "needs 4 ranks, but 2 were started"),
        (["ring"], ["batch.size=2"], "aaa", "but batch.size is 2"),
        (["ring"], ["run.steps=1"], "aa", "run.steps is 1"),
        (["of-a-plugin"], ["run.plugins=['no.py']"], "aa", "The plugin no.py cannot be read"),
        (
            ["ring", "local", "zero1"],
            ["precision.compute=float16"],
            "aa",
            "Or compare what works: --modes ring,zero1",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(words, settings, hosts, said):
    with pytest.raises(ConfigError) as refused:
        jobs(words, settings, hosts)
    assert said in str(refused.value) and refused.value.way_out


def test_lines_have_a_cell_per_column_and_a_dash_where_none_applies():
    cells = line(row("star")).split()
    assert len(cells) == len(COLUMNS) and len(line(row("star"))) == len(heading())
    assert cells == ["star", "2", "250.0", "16.0", "50.0", "3,000", "3,000", "4.0", "-", "1.5000"]
    assert line(row("auto", formula_bytes=None, staleness=3)).split()[6:9] == ["-", "4.0", "3"]
    assert footer([row("auto", formula_bytes=None)]) == []


def test_the_formulas_below_the_table_explain_their_letters():
    assert footer([row("star"), row("auto", formula_bytes=None)]) == [
        says.STAR_SENDS_ROOT,
        says.BYTES_ALL_GRADIENTS_PADDING,
    ]
    for word in settings_by_mode():
        if not (formula := formula_of(word)):
            continue
        said = footer([row(word)])[-1]
        letters = set(
            re.findall(r"n'|\b(?:lg|[a-zA-Z])\b(?!')", re.sub(r"\b[aA] |'s\b", "", formula.words))
        )
        assert all(f"{letter} {LETTERS[letter]}" in said for letter in letters), (word, letters)


@pytest.mark.slow
def test_a_nonfinite_loss_is_null_in_the_file_and_absent_in_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row("star", val_loss=math.nan, curve=[(0.5, 2.0), (1.0, None)]),
        row("ring", curve=[(0.5, 2.0), (1.0, 1.5)]),
    ]
    write_json(tmp_path / "rows.json", {"ranks": 2}, rows)
    star, ring = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (
        star["val_loss"] is None
        and star["curve"] == [[0.5, 2.0], [1.0, None]]
        and ring["val_loss"] == 1.5
    )
    plot(rows, "a job", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
