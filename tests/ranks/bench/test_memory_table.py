"""`bench train --memory`: one row for each key of [memory], all with the losses of the first."""

import pytest

from mpitrain.bench.training.memory import WAYS
from mpitrain.cli.bench.train import _measure_memory
from mpitrain.errors import ConfigError
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
    run_ranks(2, _measure_memory, [*TINY, "layout.tp=2"], 2, 1)
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(WAYS) and all(
        row.startswith(name) for row, name in zip(rows, WAYS, strict=True)
    )
    saved = {name: float(row.split()[-2]) for name, row in zip(WAYS, rows, strict=True)}
    losses = {row.split()[-1] for row in rows}
    assert len(losses) == 1 and saved["none"] == saved["release"] == 0
    assert saved["unit"] > 40 and saved["2"] > 20 and saved["attention"] >= 0


def test_modes_without_common_steps_are_refused_before_the_build():
    def refused(transport):
        with pytest.raises(ConfigError):
            _measure_memory(transport, [*TINY, "layout.pp=2", "pipeline.schedule=async"], 1, 1)
        return True

    assert all(run_ranks(2, refused))
