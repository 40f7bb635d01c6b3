"""`mpitrain runs metrics`: the series of runs as a table and as CSV, which pandas and csv read back."""

import csv
import io
import json
import math

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import ConfigError

LINES = [
    {"event": "start", "step": 0, "parameters": 7, "wall_s": 0.1},
    {"step": 1, "loss": 5.5, "lr": 1e-05, "grad_norm": None, "nonfinite": True, "wall_s": 1.0},
    {"step": 10, "loss": 4.25, "lr": 0.1, "tokens_seen": 12345678901, "wall_s": 2.5},
    {"step": 10, "val_loss": 4.5, "val_accuracy": 0.25, "eval_s": 0.5, "wall_s": 3.0},
    {"event": "end", "step": 10, "replicas_equal": True, "wall_s": 3.1},
]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    for name, lines in (("a", LINES), ("b,c", LINES[:2])):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 11, "lo')
    monkeypatch.chdir(tmp_path)


def shown(*words):
    done = CliRunner().invoke(commands, ["metrics", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_csv_has_every_series_of_every_run_by_step(runs):
    rows = [*csv.DictReader(io.StringIO(shown("a", "b,c", "--csv")))]
    assert [(row["run"], row["step"]) for row in rows] == [("a", "1"), ("a", "10"), ("b,c", "1")]
    for row, lines in zip(rows, (LINES[1:2], LINES[3:1:-1], LINES[1:2]), strict=True):
        joined = {key: value for line in lines for key, value in line.items()}
        for name, text in row.items():
            if name == "run":
                continue
            value = joined.get(name)
            if name not in joined:
                assert text == "", name
            elif value is None:
                assert math.isnan(float(text))
            else:
                assert float(text) == value, name
    assert "parameters" not in rows[0] and rows[1]["tokens_seen"] == "12345678901"


def test_the_table_has_a_line_for_each_logged_step(runs):
    one = [line.split() for line in shown("a").splitlines()]
    assert one == [
        ["step", "loss", "val_loss", "val_accuracy", "lr", "grad_norm", "wall_s"],
        ["1", "5.5000", "-", "-", "1.00e-05", "nan", "1.0"],
        ["10", "4.2500", "4.5000", "25.0%", "1.00e-01", "-", "2.5"],
    ]
    two = [line.split() for line in shown("a", "b,c").splitlines()]
    assert [line[0] for line in two] == ["run", "a", "a", "b,c"]


@pytest.mark.parametrize("flag", [[], ["--csv"]])
def test_a_name_with_control_characters_is_escaped(runs, tmp_path, flag):
    hostile = {"step": 1, "loss": 1.0, "\x1b[2J": 3, "step_s": 10**400, "wall_s": "\x1b[0m"}
    (tmp_path / "a/metrics.jsonl").write_text(json.dumps(hostile) + "\n")
    assert "\x1b" not in shown("a", *flag) and "10000000" not in shown("a", *flag)


def test_a_directory_without_a_run_is_refused_and_an_empty_run_has_no_rows(runs, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        shown("a", "nowhere")
    (tmp_path / "a/metrics.jsonl").write_text("")
    assert shown("a", "--csv") == "run,step\n"
    assert len(shown("a").splitlines()) == 1


@pytest.mark.parametrize("flag", [[], ["--csv"]])
def test_a_series_named_run_changes_no_name_and_a_large_number_stays_short(runs, tmp_path, flag):
    """The file of another person may have any keys."""
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 1, "run": 4, "loss": 1.0, "lr": 1e299}\n')
    text = shown("a", "b,c", *flag)
    assert text.splitlines()[1].split("," if flag else None)[:1] == ["a"] and len(text) < 400
