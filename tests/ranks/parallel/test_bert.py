"""BERT: half precision trains as float32, and kernels as the host. Layouts and modes train as one rank (test_matrix.py)."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.run.rules import check_each, of_model
from mpitrain.transport.threads import run_ranks
from tests.training import configured, stepped

pytestmark = pytest.mark.slow

SHAPE = {"layers": 2, "width": 32, "heads": 4, "context": 12}
BERT = ["model.kind=bert", "precision.compute=float64", "batch.size=12", "run.eval_rows=20"]
BERT += ["optimizer.lr=0.01", "optimizer.warmup=2"]
BERT += [f"model.{key}={value}" for key, value in SHAPE.items()]
DROPS = ["model.dropout=0.1", "model.attention_dropout=0.2"]
TIED = ["model.tied=true"]
TEXTS = ["data.source=jsonl:texts.jsonl", *DROPS]


def losses_of(transport, *settings):
    """The losses of 4 steps in any mode, and an evaluation."""
    trainer, source, _ = build(transport, configured(*BERT, *settings))
    losses = [result.loss for result in stepped(trainer, source, range(4))]
    trainer.sync_parameters()
    return np.array([*losses, *trainer.evaluate(source)])


@pytest.mark.parametrize(
    ("compute", "ranks", "layout", "tolerance"),
    [("bfloat16", 1, [], 0.03), ("float16", 2, ["layout.tp=2"], 0.01)],
)
def test_half_precision_trains_as_float32(compute, ranks, layout, tolerance):
    alone, halves = (
        run_ranks(n, losses_of, *DROPS, f"precision.compute={name}", *more)
        for n, name, *more in ((1, "float32"), (ranks, compute, *layout))
    )
    for found in halves:
        assert np.abs(found - alone[0])[:-1].max() <= tolerance  # the last is accuracy


@pytest.mark.compile
def test_the_simulator_trains_as_the_host():
    common = ["precision.compute=float32", "layout.cp=2", "model.layers=1", *DROPS]
    host, simulated = (
        run_ranks(2, losses_of, *common, f"device.kind={kind}") for kind in ("cpu", "cuda-sim")
    )
    for own, other in zip(host, simulated, strict=True):
        assert np.abs(own - other).max() <= 1e-5


def test_a_ring_is_refused():
    with pytest.raises(ConfigError, match=r"of a bert see each other(.|\n)*cp_mode to ulysses"):
        check_each(of_model(configured(*BERT, "layout.cp=2", "layout.cp_mode=ring")))
