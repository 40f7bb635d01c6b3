"""Half precision on ranks that are threads: in step after an overflow, bitwise on resume. How near to one rank in float64 every
mode and layout is, says test_matrix.py.
"""

import json
import threading
from collections import defaultdict

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain.errors import TrainingError
from mpitrain.optim import Optimizer
from mpitrain.parallel.replica import Replica
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done, newest
from mpitrain.transport.threads import run_ranks
from tests.runs import go, records
from tests.saving import save
from tests.training import TINY, configured, curves, same, stepped

pytestmark = pytest.mark.slow

TOLERANCE = 0.002
"""Of the losses of float16 on four ranks, beside those of one."""


def test_what_is_divided_changes_no_bit():
    """Two ranks have one order in which to sum, and without clipping nobody asks for the norm."""
    base = [*TINY, "precision.compute=float16", "optimizer.clip=0", "model.tied=true"]
    losses, _, parameters = curves(2, *base, steps=6)
    for zero in (1, 2, 3):
        divided = curves(2, *base, f"replication.zero={zero}", steps=6)
        assert np.array_equal(losses, divided[0]) and np.array_equal(parameters, divided[2]), zero


@pytest.mark.parametrize(
    "settings, ranks, skips",
    [
        ([], 2, (0, 1)),
        (["replication.zero=1"], 2, (0, 1)),
        (["replication.mode=master"], 2, (0,)),
        (["replication.mode=server"], 3, (2,)),
        (["replication.mode=local"], 2, (1,)),
        (["replication.mode=gossip"], 2, (1,)),
        (["replication.mode=server", "replication.update=async"], 2, (1,)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_adamw_counts_the_updates_that_were_made(settings, ranks, skips, monkeypatch):
    """skips: the ranks that would update in step 1, where the last worker's gradient is infinite, and do not."""
    made, update = defaultdict(list), Optimizer.update

    def noting(self, scale, lr, step, *arguments, **named):
        made[threading.get_ident()] += [step] * bool(self.pieces)
        update(self, scale, lr, step, *arguments, **named)

    monkeypatch.setattr(Optimizer, "update", noting)

    def run(transport):
        trainer, source, _ = build(transport, configured(*TINY, *settings))
        mode, right = trainer.replica, trainer.replica.loss
        workers = trainer.grid.axes.dp

        def loss(logits, targets, scale):
            value, gradient = right(logits, targets, scale)
            if number == 1 and transport.rank == workers - 1:
                gradient[0, 0] = np.inf
            return value, gradient

        mode.loss = loss
        for index in range(4):
            own = None
            for number in mode.steps(index, lambda: False):
                own = trainer.step(number, *mode.batch(source, number))
            mode.outcome(index, own)
        mode.sync()
        return sorted(set(made[threading.get_ident()])), mode.skips.scalars().get(
            "skipped_updates", 0
        )

    with np.errstate(all="ignore"):
        found = run_ranks(ranks, run)
    for rank, (numbers, _) in enumerate(found):
        assert numbers in ([], [1, 2, 3] if rank in skips else [1, 2, 3, 4]), rank
    assert all(found[rank][0] for rank in skips)


@pytest.mark.parametrize(
    "kind, zero", [*(("cpu", zero) for zero in range(4)), ("cuda-sim", 0), ("cuda-sim", 3)]
)
def test_frozen_tensors_have_16_bits_alone_and_stay_as_they_are(kind, zero):
    """Their values are the rounded ones from the beginning; others are rounded after each update."""
    compute = ("bfloat16", "float16")[(zero + (kind == "cpu")) % 2]

    def run(transport):
        settings = [f"precision.compute={compute}", f"replication.zero={zero}"]
        trainer, source, _ = build(
            transport,
            configured(
                *TINY,
                *settings,
                f"device.kind={kind}",
                "model.layers=1",
                "model.freeze=['blocks.0.*']",
            ),
        )
        frozen = trainer.replica.frozen
        flat, first = trainer.backend.to_host(frozen).copy(), trainer.tensors()
        half = trainer.job.device.half
        assert frozen.dtype == (half or np.float32)
        length, shards = trainer.storage.frozen.length, 2 if zero == 3 else 1
        assert frozen.size == length // shards > 0
        assert all(
            array.size <= trainer.storage.length or array.dtype == frozen.dtype
            for array in trainer.replica.parameter_arrays
        )
        stepped(trainer, source, range(2))
        assert np.array_equal(flat, trainer.backend.to_host(frozen))
        assert np.array_equal(flat, flat.astype(compute_type(compute)).astype(flat.dtype))
        trainer.sync_parameters()
        for name, tensor in trainer.tensors().items():
            is_frozen = name.startswith("blocks.0.")
            assert np.array_equal(tensor, first[name]) == is_frozen, name

    run_ranks(2, run)


def compute_type(compute):
    return np.float16 if compute == "float16" else ml_dtypes.bfloat16


def steps(transport, config, count, saved=None, overflow=None, folder=None, own=None):
    """Some steps; overflow: the rank and the step where a gradient is beyond float16."""
    trainer, source, done = build(transport, config, saved)
    if overflow and overflow[0] == transport.rank:
        right = trainer.replica.loss

        def loss(logits, targets, scale):
            value, gradient = right(logits, targets, scale)
            if number == overflow[1]:
                gradient[0, 0] = np.inf
            return value, gradient

        trainer.replica.loss = loss
    outcomes = []
    for number in range(done.step, done.step + count):
        outcomes.append(trainer.step(number, *trainer.replica.batch(source, number)))
    if folder:
        save(folder, trainer, Done(count, count * 12, "run"), keep=1)
    if own is not None:
        own[transport.rank] = (
            trainer.tensors(),
            [kept.array.copy() for kept in trainer.replica.state()],
        )
    return outcomes


@pytest.mark.parametrize(
    "settings",
    [
        "replication.zero=0",
        "replication.zero=1",
        "replication.mode=master",
        "replication.mode=server",
        "replication.wire=fp16",
        "replication.wire=int8",
        "layout.tp=2",
        "layout.pp=2 batch.micro_batches=2",
    ],
)
def test_an_overflow_on_one_rank_halves_the_scale_of_all(settings):
    """Nothing of it is left for later steps: a block of a wire format that is not finite lies over the padding as well."""
    base = [
        *TINY,
        "precision.compute=float16",
        "optimizer.name=momentum",
    ]  # the update of AdamW has no scale
    with np.errstate(all="ignore"):
        (alone,) = run_ranks(1, steps, configured(*base), 6, None, (0, 3))
        everyone = run_ranks(4, steps, configured(*base, *settings.split()), 6, None, (2, 3))
    for outcomes in everyone:
        assert [outcome.updated for outcome in outcomes] == [True, True, True, False, True, True]
        assert [outcome.extras["loss_scale"] for outcome in outcomes] == [2.0**16] * 4 + [
            2.0**15
        ] * 2
        assert [outcome.extras.get("overflows") for outcome in outcomes] == [0, 0, 0, 1, 0, 0]
        assert [outcome.loss for outcome in outcomes] == [outcome.loss for outcome in everyone[0]]
        for mine, truth in zip(outcomes, alone, strict=True):
            assert abs(mine.loss / truth.loss - 1) <= TOLERANCE
            assert not truth.updated or abs(mine.grad_norm / truth.grad_norm - 1) <= 0.01
    assert alone[5].loss < alone[2].loss


@pytest.mark.parametrize("zero", (0, 1))
def test_a_resume_restores_loss_scale_and_update_count_bitwise(zero, tmp_path):
    config = configured(*TINY, "precision.compute=float16", f"replication.zero={zero}")
    with np.errstate(all="ignore"):
        whole, rest = {}, {}
        outcomes = run_ranks(2, steps, config, 8, None, (1, 2), None, whole)[0]
        run_ranks(2, steps, config, 4, None, (1, 2), tmp_path)
        resumed = run_ranks(2, steps, config, 4, newest(tmp_path), None, None, rest)[0]
    assert [o._replace(comm_s=0) for o in outcomes[4:]] == [o._replace(comm_s=0) for o in resumed]
    assert resumed[0].extras["loss_scale"] == 2.0**15
    count = sum(tensor.size for tensor in whole[0][0].values())
    scalars = json.loads((newest(tmp_path) / "manifest.json").read_text())["scalars"]
    assert scalars["loss_scale"] == 2.0**15 and scalars["skipped_updates"] == 1
    files = [load_file(file) for file in newest(tmp_path).glob("*.safetensors")]
    assert sum(tensor.size for file in files for tensor in file.values()) == 3 * count, (
        "masters, moments: no mirror"
    )
    for rank in range(2):
        (mirror, kept), (mirror_too, kept_too) = whole[rank], rest[rank]
        assert all(np.array_equal(mirror[name], mirror_too[name]) for name in mirror)
        assert same(kept, kept_too)


def test_twenty_overflows_in_a_row_end_a_run_whatever_on_nonfinite_says(
    book, tmp_path, monkeypatch
):
    right = Replica.loss

    def loss(self, logits, targets, scale):
        value, gradient = right(self, logits, targets, scale)
        gradient[0, 0] = np.inf
        return value, gradient

    monkeypatch.setattr(Replica, "loss", loss)
    with (
        np.errstate(all="ignore"),
        pytest.raises(
            TrainingError, match=r"The last 20 steps up to step 20 .* a loss scale of 1\."
        ),
    ):
        go(2, [*book, "precision.compute=float16", "run.steps=30", "run.on_nonfinite=skip"])
    lines = [record for record in records(tmp_path) if "loss" in record]
    assert len(lines) == 20 and all(line["overflow"] and "skipped" not in line for line in lines)
    assert [line["loss_scale"] for line in lines[:3]] == [2.0**16, 2.0**15, 2.0**14]
