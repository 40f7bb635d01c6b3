"""A checkpoint of any number of ranks, with what replicas share whole or divided, goes on at any other."""

from itertools import product

import numpy as np
import pytest

from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done, newest
from mpitrain.transport.threads import run_ranks
from tests.saving import save
from tests.training import TINY, configured

pytestmark = pytest.mark.slow
DIVIDED = [
    *product(("a", "aa", "aaa", "aaaa"), (0, 1)),
    ("aaa", 2),
    ("aaaa", 2),
    ("aa", 3),
    ("aaa", 3),
]
LAYOUTS = [
    *((hosts, f"replication.zero={stage}") for hosts, stage in DIVIDED),
    *(
        (hosts, f"replication.zero={stage}", "replication.shard=host")
        for hosts, stage in (("abab", 1), ("aabb", 3))
    ),
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
    trainer, source, done = build(
        transport, configured(*TINY, *settings), newest(folder) if saved else None
    )
    before = whole(trainer)
    indices = range(done.step, done.step + steps)
    losses = [
        trainer.step(index, *trainer.replication.rows.batch(source, index)).loss
        for index in indices
    ]
    trainer.replication.step_end.sync()
    if not saved:
        save(folder, trainer, Done(steps, 12 * steps, "run"), keep=1)
    return losses, before, whole(trainer)


def test_parameters_and_state_come_back_bitwise(tmp_path):
    for number, (hosts, *settings) in enumerate(LAYOUTS):
        folder, truth = tmp_path / str(number), {}
        for _, _, after in run_ranks(
            len(hosts), go, ["model.tied=true", *settings], folder, 2, False, hosts=hosts
        ):
            for key, (start, values) in after.items():
                truth.setdefault(key, {}).update(enumerate(values.tolist(), start))
        for other_hosts, *others in (LAYOUTS[(number + 3) % len(LAYOUTS)], LAYOUTS[number - 2]):
            held = set()
            for _, before, _ in run_ranks(
                len(other_hosts),
                go,
                ["model.tied=true", *others],
                folder,
                0,
                True,
                hosts=other_hosts,
            ):
                for key, (start, values) in before.items():
                    here = range(start, start + len(values))
                    assert [truth[key][i] for i in here] == values.tolist(), (
                        key,
                        hosts,
                        settings,
                        other_hosts,
                        others,
                    )
                    held |= {(key, i) for i in here}
            assert len(held) == sum(map(len, truth.values()))


def test_the_next_ten_losses_are_equal_with_the_state_whole_or_divided(tmp_path):
    run_ranks(3, go, ["replication.zero=1"], tmp_path, 2, False)
    for ranks in (1, 2, 3, 4):
        algorithm = ["replication.algorithm=ring", "optimizer.clip=0"]
        whole_state, divided = (
            run_ranks(ranks, go, [*algorithm, f"replication.zero={stage}"], tmp_path, 10, True)[0][
                0
            ]
            for stage in (0, 1)
        )
        assert np.array_equal(whole_state, divided), ranks
