"""`mpitrain runs diff` names planted faults: the step, the unit and the tensor; and finds no others."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from threadpoolctl import threadpool_info, threadpool_limits

from mpitrain.cli import commands
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.layers.base import Gradient
from mpitrain.machine.process import blas_threads_in_use
from mpitrain.run import trainer as trainers
from mpitrain.run.build import build
from mpitrain.run.run_dir import configuration
from mpitrain.tools.report import diff
from mpitrain.tools.report.diff import compare_bits, compare_numbers, start_of_replay, tolerance
from mpitrain.tools.report.replay import replay
from mpitrain.transport.threads import run_ranks
from tests.runs import TINY, go
from tests.saving import save

SMALL = [
    *TINY,
    "model.heads=2",
    "batch.size=4",
    "run.steps=4",
    "run.eval_every=-1",
    "run.sample=0",
    "run.trace=false",
    "checkpoint.every=2",
    "checkpoint.keep=9",
]
MARKED = "run.stall_seconds=601"
"""A key that changes no bit, by which the runs with a fault are known."""


def flipped(kind, rank, step, tensor, element, bit):
    """The class of replicas that change a bit of one rank's gradient in one step, before its reduction.

    Only those of marked runs do.
    """

    class Flipped(kind):
        now = 0

        def begin(self, index, *rest):
            self.now = index + 1
            super().begin(index, *rest)

        def ready(self, unit, is_last):
            units = {entry.unit for entry in self.storage.entries if entry.name == tensor}
            is_here = self.run.stall_seconds == 601 and self.grid.transport.rank == rank
            if is_here and is_last and self.now == step and unit in units:
                for name, array in leaves(self.gradients(unit)):
                    if tensor.endswith(f".{name}"):
                        bits = array.reshape(-1).view(np.uint32)
                        bits[element % array.size] ^= np.uint32(1 << bit)
            super().ready(unit, is_last)

    return Flipped


def leaves(nested, before=""):
    for name, one in nested.items():
        if isinstance(one, Gradient):
            yield before + name, one.array
        else:
            yield from leaves(one, f"{before}{name}.")


@pytest.fixture
def planted(monkeypatch):
    """Returns a function that plants a fault in marked runs from now on."""
    real = trainers.mode_of

    def plant(rank, *fault):
        monkeypatch.setattr(trainers, "mode_of", lambda *keys: flipped(real(*keys), rank, *fault))

    plant.undo = lambda: monkeypatch.setattr(trainers, "mode_of", real)
    return plant


def trained(folder, ranks, *settings):
    go(ranks, [*SMALL, f"run.out={folder}", *settings])
    return diff.read_run(folder)


def invoke(*arguments):
    done = CliRunner().invoke(commands, ["diff", *map(str, arguments)])
    return done.exit_code, done.output


LAYOUTS = {
    "dp": (2, []),
    "zero": (2, ["replication.zero=2"]),
    "tp": (2, ["layout.tp=2"]),
    "pp": (2, ["layout.pp=2"]),
}
FLIPS = {
    "dp": [
        (0, 1, "head.logits.weight", 7, 22),
        (1, 2, "embedding.tokens", 2, 12),
        (1, 3, "blocks.0.attention.norm.gain", 1, 20),
        (0, 4, "blocks.0.mlp.down.bias", 5, 18),
        (1, 4, "head.norm.bias", 0, 21),
    ],
    "zero": [
        (0, 1, "blocks.0.mlp.up.weight", 30, 22),
        (1, 2, "blocks.0.attention.out.weight", 3, 15),
        (0, 2, "embedding.positions", 11, 20),
        (1, 3, "head.logits.weight", 77, 19),
        (0, 4, "blocks.0.attention.qkv.weight", 9, 22),
    ],
    "tp": [
        (0, 1, "blocks.0.attention.qkv.weight", 4, 22),
        (1, 2, "blocks.0.mlp.up.weight", 3, 18),
        (1, 3, "blocks.0.mlp.down.weight", 8, 16),
        (0, 3, "blocks.0.mlp.up.bias", 2, 21),
        (1, 4, "blocks.0.attention.out.weight", 6, 20),
    ],
    "pp": [
        (1, 1, "head.norm.gain", 3, 22),
        (1, 2, "head.logits.weight", 12, 17),
        (0, 2, "embedding.tokens", 3, 22),
        (0, 3, "blocks.0.attention.norm.bias", 5, 21),
        (1, 4, "head.logits.weight", 90, 14),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_planted_flips_are_named_with_step_and_tensor(layout, tmp_path, planted):
    ranks, settings = LAYOUTS[layout]
    right = trained(tmp_path / "right", ranks, *settings, "run.digest_every=1")
    for number, (rank, step, tensor, element, bit) in enumerate(FLIPS[layout]):
        planted(rank, step, tensor, element, bit)
        wrong = trained(tmp_path / f"{number}", ranks, *settings, MARKED, "run.digest_every=1")
        found = compare_bits(right, wrong)
        assert (found.first, found.equal) == (step, step - 1)
        assert found.unequal["digests"].tensors[0] == f"gradient/{tensor}"
        start = start_of_replay(found.first, right, wrong)
        assert start == (step - 1) // 2 * 2
        again = replay((right, wrong), start, found.first)
        first, *others = again.differing
        assert (again.step, first.buffer, first.tensor) == (step, "gradient", tensor)
        assert tensor.startswith(first.unit) and first.unit
        assert not [other for other in others if other.buffer == "gradient"]
        assert again.unlike == (None, None)


def test_a_fault_of_the_machine_is_found_in_the_run_that_has_it(tmp_path, planted):
    """The replay does not repeat the fault, so it repeats one run and not the other."""
    right = trained(tmp_path / "right", 2, "run.digest_every=1")
    planted(1, 3, "blocks.0.mlp.up.weight", 5, 20)
    wrong = trained(tmp_path / "wrong", 2, MARKED, "run.digest_every=1")
    planted.undo()
    again = replay((right, wrong), 2, 3)
    assert again.step is None and not again.differing
    mine, its = again.unlike
    assert mine is None and (its.step, its.kind) == (3, "digests")
    assert its.tensors[0] == "gradient/blocks.0.mlp.up.weight"
    code, output = invoke(tmp_path / "right", tmp_path / "wrong", "--replay")
    assert code == 1 and "replays are equal" in output and "wrong is not" in output


def test_a_replay_has_the_blas_threads_of_the_first_run(tmp_path):
    """Bits of matrix products depend on them, and a program may have set any number."""
    if not any(one["user_api"] == "blas" for one in threadpool_info()):
        pytest.skip("this NumPy has no BLAS that threadpoolctl knows")
    runs, seen = [], []
    for threads in (3, 2):
        with threadpool_limits(threads, user_api="blas"):
            runs.append(trained(tmp_path / f"{threads}", 2))
    assert diff.changed_keys(*runs) == {diff.THREADS: (3, 2)}
    with threadpool_limits(1, user_api="blas"):
        for both in (runs, runs[::-1]):
            replay(tuple(both), 0, 1, lambda step: seen.append(blas_threads_in_use()))
        assert seen == [3, 2] and blas_threads_in_use() == 1


def test_without_digests_logged_steps_and_checkpoints_bound_the_interval(tmp_path, planted):
    right = trained(tmp_path / "right", 2, "run.log_every=4")
    planted(0, 2, "head.norm.gain", 1, 20)
    wrong = trained(tmp_path / "wrong", 2, MARKED, "run.log_every=4")
    found = compare_bits(right, wrong)
    assert (found.first, found.equal) == (2, -1)
    assert set(found.unequal) == {"checkpoint", "logged"}
    again = replay((right, wrong), 0, 2)
    assert again.step == 2 and again.differing[0].tensor == "head.norm.gain"
    code, output = invoke(tmp_path / "right", tmp_path / "wrong", "--replay")
    assert code == 1 and "steps 1 to 2" in output and "head.norm.gain" in output
    assert "run.stall_seconds: 600.0 and 601.0" in output


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (3, ["replication.zero=1"]),
        (2, ["replication.zero=3", "batch.micro_batches=2"]),
        (2, ["replication.mode=master"]),
        (2, ["replication.mode=server"]),
        (2, ["layout.tp=2", "layout.sequence_parallel=true"]),
    ],
)
def test_digests_repeat_and_change_no_bit(ranks, settings, tmp_path):
    one = trained(tmp_path / "one", ranks, *settings, "run.digest_every=1")
    other = trained(tmp_path / "other", ranks, *settings, "run.digest_every=2")
    assert sorted(one.digests) == [0, 1, 2, 3, 4] and sorted(other.digests) == [0, 2, 4]
    without = trained(tmp_path / "without", ranks, *settings)
    assert not without.digests and one.logged == other.logged == without.logged
    for each in (other, without):
        assert compare_bits(one, each).first is None
    code, output = invoke(tmp_path / "one", tmp_path / "without")
    assert code == 0 and "run.digest_every: 1 and 0" in output
    names = {name.partition("/")[0] for name in one.digests[1].tensors}
    assert names >= {"gradient", "parameters", "first_moment", "second_moment"}
    assert len(one.digests[1].ranks) == ranks


def test_a_resumed_run_has_the_digests_of_one_that_was_not_stopped(tmp_path):
    whole = trained(tmp_path / "whole", 2, "run.digest_every=1")
    settings = [*SMALL, f"run.out={tmp_path / 'run'}", "run.digest_every=1"]
    go(2, settings, stop=partial(Stop(3)))
    go(2, settings, resume="yes")
    resumed = diff.read_run(tmp_path / "run")
    found = compare_bits(whole, resumed)
    assert found.first is None and resumed.digests.keys() == whole.digests.keys()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [r["step"] for r in map(json.loads, lines) if r.get("event") == "digests"]
    assert steps == [0, 1, 2, 3, 4]


def test_a_run_that_was_resumed_in_another_layout_is_compared_by_numbers(tmp_path):
    one = trained(tmp_path / "one", 1)
    trained(tmp_path / "mixed", 2, "run.steps=2")
    go(1, [*SMALL, f"run.out={tmp_path / 'mixed'}", "layout.dp=1"], resume="yes")
    mixed = diff.read_run(tmp_path / "mixed")
    assert one.ranks == mixed.ranks and not diff.are_comparable_by_bits(one, mixed)
    code, output = invoke(tmp_path / "one", tmp_path / "mixed")
    assert code == 0 and f"{tolerance(one.config):g}" in output


class Stop:
    """Requests a stop at the n-th call."""

    def __init__(self, calls):
        self.left = 2 * calls

    def __call__(self, rank):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(
    "settings", [["replication.mode=gossip"], ["layout.pp=2", "pipeline.schedule=async"]]
)
def test_ranks_that_update_by_themselves_have_no_digests(settings, tmp_path):
    with pytest.raises(ConfigError) as refused:
        trained(tmp_path / "run", 2, *settings, "run.digest_every=1")
    assert "run.digest_every" in refused.value.law


def changed(folder, into, change):
    """Save the newest checkpoint of a run again, with changed parameters, as another run."""
    step = max(diff.read_run(folder).saved)
    into.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (into / name).write_bytes((folder / name).read_bytes())

    def run(transport):
        job = build(transport, configuration(folder), folder / f"checkpoints/step-{step:08d}")
        trainer = job.trainer
        for entry in trainer.storage.entries:
            change(entry.name, entry.view(trainer.parameters))
        save(into / "checkpoints", trainer, job.done, 9)

    (into / "checkpoints").mkdir()
    run_ranks(diff.read_run(folder).ranks, run)
    return diff.read_run(into)


@pytest.mark.parametrize(
    "settings, rule",
    [(["precision.compute=float64"], 1e-9), ([], 1e-4), (["optimizer.name=sgd"], 1e-5)],
)
def test_across_layouts_changes_above_the_printed_tolerance_are_named(settings, rule, tmp_path):
    settings = [*settings, "run.steps=20", "checkpoint.every=0"]
    one = trained(tmp_path / "one", 1, *settings)
    other = trained(tmp_path / "other", 2, *settings, "layout.tp=2")
    limit = tolerance(one.config)
    assert limit == rule and not diff.are_comparable_by_bits(one, other)
    logged, compared = compare_numbers(one, other, limit)
    assert logged is None and [(step, found) for step, found, _ in compared] == [(20, [])]
    code, output = invoke(tmp_path / "one", tmp_path / "other")
    assert code == 0 and f"{limit:g}" in output

    def change(factor):
        def of(name, array):
            scale = factor * limit * np.linalg.norm(array)
            flat = array.reshape(-1)
            if name == "head.logits.weight":
                flat[5] += scale
            elif name == "blocks.0.mlp.up.weight":
                low, high = flat.argmin(), flat.argmax()
                flat[[low, high]] = flat[[high, low]] if factor > 1 else flat[[low, high]]
            elif name == "blocks.0.attention.out.weight":
                flat *= 1 + factor * limit

        return of

    far = changed(tmp_path / "one", tmp_path / "far", change(4.0))
    _, ((step, found, of),) = compare_numbers(far, other, limit)
    assert {each.name for each in found} == {
        "head.logits.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.attention.out.weight",
    }
    assert step == 20 and of > len(found) and invoke(tmp_path / "far", tmp_path / "other")[0] == 1
    near = changed(tmp_path / "one", tmp_path / "near", change(0.1))
    assert compare_numbers(near, other, limit)[1][0][1] == []
    # In one layout every bit counts.
    apart = compare_bits(one, near).unequal["checkpoint"].apart
    assert apart[0].name.startswith("parameters/") and len(apart) == 2


def test_a_projection_sees_elements_that_change_places():
    array = np.arange(12.0)
    swapped = array.copy()
    swapped[[2, 9]] = swapped[[9, 2]]
    one, other = diff.sums_of(array, "name"), diff.sums_of(swapped, "name")
    assert one.sum == other.sum and one.norm == other.norm
    signs = [diff.sums_of(np.eye(12)[i], "name").projection for i in range(12)]
    assert set(signs) == {-1.0, 1.0}
    assert one.projection == sum(signs * array) and other.projection == sum(signs * swapped)


def test_wrong_use_is_refused_with_exit_code_2(tmp_path):
    one = trained(tmp_path / "one", 1)
    trained(tmp_path / "two", 2)
    for arguments in (
        [tmp_path / "one", tmp_path / "nowhere"],
        [tmp_path / "one", tmp_path / "two", "--replay"],
    ):
        done = CliRunner().invoke(commands, ["diff", *map(str, arguments)])
        assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    half = trained(tmp_path / "half", 2, "precision.compute=bfloat16")
    with pytest.raises(ConfigError):
        tolerance(half.config)
    empty = one._replace(logged={}, saved={})
    for compare in (compare_bits, partial(compare_numbers, limit=1e-4)):
        with pytest.raises(ConfigError):
            compare(one, empty)
    damaged: Path = next(one.saved[4].glob("model-*"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError):
        compare_bits(one, one)
