"""Mode master: the curve of one rank, whatever rank 0 alone does, for the bytes that the formulas say."""

import pytest

from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.training import TINY, configured

pytestmark = pytest.mark.slow
STEPS = 6
MASTER = "replication.mode=master"
BASE = [*TINY, "precision.compute=float64", f"run.steps={STEPS}", "model.layers=1"]
UNEVEN = [*BASE, "batch.size=32"]


def test_rank_0_alone_reads_the_source_and_keeps_the_state():
    def run(transport):
        trainer, source, _ = build(transport, configured(*BASE, MASTER))
        read, batch = [], source.batch
        source.batch = lambda *arguments: (read.append(1), batch(*arguments))[1]
        for index in range(2):
            trainer.step(index, *trainer.replica.batch(source, index))
        return len(read), [kept.name for kept in trainer.replica.state()]

    first, *others = run_ranks(3, run)
    assert first == (2, ["parameters", "first_moment", "second_moment"])
    assert others == [(0, ["parameters"])] * 2


@pytest.mark.parametrize("ranks", (1, 2, 3, 5))
def test_every_rank_sends_the_bytes_of_the_formula(ranks):
    def run(transport):
        trainer, source, _ = build(
            transport,
            configured(*UNEVEN, MASTER, "batch.micro_batches=2", "replication.algorithm=star"),
        )
        trainer.step(0, *trainer.replica.batch(source, 0))
        sent = []
        for index in (1, 2):
            before = transport.traffic.nbytes
            trainer.step(index, *trainer.replica.batch(source, index))
            sent.append(transport.traffic.nbytes - before)
        return trainer.storage.length * 8, sent

    control, rows = 5 * 8, [(rank + 1) * 32 // ranks - rank * 32 // ranks for rank in range(ranks)]
    rows_nbytes, logits, targets = [[r * 16 * n for r in rows] for n in (16, 256 * 8, 8)]
    children = {1: [0], 2: [1, 0], 3: [2, 0, 0], 5: [3, 1, 0, 0, 0]}[ranks]  # in the binomial tree
    for rank, (nbytes, sent) in enumerate(run_ranks(ranks, run)):
        if rank == 0:
            wanted = (
                nbytes * (ranks - 1).bit_length()
                + sum(rows_nbytes[1:])
                + sum(logits[1:])
                + (ranks - 1) * control
            )
        else:
            wanted = nbytes * (1 + children[rank]) + logits[rank] + targets[rank] + control
        assert sent == [wanted, wanted]
