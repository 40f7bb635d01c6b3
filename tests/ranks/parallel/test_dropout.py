"""Dropout trains in any layout as on one rank: the same masks, bit by bit, and the same losses."""

import threading
from functools import cache

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, normal
from mpitrain.layers.dropout import Dropout
from mpitrain.machine.backend import Arena, has_memory
from mpitrain.run.build import build
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel.test_tensor import ONE as GPT
from tests.ranks.parallel.test_tensor import curve, source_of
from tests.training import SERVERLESS, assert_parts, configured, near

STEPS = 2
DROPS = ["model.dropout=0.2", "model.attention_dropout=0.15", "run.seed=5"]
MLP = ["model.kind=mlp", "model.layers=3", "model.width=24"]
OWN_ROWS = ["layout.tp=2", "layout.sequence_parallel=true"]
PIPE = ["layout.pp=2", "batch.micro_batches=4"]
LAYOUTS = {
    "micro-batches": (1, ["batch.micro_batches=3"]),
    "recompute": (1, ["batch.micro_batches=2", "memory.recompute=unit"]),
    "recompute 2": (1, ["memory.recompute=2"]),
    "dp": (3, ["batch.micro_batches=2"]),
    "zero 3": (2, ["replication.zero=3"]),
    "tp": (2, ["layout.tp=2"]),
    "own rows": (2, [*OWN_ROWS, "batch.micro_batches=2"]),
    "own rows, recompute": (2, [*OWN_ROWS, "memory.recompute=unit"]),
    "cp": (3, ["layout.cp=3", "memory.recompute=unit"]),
    "cp and own rows": (6, [*OWN_ROWS, "layout.cp=3"]),
    "gpipe": (2, [*PIPE, "pipeline.schedule=gpipe"]),
    "1f1b": (2, [*PIPE, "model.tied=true"]),
    "zero-bubble": (2, [*PIPE, "pipeline.schedule=zero-bubble", "memory.recompute=2"]),
    "interleaved": (2, [*PIPE, "pipeline.schedule=interleaved"]),
    "tp and pp": (4, [*PIPE, "layout.tp=2"]),
    "mlp": (2, ["layout.tp=2"]),
    "mlp, dp and tp": (4, ["layout.tp=2", "memory.recompute=unit"]),
}


class Masks:
    """The masks of a job by (layer, step), from all ranks: 1 kept, 0 dropped, -1 unknown."""

    def __init__(self, rows):
        self.found, self._rows, self._lock = (
            dict[tuple[int, int], np.ndarray](),
            rows,
            threading.Lock(),
        )

    def watch(self, monkeypatch):
        dropped = Dropout.dropped

        def watched(layer, x, now, arena, residual=None, out=None):
            if has_memory(x):  # Others count the bytes of a step.
                self._note(layer, now, dropped(layer, np.ones(x.shape), now, Arena()) != 0)
            return dropped(layer, x, now, arena, residual, out)

        monkeypatch.setattr(Dropout, "dropped", watched)

    def _note(self, layer, now, mask):
        width, mine = mask.shape[-1], layer.layers.row_numbers(mask.shape, now)
        with self._lock:
            whole = self.found.setdefault(
                (layer.number, now.step), np.full((self._rows, layer.columns or width), -1, np.int8)
            )
            region = np.ix_(mine, range(layer.column, layer.column + width))
            assert np.all((whole[region] == -1) | (whole[region] == mask.reshape(-1, width)))
            whole[region] = mask.reshape(-1, width)


def losses(transport, config, steps):
    """Train without any look at parameters, which servers and overlapping steps do not have."""
    source = source_of(config)
    trainer = build(transport, config, source=source).trainer
    return [trainer.step(step, *trainer.replica.batch(source, step)).loss for step in range(steps)]


def trained(ranks, settings, monkeypatch, rows, train=curve):
    masks = Masks(rows)
    with monkeypatch.context() as patch:
        masks.watch(patch)
        found = run_ranks(ranks, train, configured(*settings), STEPS)
    assert masks.found and all((one >= 0).all() for one in masks.found.values())
    return masks.found, found


def assert_same_masks(truth, masks):
    assert masks.keys() == truth.keys()
    assert all(np.array_equal(truth[key], masks[key]) for key in truth)


@cache
def alone(rows, *base):
    with pytest.MonkeyPatch.context() as patch:
        return trained(1, base, patch, rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_masks_and_losses_of_one_rank(name, monkeypatch):
    ranks, settings = LAYOUTS[name]
    base = [*GPT, *DROPS, *(one for one in settings if "tied" in one)]
    rows = 12 * 24
    if "mlp" in name:
        base, rows = [*GPT, DROPS[0], *MLP], 12
    truth, ((numbers, whole, _),) = alone(rows, *base)
    masks, found = trained(ranks, [*base, *settings], monkeypatch, rows)
    assert_same_masks(truth, masks)
    for told, tensors, _ in found:
        assert near([numbers], [told])
        assert_parts(tensors, whole)


@pytest.mark.compile
def test_the_kernels_have_the_masks_of_the_host(monkeypatch):
    small = [*GPT, *DROPS, "precision.compute=float32", "model.width=16", "model.heads=2"]
    base = [*small, "model.context=8", "data.vocabulary=37", "batch.size=3"]
    found = [
        trained(1, [*base, f"device.kind={kind}"], monkeypatch, 24) for kind in ("cpu", "cuda-sim")
    ]
    (truth, ((told, *_),)), (masks, ((others, *_),)) = found
    assert_same_masks(truth, masks)
    assert np.all(np.abs(told / others - 1) <= 1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        [*PIPE, "pipeline.schedule=async"],
        [*PIPE, "pipeline.schedule=async-2bw"],
        *([f"replication.mode={mode}"] for mode in ("server", *SERVERLESS)),
    ],
    ids=["async", "async-2bw", "server", *SERVERLESS],
)
def test_other_modes_and_overlapping_steps_have_the_masks_of_one_rank(settings, monkeypatch):
    base = [*GPT, *DROPS, f"run.steps={STEPS}"]
    masks, _ = trained(2, [*base, *settings], monkeypatch, 12 * 24, losses)
    assert_same_masks(alone(12 * 24, *base)[0], masks)


def test_evaluations_have_no_dropout():
    still = [*GPT, "optimizer.lr=1e-30"]
    found = [run_ranks(1, curve, configured(*still, *more), 1)[0][0] for more in ([], DROPS[:1])]
    assert np.array_equal(found[0][-1], found[1][-1]) and found[0][0, 0] != found[1][0, 0]


@pytest.mark.parametrize("key", ["model.dropout", "model.attention_dropout"])
def test_a_rate_for_a_model_without_dropout_is_refused(key):
    def units(layers):
        return [
            Unit("embedding", layers.embedding(8, 4, 6)),
            Unit("head", layers.head(6, 8, normal(0.1))),
        ]

    with pytest.raises(ConfigError, match=f"{key}=0.2 needs"):
        run_ranks(2, lambda transport: Trainer(transport, units, configured(f"{key}=0.2")))
