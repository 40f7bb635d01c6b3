"""A disk that fills beside commands that measure: one message with a way out, no half-written file, and what was measured is
printed.
"""

import errno
import os
import re
import stat

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.bench.collectives import measure_and_fit, measure_collective
from mpitrain.cli.bench.device import print_rows
from mpitrain.cli.compare import TrainingJob, measure_modes, measure_sides
from mpitrain.collectives.selection.tuning import read_tuning
from mpitrain.errors import ConfigError
from mpitrain.files import check_writable
from mpitrain.tools.text_table import TextColumn, TextTable
from mpitrain.transport.threads import run_ranks

SMALL = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=4",
    "device.kind=cpu",
]
SWEEP = {
    "algorithm": "ring",
    "min_bytes": 64,
    "max_bytes": 256,
    "factor": 4,
    "dtype": "float32",
    "device": "cpu",
    "buffers": "plain",
    "iterations": 2,
    "warmup": 1,
    "sweeps": 1,
    "tuning": None,
    "csv_file": None,
    "wide": False,
    "fail_below": None,
    "against_file": None,
    "tolerance": 1.0,
}


@pytest.fixture
def fills(monkeypatch):
    """A disk that has no room left after so many files; other work spoils no rows."""
    monkeypatch.setattr("mpitrain.tools.bench.collectives.fit.is_spoilt", lambda row: False)

    def after(count):
        fsync, synced = os.fsync, []

        def full(descriptor):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                synced.append(descriptor)
                if len(synced) > count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)

    return after


MEASURED = {
    "sweep": (
        lambda transport, file: measure_collective(
            transport, "allreduce", {**SWEEP, "json_file": file, "plot_file": None}
        ),
        2,
        "wrong elements 0",
    ),
    "fit": (
        lambda transport, file: measure_and_fit(
            transport, {**SWEEP, "out": file, "max_bytes": 128, "json_file": None, "sweeps": 1}
        ),
        2,
        "us of a message",
    ),
    "compare": (
        lambda transport, file: measure_modes(
            transport,
            TrainingJob([*SMALL, "run.eval_rows=8"], 1, 2, outputs={"json_file": file}),
            ["ring", "star"],
        ),
        2,
        "sends (n-1) S, the root",
    ),
    "train": (
        lambda transport, file: measure_sides(
            transport,
            TrainingJob([*SMALL, "run.steps=7"], 1, 2, outputs={"json_file": file}),
            ["job"],
            [],
        ),
        1,
        "blocks of 2 steps",
    ),
}


@pytest.mark.parametrize("what", MEASURED)
def test_what_was_measured_is_printed_although_it_cannot_be_written(what, fills, tmp_path, capsys):
    measure, ranks, printed = MEASURED[what]
    file = tmp_path / "rows.json"
    fills(1)  # the check before the measurement

    def main(transport):
        with pytest.raises(ConfigError) as raised:
            measure(transport, file)
        return raised.value.agreed, str(raised.value)

    for is_agreed, said in run_ranks(ranks, main):
        assert is_agreed and f"{file}" in said
        assert "Make room" in said
    assert printed in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_fit_that_does_not_reach_its_end_keeps_the_sweeps_before(fills, tmp_path):
    file = tmp_path / "tuning.json"
    options = {**SWEEP, "out": file, "max_bytes": 128, "json_file": None, "sweeps": 2}
    fills(2)  # the check, and the first sweep

    def main(transport):
        with pytest.raises(ConfigError, match="Make room"):
            measure_and_fit(transport, options)
        return True

    assert all(run_ranks(2, main)) and set(read_tuning(file).levels["host"].plans) == {2}


def test_a_chart_is_printed_although_it_cannot_be_written(fills, tmp_path):
    pytest.importorskip("matplotlib")
    fills(2)
    shown = CliRunner().invoke(
        commands,
        ["plan", "schedule", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")],
    )
    assert "bubble" in shown.output and isinstance(shown.exception, ConfigError)
    assert "No space left" in str(shown.exception) and not list(tmp_path.iterdir())


def test_a_report_is_printed_although_it_cannot_be_written(fills, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    fills(0)
    shown = CliRunner().invoke(commands, ["report", str(tmp_path)])
    assert "the last line of its metrics is of step 3" in shown.output
    if isinstance(shown.exception, ConfigError):  # with Bokeh there is something to write
        assert "No space left" in str(shown.exception) and not list((tmp_path / "report").iterdir())


def test_products_are_printed_although_they_cannot_be_written(fills, tmp_path, capsys):
    fills(1)
    row = type("Row", (), {"wrong": 0, "_asdict": lambda self: {"a": 1.0}})()
    table = TextTable([TextColumn("rows", "<", lambda row: "a row")])
    with pytest.raises(ConfigError, match="No space left"):
        print_rows([row], table, {"json_file": tmp_path / "a.json"}, "a GPU")
    assert capsys.readouterr().out == "# a GPU\nrows\na row\n" and not list(tmp_path.iterdir())


def test_a_full_disk_is_seen_before_anything_is_measured(fills, tmp_path):
    fills(0)
    with pytest.raises(ConfigError, match="No space left"):
        check_writable(tmp_path / "rows.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, said, way_out",
    [
        ("folder", "it is a folder", "Name a file"),
        ("pipe", "a pipe", "Name a file"),
        ("n" * 300, "File name too long", "Choose a shorter name"),
        ("taken", "a directory named taken.partial is in the way", "Remove .*taken.partial"),
        ("file/rows", "Not a directory", "Remove .*/file"),
        ("none/rows", "No such file", "that exists"),
    ],
)
def test_what_is_in_the_way_is_said_before_anything_is_measured(name, said, way_out, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken.partial").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=said) as raised:
        check_writable(tmp_path / name)
    assert re.search(way_out, raised.value.way_out)


@pytest.mark.parametrize(
    "words",
    [
        ["report", "LONG"],
        ["plot", "LONG"],
        ["eval", "LONG"],
        ["train", "--out", "LONG"],
        ["plan", "schedule", "--json", "LONG"],
    ],
)
def test_a_path_of_300_characters_is_one_message_and_exit_2(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpitrain.cli.train.be_courtesy", lambda: None)
    from mpitrain.cli import main

    with pytest.raises(SystemExit) as end:
        main([word.replace("LONG", "n" * 300) for word in words])
    said = capfd.readouterr().err
    assert end.value.code == 2 and said.startswith("ConfigError: ") and said.count("\n") == 2, said
