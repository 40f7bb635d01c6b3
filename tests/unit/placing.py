"""Parameters and gradients of a list of units, laid out for tests in plain arrays instead of flat buffers."""

import zlib

import numpy as np

from mpitrain.layers.base import READING, Gradient


def place(units, seed, dtype):
    """(weights, gradients) by unit name, nested as layers want them; a tied name holds the earlier unit's array."""
    weights, gradients, arrays, slots = {}, {}, {}, {}
    for unit in units:
        weights[unit.name], gradients[unit.name] = {}, {}
        for parameter in unit.layer.parameters():
            full = unit.tied.get(parameter.name, f"{unit.name}.{parameter.name}")
            if full not in arrays:
                generator = np.random.default_rng([seed, zlib.crc32(full.encode())])
                arrays[full] = parameter.draw(generator, parameter.shape).astype(dtype)
                slots[full] = Gradient(np.full(parameter.shape, np.nan, dtype))
            assert arrays[full].shape == parameter.shape
            _nest(weights[unit.name], parameter.name, arrays[full])
            _nest(gradients[unit.name], parameter.name, slots[full])
    return weights, gradients, arrays, slots


def _nest(tree, name, leaf):
    *path, last = name.split(".")
    for step in path:
        tree = tree.setdefault(step, {})
    tree[last] = leaf


def run(units, weights, gradients, x, loss, arena):
    """One forward and backward; `loss` maps the output to (value, its gradient). Returns the value."""
    saved = []
    for unit in units:
        x, kept = unit.layer.forward(weights[unit.name], x, READING, arena)
        saved.append(kept)
    value, dy = loss(x)
    for unit in reversed(units):
        dy, pending = unit.layer.backward_input(weights[unit.name], dy, saved.pop(), arena)
        unit.layer.backward_weight(pending, gradients[unit.name], arena)
    return value
