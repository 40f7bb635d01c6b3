"""Modes local and gossip: an emulation on one rank says what workers that train apart must find."""

import math
from functools import partial
from itertools import islice

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain.config import with_settings
from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done, newest
from mpitrain.run.choices import parse
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.generation import tokens
from tests.runs import go, records
from tests.saving import save
from tests.training import TINY, by_hand, configured, stepped

pytestmark = pytest.mark.slow
STEPS = 7
BASE = [*TINY, "precision.compute=float64", f"run.steps={STEPS}", "model.layers=1", "batch.size=32"]
LOCAL, GOSSIP, MASTER = (f"replication.mode={mode}" for mode in ("local", "gossip", "master"))


def rows_of(rank, ranks, rows=32):
    return range(rank * rows // ranks, (rank + 1) * rows // ranks)


class Worker:
    """One emulated worker: its own parameters by name, and its optimizer's state."""

    def __init__(self, trainer):
        self.values = {e.name: e.view(trainer.parameters).copy() for e in trainer.storage.entries}
        self.states = {name: {} for name in self.values}


def emulated(transport, settings, ranks, mixing, mean):
    """Losses and norms (STEPS, ranks, 2), and the mean of the final parameters; gradients from a trainer of one rank.

    mixing  initial parameters by name -> (workers, step) -> None, which brings the workers together
    mean    a tensor of each worker -> their average
    """
    wanted = configured(*settings)
    trainer, source, _ = build(
        transport, configured(*BASE, "optimizer.name=sgd", "optimizer.clip=0")
    )
    entries = trainer.storage.entries
    workers, told = [Worker(trainer) for _ in range(ranks)], []
    mix = mixing(workers[0].values)
    for step in range(STEPS):
        for rank, worker in enumerate(workers):
            for entry in entries:
                entry.view(trainer.parameters)[...] = worker.values[entry.name]
            rows = rows_of(rank, ranks)
            outcome = trainer.step(step, *source.batch(0, step, 32, rows))
            own = 32 / len(rows)  # the trainer's mean is over 32 rows
            gradients = {e.name: own * e.view(trainer.gradients) for e in entries}
            norm = math.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
            clipped = min(1.0, wanted.optimizer.clip / norm) if wanted.optimizer.clip else 1.0
            for name, entry in zip(worker.values, entries, strict=True):
                worker.values[name] = by_hand(
                    wanted.optimizer.name,
                    entry,
                    clipped * gradients[name],
                    worker.values[name],
                    worker.states[name],
                    outcome.lr,
                    step + 1,
                )
            told.append((own * outcome.loss, norm))
        mix(workers, step)
    final = [mean([worker.values[entry.name] for worker in workers]).ravel() for entry in entries]
    return np.array(told).reshape(STEPS, ranks, 2), np.concatenate(final)


def by_rows(arrays):
    return sum(len(rows_of(rank, len(arrays))) * array for rank, array in enumerate(arrays)) / 32


def alike(arrays):
    return sum(arrays) / len(arrays)


def local(period, lr=1.0, momentum=0.0):
    """After a full period the average by rows, or what Nesterov's momentum makes of it."""

    def mixing(initial):
        starts, speeds = dict(initial), dict.fromkeys(initial, 0.0)

        def mix(workers, step):
            if (step + 1) % period:
                return
            for name in starts:
                change = starts[name] - by_rows([worker.values[name] for worker in workers])
                speeds[name] = momentum * speeds[name] + change
                starts[name] = starts[name] - lr * (change + momentum * speeds[name])
                for worker in workers:
                    worker.values[name] = starts[name].copy()

        return mix

    return mixing


def gossip(initial):
    """After step k the mean with the worker that is 2^k before, k modulo the number of such distances."""

    def mix(workers, step):
        n = len(workers)
        distance = 2 ** (step % max(1, math.ceil(math.log2(n))))
        before = [dict(worker.values) for worker in workers]
        for rank, worker in enumerate(workers):
            other = before[(rank - distance) % n]
            worker.values = {
                name: (value + other[name]) / 2 for name, value in worker.values.items()
            }

    return mix


def trained(transport, settings):
    """Loss and norm of each step, and the parameters of the settled end."""
    trainer, source, _ = build(transport, configured(*settings))
    outcomes = stepped(trainer, source, range(STEPS))
    assert replicas_equal(trainer)
    return np.array([(o.loss, o.grad_norm) for o in outcomes]), used(trainer, trainer.parameters)


def used(trainer, flat):
    """A flat buffer without its padding, which depends on the number of ranks."""
    return np.concatenate([entry.view(flat).ravel() for entry in trainer.storage.entries])


def assert_emulated(ranks, settings, period, mixing, mean):
    """Each worker's own facts in all steps, and at the end of a period those of all."""
    ((told, final),) = run_ranks(1, emulated, settings, ranks, mixing, mean)
    assert np.ptp(told[:, 0, 0]) > 0.01, "the loss must move, or equality says nothing"
    weights = np.array([len(rows_of(rank, ranks)) / 32 for rank in range(ranks)])
    for rank, (facts, parameters) in enumerate(
        run_ranks(ranks, trained, [*settings, f"replication.period={period}"])
    ):
        for step, (loss, norm) in enumerate(facts):
            wanted = told[step, rank]
            if (step + 1) % period == 0 or step + 1 == STEPS:
                wanted = weights @ told[step, :, 0], math.sqrt(weights @ told[step, :, 1] ** 2)
            assert np.all(np.abs(np.array([loss, norm]) - wanted) <= 1e-9), (rank, step)
        assert np.all(np.abs(parameters - final) <= 1e-9 + 1e-9 * np.abs(final)), rank


@pytest.mark.parametrize(
    "mode, ranks, optimizer",
    [
        (LOCAL, 1, "momentum"),
        (LOCAL, 2, "sgd"),
        (LOCAL, 3, "adamw"),
        (LOCAL, 5, "momentum"),
        (GOSSIP, 1, "sgd"),
        (GOSSIP, 2, "adamw"),
        (GOSSIP, 3, "momentum"),
        (GOSSIP, 5, "adamw"),
    ],
)
def test_workers_that_train_apart_equal_a_serial_emulation(mode, ranks, optimizer):
    settings = [*BASE, mode, f"optimizer.name={optimizer}", "optimizer.clip=0.7"]
    apart = (3, local(3), by_rows) if mode == LOCAL else (2, gossip, alike)
    assert_emulated(ranks, settings, *apart)


def test_an_outer_momentum_equals_a_serial_emulation():
    outer = ["replication.outer_lr=0.7", "replication.outer_momentum=0.9", "batch.micro_batches=2"]
    assert_emulated(3, [*BASE, LOCAL, *outer], 2, local(2, 0.7, 0.9), by_rows)


MODES = [
    [LOCAL, "replication.period=3"],
    [LOCAL, "replication.period=3", "replication.outer_momentum=0.5"],
    [GOSSIP],
]


@pytest.mark.parametrize("settings", MODES)
def test_evaluations_use_the_average_and_training_does_not(settings):
    def run(transport, asks):
        trainer, source, _ = build(transport, configured(*BASE, *settings))
        source.held_out = 5
        said = []
        for index in range(STEPS):
            trainer.step(index, *trainer.replica.batch(source, index))
            if asks:
                text = islice(tokens(trainer, [65], 0.8, 40, 0), 4)
                said.append((*trainer.evaluate(source), replicas_equal(trainer), *text))
        trainer.replica.sync()
        return said, trainer.parameters.copy()

    asked, quiet = run_ranks(3, run, True), run_ranks(3, run, False)
    for (said, parameters), (_, unasked) in zip(asked, quiet, strict=True):
        assert said == asked[0][0] and all(equal for _, _, equal, *_ in said) and len(said[0]) == 7
        assert len({loss for loss, *_ in said}) == STEPS
        assert np.array_equal(parameters, unasked) and np.array_equal(parameters, asked[0][1])


@pytest.mark.parametrize("settings", [[MASTER], *MODES])
def test_a_checkpoint_within_a_period_is_all_there_is(settings, tmp_path):
    def run(transport):
        first, source, _ = build(transport, configured(*BASE, *settings))
        source.held_out = 5
        stepped(first, source, range(4))
        path = save(tmp_path, first, Done(4, 128, "run"), keep=1)
        second, _, done = build(transport, first.config, path)
        assert done.step == 4 and first.evaluate(source) == second.evaluate(source)
        facts = [
            [result[:6] for result in stepped(trainer, source, range(4, STEPS))]
            for trainer in (first, second)
        ]
        assert facts[0] == facts[1] and replicas_equal(first) and replicas_equal(second)
        return np.array_equal(first.parameters, second.parameters)

    assert run_ranks(3, run) == [True] * 3


@pytest.mark.parametrize("settings", [[], [MASTER], *MODES])
def test_another_mode_resumes_from_the_average_and_says_so(settings, tmp_path, capfd):
    def begin(transport):
        trainer, source, _ = build(transport, configured(*BASE, *settings))
        stepped(trainer, source, range(4))
        save(tmp_path, trainer, Done(4, 128, "run"), keep=1)
        return {kept.name: used(trainer, kept.array) for kept in trainer.replica.state()}

    def go_on(transport, others):
        trainer, source, _ = build(transport, configured(*BASE, *others), newest(tmp_path))
        found = {kept.name: used(trainer, kept.array) for kept in trainer.replica.state()}
        stepped(trainer, source, [4])
        return found

    then = run_ranks(3, begin)
    state = {
        name: np.mean([kept.get(name, then[0][name]) for kept in then], 0)
        for name in ("first_moment", "second_moment")
    }
    capfd.readouterr()
    for others in ([MASTER], MODES[1]):
        for found in run_ranks(2, go_on, others):
            for name, array in found.items():
                if name in state:
                    assert np.all(np.abs(array - state[name]) <= 1e-12), (others, name)
                else:
                    agreed = {
                        "own_parameters": then[0]["parameters"],
                        "outer_start": then[0]["parameters"],
                        "outer_momentum": 0,
                        **{
                            known: kept
                            for known, kept in then[0].items()
                            if known != "own_parameters"
                        },
                    }
                    assert np.all(array == agreed[name]), (others, name)
        said, moments = capfd.readouterr().err, "first_moment, second_moment"
        names = "first_moment, own_parameters, second_moment" if others in MODES else moments
        line = f"note: {names} in {newest(tmp_path)} starts from its mean over the ranks of dp 3, pp 1, servers 0, tp 1.\n"
        assert said == (line if settings in MODES else "")


def facts(folder, apart=()):
    """Step, losses and norm of each record of a run; but for these steps, whose loss and norm are a worker's own."""
    return [
        tuple(map(record.get, ("step", "loss", "grad_norm", "val_loss")))
        for record in records(folder)
        if ("loss" in record and record["step"] not in apart) or "val_loss" in record
    ]


@pytest.mark.parametrize(
    "mode",
    [[LOCAL], [LOCAL, "replication.outer_lr=0.7", "replication.outer_momentum=0.9"], [GOSSIP]],
)
def test_an_extended_run_equals_one_planned_that_long_bitwise(mode, book, tmp_path):
    settings = ["batch.size=8", "optimizer.schedule=constant", "replication.period=3", *mode]
    settings += ["run.eval_every=4", "checkpoint.every=4", "checkpoint.keep=9"]

    def run(folder, steps, resume="no"):
        out = f"run.out={tmp_path / folder / 'run'}"
        go(3, [*book, *settings, out, f"run.steps={steps}"], resume)

    def saved(folder):
        return {
            (path.parent.name, name, path.name): tensor
            for path in (tmp_path / folder).glob("run/checkpoints/*/*.safetensors")
            for name, tensor in load_file(path).items()
        }

    run("planned", 11)
    run("extended", 4)
    tensors = saved("extended")
    name = "head.norm.gain"
    own = [tensors[key] for key in sorted(tensors) if key[1].startswith(f"own_parameters/{name}/")]
    assert len(own) == 3 and np.ptp(own, 0).any(), "workers must differ, or equality says nothing"
    (model,) = (tensor for (_, key, _), tensor in tensors.items() if key == name)
    right = np.average(own, 0, [2, 3, 3] if LOCAL in mode else None)
    assert np.allclose(model, right, rtol=1e-6, atol=0)
    run("extended", 4, "yes")  # which has nothing left to do, and must spoil nothing
    run("extended", 11, "yes")
    # Step 4 is the end of one run alone.
    assert facts(tmp_path / "extended", [4]) == facts(tmp_path / "planned", [4])
    planned, extended = saved("planned"), saved("extended")
    assert planned.keys() == extended.keys() and len({step for step, *_ in planned}) == 3
    for key, tensor in planned.items():
        assert np.array_equal(tensor, extended[key]), key


@pytest.mark.parametrize("mode, each", [(LOCAL, 0), (GOSSIP, 1)])
def test_a_rank_sends_the_bytes_of_the_formula(mode, each):
    def run(transport):
        trainer, source, _ = build(
            transport, configured(*BASE, mode, "replication.period=3", "replication.algorithm=ring")
        )
        sent = []
        for index in range(6):
            before = transport.traffic.nbytes
            trainer.step(index, *trainer.replica.batch(source, index))
            sent.append(transport.traffic.nbytes - before)
        before = transport.traffic.nbytes
        for _ in range(2):
            trainer.replica.sync()  # once: what has been averaged stays so until the next step
        return trainer.storage.length * 8, sent, transport.traffic.nbytes - before

    for ranks in (1, 2, 5):
        found = run_ranks(ranks, run)
        control = np.sum([sent for _, sent, _ in found], 0) - ranks * each * found[0][0] * (
            ranks > 1
        )
        average = 2 * found[0][0] * (ranks - 1)  # of all ranks together
        parameters = average if mode == LOCAL else 0
        assert sum(settled for _, _, settled in found) == average - parameters
        assert control.tolist() == [0, 0, parameters + 2 * 48 * (ranks - 1)] * 2
        for nbytes, sent, _ in found:
            assert sent[:2] == [each * nbytes * (ranks > 1)] * 2


@pytest.mark.parametrize("mode", (LOCAL, GOSSIP))
def test_a_nan_or_a_stop_of_one_worker_is_known_after_the_period(mode):
    def run(transport):
        trainer, source, _ = build(transport, configured(*BASE, mode, "replication.period=3"))
        found, loss = [], trainer.replica.loss
        for index in range(6):
            is_odd = transport.rank == 1 and index == 1
            trainer.replica.loss = (
                (lambda logits, *_: (np.nan, logits * np.nan)) if is_odd else loss
            )
            outcome = trainer.step(
                index, *trainer.replica.batch(source, index), partial(bool, is_odd)
            )
            found.append((outcome.updated, outcome.nonfinite > 0, outcome.stop))
        assert np.isfinite(trainer.parameters).all()
        return found

    fine = True, False, False
    assert run_ranks(3, run) == [[fine, fine, (False, True, True), fine, fine, fine]] * 3


@pytest.mark.parametrize("mode", ("master", "local", "gossip"))
@pytest.mark.parametrize(
    "setting, law",
    [
        ("replication.wire=fp16", "needs replication.wire none, but it is fp16"),
        ("replication.zero=1", "needs replication.zero 0, but it is 1"),
    ],
)
def test_what_these_modes_cannot_do_is_refused_in_words(mode, setting, law):
    with pytest.raises(ConfigError) as found:
        parse(with_settings({}, [f"replication.mode={mode}", setting]))
    assert law in str(found.value) and "or replication.mode to all-reduce." in str(found.value)
