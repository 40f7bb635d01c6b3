"""Pipelines whose stages update by themselves: bit for bit what a serial emulation in one process says.

The emulation knows no stream: it has the versions that the published recurrences name, and takes each micro-batch's gradient on
one rank, with every stage's parameters put in their place.
"""

from functools import partial
from itertools import pairwise
from operator import attrgetter

import numpy as np
import pytest

from mpitrain.machine.backend import Arena
from mpitrain.ops.device import host_ops
from mpitrain.optim import learning_rate
from mpitrain.parallel.weight_stashing import PipeDream
from mpitrain.pipeline.partition import cut
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.regions import share
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.saving import save
from tests.training import configured

host = host_ops()

pytestmark = pytest.mark.slow
STEPS, ROWS = 6, 13  # ragged, whatever it is divided by
SMALL = [
    "model.layers=3",
    "model.width=8",
    "model.heads=2",
    "model.context=8",
    f"batch.size={ROWS}",
    f"run.steps={STEPS}",
    "optimizer.warmup=2",
    "optimizer.lr=0.02",
    "optimizer.clip=0.3",
    "precision.compute=float64",
    "run.eval_rows=5",
    "checkpoint.every=4",
]  # there the pipe runs empty


def layout(name, pp, micro_batches, *settings):
    return [
        *SMALL,
        f"pipeline.schedule={name}",
        f"layout.pp={pp}",
        f"batch.micro_batches={micro_batches}",
        *settings,
    ]


def driven(trainer, source, steps, stop_at=None):
    """The outcomes of these steps as the loop of a run asks for them, up to one that says to stop."""
    replica, outcomes = trainer.replica, {}
    for index in steps:
        own = None
        for number in replica.steps(index, lambda: False):
            stop = number == stop_at and trainer.transport.rank == trainer.transport.size - 1
            own = trainer.step(number, *replica.batch(source, number), partial(bool, stop))
        outcomes[index] = replica.outcome(index, own)._replace(comm_s=0.0, extras={})
        if outcomes[index].stop:
            break
    return outcomes


def streamed(transport, settings, stop_at=None, folder=None, saved=None):
    """Outcomes, this rank's parameters and moments by name, their descriptions, and what an evaluation says."""
    trainer, source, done = build(transport, configured(*settings), saved)
    outcomes = driven(trainer, source, range(done.step, STEPS), stop_at)
    if folder:
        save(folder, trainer, Done(max(outcomes) + 1, 0, "run"), keep=9)
    assert replicas_equal(trainer)
    evaluated = trainer.evaluate(source)
    found = {}
    for kept in trainer.replica.state():
        found |= {
            (kept.name, entry.name): entry.view(kept.array).copy()
            for entry in trainer.storage.entries
        }
    assert trainer.arena.live == 0
    return (
        outcomes,
        found,
        {entry.name: entry.parameter for entry in trainer.storage.entries},
        evaluated,
    )


def emulated(settings, ends):
    """The same on one rank, with a pipe that runs empty after the steps `ends` and no other, up to the last of them."""
    config = configured(*settings)
    stages, m, every = (
        config.layout.pp,
        config.batch.micro_batches,
        config.pipeline.schedule == "async",
    )
    replicas, size, o = config.layout.dp or 1, config.batch.size, config.optimizer
    alone = [s for s in settings if not s.startswith(("layout.", "pipeline."))]

    def run(transport):
        trainer, source, _ = build(
            transport, configured(*alone, "batch.micro_batches=1", "optimizer.clip=0")
        )
        storage, replica = trainer.storage, trainer.replica
        flat, gradients = replica.parameters, trainer.gradients
        held = {kept.name: kept.array for kept in replica.state()}
        replica.finish = lambda totals: sum(
            w * float(loss) for w, loss in zip(replica.weights, replica.losses, strict=True)
        )  # and update nothing
        bounds = np.cumsum([0, *cut(trainer.units, stages, "")])
        spans = [
            slice(storage.spans[a].start, storage.spans[b - 1].stop) for a, b in pairwise(bounds)
        ]

        def gradient(step, micro, weights):
            """What a micro-batch's rows in all replicas have of its step's mean loss, and each replica's gradient."""
            _put(replica, weights)
            rows = [
                [*mine][chunk.start : chunk.stop]
                for replica in range(replicas)
                for mine in [share(size, replica, replicas)]
                for chunk in [share(len(mine), micro, m)]
            ]
            used, loss, made = sum(map(len, rows)) if every else size, 0.0, []
            replica.rows_of_update = used
            for mine in rows:
                chunk = trainer.step(
                    0, *source.batch(config.run.seed, step, size, range(mine[0], mine[-1] + 1))
                )
                loss += chunk * used / size
                made.append(gradients.copy())
            return loss, np.array(made)

        def update(here, step, count, gradient):
            """Update the stage that has this chunk of the flat buffer; the square of its gradient's norm."""
            mine = gradient[here].copy()
            norm = np.sqrt(host.gradient_facts(mine, Arena())[0])
            scale = o.clip / norm if 0 < o.clip < norm else 1.0
            for start, stop, decayed in storage.runs(here.start, here.stop, attrgetter("decayed")):
                chunk = slice(start, stop)
                host.adamw(
                    flat[chunk],
                    mine[start - here.start : stop - here.start],
                    held["first_moment"][chunk],
                    held["second_moment"][chunk],
                    scale=scale,
                    lr=learning_rate(o, step, config.run.steps),
                    beta1=o.beta1,
                    beta2=o.beta2,
                    eps=o.epsilon,
                    step=count + 1,
                    weight_decay=o.weight_decay if decayed else 0.0,
                    arena=Arena(),
                )
            return norm**2

        versions, outcomes, begin, start = (
            [flat.copy()],
            {},
            0,
            0,
        )  # `start`: the version of the empty pipe, after `begin`
        for step in range(max(ends) + 1):
            losses, squares, summed = 0.0, 0.0, 0.0
            for micro in range(m):
                weights = np.empty_like(flat)
                for stage, here in enumerate(spans):
                    late = (
                        (step - begin) * m + micro - (stages - 1 - stage)
                        if every
                        else step - begin - 1
                    )
                    weights[here] = versions[start + max(0, late)][here]
                loss, made = gradient(step, micro, weights)
                losses, summed = losses + loss, made if every else summed + made
                if every or micro == m - 1:
                    flat[:] = versions[-1]
                    squares += sum(
                        update(here, step, step * m + micro if every else step, summed.sum(0))
                        for here in spans
                    )
                    versions.append(flat.copy())
            outcomes[step] = losses, np.sqrt(squares / (m if every else 1))
            if step in ends:
                begin, start = step + 1, len(versions) - 1
        return outcomes, {
            (what, e.name): e.view(array).copy()
            for what, array in held.items()
            for e in storage.entries
        }

    return run_ranks(1, run)[0]


def _put(replica, weights):
    """Compute with these from now on."""
    replica.parameters[:] = weights
    replica.restore({})  # rounds them, in half precision


def assert_equal(ranks, truth, is_equal=np.array_equal):
    outcomes, wanted = truth
    names = set()
    for told, found, parameters, evaluated in ranks:
        for step in told:
            assert np.allclose(
                [told[step].loss, told[step].grad_norm], outcomes[step], rtol=1e-12, atol=0
            ), step
        names |= found.keys()
        for (what, name), values in found.items():
            assert is_equal(values, parameters[name].part_of(wanted[what, name])), (what, name)
        assert evaluated == ranks[0][3] and told == ranks[0][0]
    assert names == wanted.keys()


def near(one, other):
    return np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(other))


@pytest.mark.parametrize(
    "name, pp, m",
    [("async", 1, 2), ("async", 2, 2), ("async", 4, 5), ("async-2bw", 2, 5), ("async-2bw", 4, 4)],
)
def test_every_micro_batch_uses_the_parameters_of_its_forward(name, pp, m):
    settings = layout(name, pp, m)
    assert_equal(run_ranks(pp, streamed, settings), emulated(settings, (3, 5)))


@pytest.mark.parametrize("dp, pp", [(1, 3), (2, 2)])
def test_the_async_control_message_delays_no_rank(dp, pp, monkeypatch):
    """Of a ring every round waits for the one before on each rank, which may wait for something else meanwhile."""
    monkeypatch.setattr(PipeDream, "poll", lambda self: self.buckets.poll())
    settings = layout(
        "async", pp, pp, f"layout.dp={dp}", "replication.algorithm=ring", "optimizer.clip=0"
    )
    assert_equal(run_ranks(dp * pp, streamed, settings), emulated(settings, (3, 5)))


@pytest.mark.parametrize("name", STREAMS)
def test_replicas_stay_equal_bitwise_in_every_layout(name):
    settings = layout(
        name, 2, 3, "layout.dp=2", "optimizer.clip=0"
    )  # a norm is summed by blocks that depend on padding
    assert_equal(run_ranks(4, streamed, settings), emulated(settings, (3, 5)))
    settings = layout(name, 2, 2, "layout.tp=2")
    assert_equal(run_ranks(4, streamed, settings), emulated(settings, (3, 5)), near)


def test_in_half_precision_what_is_kept_are_the_rounded_parameters():
    settings = layout("async", 2, 3, "precision.compute=bfloat16", "optimizer.clip=0")
    wanted = emulated(settings, (3, 5))
    for _, found, parameters, _ in run_ranks(2, streamed, settings):
        for (what, name), values in found.items():
            assert np.array_equal(values, parameters[name].part_of(wanted[1][what, name])), (
                what,
                name,
            )


@pytest.mark.parametrize(
    "name, pp, m, end", [("async", 2, 2, 2), ("async", 4, 4, 2), ("async-2bw", 2, 3, 2)]
)
def test_a_stop_empties_the_pipeline_and_a_resume_continues(name, pp, m, end, tmp_path):
    settings = layout(name, pp, m)
    stopped = run_ranks(pp, streamed, settings, 0, tmp_path)
    assert_equal(stopped, emulated(settings, (end,)))
    for told, *_ in stopped:
        assert [step for step in told if told[step].stop] == [end] == [max(told)]
    (path,) = tmp_path.iterdir()
    resumed = run_ranks(pp, streamed, settings, None, None, path)
    assert all([*told] == [*range(end + 1, STEPS)] for told, *_ in resumed)
    assert_equal(resumed, emulated(settings, (end, 3, 5)))


def test_parameters_between_steps_are_those_of_an_empty_pipeline():
    settings = layout("async", 2, 4)

    def run(transport):
        trainer, source, _ = build(transport, configured(*settings))
        for index in range(2):
            trainer.step(index, *trainer.replica.batch(source, index))
        evaluated = trainer.evaluate(source)
        return evaluated, trainer.tensors()

    _, wanted = emulated(settings, (1,))
    found = run_ranks(2, run)
    assert found[0][0] == found[1][0]
    for _, tensors in found:
        assert all(
            np.array_equal(values, wanted["parameters", name]) for name, values in tensors.items()
        )


def test_nonfinite_updates_are_skipped_on_all_ranks():
    settings = layout(
        "async",
        2,
        2,
        "precision.compute=float32",
        "optimizer.name=sgd",
        "optimizer.lr=1e30",
        "optimizer.clip=0",
    )

    def quiet(transport):
        with np.errstate(all="ignore"):
            return streamed(transport, settings)

    (outcomes, found, *_), (others, more, *_) = run_ranks(2, quiet)
    assert (
        str(outcomes) == str(others)
        and outcomes[0].updated + outcomes[5].updated <= 1
        and outcomes[5].nonfinite > 0
    )
    assert all(np.isfinite(values).all() for values in (*found.values(), *more.values()))
