"""`plan memory` counts what a step of the same job leases, unit by unit."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.terminal.progress import Progress
from mpitrain.errors import ConfigError
from mpitrain.run.build import alone, build
from mpitrain.run.count.step import Counter
from mpitrain.tools.plan.memory import count, ranks_of, table
from mpitrain.tools.plan.unit_counts import keeps
from mpitrain.transport.threads import run_ranks
from tests.training import MLP, TINY, configured


def measured(transport, config):
    trainer, source, _ = build(transport, config)
    for index in range(2):
        trainer.step(index, *trainer.replica.batch(source, index))
    return trainer.grid.coords.pp, trainer.pipe.peak_bytes, trainer.parameter_count


@pytest.mark.parametrize(
    "settings", [TINY, MLP, [*TINY, "layout.tp=2", "layout.dp=2"], [*TINY, "layout.pp=2"]]
)
def test_the_peak_of_a_stage_is_that_of_its_ranks(settings):
    config = configured(*settings)
    found = count(config)
    for pp, peak, parameters in run_ranks(ranks_of(config), measured, config):
        assert found.stages[pp].step.peak == peak and found.parameters == parameters


SLOW = "attention multiplies on CUDA cores, not tensor cores: heads have"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["precision.compute=bfloat16"], f"{SLOW} 8 channels"),
        (["precision.compute=float16", "model.width=288"], f"{SLOW} 144 channels"),
        (["precision.compute=bfloat16", "model.width=32"], ""),
        (["model.width=288"], ""),
        (["precision.compute=bfloat16", "device.kind=cpu"], ""),
        ([*MLP, "precision.compute=bfloat16"], ""),
    ],
)
def test_plan_and_run_say_whether_16_bit_heads_fall_to_cuda_cores(settings, said, capsys):
    found = count(configured(*TINY, "device.kind=cuda-sim", "model.layers=1", *settings))
    record = {"parameters": 1, "ranks": 1, "event": "start", "step": 0}
    Progress().on_begin(found.config, Path("run"), record)
    for lines in ([*table(found)], capsys.readouterr().out.splitlines()):
        second = lines[1] if SLOW in "".join(lines) else ""
        assert second.startswith(said) and bool(second) == bool(said)


DEEP = [*TINY, "model.layers=4"]
FROZEN = 'model.freeze=["embedding*", "blocks.0*", "blocks.1.attention*"]'


@pytest.mark.parametrize(
    "settings",
    [
        TINY,
        MLP,
        [*TINY, "memory.recompute=unit"],
        [*DEEP, "memory.recompute=2"],
        [*DEEP, "memory.recompute=3", "memory.logit_chunks=3"],
        [*DEEP, FROZEN],
        [*DEEP, FROZEN, "memory.recompute=2", "memory.logit_chunks=3"],
        [*TINY, 'model.freeze=["embedding*", "blocks*"]'],
    ],
)
def test_the_units_of_one_stage_add_up_to_its_step(settings):
    (stage,) = count(configured(*settings)).stages
    assert max(unit.peak for unit in stage.units) == stage.step.peak
    assert sum(unit.flops for unit in stage.units) == stage.step.flops
    assert all(unit.pending >= 0 for unit in stage.units)


def test_a_frozen_parameter_has_no_gradient_and_no_state():
    config = configured(*TINY, "model.freeze=['embedding.*', '*.weight']")

    def stored(transport):
        storage = build(transport, config).trainer.storage
        return storage.length, storage.frozen.length

    ((trained, frozen),) = run_ranks(1, stored)
    assert frozen > trained and count(config).state == 16 * trained + 4 * frozen


def test_units_without_a_backward_save_nothing_and_are_counted():
    settings = [*DEEP, FROZEN, "memory.recompute=2", "layout.pp=4"]
    stages = count(configured(*settings)).stages
    frozen = [unit for stage in stages for unit in stage.units][1:4]
    assert all(unit.saved == unit.pending == 0 < unit.flops for unit in frozen)


def test_each_unit_keeps_its_input_if_a_recomputed_segment_begins_with_it():
    job = alone(configured(*DEEP, "memory.recompute=2"), ["a"])
    kept = [has_input for has_input, _ in keeps(Counter(job))]
    assert kept[:-1] == [True] * (len(kept) - 1)


def test_a_segment_of_units_saves_one_input():
    (stage,) = count(configured(*DEEP, "memory.recompute=2")).stages
    (plain,) = count(configured(*DEEP)).stages
    blocks = slice(1, -1)
    assert sum(unit.saved for unit in stage.units[blocks]) == 4 * plain.units[0].saved


def test_micro_batches_of_a_pipeline_are_live_together():
    (first, last) = count(configured(*TINY, "layout.pp=2", "pipeline.schedule=gpipe")).stages
    assert first.step.peak > max(unit.peak for unit in first.units)
    assert last.step.flops > 0 == last.step.recomputed


def test_the_table_has_a_line_for_each_unit_and_each_step():
    found = count(configured(*TINY, "layout.pp=2"))
    lines = [*table(found)]
    units = [unit.name for stage in found.stages for unit in stage.units]
    assert [
        line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in units
    ] == units
    assert sum("step" in line for line in lines) == 2


@pytest.mark.parametrize("options", [["--set", "model.heads=3"], ["--tp", "3"], ["nowhere.toml"]])
def test_a_wrong_configuration_is_refused(options):
    ended = CliRunner().invoke(commands, ["plan", "memory", *options])
    assert isinstance(ended.exception, ConfigError) and ended.exception.exit_code == 2
