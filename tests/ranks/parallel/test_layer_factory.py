"""Layers in parts, stages and replicas together equal one rank: a set of layers made for the purpose, in tests/cases."""

import numpy as np
import pytest

from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import Plain
from mpitrain.models.gpt import gpt
from mpitrain.ops.device import device_for
from mpitrain.optim import learning_rate
from mpitrain.parallel.grid import Axes, Grid, share
from mpitrain.parallel.modes import replication_for
from mpitrain.parallel.replication.protocol import ReplicationContext, StepInput
from mpitrain.parallel.replication.step_end import weight_of
from mpitrain.pipeline.partition import assign_units
from mpitrain.pipeline.stage import Stage
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.cases.sharded import Sharded
from tests.training import configured

GPT = {"vocab": 11, "context": 7, "width": 16, "heads": 4, "depth": 1, "tied": True}
ROWS, STEPS, MICRO_BATCHES = 7, 3, 2
SETTINGS = [
    "precision.compute=float64",
    f"batch.size={ROWS}",
    f"batch.micro_batches={MICRO_BATCHES}",
    "optimizer.warmup=0",
    "optimizer.lr=0.01",
    "optimizer.clip=0.5",
    "run.steps=3",
]
TOKENS = np.random.default_rng(0).integers(GPT["vocab"], size=(STEPS, ROWS, GPT["context"] + 1))


def alone(transport):
    """Losses and norms of one rank, its parameters, their number."""
    layers = Plain(device_for("cpu").ops)
    trainer = Trainer(transport, gpt(layers, **GPT), configured(*SETTINGS), layers.loss())
    outcomes = [trainer.step(index, rows[:, :-1], rows[:, 1:]) for index, rows in enumerate(TOKENS)]
    return (
        [(o.loss, o.grad_norm) for o in outcomes],
        trainer.storage.parameter_count,
        {e.name: e.view(trainer.parameters).copy() for e in trainer.storage.entries},
    )


def together(transport, axes):
    """Losses and norms that a rank of many is told, what it counts, and {name: (description, values)} of what it holds."""
    config, device = configured(*SETTINGS), device_for("cpu")
    arena, backend = device.arena(), device.backend
    place = axes.coords(transport.rank)
    grid = Grid(transport, axes)
    layers = Sharded(grid.tp)
    units = gpt(layers, **GPT)
    stages, tied = assign_units(units, [2, 2] if axes.pp == 2 else [4], range(axes.pp))
    grid.place_model(range(axes.pp), tied)
    storage = Storage(stages[place.pp], "float64", axes.dp)
    replication = replication_for(
        ReplicationContext(config, grid, storage, parse_wire("none"), device, arena, layers.loss())
    )
    stage = Stage(stages[place.pp], replication, arena)
    is_first, is_last = place.pp == 0, place.pp == axes.pp - 1
    outcomes = []
    for index, rows in enumerate(TOKENS):
        own = share(ROWS, place.dp, axes.dp)
        replication.step_end.begin(index)
        stage.begin(MICRO_BATCHES)
        loss, scale = 0.0, weight_of(ROWS * GPT["context"])
        for micro in range(MICRO_BATCHES):
            here = share(len(own), micro, MICRO_BATCHES)
            part = rows[own.start + here.start : own.start + here.stop]
            shape = (len(here), GPT["context"], GPT["width"])

            def received(peer, shape=shape):
                array = arena.take(shape, np.float64)
                grid.pp.transport.recv(array, peer)
                return array

            y = stage.forward(
                micro, backend.from_host(part[:, :-1]) if is_first else received(place.pp - 1)
            )
            if is_last:
                targets = backend.from_host(part[:, 1:]).reshape(-1)
                value, dy = replication.rows.loss(y.reshape(len(targets), -1), targets, scale)
                loss += scale * value
                dy = dy.reshape(y.shape)
            else:
                grid.pp.transport.send(y, place.pp + 1)
                dy = received(place.pp + 1)
            dx = stage.backward(micro, dy)
            if not is_first:
                grid.pp.transport.send(dx, place.pp - 1)
            del y, dy, dx
        lr = learning_rate(config.optimizer, index, STEPS)
        outcomes.append(
            replication.step_end.finish(StepInput(index, [loss] if grid.reports_loss else [], lr))
        )
    assert arena.live == 0
    return (
        [(o.loss, o.grad_norm) for o in outcomes],
        storage.parameter_count,
        {
            e.name: (e.parameter, e.view(replication.store.parameters).copy())
            for e in storage.entries
        },
    )


@pytest.mark.parametrize(
    "axes",
    [Axes(tp=1), Axes(tp=2), Axes(tp=3), Axes(tp=4), Axes(dp=3, pp=2), Axes(tp=2, dp=2, pp=2)],
    ids=lambda axes: f"tp {axes.tp} dp {axes.dp} pp {axes.pp}",
)
def test_parts_of_layers_stages_and_replicas_equal_one_rank(axes):
    ((truth, count, whole),) = run_ranks(1, alone)
    found = run_ranks(axes.ranks, together, axes)
    assert (
        sum(
            counted for rank, (_, counted, _) in enumerate(found) if axes.coords(rank)[:2] == (0, 0)
        )
        == count
    )
    for told, _, tensors in found:
        assert np.all(np.abs(np.array(told) - truth) <= 1e-9)
        for name, (parameter, values) in tensors.items():
            assert np.all(np.abs(values - parameter.part_of(whole[name])) <= 1e-9), name
            if parameter.holders:
                assert all(
                    np.array_equal(values, others[name][1])
                    for _, _, others in found
                    if name in others and others[name][0].slices == parameter.slices
                ), name
