"""Low-rank adapters of linear layers (LoRA): a frozen weight plus a trained product of two matrices.

    y = x W^T + b + s (x A^T) B^T         W (O, I) frozen; A (r, I); B (O, r); s = alpha / r

A has random initial values, and B is 0 at first. So an adapted layer starts as the layer without
adapters.
An adapter covers all outputs, or one of several that are joined, such as the queries of qkv.

With layout.tp one matrix of an adapter is split as the weight of its layer. The other one is
replicated, and each rank computes a summand of its gradient:

    layer             split                        replicated
    column-parallel   B, as the rows of W          A
    row-parallel      A, as the columns of W       B

The product (x A^T) B^T is added before the ranks sum a layer's output, or its input's gradient. So
adapters add no message between layers.

source  Hu et al. 2021, LoRA, arXiv:2106.09685. The draw of A is that of PEFT.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.base import Gradients, Now, Parameter, Weights, uniform, zeros
from mpitrain.layers.dropout import Drawing, Dropout
from mpitrain.layers.recomputed import input_of, state_of, with_input
from mpitrain.machine.backend import Arena, copy_rows
from mpitrain.ops import Ops
from mpitrain.regions import overlap


class Adapter(NamedTuple):
    """A LoRA adapter of all outputs of a layer, or of one named range, such as the queries of qkv.

    region   name of the range; empty if the adapter covers all outputs
    columns  the covered outputs, as indices into this rank's outputs
    """

    region: str
    columns: slice

    @property
    def is_whole(self) -> bool:
        return not self.region


class InputDropout:
    """Dropout of the input of a layer's adapters; the frozen weight sees the whole input.

    A layer's input has all rows of a micro-batch, also under sequence parallelism.

    number  number of the layer, which selects its random bits
    """

    def __init__(self, layers: Drawing, rate: float, number: int):
        self.ops, self.seed, self.tokens = layers.ops, layers.seed, layers.tokens
        self._rate, self._number = rate, number

    def row_numbers(self, shape: Sequence[int], now: Now) -> range | np.ndarray:
        return now.numbers(shape[0], self.tokens)

    def of(self, weight: Parameter) -> Callable[..., Any]:
        """Return the dropout before adapters of this weight: (x, now, arena, out) -> result.

        x    (rows, columns of the input on this rank)
        out  receives the result, and may be x; in an evaluation the result is x
        """
        columns = weight.slices[0][1] if weight.slices else slice(0, weight.shape[1])
        drop = Dropout(self, self._rate, self._number, columns.start, weight.shape[1])

        def dropped(x: Any, now: Now, arena: Arena, out: Any = None) -> Any:
            return drop.dropped(x, now, arena, None, out) if now.trains else x

        return dropped


class LowRank:
    """The adapters of one linear layer, and the layer's products with its frozen weight.

    M rows, K inputs and N outputs on this rank; r the rank of an adapter.
    """

    def __init__(
        self,
        ops: Ops,
        base: Sequence[Parameter],
        regions: Mapping[str, range],
        rank: int,
        scale: float,
        activation: str | None,
        dropout: InputDropout | None = None,
    ):
        """Describe the adapters of a layer.

        base        the parameters of the layer without adapters
        regions     {region: its rows of the unsharded weight}
        scale       s = alpha / r
        activation  activation after the layer: None, "gelu" or "relu"
        dropout     dropout of the adapters' input; None: no dropout
        """
        self._ops, self._scale = ops, scale
        weight = next(p for p in base if p.name == "weight")
        self._dropped = dropout.of(weight) if dropout else lambda x, now, arena, out=None: x
        self.adapters = [Adapter(name, local(weight, rows)) for name, rows in regions.items()]
        self.parameters = [
            p for name, rows in regions.items() for p in described(weight, name, rows, rank)
        ]
        self._outputs = weight.local_shape[0]
        self._activate, self._activate_backward = {
            None: (None, None),
            "gelu": (ops.gelu, ops.gelu_backward),
            "relu": (ops.relu, ops.relu_backward),
        }[activation]

    def multiply(
        self,
        w: Weights,
        x: Any,
        now: Now,
        bias: Any,
        arena: Arena,
        out: Any = None,
        residual: Any = None,
    ) -> tuple[Any, Any]:
        """Return (y, saved), y = activation(x W^T + bias + adapters + residual).

        x            (M, K)
        y, residual  (M, N)
        """
        own, delta, states = self._ops, residual, []
        dropped = self._dropped(x, now, arena)
        for adapter in self.adapters:
            a, b = _pair(w, adapter)
            h, first = self._inner(dropped, a, arena)
            if adapter.is_whole:
                delta, second = own.linear(h, b, None, arena, None, residual)
            else:
                some, second = own.linear(h, b, None, arena)
                if delta is residual:
                    delta = arena.take((len(x), self._outputs), x.dtype)
                    delta[...] = 0
                copy_rows(delta[:, adapter.columns], some)
            states.append((with_input(first, None), second))
        if residual is not None and not self.adapters[0].is_whole:
            own.add(delta, residual, delta, arena)
        y, saved = own.linear(x, w["weight"], bias, arena, out, delta)
        if self._activate is None:
            return y, (saved, states, now)
        y, slope = self._activate(y, arena)
        return y, ((saved, states, now), slope)

    def state(self, w: Weights, x: Any, now: Now, bias: Any, arena: Arena) -> Any:
        """Return `saved` of `multiply`, without computing y, for a layer without an activation."""
        states, dropped = [], self._dropped(x, now, arena)
        for adapter in self.adapters:
            a, b = _pair(w, adapter)
            h, first = self._inner(dropped, a, arena)
            states.append((with_input(first, None), state_of(self._ops, h, b, None, arena)))
        return state_of(self._ops, x, w["weight"], bias, arena), states, now

    def _inner(self, x: Any, a: Any, arena: Arena) -> tuple[Any, Any]:
        """Return s x A^T, (M, r), and the state of the product.

        The scale is a float32 factor here: times A or B it could underflow in float16.
        """
        h, state = self._ops.linear(x, a, None, arena)
        self._ops.weighted_sum(h, self._scale, None, 0.0, h, arena)
        return h, state

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, out: Any = None
    ) -> tuple[Any, Any]:
        """Return (dx, pending). If the layer has an activation, its backward is included.

        dy  (M, N)
        dx  (M, K)
        """
        own = self._ops
        if self._activate_backward:
            saved, slope = saved
            dy = self._activate_backward(dy, slope, arena)
        saved, states, now = saved
        x = self._dropped(input_of(saved), now, arena)
        dx, base = own.linear_backward_input(dy, w["weight"], saved, arena, out)
        pending = []
        for adapter, (first, second) in zip(self.adapters, states, strict=True):
            a, b = _pair(w, adapter)
            some = dy
            if not adapter.is_whole:
                columns = dy[:, adapter.columns]
                some = arena.take(columns.shape, dy.dtype)
                copy_rows(some, columns)
            dh, outer = own.linear_backward_input(some, b, second, arena)
            own.weighted_sum(dh, self._scale, None, 0.0, dh, arena)
            more, inner = own.linear_backward_input(dh, a, with_input(first, x), arena)
            own.add(dx, self._dropped(more, now, arena, more), dx, arena)
            pending.append((inner, outer))
        return dx, (base, pending)

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> Any:
        """Write the gradients of A and B, or add to them; return the pending state of the base."""
        base, pairs = pending
        for adapter, pair in zip(self.adapters, pairs, strict=True):
            leaves = dw.get(adapter.region, {}) if adapter.region else dw
            for name, state in zip(("lora_A", "lora_B"), pair, strict=True):
                if name in leaves:
                    leaf = leaves[name]
                    self._ops.linear_backward_weight(state, leaf.array, leaf.claim(), arena)
        return base


def described(weight: Parameter, region: str, rows: range, rank: int) -> list[Parameter]:
    """Describe A and B of an adapter, sharded as the weight of its layer is.

    rows  the rows of the unsharded weight that the adapter covers
    """
    inputs, prefix = weight.shape[1], f"{region}." if region else ""
    bound = inputs**-0.5
    a = Parameter(f"{prefix}lora_A", (rank, inputs), uniform(bound), decayed=True)
    b = Parameter(f"{prefix}lora_B", (len(rows), rank), zeros, decayed=True)
    if weight.slices is None:
        return [p._replace(holders=weight.holders) for p in (a, b)]
    every = slice(0, rank)
    if weight.local_shape[1] < inputs:  # The layer is row-parallel.
        ((_, columns),) = weight.slices
        return [
            a._replace(slices=((every, columns),)),
            b._replace(holders=weight.holders or "tp", partial=True),
        ]
    runs = [run for run, _ in _inside(weight, rows)]
    cut = tuple((slice(run.start - rows.start, run.stop - rows.start), every) for run in runs)
    return [a._replace(holders="tp", partial=True), b._replace(slices=cut)]


def local(weight: Parameter, rows: range) -> slice:
    """Return the outputs of this rank that are among these rows of the unsharded weight."""
    slices = [slice(offset, offset + len(run)) for run, offset in _inside(weight, rows)]
    return slice(slices[0].start, slices[-1].stop)


def _inside(weight: Parameter, rows: range) -> list[tuple[range, int]]:
    """Return the runs of this rank's rows that are among `rows`, and their offsets in its tensor."""
    runs, offset = [], 0
    whole = ((slice(0, weight.shape[0]),),)
    for first, *_ in weight.slices or whole:
        if run := overlap(first, rows):
            runs.append((run, offset + run.start - first.start))
        offset += first.stop - first.start
    return runs


def _pair(w: Weights, adapter: Adapter) -> tuple[Any, Any]:
    own = w[adapter.region] if adapter.region else w
    return own["lora_A"], own["lora_B"]
