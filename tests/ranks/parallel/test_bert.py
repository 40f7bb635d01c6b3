"""BERT: training on masked tokens and on classes of texts is the same in every layout, mode and body."""

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


SERVER = ["replication.mode=server", "replication.update=sync"]
LOCAL = ["replication.mode=local"]
IN_PARTS = [*LOCAL, "batch.micro_batches=3", "memory.recompute=unit"]
SINGLE = ["precision.compute=float32"]
HALF = ["precision.compute=float16", "layout.tp=2"]
ALIKE = {
    "servers": ((1, []), 3, SERVER, 1e-9),
    "averages": ((2, LOCAL), 2, IN_PARTS, 1e-9),
    "bfloat16": ((1, SINGLE), 1, ["precision.compute=bfloat16"], 0.03),
    "float16, tp 2": ((1, SINGLE), 2, HALF, 0.01),
}


@pytest.mark.parametrize(("own", "ranks", "other", "tolerance"), ALIKE.values(), ids=ALIKE)
def test_modes_and_precisions_train_alike(own, ranks, other, tolerance):
    alone = run_ranks(own[0], losses_of, *DROPS, *own[1])
    for n, found in enumerate(run_ranks(ranks, losses_of, *DROPS, *other)):
        assert np.abs(found - alone[n % len(alone)])[:-1].max() <= tolerance  # the last is accuracy


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
