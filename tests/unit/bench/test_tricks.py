"""The tricks of `mpitrain compare`: their checks, their lines below the table, and the keys that they set."""

import pytest

from mpitrain.config import parse
from mpitrain.errors import ConfigError
from mpitrain.strict_json import parsed
from mpitrain.tools.bench.comparison.compare import KINDS
from mpitrain.tools.bench.comparison.tricks import TRICKS, WITHOUT, checks, names_of, summary
from mpitrain.tools.bench.results import write_json
from mpitrain.tools.bench.turns import Row, compared


def row(name, formula=3000.0, **more):
    memory = [dict.fromkeys(KINDS, 200_000), dict.fromkeys(KINDS, 100_000)]
    own = Row(
        name,
        of="recomputation",
        settings=["memory.recompute=unit"],
        blocks=[1.0],
        step_s=1.0,
        memory=memory,
        counted=[200_000, 100_000],
        sent_bytes=[1000.0, 3000.0],
        formula_bytes=formula,
    )
    return own._replace(**more)


ABSENT = Row("ZeRO 1", "ZeRO 1", reason="one replica")


def test_counted_bytes_and_formulas_are_checked_on_both_sides():
    right, wrong = row(WITHOUT), row(WITHOUT, formula=None, counted=[1, 2])
    off_by_one = compared(row("recomputation", formula=3001.0), right)
    having = compared(row("recomputation"), right)
    assert checks([wrong, having, right, off_by_one]) == ((3, 4), (2, 3))
    lines = summary([wrong, having, ABSENT])
    assert lines[-1] == "ZeRO 1: one replica" and "in 1 of 2 jobs" in lines[3]


def test_the_file_has_every_trick_with_its_reason_or_its_measurements(tmp_path):
    off = row(WITHOUT, blocks=[2.0])
    rows = [off, compared(row("recomputation"), off), ABSENT]
    write_json(tmp_path / "rows.json", {}, rows)
    first, second, third = parsed((tmp_path / "rows.json").read_bytes())["rows"]
    assert (second["speed"], second["ratios"], first["blocks"]) == ("faster", [0.5], [2.0])
    assert third["reason"] == "one replica" and third["blocks"] == []


def test_settings_without_a_trick_are_values_of_existing_keys():
    known = parse({}).flat()
    assert all(key in known for trick in TRICKS.values() for key in trick.off)


def test_an_unknown_trick_is_refused_with_the_list():
    assert names_of(None) == [*TRICKS] and names_of("ZeRO 3, LoRA,LoRA") == ["ZeRO 3", "LoRA"]
    with pytest.raises(ConfigError) as refused:
        names_of("ZeRO 4")
    assert "recomputation" in refused.value.law and "'ZeRO 4'" in refused.value.law
