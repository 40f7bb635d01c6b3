"""Asynchronous and bounded servers: one worker has the bits of a serial run, several what each server's log says."""

import random
import time
from typing import NamedTuple

import numpy as np
import pytest

from mpitrain.layers.flat import Storage, dealt
from mpitrain.optim import learning_rate
from mpitrain.parallel.servers import Server, Worker
from mpitrain.regions import share
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.training import TINY, by_hand, configured, curves

pytestmark = pytest.mark.slow
STEPS = 8
SERVER = [*TINY, "replication.mode=server", f"run.steps={STEPS}", "checkpoint.every=3"]


class Applied(NamedTuple):
    """A line of the log that this file keeps of a server: the update that a worker's gradient became.

    server   counted among the servers
    version  updates that the parameters had when the worker pulled them
    update   updates before this one
    """

    server: int
    worker: int
    version: int
    update: int
    ticket: int


def logged(server):
    """The log of a server, to which every update will be added."""
    log, update = [], server._update_from

    def noting(worker, numbers):
        ticket, _, _, version = numbers[:4]
        log.append(Applied(server._number, worker, int(version), server._updates, int(ticket)))
        return update(worker, numbers)

    server._update_from = noting
    return log


def late(transport, config, delay=0.0):
    """Every step's outcome, the settled parameters by name, and a server's log."""
    trainer, source, _ = build(transport, config)
    replica, chance = trainer.replica, random.Random(transport.rank)
    outcomes, log = [], logged(replica) if trainer.grid.is_server else None
    for index in range(config.run.steps):
        own = None
        for number in replica.steps(index, lambda: False):
            time.sleep(delay * chance.random())
            own = trainer.step(number, *replica.batch(source, number))
        outcomes.append(replica.outcome(index, own)._replace(comm_s=0.0))
    assert replicas_equal(trainer) and trainer.evaluate(source)
    if trainer.grid.is_server:
        held = {kept.name: len(kept.array) for kept in replica.state()}
        assert (
            set(held) == {"parameters", "first_moment", "second_moment"}
            and len(set(held.values())) == 1
        )
        return outcomes, None, log
    return (
        outcomes,
        {e.name: e.view(trainer.parameters).copy() for e in trainer.storage.entries},
        None,
    )


def emulated(config, workers, servers, logs):
    """The parameters after each server's updates in the order of its log, each gradient from the versions it was pulled at."""

    def run(transport):
        trainer, source, _ = build(
            transport,
            configured(
                *[s for s in TINY if "bucket" not in s],
                "precision.compute=float64",
                "model.tied=true",
            ),
        )
        storage = Storage(trainer.units, "float64", workers)
        owner = {
            entry.name: server
            for server, pieces in enumerate(dealt(storage.spans, servers))
            for entry in storage.entries
            for piece in pieces
            if piece.start <= entry.start < piece.stop
        }
        assert len(owner) == len(storage.entries)
        entries = {entry.name: entry for entry in trainer.storage.entries}
        versions = [
            [
                {
                    name: entries[name].view(trainer.parameters).copy()
                    for name, of in owner.items()
                    if of == server
                }
            ]
            for server in range(servers)
        ]
        states, pulled, gradients = {name: {} for name in owner}, {}, {}
        for log in logs:
            for applied in log:
                pulled.setdefault(applied.ticket, {})[applied.server] = applied.version

        def gradient(ticket):
            if ticket not in gradients:
                for server, version in pulled[ticket].items():
                    for name, value in versions[server][version].items():
                        entries[name].view(trainer.parameters)[...] = value
                rows = share(config.batch.size, ticket % workers, workers)
                inputs, targets = source.batch(0, ticket // workers, config.batch.size, rows)
                trainer.replica.rows_of_update = len(rows)
                trainer.replica.finish = lambda totals: None  # and update nothing
                trainer.step(0, inputs, targets)
                found = {name: entries[name].view(trainer.gradients).copy() for name in owner}
                norm = np.sqrt(sum((value**2).sum() for value in found.values()))
                gradients[ticket] = {
                    name: value * min(1.0, config.optimizer.clip / norm)
                    for name, value in found.items()
                }
            return gradients[ticket]

        left = [list(log) for log in logs]
        while any(left):
            server = next(
                s
                for s in range(servers)
                if left[s]
                and all(
                    len(versions[other]) > version
                    for other, version in pulled[left[s][0].ticket].items()
                )
            )
            applied = left[server].pop(0)
            lr = learning_rate(config.optimizer, applied.ticket // workers, config.run.steps)
            stale = applied.update - applied.version
            lr *= 1 / (1 + stale) if config.replication.async_lr == "staleness" else 1 / workers
            versions[server].append(
                {
                    name: by_hand(
                        "adamw",
                        entries[name],
                        gradient(applied.ticket)[name],
                        value,
                        states[name],
                        lr,
                        applied.update + 1,
                    )
                    for name, value in versions[server][-1].items()
                }
            )
        return {name: value for each in versions for name, value in each[-1].items()}

    return run_ranks(1, run)[0]


@pytest.mark.parametrize("update", ("async", "bounded"))
@pytest.mark.parametrize("servers", (1, 2))
def test_one_worker_has_the_bits_of_a_serial_run(update, servers):
    losses, norms, parameters = curves(1, *TINY, steps=20)
    settings = [
        *TINY,
        "replication.mode=server",
        f"replication.update={update}",
        f"replication.servers={servers}",
    ]
    every = run_ranks(1 + servers, late, configured(*settings))
    assert np.array_equal(losses, [o.loss for o in every[0][0]]) and np.array_equal(
        norms, [o.grad_norm for o in every[0][0]]
    )
    assert np.array_equal(
        parameters, np.concatenate([value.ravel() for value in every[0][1].values()])
    )
    assert all(other[0] == every[0][0] for other in every)


@pytest.mark.parametrize(
    "update, workers, servers, lr",
    [
        ("async", 3, 2, "1/workers"),
        ("async", 2, 1, "staleness"),
        ("bounded", 3, 1, "1/workers"),
        ("bounded", 3, 2, "staleness"),
    ],
)
def test_async_workers_equal_a_serial_emulation_of_the_log(update, workers, servers, lr):
    config = configured(
        *SERVER,
        f"replication.update={update}",
        f"replication.servers={servers}",
        "replication.staleness=1",
        f"replication.async_lr={lr}",
        "precision.compute=float64",
        "model.tied=true",
        "batch.size=10",
    )
    every = run_ranks(workers + servers, late, config, 0.01)
    outcomes, parameters, _ = every[0]
    logs = [log for *_, log in every[workers:]]
    assert all(other[0] == outcomes for other in every), "all ranks are told the same"
    for number, log in enumerate(logs):
        assert sorted(applied.ticket for applied in log) == list(range(STEPS * workers))
        assert [applied.update for applied in log] == list(range(len(log))) and {
            applied.server for applied in log
        } == {number}
        stale = [applied.update - applied.version for applied in log]
        assert update == "async" or max(stale) <= (workers - 1) * 3
        assert max(stale) > 0 and max(stale) <= max(o.extras["staleness"] for o in outcomes)
    assert update == "async" or max(o.extras["lead"] for o in outcomes) <= 1
    wanted = emulated(config, workers, servers, logs)
    for name, value in parameters.items():
        assert np.all(np.abs(value - wanted[name]) <= 1e-9 + 1e-9 * np.abs(wanted[name])), name


def test_bounded_by_nothing_is_the_synchronous_code():
    def kind(transport):
        trainer, *_ = build(
            transport, configured(*SERVER, "replication.update=bounded", "replication.staleness=0")
        )
        return type(trainer.replica)

    assert run_ranks(3, kind) == [Worker, Worker, Server]
