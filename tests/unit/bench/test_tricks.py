"""The table of `mpitrain plan tricks`: its verdicts, its lines, and the keys that it sets."""

import pytest

from mpitrain.config import parse
from mpitrain.errors import ConfigError
from mpitrain.strict_json import parsed
from mpitrain.tools.bench.comparison.compare import KINDS
from mpitrain.tools.bench.comparison.tricks import (
    TABLE,
    TRICKS,
    TrickSide,
    Tried,
    as_row,
    checks,
    names_of,
    summary,
)
from mpitrain.tools.bench.results import write_json


def side(blocks, nbytes=1_000_000, formula=3000.0):
    memory = [dict.fromkeys(KINDS, nbytes // 5), dict.fromkeys(KINDS, nbytes // 10)]
    return TrickSide(blocks, memory, [nbytes // 5, nbytes // 10], [1000.0, 3000.0], formula)


def tried(on, off, **more):
    return Tried("recomputation", ["memory.recompute=unit"], False, "", on, off)._replace(**more)


@pytest.mark.parametrize(
    "blocks, speed, word",
    [
        ([0.5, 0.9, 0.8, 0.7, 0.9], "faster", "yes"),
        ([1.1, 1.2, 2.0, 1.1, 1.3], "slower", "no"),
        ([0.5, 0.5, 0.5, 0.5, 1.1], "~", "~"),
        ([1.0, 0.5, 0.5, 0.5, 0.5], "~", "~"),
        ([float("nan"), 0.5, 0.5, 0.5, 0.5], "~", "~"),
    ],
)
def test_a_trick_is_faster_or_slower_only_if_every_block_agrees(blocks, speed, word):
    found = tried(side(blocks), side([1.0] * 5))
    assert found.speed == speed and TABLE.line(found).split()[1] == word


def test_memory_is_compared_on_the_fullest_rank():
    small, large = side([1.0], 500_000), side([1.0], 1_000_000)
    for on, off, ratio, words in (
        (small, large, 0.5, "yes 0.50"),
        (large, small, 2.0, "no 2.00"),
        (large, large, 1.0, " same "),
    ):
        assert tried(on, off).smaller == ratio and words in TABLE.line(tried(on, off))


def test_a_line_ends_with_the_settings_or_says_that_they_are_set():
    found = tried(side([1.0]), side([1.0]))
    assert TABLE.line(found).endswith("  memory.recompute=unit")
    assert TABLE.line(found._replace(is_used=True)).endswith("  set already")
    assert TABLE.heading()[0].index("  set") == TABLE.line(found).index("  memory.recompute")


def test_counted_bytes_and_formulas_are_checked_on_both_sides():
    right, wrong = side([1.0]), side([1.0], formula=None)._replace(counted=[1, 2])
    off_by_one = right._replace(formula=3001.0)
    assert checks([tried(right, wrong), tried(right, off_by_one)]) == ((3, 4), (2, 3))
    lines = summary([tried(right, wrong), Tried("ZeRO 1", [], False, "one replica")])
    assert lines[-1] == "ZeRO 1: one replica" and "in 1 of 2 jobs" in lines[3]


def test_the_file_has_every_trick_with_its_reason_or_its_measurements(tmp_path):
    tricks = [tried(side([1.0]), side([2.0])), Tried("ZeRO 1", [], False, "one replica")]
    write_json(tmp_path / "rows.json", {}, [*map(as_row, tricks)])
    first, second = parsed((tmp_path / "rows.json").read_bytes())["rows"]
    assert (first["speed"], first["ratios"], first["off"]["blocks"]) == ("faster", [2.0], [2.0])
    assert second["reason"] == "one replica" and second["on"] is None


def test_settings_without_a_trick_are_values_of_existing_keys():
    known = parse({}).flat()
    assert all(key in known for trick in TRICKS.values() for key in trick.off)


def test_an_unknown_trick_is_refused_with_the_list():
    assert names_of(None) == [*TRICKS] and names_of("ZeRO 3, LoRA,LoRA") == ["ZeRO 3", "LoRA"]
    with pytest.raises(ConfigError) as refused:
        names_of("ZeRO 4")
    assert "recomputation" in refused.value.law and "'ZeRO 4'" in refused.value.law
