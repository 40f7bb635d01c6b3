"""A data-parallel trainer in one file. Its losses are those of `mpitrain train`, bit for bit.

    mpitrain launch -n 2 -- python jobs/lessons/train_plain.py [TEXT]

Each rank has the whole model, a replica, and computes its rows of every batch. The gradients of all
ranks are summed, so every rank makes the same update, and the replicas stay equal. `mpitrain train`
does the same with many more choices: pipelines and sharded layers, ZeRO, checkpoints, GPUs.
"""

import math
import sys
from pathlib import Path

import numpy as np

import mpitrain
from mpitrain.data import open_source
from mpitrain.layers.base import Now, backward
from mpitrain.layers.flat import Storage
from mpitrain.ops.device import device_for
from mpitrain.optim import RULES, Optimizer, learning_rate
from mpitrain.parallel.buckets import Buckets
from mpitrain.regions import Piece

SETTINGS = {
    "run": {"steps": 10, "seed": 1},
    "data": {"source": f"text:{Path(mpitrain.__file__).parent / 'README.md'}"},
    "model": {"layers": 2, "width": 32, "heads": 2, "context": 32},
    "batch": {"size": 24, "micro_batches": 2},
    "replication": {"algorithm": "ring", "bucket_mb": 0.02},
    "optimizer": {"name": "adamw", "lr": 0.01, "warmup": 3, "clip": 1.0},
    "device": {"kind": "cpu", "passes": "numpy"},
}


class Replica:
    """This rank's copy of the model: its parameters and gradients, each in one flat array.

    A bucket is a run of units whose gradients are summed by one ring all-reduce. It starts as soon as
    the backward of its last unit is done, while earlier units still compute.
    """

    def __init__(self, ranks, config, vocabulary):
        self.config, model = config, config.model
        self.device = device_for("cpu", passes=config.device.passes)
        self.arena = self.device.arena()  # the memory of activations, used again in each step
        layers = mpitrain.Plain(self.device.ops)
        self.loss = layers.loss()
        self.units = mpitrain.gpt(
            layers,
            vocab=vocabulary,
            context=model.context,
            width=model.width,
            heads=model.heads,
            depth=model.layers,
        )
        # The layout of all tensors in a flat array. Initial values depend on the seed and a tensor's name only.
        self.storage = storage = Storage(self.units, np.float32, ranks.size)
        self.parameters = np.zeros(storage.length, np.float32)
        storage.initialize(self.parameters, config.run.seed, self.device.backend)
        self.weights = storage.weights(self.parameters)  # views, by unit and name
        self.sums = ranks.allocate(
            storage.length, np.float32
        )  # in memory that ranks of a host share
        self.gradients, self.leaves = storage.gradients(self.sums)
        group = mpitrain.Group(ranks, config.replication.algorithm)
        cuts = storage.buckets(1e6 * config.replication.bucket_mb)
        self.buckets = Buckets(group, self.sums, cuts, [{*cut.units} for cut in cuts])
        whole = Piece(0, storage.length, 0)
        self.optimizer = Optimizer(
            RULES[config.optimizer.name],
            config.optimizer,
            storage,
            {whole: (self.parameters, self.sums, None)},  # no mirror in 16 bits
            self.device.ops,
            self.device.backend,
            self.arena,
        )
        # The elements that this rank squares for the norm: an even share, for the ranks add their sums.
        self.own = slice(*(storage.length * (ranks.rank + end) // ranks.size for end in (0, 1)))
        # Loss, square of the norm, elements that are not finite; then requests to stop, and targets that do not count.
        self.control = np.zeros(5)
        self.sum_of_control = mpitrain.bind(ranks, self.control, algorithm="ring")

    def step(self, number, inputs, targets):
        """Make step `number`, from 0, with this rank's rows; return the loss of the whole batch."""
        config = self.config
        self.arena.rewind()
        self.buckets.begin(number)
        for leaf in (leaf for leaves in self.leaves for leaf in leaves):
            leaf.filled = False  # The first gradient of a step overwrites, later ones are added.
        weight = 1 / (config.batch.size * targets.shape[1])  # of each target in the mean
        loss, count = 0.0, config.batch.micro_batches
        for micro, (x, y) in enumerate(
            zip(np.split(inputs, count), np.split(targets, count), strict=True)
        ):
            saved, now = [], Now(number, 0, len(x), True)
            for unit, weights in zip(self.units, self.weights, strict=True):
                x, activations = unit.layer.forward(weights, x, now, self.arena)
                saved.append(activations)
            logits = x.reshape(y.size, -1)
            value, gradient = self.loss.gradient(logits, y.reshape(-1), weight, self.arena)
            loss += weight * float(value)
            gradient = gradient.reshape(x.shape)
            for unit in reversed(range(len(self.units))):
                layer, weights, own = (
                    self.units[unit].layer,
                    self.weights[unit],
                    self.gradients[unit],
                )
                gradient = backward(layer, weights, gradient, saved.pop(), own, self.arena)
                if micro == count - 1:
                    self.buckets.ready(unit)
                self.buckets.poll()
        self.buckets.wait()
        # The control message, so that all ranks know the loss and clip by the same norm.
        squares, nonfinite = self.device.ops.gradient_facts(self.sums[self.own], self.arena)
        self.control[:] = loss, squares, nonfinite, 0, 0
        self.sum_of_control.run()
        loss, squares, nonfinite = self.control[:3].tolist()
        if nonfinite:
            raise FloatingPointError(f"step {number + 1}: {nonfinite:.0f} gradients are not finite")
        clip = min(1.0, config.optimizer.clip / math.sqrt(squares))
        lr = learning_rate(config.optimizer, number, config.run.steps)
        self.optimizer.update(clip, lr, number + 1)
        return loss


def train(ranks, settings=SETTINGS):
    """Train on all ranks; return the losses, which are the same on each."""
    config = mpitrain.parse(settings)
    source = open_source(config.data.source, config.model.context, "float32")
    replica = Replica(ranks, config, source.inputs)
    size, losses = config.batch.size, []
    own = range(*(size * (ranks.rank + end) // ranks.size for end in (0, 1)))  # rows of a batch
    for number in range(config.run.steps):
        inputs, targets = source.batch(config.run.seed, number, size, own)
        losses.append(replica.step(number, inputs, targets))
        if ranks.rank == 0:
            print(f"step {number + 1}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    if sys.argv[1:]:
        SETTINGS["data"]["source"] = f"text:{sys.argv[1]}"
    with mpitrain.ranks() as ranks:
        train(ranks)
