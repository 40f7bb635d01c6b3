"""`bench train --memory`: one row for each key of [memory], all with the losses of the first."""

import pytest
from click.testing import CliRunner

from mpitrain.cli.bench.train import TrainingJob, command, measure_memory
from mpitrain.errors import ConfigError
from mpitrain.tools.bench.training.shapes import WAYS
from mpitrain.transport.threads import run_ranks

TINY = [
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=4",
    "device.kind=cpu",
]


def test_rows_name_their_key_and_what_it_saves(capsys):
    run_ranks(2, measure_memory, TrainingJob([*TINY, "layout.tp=2"], 2, 1))
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(WAYS) and all(
        row.startswith(name) for row, name in zip(rows, WAYS, strict=True)
    )
    saved = {name: float(row.split()[-2]) for name, row in zip(WAYS, rows, strict=True)}
    losses = {row.split()[-1] for row in rows}
    assert len(losses) == 1 and saved["none"] == saved["release"] == 0
    assert saved["unit"] > 40 and saved["2"] > 20 and saved["attention"] >= 0


def test_modes_without_common_steps_are_refused_before_the_build():
    work = TrainingJob([*TINY, "layout.pp=2", "pipeline.schedule=async"], 1, 1)

    def refused(transport):
        with pytest.raises(ConfigError):
            measure_memory(transport, work)
        return True

    assert all(run_ranks(2, refused))


MLP = ["data.source=digits", "model.kind=mlp", "model.layers=3", "model.width=16", "batch.size=8"]


@pytest.mark.parametrize(
    "job, refused",
    [
        ([*MLP, "optimizer.warmup=0"], {"attention", "4 chunks", "unit, 4 chunks"}),
        ([*TINY, "replication.zero=3"], {"2"}),
        ([*TINY, "replication.mode=master"], {"4 chunks", "unit, 4 chunks"}),
    ],
)
def test_a_key_that_the_job_refuses_is_a_note(capsys, job, refused):
    run_ranks(2, measure_memory, TrainingJob(job, 1, 1))
    _, _, *rows = capsys.readouterr().out.splitlines()
    notes = {row.split(":")[0] for row in rows if ": not measured. " in row}
    measured = [name for name in WAYS if name not in refused]
    assert notes == refused and len(rows) == len(WAYS)
    assert all(row.startswith(name) for row, name in zip(rows, measured, strict=False))


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_the_bound_of_a_shape_is_a_finite_number_of_seconds(seconds):
    ended = CliRunner().invoke(command, ["--row-seconds", seconds, "--blocks", "0"])
    assert ended.exit_code == 2 and "--row-seconds" in ended.output


def test_row_seconds_without_shapes_is_refused():
    ended = CliRunner().invoke(command, ["--row-seconds", "3"])
    assert ended.exit_code == 2 and "Add --shapes" in ended.output
