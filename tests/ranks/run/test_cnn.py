"""Images and the cnn: one curve on every layout and device, counted activations, and accuracy."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.ops.host import layers
from mpitrain.run.build import alone, build
from mpitrain.run.utilisation import work_of
from mpitrain.transport.threads import run_ranks
from tests.processes import skip_without
from tests.training import configured

skip_without("sklearn")

CNN = [
    "data.source=digits",
    "model.kind=cnn",
    "model.channels=[3, 5]",
    "model.layers=1",
    "model.width=24",
    "batch.size=24",
    "run.steps=12",
    "optimizer.lr=0.01",
    "optimizer.warmup=2",
    "replication.bucket_mb=0.004",
    "memory.limit_gb=1e6",  # a job with a limit counts its step
]
EXACT = [*CNN, "precision.compute=float64"]
LAYOUTS = {
    "micro-batches": (1, ["batch.micro_batches=3"]),
    "recomputed": (1, ["memory.recompute=unit"]),
    "recomputed by 2": (2, ['memory.recompute="2"', "layout.pp=2"]),
    "dp": (3, []),
    "zero 1": (2, ["replication.zero=1"]),
    "zero 2": (2, ["replication.zero=2", "batch.micro_batches=2"]),
    "zero 3": (3, ["replication.zero=3"]),
    "pp": (2, ["layout.pp=2"]),
    "zero-bubble": (2, ["layout.pp=2", "pipeline.schedule=zero-bubble"]),
    "dp and pp": (4, ["layout.pp=2", "layout.dp=2", "replication.zero=1"]),
}
FROZEN = 'model.freeze=["convolutions.0*", "hidden.0.bias"]'
STEPS = 5


def curve(transport, settings):
    """Losses, gradient norms, evaluation, and the counted and measured bytes of activations."""
    trainer, source, _ = build(transport, configured(*settings))
    found = [trainer.step(n, *trainer.replica.batch(source, n)) for n in range(STEPS)]
    assert trainer.job.counts.peak == trainer.pipe.peak_bytes > 0
    facts = [(one.loss, one.grad_norm) for one in found]
    return np.array([*facts, trainer.evaluate(source)])


@pytest.mark.counted
@pytest.mark.parametrize("turn, frozen", [(0, []), (1, [FROZEN])])
def test_every_layout_has_the_curve_and_activation_count_of_one_rank(turn, frozen):
    """Each layout once, with frozen tensors or without."""
    truth = run_ranks(1, curve, [*EXACT, *frozen])[0]
    assert np.ptp(truth[:-1, 0]) > 0.02
    for name, (ranks, settings) in [*LAYOUTS.items()][turn::2]:
        for found in run_ranks(ranks, curve, [*EXACT, *frozen, *settings]):
            assert np.all(np.abs(found - truth) <= 1e-9 * (1 + np.abs(truth))), name


@pytest.mark.counted
@pytest.mark.parametrize("tile", [1, 2000])
def test_the_size_of_a_tile_changes_no_result_but_by_rounding(tile, monkeypatch):
    truth = run_ranks(1, curve, EXACT)[0]
    monkeypatch.setattr(layers, "TILE_BYTES", tile)
    found = run_ranks(2, curve, EXACT)[0]
    assert np.all(np.abs(found - truth) <= 1e-9 * (1 + np.abs(truth)))


@pytest.mark.counted
@pytest.mark.compile
def test_kernels_have_the_curve_and_activation_count_of_the_host():
    usual = [*CNN, "batch.size=6", "optimizer.name=sgd", "layout.pp=2"]
    truth = run_ranks(2, curve, usual)[0]
    found = run_ranks(2, curve, [*usual, "device.kind=cuda-sim"])[0]
    assert np.all(np.abs(found / truth - 1)[:, 0] <= 1e-5)


def test_digits_are_images_for_a_cnn_and_samples_for_an_mlp():
    for kind, shape in (("cnn", (1, 8, 8)), ("mlp", (64,))):
        job = alone(configured("data.source=digits", f"model.kind={kind}"), [""])
        assert job.source.shape == shape and job.source.inputs == 64
    assert configured("data.source=digits").model.kind == "mlp"


def test_flops_are_those_of_all_windows():
    """Forward 2 FLOPs a multiply-add; backward twice as many, but for the pixels, which have no gradient."""
    job = alone(configured(*CNN), [""])
    found = work_of(job, 0)
    pixels, later = 8 * 8 * 9 * 1 * 3, 4 * 4 * 9 * 3 * 5 + 2 * 2 * 5 * 24 + 24 * 10
    assert found.model == found.hardware == 24 * (2 * 2 * pixels + 3 * 2 * later)


@pytest.mark.parametrize(
    "settings, value",
    [
        (["layout.tp=2"], "layout.tp is 2"),
        (["model.kernel=4"], "is 4"),
        (["model.channels=[]"], "is []"),
        (["model.channels=[8, 8, 8, 8]"], "8 x 8"),
    ],
)
def test_a_key_that_a_cnn_cannot_have_is_refused_on_every_rank(settings, value):
    def refused(transport):
        with pytest.raises(ConfigError) as error:
            build(transport, configured(*CNN, *settings))
        return error.value.law

    laws = run_ranks(2, refused)
    assert value in laws[0] and laws[0] == laws[1]


@pytest.mark.slow
def test_a_cnn_reads_97_of_100_digits_on_two_ranks():
    settings = ["data.source=digits", "model.kind=cnn", "run.steps=200"]

    def accuracy(transport):
        trainer, source, _ = build(transport, configured(*settings))
        for n in range(200):
            trainer.step(n, *trainer.replica.batch(source, n))
        return trainer.evaluate(source)[1]

    assert run_ranks(2, accuracy)[0] >= 0.97
