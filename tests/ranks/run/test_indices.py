"""A token or a target that the model does not have is refused before it is computed with, and no
rank waits for another.
"""

import numpy as np
import pytest

from mpitrain.errors import CommError, DataError
from mpitrain.layers.base import Unit, normal
from mpitrain.layers.plain import Plain, Sequential
from mpitrain.ops.device import ops_for
from mpitrain.run.build import build
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel.test_training import configured

V = 11
TINY = [
    "model.layers=2",
    "model.width=8",
    "model.heads=2",
    "model.context=4",
    "batch.size=4",
    "run.steps=9",
]


class Tokens:
    """Rows of tokens; in the global batch of a step the element `at` of inputs or targets is
    `wrong`.
    """

    form, shape, inputs, classes, held_out = "tokens", (4,), V, V, 4

    def __init__(self, what="", wrong=0, at=(2, 3), step=0, dtype=np.int64):
        self.what, self.wrong, self.at, self.step, self.dtype = what, wrong, at, step, dtype

    def batch(self, seed, step, size, rows, before=None):
        tokens = np.random.default_rng([seed, step]).integers(V, size=(size, 5)).astype(self.dtype)
        arrays = {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
        if self.what and step == self.step:
            arrays[self.what][self.at] = self.wrong
        return tuple(array[rows.start : rows.stop] for array in arrays.values())

    def held_out_rows(self, rows):
        inputs, targets = self.batch(9, self.step, 4, range(4))
        return inputs[list(rows)], targets[list(rows)]


def refusal(ranks, source, *settings, call="step"):
    """What the first rank that refuses says, and which type it raises."""

    def go(transport):
        trainer = build(transport, configured(*TINY, *settings), source=source).trainer
        if call == "evaluate":
            trainer.evaluate(source)
        for index in range(3 if call == "step" else 0):
            trainer.step(index, *trainer.replica.batch(source, index))

    with pytest.raises((DataError, CommError)) as raised:
        run_ranks(ranks, go)
    return raised.value


@pytest.mark.parametrize("what", ["tokens", "targets"])
@pytest.mark.parametrize("wrong", [-101, -1, V, 2**40])
def test_one_rank_refuses_it_and_says_where_it_is(what, wrong):
    error = refusal(1, Tokens(what, wrong, step=1))
    assert isinstance(error, DataError) and error.agreed and error.exit_code == 2
    assert (
        error.law
        == f"{what.capitalize()} must lie in 0..{V - 1}, but step 2 on rank 0 (localhost) has {wrong} at [2, 3]."
    )


@pytest.mark.parametrize(
    "ranks, settings, rank",
    [
        (3, ["layout.dp=3", "batch.size=6"], 1),
        (2, ["layout.tp=2"], "[01]"),
        (2, ["layout.pp=2"], "[01]"),
        (4, ["layout.tp=2", "layout.sequence_parallel=true"], "[23]"),
        (3, ["replication.mode=server", "replication.update=sync"], 1),
        (2, ["replication.mode=local"], 1),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("what, wrong", [("tokens", V), ("targets", -101)])
def test_of_several_ranks_one_ends_all_and_names_itself(ranks, settings, rank, what, wrong):
    error = refusal(ranks, Tokens(what, wrong), *settings)
    assert isinstance(error, CommError)
    assert (
        rank if isinstance(rank, int) else ""
    ) == "" or f"{rank} (localhost) has {wrong}" in error.law
    assert f"{what.capitalize()} must lie in 0..{V - 1}," in error.law


@pytest.mark.parametrize("what", ["tokens", "targets"])
def test_held_out_rows_are_looked_at_too(what):
    assert (
        f"{what.capitalize()} must lie in 0..{V - 1}"
        in refusal(1, Tokens(what, V), call="evaluate").law
    )


@pytest.mark.compile
@pytest.mark.parametrize("what, wrong", [("tokens", V), ("targets", -101)])
def test_on_a_device_it_is_refused_before_it_gets_there(what, wrong):
    assert f"has {wrong} at [2, 3]" in refusal(1, Tokens(what, wrong), "device.kind=cuda-sim").law


@pytest.mark.parametrize("ranks, settings", [(1, []), (2, ["layout.tp=2"])])
@pytest.mark.parametrize("dtype", [np.uint16, np.int8, np.uint64])
def test_integers_of_any_width_train_as_int64_do(ranks, settings, dtype):
    def losses(transport, source):
        trainer = build(transport, configured(*TINY, *settings), source=source).trainer
        return [
            trainer.step(index, *trainer.replica.batch(source, index)).loss for index in range(3)
        ]

    assert run_ranks(ranks, losses, Tokens(dtype=dtype)) == run_ranks(ranks, losses, Tokens())


@pytest.mark.parametrize("dtype", [np.float32, bool])
def test_what_are_no_integers_is_refused(dtype):
    assert f"0 (localhost) are {np.dtype(dtype)}." in refusal(1, Tokens(dtype=dtype)).law


WRONG_SHAPES = {
    "one for each row": lambda x, y: (x, y[:, 0]),
    "one column less": lambda x, y: (x, y[:, 1:]),
    "one row less": lambda x, y: (x, y[1:]),
    "none": lambda x, y: (x, y[:0]),
    "turned": lambda x, y: (x, y.reshape(2, -1)),
}


def said_to(changed, ranks, *settings):
    """What a step of rows that are `changed` is refused with."""

    def go(transport):
        source = Tokens()
        trainer = build(transport, configured(*TINY, *settings), source=source).trainer
        trainer.step(0, *changed(*trainer.replica.batch(source, 0)))

    with pytest.raises((DataError, CommError)) as raised:
        run_ranks(ranks, go)
    return raised.value.law


@pytest.mark.parametrize("ranks, settings", [(1, []), (2, []), (2, ["layout.pp=2"])])
def test_more_rows_than_this_ranks_share_are_refused(ranks, settings):
    def twice(*arrays):
        return tuple(np.concatenate([array, array]) for array in arrays)

    share = 4 if settings else 4 // ranks
    law = f"at most its share of batch.size rows, {share}, but step 1 on rank"
    assert law in said_to(twice, ranks, *settings)


@pytest.mark.parametrize("ranks, settings", [(1, []), (2, ["layout.pp=2"]), (2, ["layout.tp=2"])])
@pytest.mark.parametrize("changed", WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_targets_of_another_shape_than_the_predictions_are_refused(changed, ranks, settings):
    assert "(4, 4)," in said_to(changed, ranks, *settings)


def test_a_users_own_embedding_and_loss_are_checked():
    def go(transport, tokens, classes):
        layers = Plain(ops_for("cpu"))
        units = [
            Unit("in", Sequential(embedding=layers.embedding(V, 4, 8), norm=layers.norm(8))),
            Unit("out", layers.linear(8, 3, normal(0.1))),
        ]
        Trainer(transport, units, configured(*TINY)).step(0, tokens, classes)

    good = np.zeros((4, 4), np.int64)
    run_ranks(1, go, good, good + 2)
    with pytest.raises(
        DataError,
        match=r"Tokens must lie in 0\.\.10, but step 1 on rank 0 \(localhost\) has 11 at \[0, 0\]",
    ):
        run_ranks(1, go, good + 11, good)
    with pytest.raises(DataError, match=r"Targets must lie in 0\.\.2, but .* has 3 at \[0, 0\]"):
        run_ranks(1, go, good, good + 3)
