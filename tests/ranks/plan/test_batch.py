"""`mpitrain plan batch` on ranks: the answer fits and one more row does not; the noise scale is right."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.job_options import configured
from mpitrain.cli.plan.jobs import plan_batch as plan
from mpitrain.config import with_settings
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, normal
from mpitrain.machine.backend import HostMemory
from mpitrain.run.build import build
from mpitrain.run.choices import parse
from mpitrain.run.job import agree_on
from mpitrain.run.trainer import Trainer
from mpitrain.tools.plan import batch, steps
from mpitrain.tools.plan import memory as plan_memory
from mpitrain.tools.plan.batch import largest_multiple
from mpitrain.tools.plan.steps import Steps
from mpitrain.transport.threads import run_ranks
from tests.training import MLP

TINY = [
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=8",
    "device.kind=cpu",
]
JOBS = [
    (1, TINY),
    (1, [*TINY, "memory.recompute=unit"]),
    (1, [*TINY, "batch.micro_batches=3", "memory.logit_chunks=2"]),
    (2, TINY),
    (3, [*TINY, "replication.zero=3"]),
    (2, [*TINY, "layout.tp=2", "layout.sequence_parallel=true"]),
    (2, [*TINY, "layout.pp=2", "pipeline.schedule=gpipe", "batch.micro_batches=2"]),
    (2, [*MLP, "device.kind=cpu", "replication.zero=1"]),
]


def parsed(*settings):
    return parse(with_settings({}, [*settings]))


def search_in(transport, settings, most=64, seconds=0.5):
    return batch.search(transport, agree_on(transport, lambda: parsed(*settings)), most, seconds)


def stepped(transport, config):
    trainer, source, _ = build(transport, config)
    trainer.step(0, *trainer.replica.batch(source, 0))
    return trainer.arena.peak, trainer.job


@pytest.mark.counted
@pytest.mark.parametrize("ranks, settings", JOBS)
def test_the_answer_runs_and_one_unit_more_does_not(ranks, settings, monkeypatch):
    # The noise and the times have tests of their own.
    for module, name, least in ((steps, "MOST", 2), (batch, "PARTS", 2), (steps, "BLOCKS", 1)):
        monkeypatch.setattr(module, name, least)
    monkeypatch.setattr(steps, "TURN", 1)
    measured = run_ranks(ranks, stepped, parsed(*settings))
    axes, count = measured[0][1].axes, measured[0][1].plan.micro_batches

    def config(rows, *more):
        size = [f"batch.micro_batches={count}", f"batch.size={rows * axes.dp * count}"]
        return parsed(*settings, *size, *more)

    state = ranks * plan_memory.count(config(8, f"layout.dp={axes.dp}")).state
    peaks = [peak for peak, _ in run_ranks(ranks, stepped, config(8))]
    limit = state + 1.05 * sum(peaks)
    settings = [*settings, f"memory.limit_gb={limit / 1e9!r}"]
    every = run_ranks(ranks, search_in, settings, 24, 20)
    found = every[0]
    assert all(other.fit == found.fit and other.present == found.present for other in every)
    unit, rows = found.fit.unit, found.fit.rows
    assert 8 <= rows < 24 and rows % unit == 0 and not found.fit.is_most
    assert found.timed[-1].rows == rows
    peaks = [peak for peak, _ in run_ranks(ranks, stepped, config(rows))]
    assert state + sum(peaks) <= limit
    with pytest.raises(ConfigError) as refused:
        run_ranks(ranks, stepped, config(rows + unit))
    assert refused.value.agreed and "memory.limit_gb" in refused.value.law
    free = config(rows + unit)
    free = free.model_copy(update={"memory": free.memory.model_copy(update={"limit_gb": 0.0})})
    peaks = [peak for peak, _ in run_ranks(ranks, stepped, free)]
    assert state + sum(peaks) > limit
    # The keys that it advises are a configuration that runs under the limit.
    keys = found.present.keys.replace("--set ", "").split()
    (_, resolved), *_ = run_ranks(ranks, stepped, parsed(*settings, *keys))
    size, count = resolved.config.batch.size, resolved.plan.micro_batches
    assert size == parsed(*settings).batch.size and count == found.present.micro_batches


def test_a_job_whose_smallest_micro_batch_does_not_fit_is_refused():
    state = 2 * plan_memory.count(parsed(*TINY, "layout.dp=2")).state
    with pytest.raises(ConfigError) as refused:
        run_ranks(2, search_in, [*TINY, f"memory.limit_gb={(state + 1000) / 1e9!r}"])
    assert refused.value.agreed and refused.value.exit_code == 2
    assert "activations of 1 row(s)" in refused.value.law


def test_out_of_memory_on_one_rank_is_the_answer_of_all(monkeypatch):
    """One of three ranks can allocate less than counting allows; all end with fewer rows."""
    monkeypatch.setattr(steps, "MOST", 2)
    (before, *_) = run_ranks(3, search_in, TINY, 40, 0.01)
    count, real = before.fit.counted // 3, batch.can_allocate

    class Small(HostMemory):
        def allocate(self, nbytes):
            if nbytes > count:
                raise MemoryError
            return super().allocate(nbytes)

    def can_allocate(transport, device, nbytes):
        if transport.rank == 1:
            device = device._replace(backend=WithSmall(device.backend))
        return real(transport, device, nbytes)

    class WithSmall:
        def __init__(self, backend):
            self.synchronize = backend.synchronize

        def arena(self):
            from mpitrain.machine.backend import Arena

            return Arena(Small())

    monkeypatch.setattr(batch, "can_allocate", can_allocate)
    found = run_ranks(3, search_in, TINY, 40, 0.01)
    rows = {each.fit.rows for each in found}
    assert len(rows) == 1 and 1 <= rows.pop() < 40


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 63, 64, 65, 100])
@pytest.mark.parametrize("unit", [1, 3])
def test_bisection_finds_the_largest_multiple(largest, unit):
    asked = []

    def fits(rows):
        asked.append(rows)
        return rows <= largest

    assert largest_multiple(fits, unit, 100) == min(largest // unit * unit, 100 // unit * unit)
    assert len(asked) <= 16


class Squares:
    """Half the squared error of one output, and its gradient."""

    def gradient(self, logits, targets, scale, arena):
        apart = logits[:, 0] - targets
        return float((apart**2).sum() / 2), (scale * apart[:, None]).astype(logits.dtype)

    def value(self, logits, targets, arena):
        return float(((logits[:, 0] - targets) ** 2).sum() / 2)

    def correct(self, logits, targets, arena):
        return 0


class Regression:
    """Inputs x ~ N(0, 1) with F features, and targets w x + N(0, sigma^2)."""

    form, classes, held_out = "samples", 1, 0

    def __init__(self, features, sigma):
        self.inputs, self.shape, self.sigma = features, (features,), sigma
        self.w = np.random.default_rng(5).standard_normal(features) / 4

    def batch(self, seed, step, size, rows, before=None):
        draw = np.random.default_rng([seed, step])
        x = draw.standard_normal((size, self.inputs))
        y = x @ self.w + self.sigma * draw.standard_normal(size)
        mine = slice(rows.start, rows.stop)
        return x[mine].astype(np.float32), y[mine].astype(np.float32)


def regression(transport, sigma, micro_batches, rows):
    source, dp = Regression(12, sigma), transport.size
    config = parsed(
        "model.kind=mlp",
        "data.source=digits",
        "device.kind=cpu",
        f"batch.size={rows * dp * micro_batches}",
        f"batch.micro_batches={micro_batches}",
        f"optimizer.lr={Steps.STILL}",
    )
    trainer = Trainer(
        transport,
        lambda layers: [Unit("head", layers.linear(source.inputs, 1, normal(0.0)))],
        config,
        Squares(),
    )
    taken = Steps(replace(trainer.job, trainer=trainer, source=source), rows)
    return steps.measure_noise(taken, rows, 1, bool), source


@pytest.mark.parametrize(
    "ranks, sigma, micro_batches, rows", [(1, 0.5, 1, 16), (2, 0.6, 1, 16), (3, 0.0, 2, 4)]
)
def test_the_noise_scale_of_a_linear_regression_is_the_known_one(
    ranks, sigma, micro_batches, rows, monkeypatch
):
    """With w = 0 the gradient of a row is -x y: tr(S) = (F + 1) |w|^2 + F sigma^2, and |G| = |w|.

    The bias adds y to it: variance |w|^2 + sigma^2, mean 0.
    """
    monkeypatch.setattr(steps, "PRECISE", 0.1)
    every = run_ranks(ranks, regression, sigma, micro_batches, rows)
    found, source = every[0]
    assert all(other == found for other, _ in every)
    features, square = source.inputs, float((source.w**2).sum())
    trace = (features + 1) * square + features * sigma**2 + square + sigma**2
    assert abs(found.rows - trace / square) <= 0.2 * trace / square
    assert not found.is_uncertain and found.small == ranks * micro_batches
    # The truth lies within four standard errors.
    assert abs(found.rows - trace / square) <= 4 * found.error + 0.01 * found.rows


def test_norms_without_noise_have_the_scale_0_and_pure_noise_infinity():
    exact = steps.estimate([steps.Norms(4.0, 4.0)] * 3, 16, 2)
    assert exact.rows == 0 and exact.error == 0
    hidden = steps.estimate([steps.Norms(1 / 16, 1 / 2)] * 3, 16, 2)
    assert math.isinf(hidden.rows) and hidden.is_uncertain


def test_ignored_targets_do_not_change_the_norm_of_a_mean(monkeypatch):
    """The norm of some rows of a batch is that of these rows as a batch of their own."""

    class Fake:
        size, rows = 8, 8

        def run(self, number, rows, first):
            # Two of 8 rows present, with a quarter of their targets ignored: 1.5 of 8 count.
            return 0.0, 3.0, (8 - 0.5) / 8

    assert steps._norm(Fake(), 0, 2, 0, 2 / 8) == pytest.approx(3.0 * 7.5 / 1.5)


def test_sizes_are_powers_of_two_and_the_largest():
    assert steps.sizes(1, 1) == [1] and steps.sizes(1, 6) == [1, 2, 4, 6]
    assert steps.sizes(3, 12) == [3, 6, 12]
    many = steps.sizes(1, 1000)
    assert len(many) <= steps.SIZES and many[0] == 1 and many[-2:] == [512, 1000]


def test_a_size_that_other_work_spoilt_is_never_the_fastest():
    quiet = steps.Timed(2, 2, [1.0] * 5, 1.0)
    spoilt = steps.Timed(4, 4, [0.5, 9.0, 9.0, 9.0, 9.0], 1.0)
    assert steps.fastest([quiet]) is quiet and steps.fastest([quiet, spoilt]) is None
    slow = spoilt._replace(blocks=[4.0, 40.0, 40.0, 40.0, 40.0])
    assert steps.fastest([quiet, slow]) is quiet and steps.fastest([slow]) is None


def test_the_command_prints_a_table_and_the_keys_and_writes_them(tmp_path, capsys):
    file, settings = tmp_path / "found.json", [*TINY, "memory.limit_gb=0.005"]
    run_ranks(2, plan, partial(configured, None, settings), 8, 1.0, None, file)
    text = capsys.readouterr().out
    assert "--set batch.size=8 --set batch.micro_batches=" in text and "noise scale" in text
    assert max(map(len, text.splitlines())) <= 130
    found = json.loads(file.read_text())
    assert [row["rows"] for row in found["rows"]] == [1, 2, 4, 8]
    assert found["header"]["most_rows"] == 8 and found["header"]["is_most"]
    assert found["header"]["present"]["size"] == 8


def test_in_a_pipeline_the_steps_of_every_number_of_micro_batches_are_predicted(tmp_path, capsys):
    file, settings = tmp_path / "found.json", [*TINY, "layout.pp=2"]
    run_ranks(2, plan, partial(configured, None, settings), 8, 1.0, None, file)
    text = capsys.readouterr().out
    assert "2 stages by 1f1b, 8 rows in each of 1 replica(s)" in text and "same results:" in text
    found = json.loads(file.read_text())["header"]["micro_batches"]
    assert [each["micro_batches"] for each in found] == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "settings, law",
    [
        (["replication.mode=local"], "replication.mode is local"),
        (["replication.mode=master"], "replication.mode master"),
        (["replication.mode=server", "replication.update=async"], "replication.mode is server"),
        (["layout.pp=2", "pipeline.schedule=async"], "pipeline.schedule is async"),
        (["layout.dp=3"], "needs 3 ranks"),
    ],
)
def test_a_job_without_common_steps_is_refused(settings, law, capsys):
    with pytest.raises(ConfigError) as caught:
        run_ranks(2, plan, partial(configured, None, [*TINY, *settings]), 8, 1.0, None, None)
    assert caught.value.agreed and law in caught.value.law and capsys.readouterr().out == ""


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_seconds_that_limit_nothing_are_wrong_usage(seconds):
    assert CliRunner().invoke(commands, ["plan", "batch", "--seconds", seconds]).exit_code == 2


def test_there_is_nothing_to_verify_without_a_pipeline(capsys):
    with pytest.raises(ConfigError, match="A model on one stage") as caught:
        run_ranks(1, plan, partial(configured, None, TINY), 8, 1, (1, 1), None)
    assert caught.value.agreed and capsys.readouterr().out == ""
