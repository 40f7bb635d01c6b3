"""The losses of model.loss: PyTorch's gradients, one division by the targets of an update, and every layout alike."""

from functools import partial

import numpy as np
import pytest

from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.layers.plain import LOSSES
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import host_ops, reference_ops
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests import training
from tests.training import TINY, assert_alike, configured, near, stepped

SETTINGS = [
    "model.kind=mlp",
    "model.layers=2",
    "model.width=16",
    "batch.size=12",
    "optimizer.lr=0.01",
    "precision.compute=float64",
    "device.kind=cpu",
]
LAYOUTS = [
    (2, ["layout.dp=2"]),
    (3, ["layout.dp=3", "replication.zero=3"]),
    (4, ["layout.tp=2", "layout.pp=2", "replication.zero=1", "batch.micro_batches=3"]),
    (3, ["replication.mode=server", "replication.servers=1"]),
    (2, ["replication.mode=master"]),
    (2, ["memory.recompute=unit", "batch.micro_batches=2", "replication.algorithm=ring"]),
]


class Numbers:
    """Rows of five features, and two numbers for each; some targets are NaN."""

    form, shape, inputs, classes, held_out = "samples", (5,), 5, 2, 7

    def __init__(self, loss):
        draw = np.random.default_rng(3)
        self.targets = LOSSES[loss].takes
        self.x = draw.standard_normal((60, 5))
        self.y = draw.random((60, 2)) if loss == "bce" else draw.standard_normal((60, 2))
        self.y[draw.random((60, 2)) < 0.2] = np.nan
        if self.targets == "classes":
            self.y = draw.integers(2, size=60)

    def batch(self, seed, step, size, rows, before=None):
        chosen = (step * size + np.arange(rows.start, rows.stop)) % 60
        return self.x[chosen], self.y[chosen]

    def held_out_rows(self, rows):
        return self.x[list(rows)], self.y[list(rows)]


def trained(transport, config, loss, steps):
    source = Numbers(loss)
    trainer = build(transport, config, source=source).trainer
    results = stepped(trainer, source, range(steps))
    evaluated, _ = trainer.evaluate(source)
    return [np.array([(r.loss, r.grad_norm, r.counted) for r in results]), np.array(evaluated)]


def in_layouts(loss, *settings, layouts=LAYOUTS, steps=6):
    """Nothing; asserts that each of these layouts has the losses, norms and evaluation of one rank."""
    every = [*SETTINGS, f"model.loss={loss}", *settings]
    truth = run_ranks(1, trained, configured(*every), loss, steps)[0]
    assert np.isfinite(truth[0]).all() and np.isfinite(truth[1])
    for ranks, layout in layouts:
        for found in run_ranks(ranks, trained, configured(*every, *layout), loss, steps):
            assert near(truth, found), (loss, layout)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_layout_equals_one_rank(loss):
    smoothing = ["model.label_smoothing=0.2"] if LOSSES[loss].takes == "classes" else []
    in_layouts(
        loss, *smoothing, layouts=LAYOUTS if loss in ("mse", "cross-entropy") else LAYOUTS[:3]
    )


def test_smoothing_of_a_divided_vocabulary_equals_one_rank():
    every = [*TINY, "precision.compute=float64", "model.label_smoothing=0.2"]
    (alone,) = run_ranks(1, training.trained, configured(*every), 3)
    for layout in (["layout.tp=2"], ["layout.tp=2", "memory.logit_chunks=3"]):
        config = configured(*every, *layout)
        assert_alike(alone, run_ranks(2, training.trained, config, 3))


def test_half_precision_and_averaging_train_on_numbers():
    for ranks, layout in (
        (2, ["precision.compute=bfloat16"]),
        (1, ["precision.compute=float16", "device.kind=cuda-sim"]),
        (2, ["replication.mode=local", "replication.period=2"]),
    ):
        every = [*SETTINGS, "precision.compute=float32", "model.loss=mse", *layout]
        steps, _ = run_ranks(ranks, trained, configured(*every), "mse", 40)[0]
        assert steps[-5:, 0].mean() < 0.9 * steps[:5, 0].mean(), layout


def test_kernels_train_as_the_host_does():
    for loss in LOSSES:
        every = [*SETTINGS, f"model.loss={loss}"]
        host, device = (
            run_ranks(1, trained, configured(*every, f"device.kind={kind}"), loss, 3)[0]
            for kind in ("cpu", "cuda-sim")
        )
        assert near(host, device), loss


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_pytorch(loss):
    torch = pytest.importorskip("torch")
    function = {
        "cross-entropy": partial(torch.nn.functional.cross_entropy, label_smoothing=0.3),
        "mse": torch.nn.functional.mse_loss,
        "mae": torch.nn.functional.l1_loss,
        "bce": torch.nn.functional.binary_cross_entropy_with_logits,
    }[loss]
    draw = np.random.default_rng(0)
    for shape in ((7, 5), (1, 1), (130, 3)):
        logits, targets = 3 * draw.standard_normal(shape), draw.random(shape)
        counted = np.ones(shape, bool)
        if loss == "cross-entropy":
            targets = draw.integers(shape[1], size=shape[0])
            targets[1::4] = -100
            count = (targets != -100).sum()
        else:
            targets[1::4, 0] = np.nan
            counted = ~np.isnan(targets)
            count = counted.sum()
        theirs = torch.tensor(logits, requires_grad=True)
        right = torch.tensor(targets)
        truth = function(
            theirs if loss == "cross-entropy" else theirs[counted],
            right if loss == "cross-entropy" else right[counted],
        )
        truth.backward()
        for ops in (host_ops(), reference_ops()):
            made = LOSSES[loss].make(ops, 0.3)
            value, gradient = made.gradient(logits.copy(), targets, 1 / count, Arena())
            assert abs(value / count - truth.item()) <= 1e-12
            assert np.abs(gradient - theirs.grad.numpy()).max() <= 1e-12
            plain = LOSSES[loss].make(ops, 0.0)
            kept = logits.copy()
            again = plain.value(kept, targets, Arena())
            assert again == pytest.approx(
                plain.gradient(logits.copy(), targets, 1.0, Arena())[0], rel=1e-13
            )
            assert np.array_equal(kept, logits)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (["model.loss=mse", "data.source=digits"], ConfigError, "takes numbers as targets, but"),
        (["model.loss=bce"], ConfigError, "takes fractions"),
        (["model.loss=mae", "model.label_smoothing=0.1"], ConfigError, "model.label_smoothing"),
        (["model.loss=huber"], ConfigError, "'cross-entropy', 'mse', 'mae' or 'bce'"),
        (["model.loss=mse", "whole"], DataError, "must be floats, 2 for each of 12 rows"),
        (["model.loss=mse", "narrow"], DataError, r"float64 of shape \(12, 1\)"),
    ],
)
def test_a_loss_refuses_other_targets(settings, error, words):
    source = Numbers(
        "cross-entropy" if "mse" not in settings[0] or "digits" in settings[-1] else "mse"
    )
    if settings[-1] in ("whole", "narrow"):
        source.y = np.arange(60) if settings.pop() == "whole" else np.ones((60, 1))

    def start(transport):
        trainer = build(transport, configured(*SETTINGS, *settings), source=source).trainer
        trainer.step(0, *source.batch(0, 0, 12, range(12)))

    with pytest.raises(MpitrainError, match=words) as caught:
        run_ranks(1, start)
    assert isinstance(caught.value, error)
