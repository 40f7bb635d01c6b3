"""A checkpoint of any number of ranks, with what replicas share whole or divided, goes on at any other."""

import pytest

from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done, newest
from mpitrain.transport.threads import run_ranks
from tests.saving import save
from tests.training import TINY, configured, stepped

pytestmark = pytest.mark.slow
LAYOUTS = [
    *(
        (hosts, f"replication.zero={stage}")
        for hosts, stage in (("a", 0), ("aaaa", 0), ("aa", 1), ("aaa", 1), ("aaaa", 2), ("aaa", 3))
    ),
    ("abab", "replication.zero=1", "replication.shard=host"),
    ("aabb", "replication.zero=3", "replication.shard=host"),
]
"""Hosts by rank, and settings."""


def whole(trainer):
    """{(name of the buffer, full name): what this rank holds of each tensor, and where it begins in it}."""
    return {
        (kept.name, entry.name): (
            max(start, entry.start) - entry.start,
            kept.array[
                place + max(0, entry.start - start) : place + min(stop, entry.stop) - start
            ].copy(),
        )
        for kept in trainer.replication.kept()
        for start, stop, place in kept.pieces
        for entry in trainer.storage.entries
        if max(start, entry.start) < min(stop, entry.stop)
    }


def go(transport, settings, folder, steps, saved):
    """Some steps from the newest checkpoint or the start; losses, and what was held before and after them."""
    config = configured(*TINY, "model.layers=1", *settings)
    trainer, source, done = build(transport, config, newest(folder) if saved else None)
    before = whole(trainer)
    results = stepped(trainer, source, range(done.step, done.step + steps))
    trainer.replication.step_end.sync()
    if not saved:
        save(folder, trainer, Done(steps, 12 * steps, "run"), keep=1)
    return [result.loss for result in results], before, whole(trainer)


def test_parameters_and_state_come_back_bitwise(tmp_path):
    tied = "model.tied=true"
    for number, (hosts, *settings) in enumerate(LAYOUTS):
        folder, truth = tmp_path / str(number), {}
        written = run_ranks(len(hosts), go, [tied, *settings], folder, 2, False, hosts=hosts)
        for _, _, after in written:
            for key, (start, values) in after.items():
                truth.setdefault(key, {}).update(enumerate(values.tolist(), start))
        for into, *others in (LAYOUTS[(number + 3) % len(LAYOUTS)], LAYOUTS[number - 2]):
            elements = set()
            read = run_ranks(len(into), go, [tied, *others], folder, 0, True, hosts=into)
            for _, before, _ in read:
                for key, (start, values) in before.items():
                    here = range(start, start + len(values))
                    assert [truth[key][i] for i in here] == values.tolist(), (key, hosts, into)
                    elements |= {(key, i) for i in here}
            assert len(elements) == sum(map(len, truth.values()))


def test_the_next_ten_losses_are_equal_with_the_state_whole_or_divided(tmp_path):
    run_ranks(3, go, ["replication.zero=1"], tmp_path, 2, False)
    for ranks in (2, 3):
        settings = ["replication.algorithm=ring", "optimizer.clip=0"]
        whole_state, divided = (
            run_ranks(ranks, go, [*settings, f"replication.zero={stage}"], tmp_path, 10, True)
            for stage in (0, 1)
        )
        assert whole_state[0][0] == divided[0][0], ranks
