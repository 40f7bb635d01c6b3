"""The layers of a rank, and their factory, with which models are built.

Each is one class for any number of tensor-parallel ranks: `rows` knows the ranks. B batch, T tokens,
C channels, H heads, V vocabulary.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Memory, Model
from mpitrain.data.source import Targets
from mpitrain.errors import ConfigError
from mpitrain.layers.adapted import LowRank
from mpitrain.layers.base import (
    ALL_ROWS,
    ALL_TOKENS,
    READING,
    Draw,
    Fusion,
    Gradients,
    Layer,
    Loss,
    Now,
    Parameter,
    Places,
    TokenShare,
    Weights,
    WholeRows,
    backward,
    flat_rows,
    fusion_of,
    normal,
    ones,
    zeros,
)
from mpitrain.layers.chunked_logits import ChunkedHead
from mpitrain.layers.dropout import Dropout, Dropped
from mpitrain.layers.experts import Experts
from mpitrain.layers.images import Conv, Flatten, MaxPool, PixelConv
from mpitrain.layers.incremental import Past, forward_next
from mpitrain.layers.recomputed import Recomputed, saved_again, state_of
from mpitrain.machine.backend import Arena, Backend, HostBackend, copy_rows
from mpitrain.ops import Ops
from mpitrain.ops.reference.attention import CAUSAL, Seen
from mpitrain.ops.reference.layers import add as add_arrays
from mpitrain.tables import Table

NOT_JOINED: Mapping[str, range] = {}
NOTHING: dict = {}


def held_by_all(parameter: Parameter, rows: WholeRows) -> Parameter:
    """Return the description of a tensor that every rank holds and uses for its own rows."""
    return parameter._replace(holders=rows.holders, partial=rows.partial)


def length_of(runs: Sequence[range]) -> int:
    """Return the length of all runs; `len` fails for a width that no machine has, which is refused later."""
    return sum(run.stop - run.start for run in runs)


class Linear:
    """A linear layer with optional activation, activation(x weight^T + bias), over the last dim.

    The ranks of layout.tp divide its outputs or its inputs, or each of them computes all of it from
    its own rows (parallel/tensor/linear.py has a drawing). On one rank all three are the same.

    inputs, outputs  of the whole weight (outputs, inputs); as attributes, those of this rank
    activation       None, "gelu" (tanh form) or "relu"
    bias             whether there is a bias, (outputs,)
    split            what several ranks divide: "outputs", "inputs", or "" for nothing; as an attribute
                     "" on one rank
    rows             the rows between layers, and the ranks
    role             of the weight, as `Parameter.role`; only the loss reads the output of a "head"
    runs             this rank's outputs or inputs: runs of rows or of columns of the whole weight; empty:
                     the ranks share them equally, else it is a ConfigError
    joined           {name: rows of the whole weight}: outputs that are joined in one tensor
    low_rank         the adapters of the weight, if it has any

    A subclass that overrides `forward` or `backward_input` without the last argument overrides
    `fusion`, too.
    """

    is_rowwise = True

    def __init__(
        self,
        ops: Ops,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
        split: str = "",
        rows: WholeRows = ALL_ROWS,
        role: str = "",
        runs: Sequence[range] = (),
        joined: Mapping[str, range] = NOT_JOINED,
    ):
        is_column, is_row = split == "outputs", split == "inputs"
        if split and not runs:
            runs = [rows.run(outputs if is_column else inputs, split)]
        self.ops, self.draw, self.bias, self.role, self.joined = ops, draw, bias, role, joined
        self.shape, self.rows, self._runs = (outputs, inputs), rows, runs
        self.inputs = length_of(runs) if is_row else inputs
        self.outputs = length_of(runs) if is_column else outputs
        self.split = split if rows.ranks > 1 else ""
        self.low_rank: LowRank | None = None
        self.output_is_free, self._is_column = activation is None, is_column
        # A sum over the ranks comes before the activation, which is an operation of its own then.
        self.activation = None if is_row else activation
        self._after = activation if is_row else None
        linear = ops.logits if is_column and role == "head" else ops.linear
        self.product, self.product_backward_input = {
            None: (linear, ops.linear_backward_input),
            "gelu": (ops.linear_gelu, ops.linear_gelu_backward_input),
            "relu": (ops.linear_relu, ops.linear_relu_backward_input),
        }[self.activation]
        self._activate, self._activate_backward = {
            None: (None, None),
            "gelu": (ops.gelu, ops.gelu_backward),
            "relu": (ops.relu, ops.relu_backward),
        }[self._after]

    def parameters(self) -> list[Parameter]:
        """Return the weight, the bias if there is one, and the adapters."""
        weight = Parameter("weight", self.shape, self.draw, decayed=True, role=self.role)
        bias = Parameter("bias", self.shape[:1], zeros, decayed=False)
        base = [weight, bias] if self.bias else [weight]
        base = self._divided(*base) if self.split else [held_by_all(p, self.rows) for p in base]
        return [*base, *(self.low_rank.parameters if self.low_rank else ())]

    def _divided(self, weight: Parameter, *bias: Parameter) -> list[Parameter]:
        """Return the descriptions of this rank's parts of the weight and of the bias, if there is one."""
        if self.split == "outputs":
            return [self._of_runs(parameter, 0) for parameter in (weight, *bias)]
        held = [parameter._replace(holders=self.rows.holders) for parameter in bias]
        return [self._of_runs(weight, 1), *held]

    def _of_runs(self, parameter: Parameter, dim: int) -> Parameter:
        """Return the description of this rank's runs along a dim."""
        if length_of(self._runs) == parameter.shape[dim]:
            return parameter
        whole = [slice(0, length) for length in parameter.shape]
        slices = [
            (*whole[:dim], slice(run.start, run.stop), *whole[dim + 1 :]) for run in self._runs
        ]
        return parameter._replace(slices=tuple(slices))

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the output for an input of this shape."""
        if self.split == "outputs":
            return *self.rows.entered(shape)[:-1], self.outputs
        own = *shape[:-1], self.outputs
        return self.rows.left(own) if self.split == "inputs" else own

    @property
    def fusion(self) -> Fusion:
        """Without an activation, the layer adds a residual, and takes the GELU before it."""
        if self.activation == "gelu" and not self.low_rank:
            bare, ops = copy(self), self.ops
            bare.activation, bare.output_is_free = None, True
            bare.product, bare.product_backward_input = ops.linear, ops.linear_backward_input
            return Fusion(gelu_cut=bare)
        if self.activation or self._is_column:
            return Fusion()
        return Fusion(adds_to_output=not self._after, takes_gelu=not self.low_rank)

    def forward(
        self, w: Weights, x: Any, now: Now, arena: Arena, residual: Any = None
    ) -> tuple[Any, Any]:
        """Return the output for x, plus the residual, and the state for `backward_input`."""
        if self.split or self.low_rank or self._after:
            return self._general_forward(w, x, now, arena, residual)
        added = () if residual is None else (None, flat_rows(residual))
        y, saved = self.product(flat_rows(x), w["weight"], w.get("bias"), arena, *added)
        return y.reshape(*x.shape[:-1], self.outputs), saved

    def _general_forward(
        self, w: Weights, x: Any, now: Now, arena: Arena, residual: Any
    ) -> tuple[Any, Any]:
        """Return the results of `forward`, also where ranks divide the weight, with adapters, and
        with an activation after the sum.
        """
        if self.split == "inputs":
            y, saved = self._summed(w, x, now, arena, residual)
        else:
            whole = self.rows.whole(x) if self.split else x
            more = None if residual is None else flat_rows(residual)
            y, saved = self._multiply(w, flat_rows(whole), now, w.get("bias"), arena, None, more)
            y = y.reshape(*whole.shape[:-1], self.outputs)
            if self.split:
                saved = self.rows.kept(saved, x, now)
        if self._activate is None:
            return y, saved
        y, slope = self._activate(y, arena)
        return y, (saved, slope)

    def _summed(self, w: Weights, x: Any, now: Now, arena: Arena, residual: Any) -> tuple[Any, Any]:
        """Return the ranks' sum of products of their inputs, plus bias and residual, and the state."""

        def product(out: Any, bias: Any, residual: Any) -> tuple[Any, Any]:
            return self._multiply(w, flat_rows(x), now, bias, arena, out, residual)

        return self.rows.summed(
            *(product, (*x.shape[:-1], self.outputs), x.dtype, arena),
            bias=w.get("bias"),
            residual=residual,
            add_bias=self.ops.add_bias,
        )

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        """Return `saved` of `forward`."""
        # Without an activation the backward needs no output, so there is no product and no sum.
        if self.activation or self._after:
            return self.forward(w, x, now, arena)[1]
        if self.split == "outputs":
            return self.rows.kept(self._state(w, self.rows.whole(x), now, arena), x, now)
        return self._state(w, x, now, arena)

    def _multiply(
        self, w: Weights, x: Any, now: Now, bias: Any, arena: Arena, out: Any, residual: Any
    ) -> tuple[Any, Any]:
        """Return activation(x weight^T + bias) + residual, (rows, outputs), and the state for its backward."""
        if self.low_rank:
            return self.low_rank.multiply(w, x, now, bias, arena, out, residual)
        # Where the product has an activation or is that of a head, there is no sum and no residual.
        more = () if out is None and residual is None else (out, residual)
        return self.product(x, w["weight"], bias, arena, *more)

    def _state(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        bias = None if self.split == "inputs" else w.get("bias")
        if self.low_rank:
            return self.low_rank.state(w, flat_rows(x), now, bias, arena)
        return state_of(self.ops, flat_rows(x), w["weight"], bias, arena)

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, slope: Any = None
    ) -> tuple[Any, Any]:
        """Return the gradient of the input, and the state for `backward_weight`.

        slope  gelu'(z), where the input is gelu(z): returns dz; None: dx
        """
        if self.split or self.low_rank or self._after:
            return self._general_backward(w, dy, saved, arena, slope)
        dx, pending = self._multiply_backward(w, flat_rows(dy), saved, arena, slope)
        return dx.reshape(*dy.shape[:-1], self.inputs), pending

    def backward(
        self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena, slope: Any = None
    ) -> Any:
        """Run both halves of backward; a sum over the ranks overlaps with the weight half."""
        if self.split == "outputs":
            beside = partial(self.backward_weight, dw=dw, arena=arena)
            return self._general_backward(w, dy, saved, arena, slope, beside)[0]
        dx, pending = self.backward_input(w, dy, saved, arena, slope)
        self.backward_weight(pending, dw, arena)
        return dx

    def _general_backward(
        self,
        w: Weights,
        dy: Any,
        saved: Any,
        arena: Arena,
        slope: Any = None,
        beside: Callable[[Any], None] = lambda pending: None,
    ) -> tuple[Any, Any]:
        """Return the results of `backward_input`, as `_general_forward`; `beside` runs while the ranks sum."""
        if self._activate_backward:
            saved, own_slope = saved
            dy = self._activate_backward(dy, own_slope, arena)
        if self.split == "outputs":
            return self._summed_backward(w, dy, saved, arena, slope, beside)
        if self.split:
            dy = self.rows.whole(dy)
        dx, pending = self._multiply_backward(w, flat_rows(dy), saved, arena, slope)
        return dx.reshape(*dy.shape[:-1], self.inputs), pending

    def _summed_backward(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, slope: Any, beside: Any
    ) -> tuple[Any, Any]:
        """Return the ranks' sum of gradients from their outputs, and the state for `backward_weight`."""
        saved, shape = self.rows.regained(saved), (*dy.shape[:-1], self.inputs)

        def product(out: Any, *terms: None) -> tuple[Any, Any]:
            return self._multiply_backward(w, flat_rows(dy), saved, arena, slope, out)

        return self.rows.summed(product, shape, dy.dtype, arena, beside=beside)

    def _multiply_backward(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, slope: Any, out: Any = None
    ) -> tuple[Any, Any]:
        """Return the gradient of the input of `_multiply`, and the state for `backward_weight`."""
        if slope is not None:
            return self.ops.gelu_linear_backward_input(dy, w["weight"], saved, slope, arena)
        if self.low_rank:
            return self.low_rank.backward_input(w, dy, saved, arena, out)
        return self.product_backward_input(dy, w["weight"], saved, arena, out)

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of weight and bias, or add to them."""
        if self.low_rank:
            pending = self.low_rank.backward_weight(pending, dw, arena)
        weight, bias, summed = dw.get("weight"), dw.get("bias"), None
        if weight:
            if bias and bias.filled == weight.filled:  # The product sums dy over its rows, too.
                bias.claim()
                summed, bias = bias.array, None
            self.ops.linear_backward_weight(pending, weight.array, weight.claim(), arena, summed)
        if bias:
            self.ops.linear_backward_bias(pending, bias.array, bias.claim(), arena)


class Norm:
    """Normalisation of each row of the last dim, times a gain.

    Layer normalisation subtracts the mean, divides by the standard deviation and adds a bias.
    Without a mean, root mean square normalisation divides by the root of the mean square.

    gain, bias  (width,)
    epsilon     added to the variance, or to the mean square
    rows        the rows between layers, and the ranks, which all hold gain and bias

    A subclass that overrides `forward` or `backward_input` without the last argument overrides
    `fusion`, too.
    """

    output_is_free, fusion = False, Fusion(adds_to_input=True)
    is_rowwise = True

    def __init__(
        self,
        ops: Ops,
        width: int,
        epsilon: float = 1e-5,
        has_mean: bool = True,
        rows: WholeRows = ALL_ROWS,
    ):
        self.width, self.epsilon, self.has_mean, self.rows = width, epsilon, has_mean, rows
        self._names = ("gain", "bias") if has_mean else ("gain",)
        self.product, self.product_backward_input, self.product_backward_weight = (
            (ops.layer_norm, ops.layer_norm_backward_input, ops.layer_norm_backward_weight)
            if has_mean
            else (ops.rms_norm, ops.rms_norm_backward_input, ops.rms_norm_backward_weight)
        )

    def parameters(self):
        gain = Parameter("gain", (self.width,), ones, decayed=False)
        bias = Parameter("bias", (self.width,), zeros, decayed=False)
        return [held_by_all(p, self.rows) for p in ([gain, bias] if self.has_mean else [gain])]

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, now, arena):
        weights = [w[name] for name in self._names]
        y, saved = self.product(flat_rows(x), *weights, self.epsilon, arena)
        return y.reshape(x.shape), saved

    def backward_input(self, w, dy, saved, arena, residual=None):
        residual = None if residual is None else flat_rows(residual)
        dx, pending = self.product_backward_input(flat_rows(dy), w["gain"], saved, arena, residual)
        return dx.reshape(dy.shape), pending

    def backward_weight(self, pending, dw, arena):
        claims = {name: dw[name].claim() for name in self._names if name in dw}
        for adds in {*claims.values()}:
            own = [dw[name].array if claims.get(name) is adds else None for name in self._names]
            self.product_backward_weight(pending, *own, adds, arena)


class HeadNorms:
    """Root mean square norms of queries and of keys, of (..., (H + 2 G) D), which values pass unchanged.

    Each head is normed (as in Qwen3): all of queries have one gain, q.gain (D,), and those of keys
    another, k.gain. The ranks divide the heads, so each computes a summand of the gains' gradients. Or
    all heads of a token are normed together (as in OLMoE): q.gain is (H D,) and k.gain (G D,).

    heads, kv_heads  on this rank, H and G
    each             channels of a head, D
    joint            whether all heads of a token are normed together
    """

    output_is_free = is_rowwise = True

    def __init__(
        self,
        ops: Ops,
        heads: int,
        kv_heads: int,
        each: int,
        epsilon: float,
        rows: WholeRows = ALL_ROWS,
        joint: bool = False,
    ):
        self._rows = rows
        stop = heads * each
        self._columns = {"q": slice(stop), "k": slice(stop, stop + kv_heads * each)}
        lengths = {"q": heads * each, "k": kv_heads * each} if joint else {"q": each, "k": each}
        self._norms = {
            name: Norm(ops, length, epsilon, has_mean=False) for name, length in lengths.items()
        }

    def parameters(self):
        return [
            p._replace(
                name=f"{name}.{p.name}",
                holders=self._rows.holders,
                partial=bool(self._rows.holders),
            )
            for name, norm in self._norms.items()
            for p in norm.parameters()
        ]

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, now, arena):
        y, states = arena.take(x.shape, x.dtype), {}
        copy_rows(flat_rows(y), flat_rows(x))
        for name, norm in self._norms.items():
            normed, states[name] = norm.forward(w[name], self._taken(name, x, arena), now, arena)
            self._put(name, normed, y)
        return y, states

    def backward_input(self, w, dy, saved, arena):
        dx, pending = arena.take(dy.shape, dy.dtype), {}
        copy_rows(flat_rows(dx), flat_rows(dy))
        for name, norm in self._norms.items():
            own = self._taken(name, dy, arena)
            part, pending[name] = norm.backward_input(w[name], own, saved.pop(name), arena)
            self._put(name, part, dx)
        return dx, pending

    def backward_weight(self, pending, dw, arena):
        for name, norm in self._norms.items():
            norm.backward_weight(pending[name], dw.get(name, {}), arena)

    def _taken(self, name, x, arena):
        """Return a copy of the columns of a norm, a row for each vector that is normed."""
        columns = flat_rows(x)[:, self._columns[name]]
        own = arena.take(columns.shape, x.dtype)
        copy_rows(own, columns)
        return own.reshape(-1, self._norms[name].width)

    def _put(self, name, normed, x):
        columns = flat_rows(x)[:, self._columns[name]]
        copy_rows(columns, normed.reshape(columns.shape))


class Activation:
    """An activation without parameters, (..., N) -> (..., N / share).

    forward, backward  the operations, of rows (M, N)
    share              2 for a gated activation, silu(first half) second half; else 1
    """

    output_is_free, is_rowwise = True, True

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], share: int = 1):
        self.product, self.product_backward, self.share = forward, backward, share

    def parameters(self):
        return []

    def output_shape(self, shape):
        return (*shape[:-1], shape[-1] // self.share)

    def forward(self, w, x, now, arena):
        y, saved = self.product(flat_rows(x), arena)
        return y.reshape(self.output_shape(x.shape)), saved

    def backward_input(self, w, dy, saved, arena):
        dx = self.product_backward(flat_rows(dy), saved, arena)
        return dx.reshape(*dy.shape[:-1], self.share * dy.shape[-1]), None

    def backward_weight(self, pending, dw, arena):
        """Do nothing: there are no parameters."""


class RowGate:
    """A layer whose rows are gated by a number each, inner(x) / (1 + e^-z) with z = x row_gate.weight^T.

    gate  the linear layer that computes z, (..., C) -> (..., 1)
    """

    output_is_free = is_rowwise = True

    def __init__(self, ops: Ops, inner: Layer, gate: Linear):
        self.ops, self.inner, self.gate = ops, inner, gate

    def parameters(self):
        own = [p._replace(name=f"row_gate.{p.name}") for p in self.gate.parameters()]
        return [*self.inner.parameters(), *own]

    def output_shape(self, shape):
        return self.inner.output_shape(shape)

    def forward(self, w, x, now, arena):
        z, gate = self.gate.forward(w["row_gate"], x, now, arena)
        y, inner = self.inner.forward(w, x, now, arena)
        gated, state = self.ops.gate_rows(flat_rows(y), flat_rows(z), arena)
        return gated.reshape(y.shape), (gate, inner, state)

    def backward_input(self, w, dy, saved, arena):
        gate, inner, state = saved
        dinner, dz = self.ops.gate_rows_backward(flat_rows(dy), state, arena)
        dx, inner = self.inner.backward_input(w, dinner.reshape(dy.shape), inner, arena)
        dz = dz.reshape(*dy.shape[:-1], 1)
        of_gate, gate = self.gate.backward_input(w["row_gate"], dz, gate, arena)
        self.ops.add(dx, of_gate, dx, arena)
        return dx, (gate, inner)

    def backward_weight(self, pending, dw, arena):
        gate, inner = pending
        self.gate.backward_weight(gate, dw.get("row_gate", {}), arena)
        self.inner.backward_weight(inner, dw, arena)


class GeluErf(Activation):
    """GELU by the error function; "gelu" of a linear layer is its form by tanh."""

    def __init__(self, ops: Ops):
        super().__init__(ops.gelu_erf, ops.gelu_erf_backward)


class Tanh(Activation):
    """A hyperbolic tangent, whose output its backward needs."""

    output_is_free = False

    def __init__(self, ops: Ops):
        super().__init__(ops.tanh, ops.tanh_backward)


class FirstToken:
    """The first token of each row, (B, T, C) -> (B, C)."""

    output_is_free = True

    def parameters(self):
        return []

    def output_shape(self, shape):
        return (shape[0], shape[-1])

    def forward(self, w, x, now, arena):
        y = arena.take(self.output_shape(x.shape), x.dtype)
        copy_rows(y, x[:, 0])
        return y, x.shape

    def backward_input(self, w, dy, saved, arena):
        dx = arena.take(saved, dy.dtype)
        dx.fill(0)
        copy_rows(dx[:, 0], dy)
        return dx, None

    def backward_weight(self, pending, dw, arena):
        """Do nothing: there are no parameters."""


class Embedding:
    """Token embedding, tokens (B, T) -> (B, T, C). The input has no gradient.

    The ranks of layout.tp divide the token table (parallel/tensor/rows.py has a drawing). Each
    has all positions and types; only rank 0 adds these, but every rank computes their gradient.

    has_table  whether the vectors of positions, a second table, are added
    types      number of token types, whose vectors are a third table; 0: there are none
    scale      factor of the sum
    rows       the rows between layers, and the ranks
    """

    output_is_free = False

    def __init__(
        self,
        ops: Ops,
        vocab: int,
        context: int,
        width: int,
        draw: Draw,
        has_table: bool = True,
        types: int = 0,
        scale: float = 1.0,
        rows: WholeRows = ALL_ROWS,
    ):
        self.scale = scale
        self.ops, self.vocab, self.context, self.width, self.draw = ops, vocab, context, width, draw
        self.has_table, self.types, self.rows = has_table, types, rows
        self._entries = rows.share(vocab)

    def parameters(self):
        lengths = {"tokens": self.vocab} | ({"positions": self.context} if self.has_table else {})
        lengths |= {"types": self.types} if self.types else {}
        tokens, *others = (
            Parameter(name, (length, self.width), self.draw, True, role="embedding")
            for name, length in lengths.items()
        )
        if len(self._entries) < self.vocab:
            rows = slice(self._entries.start, self._entries.stop), slice(0, self.width)
            tokens = tokens._replace(slices=(rows,))
        return [tokens, *(p._replace(holders=self.rows.holders) for p in others)]

    def output_shape(self, shape):
        return self.rows.left((*shape, self.width))

    def forward(self, w, x, now, arena):
        has_others = self.types or now.places is not None
        numbers = self._rows_of_tables(x, now.places, arena) if has_others else {}
        look_up = partial(self._looked_up, w, x, numbers, arena)
        y, saved = (
            look_up()
            if self.rows.ranks == 1
            else self.rows.summed(look_up, (*x.shape, self.width), w["tokens"].dtype, arena)
        )
        if self.scale != 1:
            self.ops.weighted_sum(y, self.scale, None, 0.0, y, arena)
        return y, saved

    def forward_next(self, w, x, past, arena):
        places = Places(None, None, past.positions)
        return self.forward(w, x, READING._replace(places=places), arena)[0]

    def _looked_up(self, w, x, numbers, arena, out=None, *terms):
        """Return this rank's summand, and {table: state of its lookup}. Only rank 0 adds other tables.

        numbers  {table: the row of each token}, of tables beside that of the tokens
        """
        ops, is_first, saved = self.ops, self.rows.rank == 0, {}
        from_start = w.get("positions") if is_first and "positions" not in numbers else None
        out = None if out is None else out.reshape(*x.shape, self.width)
        first = self._entries.start
        y, saved["tokens"] = ops.embedding(x, w["tokens"], from_start, arena, first, out)
        for name, rows in numbers.items():
            vectors, saved[name] = ops.embedding(rows, w[name], None, arena)
            if is_first:
                ops.add(y, vectors, y, arena)
        return y, saved

    def _rows_of_tables(self, x, places, arena):
        """Return {table: the row of each token, (B, T)} of the tables to look up beside the tokens'."""
        rows = {}
        if places is not None and self.has_table:
            rows["positions"] = places.own
        if self.types and places is not None and places.types is not None:
            rows["types"] = places.types
        elif self.types:
            rows["types"] = arena.take(x.shape, np.int32)
            rows["types"].fill(0)
        return rows

    def backward_input(self, w, dy, saved, arena):
        dy = self.rows.whole(dy)
        if self.scale != 1:
            whole, dy = dy, arena.take(dy.shape, dy.dtype)
            self.ops.weighted_sum(whole, self.scale, None, 0.0, dy, arena)
        return None, (dy, saved)

    def backward_weight(self, pending, dw, arena):
        dy, saved = pending
        for name, leaf in dw.items():
            if name in saved:
                rows = saved[name]
                self.ops.embedding_backward_table(dy, rows, leaf.array, leaf.claim(), arena)
            else:  # positions from 0
                self.ops.embedding_backward_positions(dy, leaf.array, leaf.claim(), arena)


class Rotary(NamedTuple):
    """Rotary positions: the base of the angles, a bound of the positions, and the scaling of the
    angles, as `scaled` in ops/reference/layers.py takes it.
    """

    theta: float
    context: int
    scaling: tuple[float, ...] = ()


class Attention:
    """Multi-head attention, (B, T, (H + 2 G) D) -> (B, T, H D), without parameters.

    heads     number of query heads on this rank, H
    kv_heads  number of key and value heads on this rank, G
    drop      dropout of the probabilities, or None
    rotary    how queries and keys are turned by their positions, or None
    causal    whether a query sees no later key
    seen      the window and the scores; each forward adds the other bounds
    first     number of the first head on this rank
    every     number of query heads on all ranks; 0: heads
    """

    output_is_free = False

    def __init__(
        self,
        ops: Ops,
        heads: int,
        kv_heads: int | None = None,
        drop: Dropout | None = None,
        rotary: Rotary | None = None,
        causal: bool = True,
        seen: Seen = CAUSAL,
        first: int = 0,
        every: int = 0,
    ):
        self.ops, self.heads, self.kv_heads = ops, heads, kv_heads or heads
        self.drop, self.rotary, self.causal = drop, rotary, causal
        self.seen, self.first, self.every = seen, first, every or heads
        self.vectors = heads + 2 * self.kv_heads  # of D channels, for each token

    def parameters(self):
        return []

    def output_shape(self, shape):
        return (*shape[:-1], shape[-1] // self.vectors * self.heads)

    def forward(self, w, x, now, arena):
        places, width = now.places, x.shape[-1] // self.vectors * self.heads
        if self.rotary:
            x = self._turned(x, 1, places and places.positions, arena)
        q, kv = x[..., :width], x[..., width:]
        offset = 0 if self.causal else x.shape[1] - 1
        bounds = {"starts": places and places.starts, "closed": not self.causal}
        seen = self.seen._replace(offset=offset, **bounds)
        if self.drop and now.trains:
            first, drop = now.row * self.every + self.first, self.drop
            mask = drop.key, now.step, first, self.every, drop.rate
            y, saved = self.ops.attention_dropout(q, kv, self.heads, *mask, arena, seen)
        else:
            y, saved = self.ops.attention(q, kv, self.heads, arena, seen)
        return y, (saved, now)

    def forward_next(self, w, x, past, arena):
        width = x.shape[-1] // self.vectors * self.heads
        if self.rotary:
            x = self._turned(x, 1, past.positions, arena)
        keys, values = past.arrays(self.kv_heads, width // self.heads, x.dtype)
        q, kv = x[..., :width], x[..., width:]
        return self.ops.attention_next(
            q, kv, keys, values, past.lengths, self.heads, arena, self.seen
        )

    def backward_input(self, w, dy, saved, arena):
        ops, width, (saved, now) = self.ops, dy.shape[-1], saved
        is_dropped = self.drop and now.trains
        backward = ops.attention_dropout_backward if is_dropped else ops.attention_backward
        columns = width // self.heads * self.vectors
        dx = arena.take((*dy.shape[:-1], columns), dy.dtype)
        backward(dy, saved, dx[..., :width], dx[..., width:], arena)
        if self.rotary:
            self._turned(dx, -1, now.places and now.places.positions, arena, dx)
        return dx, None

    def _turned(self, x, direction, positions, arena, out=None):
        """Return x with its queries and keys turned; positions are those of the tokens, or None."""
        rotary: Any = self.rotary
        turned = self.heads + self.kv_heads
        return self.ops.rotate(x, self.vectors, turned, *rotary, direction, arena, positions, out)

    def backward_weight(self, pending, dw, arena):
        """Do nothing: there are no parameters."""


class Sequential:
    """Layers one after another (as torch.nn.Sequential): `Sequential(a, b)` or `Sequential(up=a,
    down=b)`.

    Parameters
    ----------
    *layers : Layer
        At least one, unless `children` are given. Their names are "0", "1" and so on.
    **children : Layer
        Layers with names. The parameters of a child have its name as prefix: "up.weight".

    Raises
    ------
    ConfigError
        If there is no layer, if only some layers have names, or if a child is no layer.
    """

    def __init__(self, *layers: Any, **children: Any):
        if bool(layers) == bool(children):
            raise ConfigError(
                "Sequential takes layers, all of them with names or none, but got "
                f"{len(layers)} without and {len(children)} with names.",
                "Write Sequential(a, b) or Sequential(up=a, down=b).",
            )
        children = children or {str(number): layer for number, layer in enumerate(layers)}
        for name, child in children.items():
            if not hasattr(child, "forward"):
                raise ConfigError(
                    f"Sequential takes layers, but {name!r} is of type {type(child).__name__}.",
                    "Write Sequential(a, b); with a list of layers Sequential(*layers).",
                )
        first, *_, last = (*children, *children)
        self.children, self._last = children, last
        self.output_is_free = children[last].output_is_free
        self.vocab = getattr(children[first], "vocab", 0)
        offers = {name: fusion_of(child) for name, child in children.items()}
        self.fusion = Fusion(offers[last].adds_to_output, offers[first].adds_to_input)
        back: dict[str, Any] = dict(children)
        self._cuts, takers = set[str](), set[str]()
        for (name, offer), (after, next_offer) in pairwise(offers.items()):
            if offer.gelu_cut and next_offer.takes_gelu:
                back[name] = offer.gelu_cut
                self._cuts.add(name)
                takers.add(after)
        # The first boolean: the child takes the slope of the GELU from its neighbour. The second
        # one: the child adds the residual to its result.
        self._backwards = [
            (name, child, name in takers, name == first) for name, child in reversed(back.items())
        ]

    def parameters(self) -> list[Parameter]:
        """Return the parameters of all children, with the children's names as prefixes."""
        return [
            parameter._replace(name=f"{name}.{parameter.name}")
            for name, child in self.children.items()
            for parameter in child.parameters()
        ]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the output for an input of this shape."""
        for child in self.children.values():
            shape = child.output_shape(shape)
        return shape

    def forward(
        self, w: Weights, x: Any, now: Now, arena: Arena, residual: Any = None
    ) -> tuple[Any, Any]:
        """Return the output for x, and the state for `backward_input`.

        residual is added to the output if the last child offers this.
        """
        # A child that leaves its GELU to the next one saves its state without it, and the slope.
        saved: list[Any] = []
        for name, child in self.children.items():
            fused = () if residual is None or name != self._last else (residual,)
            x, state = child.forward(w.get(name, NOTHING), x, now, arena, *fused)
            saved += state if name in self._cuts else [state]
        return x, saved

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        """Return `saved` of `forward`."""
        *before, (last, layer) = self.children.items()
        saved: list[Any] = []
        for name, child in before:
            x, state = child.forward(w.get(name, NOTHING), x, now, arena)
            saved += state if name in self._cuts else [state]
        return [*saved, saved_again(layer, w.get(last, NOTHING), x, now, arena)]

    def inner_layers(self) -> list[Any]:
        """Return the children."""
        return [*self.children.values()]

    def forward_next(
        self, w: Weights, x: Any, past: Past, arena: Arena, residual: Any = None
    ) -> Any:
        """Return the output for new tokens, plus the residual as `forward`."""
        for name, child in self.children.items():
            fused = () if residual is None or name != self._last else (residual,)
            x = forward_next(child, w.get(name, NOTHING), x, past, arena, *fused)
        return x

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, residual: Any = None
    ) -> tuple[Any, Any]:
        """Return the gradient of the input, and the state for `backward_weight`.

        residual is added to the gradient if the first child offers this.
        """
        pending = {}
        for name, child, takes_slope, is_first in self._backwards:
            # `pop` drops the last reference, so this child's buffers return to the arena before
            # the next child allocates. `saved` has a slope below the state of the child that takes it.
            own = w.get(name, NOTHING)
            fused = saved.pop(-2) if takes_slope else residual if is_first else None
            dy, pending[name] = (
                child.backward_input(own, dy, saved.pop(), arena)
                if fused is None
                else child.backward_input(own, dy, saved.pop(), arena, fused)
            )
        return dy, pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of all parameters, or add to them."""
        while pending:
            name, wanted = pending.popitem()
            self.children[name].backward_weight(wanted, dw.get(name, NOTHING), arena)

    def backward(
        self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena, residual: Any = None
    ) -> Any:
        """Run both halves of backward, child by child, and return the gradient of the input."""
        for name, child, takes_slope, is_first in self._backwards:
            own, gradients = w.get(name, NOTHING), dw.get(name, NOTHING)
            fused = saved.pop(-2) if takes_slope else residual if is_first else None
            dy = backward(child, own, dy, saved.pop(), gradients, arena, fused)
        return dy


class Residual:
    """A residual connection, x + inner(x), with the parameter names of the inner layer.

    Parameters
    ----------
    inner : Layer
        Its output has the shape of its input.
    add : callable, optional
        (a, b, sum, arena) writes a + b to sum. By default NumPy's on the host; `Plain.residual`
        passes the device's.
    """

    output_is_free = True

    def __init__(self, inner: Any, add: Callable[..., None] | None = None):
        self.inner, self.add = inner, add or add_arrays
        self._fusion = fusion_of(inner)

    def parameters(self) -> list[Parameter]:
        """Return the parameters of the inner layer."""
        return self.inner.parameters()

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the input."""
        return shape

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        """Return the output for x, and the state for `backward_input`."""
        if self._fusion.adds_to_output:
            return self.inner.forward(w, x, now, arena, x)
        y, saved = self.inner.forward(w, x, now, arena)
        return self._plus(x, y, arena), saved

    def inner_layers(self) -> list[Any]:
        """Return the inner layer."""
        return [self.inner]

    def forward_next(self, w: Weights, x: Any, past: Past, arena: Arena) -> Any:
        """Return the output for new tokens."""
        if self._fusion.adds_to_output:
            return forward_next(self.inner, w, x, past, arena, x)
        return self._plus(x, forward_next(self.inner, w, x, past, arena), arena)

    def _plus(self, x: Any, y: Any, arena: Arena) -> Any:
        """Return x + y, written over y if that is free."""
        total = y if self.inner.output_is_free else arena.take(y.shape, y.dtype)
        self.add(y, x, total, arena)
        return total

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        """Return `saved` of `forward`."""
        return saved_again(self.inner, w, x, now, arena)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        """Return the gradient of the input, and the state for `backward_weight`."""
        if self._fusion.adds_to_input:
            return self.inner.backward_input(w, dy, saved, arena, dy)
        dx, pending = self.inner.backward_input(w, dy, saved, arena)
        self.add(dx, dy, dx, arena)
        return dx, pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of the parameters, or add to them."""
        self.inner.backward_weight(pending, dw, arena)

    def backward(self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena) -> Any:
        """Run both halves of backward, and return the gradient of the input."""
        if self._fusion.adds_to_input:
            return backward(self.inner, w, dy, saved, dw, arena, dy)
        dx = backward(self.inner, w, dy, saved, dw, arena)
        self.add(dx, dy, dx, arena)
        return dx


class CrossEntropy:
    """Softmax cross-entropy over whole rows of logits: the `Loss` of a rank with the whole
    vocabulary.
    """

    def __init__(self, ops: Ops, smoothing: float = 0.0):
        """smoothing: of the targets in training; `value` has none."""
        self.value, self.correct = ops.cross_entropy_loss, ops.count_correct
        self.gradient = (
            partial(ops.cross_entropy, smoothing=smoothing) if smoothing else ops.cross_entropy
        )


class NumberLoss:
    """A sum over single numbers, such as squared errors: the `Loss` of an operation that returns
    (loss, gradient).
    """

    def __init__(self, gradient: Callable[..., tuple[Any, Any]]):
        self.gradient = gradient

    def value(self, logits: Any, targets: Any, arena: Arena) -> Any:
        copy = arena.take(logits.shape, logits.dtype)
        copy_rows(copy, logits)
        return self.gradient(copy, targets, 1.0, arena)[0]

    def correct(self, logits: Any, targets: Any, arena: Arena) -> int:
        """Return 0: a number has no class."""
        return 0


class LossKind(NamedTuple):
    """A loss; a row of `LOSSES`.

    make   (operations, label smoothing) -> the loss, of whole rows
    takes  the targets of the data: classes, fractions from 0 to 1, or numbers, which data.normalise
           scales
    help   the text in the help of model.loss
    """

    make: Callable[[Ops, float], Loss]
    takes: Targets
    help: str


LOSSES: Table[str, LossKind] = Table(
    {
        "cross-entropy": LossKind(CrossEntropy, "classes", "of the softmax over classes"),
        "mse": LossKind(lambda ops, _: NumberLoss(ops.squared_error), "numbers", "squared error"),
        "mae": LossKind(lambda ops, _: NumberLoss(ops.absolute_error), "numbers", "absolute error"),
        "bce": LossKind(
            lambda ops, _: NumberLoss(ops.binary_cross_entropy),
            "fractions",
            "binary cross-entropy of logits",
        ),
    }
)
"""Losses by name. Each is a mean over the targets of an update: the trainer divides its sum once."""


class Plain:
    """The layer factory of a rank (as torch.nn): `rows` divides its layers over the ranks of layout.tp.

    By default there is one rank. A number that the ranks cannot divide is a ConfigError of its
    constructor. Linear layers map (..., inputs) to (..., outputs). `draw` makes the weight, of shape
    (outputs, inputs); biases are 0 at first.

    Parameters
    ----------
    ops : Ops
        The operations of a device: see `ops_for`.
    keys : Model
        The section [model], whose keys of the loss `loss` reads.
    memory : Memory
        The section [memory]: which activations the layers save.
    seed : int
        As run.seed, for layers that draw random numbers.
    rows : WholeRows
        The rows between layers, and the ranks that divide them.
    tokens : TokenShare
        Which tokens of every row this rank has.
    ep : Group, optional
        The ranks that divide the experts.
    backend : Backend, optional
        That of the arrays, for layers with arrays of their own: experts. By default the host's.
    """

    def __init__(
        self,
        ops: Ops,
        keys: Model | None = None,
        memory: Memory | None = None,
        seed: int = 0,
        rows: WholeRows | None = None,
        tokens: TokenShare | None = None,
        ep: Any = None,
        backend: Backend | None = None,
    ):
        self.ops, self.rows, self.tokens = ops, rows or ALL_ROWS, tokens or ALL_TOKENS
        self.ep, self.backend = ep, backend or HostBackend()
        self.tally: Any = None  # of the experts, if there are any
        self.keys, self.memory = keys or Model(), memory or Memory()
        self.seed = seed
        self.made = set[str]()  # constructors that a key changes and that have been called
        self.windows = set[int]()  # of the attention layers
        self._dropouts = 0
        self.split_loss: Any = None  # where ranks divide the vocabulary

    def all_tokens(self, x: Any, arena: Arena) -> Any:
        """Return (B, T, C), the tokens of all ranks of layout.cp, from those of this one."""
        return x

    def row_numbers(self, shape: Sequence[int], now: Now) -> range | np.ndarray:
        """Return the numbers within the global batch of the rows of an activation (..., C).

        Rows are samples, or the tokens of sequences. It is a range, but with layout.cp.
        """
        own = math.prod(shape[:-1])
        every = own * self.rows.ranks if self.rows.partial else own
        return now.numbers(every, self.tokens)[self.rows.rank * own % max(1, every) :][:own]

    def embedding(
        self,
        vocab: int,
        context: int,
        width: int,
        positions: bool = True,
        types: int = 0,
        scale: float = 1.0,
    ) -> Embedding:
        """Return an embedding, tokens (B, T) to (B, T, width), by default with learned positions.

        All tables are drawn with deviation 0.02. types: number of token types. scale: of the output.
        """
        self.made.add("embedding")
        return Embedding(
            self.ops, vocab, context, width, normal(0.02), positions, types, scale, self.rows
        )

    def norm(self, width: int, epsilon: float = 1e-5) -> Norm:
        """Return a LayerNorm over the last dim, of length `width`, with gain 1 and bias 0."""
        return Norm(self.ops, width, epsilon, True, self.rows)

    def rms_norm(self, width: int, epsilon: float = 1e-5) -> Norm:
        """Return a root mean square norm over the last dim, of length `width`, with gain 1."""
        return Norm(self.ops, width, epsilon, False, self.rows)

    def experts(
        self, width: int, hidden: int, inner: Draw, onto_residual: Draw, is_gated: bool = False
    ) -> Experts:
        """Return a mixture of model.experts MLPs of `hidden` units, gated by `swiglu` or with a GELU."""
        if self.tally is None:
            count = self.keys.experts
            self.tally = self.backend.zeros(2 * count, np.int64).reshape(2, count)
        shared: Layer | None = None
        if self.keys.shared:
            sizes = width, self.keys.shared, inner, onto_residual
            shared = Sequential(**self.mlp(*sizes, self.swiglu() if is_gated else None))
            if self.keys.shared_gate:
                gate = Linear(self.ops, width, 1, inner, bias=False, rows=self.rows)
                shared = RowGate(self.ops, shared, gate)
        return Experts(self, width, hidden, (inner, onto_residual), is_gated, shared)

    def mlp(
        self, width: int, hidden: int, inner: Draw, onto_residual: Draw, gate: Layer | None
    ) -> dict[str, Layer]:
        """Return the layers of an MLP without biases, by name; with a GELU if there is no gate."""
        down = self.row_linear(hidden, width, onto_residual, bias=False)
        if not gate:
            up = self.column_linear(width, hidden, inner, activation="gelu", bias=False)
            return {"up": up, "down": down}
        both, names = (hidden, hidden), ("gate", "up")
        up = self.joined_linear(width, both, 1, inner, bias=False, names=names)
        return {"up": up, "gate": gate, "down": down}

    def soft_cap(self, cap: float) -> Activation:
        """Return a soft-cap, cap tanh(x / cap) element by element."""

        def forward(x: Any, arena: Arena) -> tuple[Any, Any]:
            return self.ops.soft_cap(x, cap, arena)

        return Activation(forward, self.ops.soft_cap_backward)

    def clip(self, limit: float) -> Activation:
        """Return a limit, of numbers beyond -limit and limit, element by element."""

        def forward(x: Any, arena: Arena) -> tuple[Any, Any]:
            return self.ops.clip(x, limit, arena)

        return Activation(forward, self.ops.clip_backward)

    def scaled(self, factor: float) -> Activation:
        """Return a multiplication by a number."""

        def forward(x: Any, arena: Arena) -> tuple[Any, Any]:
            return self.ops.times(x, factor, arena), None

        return Activation(forward, lambda dy, saved, arena: self.ops.times(dy, factor, arena))

    def swiglu(self) -> Activation:
        """Return a gated activation, (..., 2 N) to (..., N), for two outputs of `joined_linear`."""
        return Activation(self.ops.swiglu, self.ops.swiglu_backward, 2)

    def geglu(self) -> Activation:
        """Return `swiglu` with a GELU."""
        return Activation(self.ops.geglu, self.ops.geglu_backward, 2)

    def joined_linear(
        self,
        inputs: int,
        counts: Sequence[int],
        each: int,
        draw: Draw,
        noun: str = "outputs",
        bias: bool = True,
        names: Sequence[str] = (),
    ) -> Linear:
        """Return a linear layer with several outputs side by side.

        Output i has counts[i] x each columns. layout.tp splits each output, between runs of `each`
        columns. All are one tensor, weight (sum of columns, inputs).

        noun   what is counted, for the error if layout.tp does not divide a count
        names  of the outputs, which adapters may then cover one by one
        """
        runs, joined, outputs = list[range](), dict[str, range](), 0
        for name, count in zip_longest(names, counts):
            own, start = self.rows.run(count, noun), outputs
            outputs += count * each
            runs.append(range(start + own.start * each, start + own.stop * each))
            if name:
                joined[name] = range(start, outputs)
        more = None, bias, "outputs", self.rows, "", runs, joined
        return Linear(self.ops, inputs, outputs, draw, *more)

    def qkv(
        self,
        width: int,
        heads: int,
        draw: Draw,
        kv_heads: int | None = None,
        bias: bool = True,
        each: int = 0,
    ) -> Linear:
        """Return a linear layer from width to the queries, keys and values of all heads.

        Keys and values have as many heads, or kv_heads, which groups of query heads share (GQA).

        each    channels of a head; 0: width / heads
        raises  ConfigError if heads does not divide width, or kv_heads does not divide heads
        """
        shared = heads if kv_heads is None else kv_heads
        each = each or divided(width, heads, f"heads do not divide a width of {width}")
        divided(heads, shared, f"key and value heads do not divide {heads} heads")
        return self.joined_linear(width, (heads, shared, shared), each, draw, "heads", bias, "qkv")

    def head_norms(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        epsilon: float = 1e-5,
        joint: bool = False,
    ) -> HeadNorms:
        """Return norms of queries and keys, of each head or joint ones, for the output of `qkv`."""
        each = divided(width, heads, f"heads do not divide a width of {width}")
        run, own = self._own_heads(heads, heads if kv_heads is None else kv_heads)
        return HeadNorms(self.ops, len(run), len(own), each, epsilon, self.rows, joint)

    def residual(self, inner: Layer) -> Residual:
        """Return a residual connection, x + inner(x)."""
        return Residual(inner, self.ops.add)

    def dropout(self, rate: float, columns: int = 0) -> Dropout:
        """Return dropout, (..., C) to (..., C), with its own random bits.

        The number of this call selects the bits. So all ranks must make their layers in one order.

        columns  C of the whole input, if the input is the output of `column_linear`; 0: layout.tp
                 does not split it
        raises   ConfigError unless 0 <= rate < 1
        """
        if not 0 <= rate < 1:
            raise ConfigError(
                f"A rate of dropout is at least 0 and below 1, but this one is {rate}.",
                "Choose 0.1, for example.",
            )
        self.made.add("dropout")
        self._dropouts += 1
        own = self.rows.run(columns, "outputs")
        return Dropout(self, rate, self._dropouts, own.start, columns)

    def dropped(self, layer: Layer, rate: float, columns: int = 0) -> Layer:
        """Return a layer with dropout of its output; the layer itself if the rate is 0."""
        return Dropped(layer, self.dropout(rate, columns)) if rate else layer

    def attention(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
        causal: bool = True,
        window: int = 0,
        scale: float = 0.0,
        cap: float = 0.0,
    ) -> Layer:
        """Return attention, from the output of `qkv` to (B, T, width).

        dropout  rate of dropout of the probabilities
        rotary   turns queries and keys by their positions; heads are of even width
        causal   whether later tokens are hidden
        window   the most tokens that each sees, up to itself; 0: all
        scale    of the scores; 0: 1 / the square root of the channels of a head
        cap      soft-cap of the scores; 0: they have none
        raises   ConfigError if heads or kv_heads do not divide, or a window is not causal
        """
        divided(width, heads, f"heads do not divide a width of {width}")
        shared = heads if kv_heads is None else kv_heads
        divided(heads, shared, f"key and value heads do not divide {heads} heads")
        self.made.add("attention")
        if dropout:
            self.made.add("attention with dropout")
        if not causal:
            self.made.add("attention to later tokens")
        if window and not causal:
            raise ConfigError(
                f"A window of attention ends at each token, but this one of {window} has no causal mask.",
                "Leave out `causal`, or the window.",
            )
        if window:
            self.made.add("attention in a window")
        self.windows.add(window)
        drop = self.dropout(dropout) if dropout else None
        seen = Seen(window=window, scale=scale, cap=cap)
        attention = self._heads(heads, shared, drop, rotary, causal, seen)
        return Recomputed(attention) if self.memory.recompute == "attention" else attention

    def _heads(self, heads: int, kv_heads: int, *rest: Any) -> Attention:
        """Return attention of this rank's heads, of so many; the arguments are those of `Attention`."""
        run, own = self._own_heads(heads, kv_heads)
        arguments = len(run), len(own), *rest, run.start, heads
        return Attention(self.ops, *arguments)

    def _own_heads(self, heads: int, kv_heads: int) -> tuple[range, range]:
        """Return this rank's heads of queries, and those of keys and values."""
        return self.rows.run(heads, "heads"), self.rows.run(kv_heads, "key and value heads")

    def column_linear(
        self,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
    ) -> Linear:
        """Return a linear layer; layout.tp splits its outputs. activation: gelu, relu or None."""
        return Linear(self.ops, inputs, outputs, draw, activation, bias, "outputs", self.rows)

    def row_linear(
        self,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
        role: str = "",
    ) -> Linear:
        """Return a linear layer; layout.tp splits its inputs. role: as of a `Parameter`."""
        return Linear(self.ops, inputs, outputs, draw, activation, bias, "inputs", self.rows, role)

    def linear(
        self, inputs: int, outputs: int, draw: Draw, activation: str | None = None, role: str = ""
    ) -> Linear:
        """Return a linear layer that layout.tp does not split."""
        return Linear(self.ops, inputs, outputs, draw, activation, rows=self.rows, role=role)

    def conv(
        self, inputs: int, outputs: int, kernel: int, draw: Draw, activation: str | None = None
    ) -> Conv:
        """Return a convolution, (B, H, W, inputs) to (B, H, W, outputs), not split by layout.tp.

        kernel      rows and columns of the kernel, an odd number
        draw        makes the weight, (outputs, kernel x kernel x inputs)
        activation  "relu" or None
        """
        return Conv(self.ops, inputs, outputs, kernel, draw, activation)

    def pixel_conv(
        self, inputs: int, outputs: int, kernel: int, draw: Draw, activation: str | None = None
    ) -> PixelConv:
        """Return `conv` of the pixels of a data source, (B, inputs, H, W) to (B, H, W, outputs).

        The pixels have no gradient.
        """
        return PixelConv(self.ops, inputs, outputs, kernel, draw, activation)

    def max_pool(self, size: int) -> MaxPool:
        """Return a max-pooling layer, for size up to 16. (B, H, W, C) becomes (B, H // size, W //
        size, C).
        """
        return MaxPool(self.ops, size)

    def flatten(self) -> Flatten:
        """Return a layer that makes a row of features of each image, (B, ...) to (B, features)."""
        return Flatten()

    def head(self, width: int, vocab: int, draw: Draw, bias: bool = False) -> Layer:
        """Return a linear layer, from rows (..., width) to logits of this rank's vocabulary."""
        if vocab < self.rows.ranks:
            raise ConfigError(
                f"{self.rows.ranks} ranks share a vocabulary, but it has {vocab} entries.",
                f"Set layout.tp to at most {vocab}.",
            )
        self.made.add("head")
        self.split_loss = self.rows.cross_entropy(self.ops, vocab, self.keys.label_smoothing)
        split, runs = ("outputs", self.rows, "head"), [self.rows.share(vocab)]
        head = Linear(self.ops, width, vocab, draw, None, bias, *split, runs)
        chunks = self.memory.logit_chunks
        return ChunkedHead(head, chunks) if chunks > 1 else head

    def loss(self) -> Loss:
        """Return the loss of model.loss."""
        return self.split_loss or LOSSES[self.keys.loss].make(self.ops, self.keys.label_smoothing)


def divided(whole: int, count: int, law: str) -> int:
    """Return whole / count; raise ConfigError with the nearest divisor if count is not one."""
    if count < 1 or whole % count:
        near = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - count))
        raise ConfigError(f"{count} {law}.", f"Nearest that does: {near}.")
    return whole // count
