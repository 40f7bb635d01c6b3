"""The layers of one rank, and their factory, with which models are built.

A tensor-parallel factory has the same constructors with the same arguments. B batch, T tokens, C
channels, H heads, V vocabulary.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Memory, Model
from mpitrain.data.source import Targets
from mpitrain.errors import ConfigError
from mpitrain.layers.adapted import LowRank
from mpitrain.layers.base import (
    ALL_ROWS,
    Fusion,
    GeluCut,
    Gradients,
    Layer,
    Loss,
    Now,
    Parameter,
    Weights,
    WholeRows,
)
from mpitrain.layers.chunked_logits import ChunkedHead
from mpitrain.layers.compose import Residual
from mpitrain.layers.dropout import Dropout, Dropped
from mpitrain.layers.images import Conv, Flatten, MaxPool, PixelConv
from mpitrain.layers.initial import Draw, normal, ones, zeros
from mpitrain.layers.recomputed import Recomputed, state_of
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.ops import Ops
from mpitrain.ops.seen import Seen
from mpitrain.tables import Table

ALONE: Mapping[str, Any] = {}
"""The fields `holders` and `partial` of a `Parameter` that no other rank of a replica holds."""


class Linear:
    """A linear layer with optional activation, activation(x weight^T + bias), over the last dim.

    weight      (outputs, inputs)
    bias        (outputs,), absent if `bias` is False
    activation  None, "gelu" (tanh form) or "relu"
    role        of the weight, as `Parameter.role`; only the loss reads the output of a "head"
    low_rank    the adapters of the weight, if it has any
    joined      {name: rows of the whole weight}: the outputs that are joined in one tensor
    held        fields of `Parameter` that say which ranks hold the same tensors

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
        held: Mapping[str, Any] = ALONE,
        role: str = "",
    ):
        self.inputs, self.outputs, self.draw, self.bias, self.ops = inputs, outputs, draw, bias, ops
        self.activation, self.role, self.held = activation, role, held
        self.low_rank: LowRank | None = None
        self.joined: Mapping[str, range] = {}
        self.output_is_free = activation is None
        self.product, self.product_backward_input = {
            None: (ops.logits if role == "head" else ops.linear, ops.linear_backward_input),
            "gelu": (ops.linear_gelu, ops.linear_gelu_backward_input),
            "relu": (ops.linear_relu, ops.linear_relu_backward_input),
        }[activation]

    def parameters(self) -> list[Parameter]:
        """Return the weight, the bias if there is one, and the adapters."""
        return [*self._base(), *(self.low_rank.parameters if self.low_rank else ())]

    def _base(self) -> list[Parameter]:
        shape = self.outputs, self.inputs
        weight = Parameter("weight", shape, self.draw, decayed=True, role=self.role, **self.held)
        bias = Parameter("bias", (self.outputs,), zeros, decayed=False, **self.held)
        return [weight, bias] if self.bias else [weight]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the output for an input of this shape."""
        return (*shape[:-1], self.outputs)

    @property
    def fusion(self) -> Fusion:
        """Without an activation, the layer adds a residual, and takes the GELU before it."""
        if self.activation:
            return self._cut()
        return Fusion(adds_to_output=True, takes_gelu=not self.low_rank)

    def _cut(self) -> Fusion:
        """Return the cut of this layer's GELU, if it has one and no adapters."""
        if self.activation != "gelu" or self.low_rank:
            return Fusion()
        bare = copy(self)
        bare.product_backward_input = self.ops.linear_backward_input
        return Fusion(gelu_cut=GeluCut(self._forward_cut, bare))

    def _forward_cut(self, w: Weights, x: Any, arena: Arena) -> tuple[Any, Any, Any]:
        y, (saved, slope) = self.forward(w, x, arena)
        return y, saved, slope

    def forward(self, w: Weights, x: Any, arena: Arena, residual: Any = None) -> tuple[Any, Any]:
        """Return the output for x, plus the residual, and the state for `backward_input`."""
        if residual is not None:
            rows = flat_rows(residual)
            y, saved = self._multiply(w, flat_rows(x), w.get("bias"), arena, residual=rows)
            return y.reshape(residual.shape), saved
        y, saved = (
            self.low_rank.activated(w, flat_rows(x), w.get("bias"), arena)
            if self.low_rank
            else self.product(flat_rows(x), w["weight"], w.get("bias"), arena)
        )
        return y.reshape(*x.shape[:-1], self.outputs), saved

    def saved_again(self, w: Weights, x: Any, arena: Arena) -> Any:
        """Return `saved` of `forward`."""
        # Without an activation the backward needs no output, so there is no product.
        if self.activation:
            return self.forward(w, x, arena)[1]
        return self._state(w, flat_rows(x), w.get("bias"), arena)

    def _multiply(
        self, w: Weights, x: Any, bias: Any, arena: Arena, out: Any = None, residual: Any = None
    ) -> tuple[Any, Any]:
        """Return x weight^T + bias + residual, (rows, outputs), and the state for its backward."""
        if self.low_rank:
            return self.low_rank.multiply(w, x, bias, arena, out, residual)
        return self.ops.linear(x, w["weight"], bias, arena, out, residual)

    def _state(self, w: Weights, x: Any, bias: Any, arena: Arena) -> Any:
        if self.low_rank:
            return self.low_rank.state(w, x, bias, arena)
        return state_of(self.ops, x, w["weight"], bias, arena)

    def _multiply_backward(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, *out: Any
    ) -> tuple[Any, Any]:
        """Return the gradient of the input (rows, inputs), and the state for `backward_weight`.

        dy and saved are those of `forward`: they include an activation.
        """
        if self.low_rank:
            return self.low_rank.backward_input(w, dy, saved, arena, *out)
        return self.product_backward_input(dy, w["weight"], saved, arena, *out)

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, slope: Any = None
    ) -> tuple[Any, Any]:
        """Return the gradient of the input, and the state for `backward_weight`.

        slope  the derivative of the GELU at z, where the input is gelu(z): returns dz; None: dx
        """
        if slope is None:
            dx, pending = self._multiply_backward(w, flat_rows(dy), saved, arena)
        else:
            dx, pending = self.ops.gelu_linear_backward_input(
                flat_rows(dy), w["weight"], saved, slope, arena
            )
        return dx.reshape(*dy.shape[:-1], self.inputs), pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of weight and bias, or add to them."""
        if self.low_rank:
            pending = self.low_rank.backward_weight(pending, dw, arena)
        bias, written = dw.get("bias") if self.bias else None, None
        if "weight" in dw:
            weight = dw["weight"]
            if bias and not bias.filled:  # The product sums dy over its rows, too.
                bias.claim()
                written, bias = bias.array, None
            self.ops.linear_backward_weight(pending, weight.array, weight.claim(), arena, written)
        if bias:
            self.ops.linear_backward_bias(pending, bias.array, bias.claim(), arena)


class Norm:
    """Normalisation of each row of the last dim, times a gain.

    Layer normalisation subtracts the mean, divides by the standard deviation and adds a bias.
    Without a mean, root mean square normalisation divides by the root of the mean square.

    gain, bias  (width,)
    epsilon     added to the variance, or to the mean square
    held        fields of `Parameter` that say which ranks hold the same tensors

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
        held: Mapping[str, Any] = ALONE,
    ):
        self.width, self.epsilon, self.has_mean, self.held = width, epsilon, has_mean, held
        self.product, self.product_backward_input, self.product_backward_weight = (
            (ops.layer_norm, ops.layer_norm_backward_input, ops.layer_norm_backward_weight)
            if has_mean
            else (ops.rms_norm, ops.rms_norm_backward_input, ops.rms_norm_backward_weight)
        )

    def parameters(self):
        gain = Parameter("gain", (self.width,), ones, decayed=False, **self.held)
        bias = Parameter("bias", (self.width,), zeros, decayed=False, **self.held)
        return [gain, bias] if self.has_mean else [gain]

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, arena):
        weights = (w["gain"], w["bias"]) if self.has_mean else (w["gain"],)
        y, saved = self.product(flat_rows(x), *weights, self.epsilon, arena)
        return y.reshape(x.shape), saved

    def backward_input(self, w, dy, saved, arena, residual=None):
        residual = None if residual is None else flat_rows(residual)
        dx, pending = self.product_backward_input(flat_rows(dy), w["gain"], saved, arena, residual)
        return dx.reshape(dy.shape), pending

    def backward_weight(self, pending, dw, arena):
        names = ("gain", "bias") if self.has_mean else ("gain",)
        written: dict[bool, dict[str, Any]] = {False: {}, True: {}}
        for name in names:
            if name in dw:
                written[dw[name].claim()][name] = dw[name].array
        for adds, arrays in written.items():
            if arrays:
                gradients = [arrays.get(name) for name in names]
                self.product_backward_weight(pending, *gradients, adds, arena)


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

    def forward(self, w, x, arena):
        y, saved = self.product(flat_rows(x), arena)
        return y.reshape(self.output_shape(x.shape)), saved

    def backward_input(self, w, dy, saved, arena):
        dx = self.product_backward(flat_rows(dy), saved, arena)
        return dx.reshape(*dy.shape[:-1], self.share * dy.shape[-1]), None

    def backward_weight(self, pending, dw, arena):
        """Do nothing: there are no parameters."""


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

    def forward(self, w, x, arena):
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


class Lookups(NamedTuple):
    """The states of an embedding's lookups: of tokens, and of other tables by name."""

    tokens: Any
    others: dict[str, Any]


class Embedding:
    """Token embedding, tokens (B, T) -> (B, T, C). The input has no gradient.

    now        of the layer factory; `now.places` has the positions and types of tokens
    has_table  whether the vectors of positions, a second table, are added
    types      number of token types, whose vectors are a third table; 0: there are none
    """

    output_is_free = False

    def __init__(
        self,
        ops: Ops,
        vocab: int,
        context: int,
        width: int,
        draw: Draw,
        now: Now | None = None,
        has_table: bool = True,
        types: int = 0,
    ):
        self.ops, self.vocab, self.context, self.width, self.draw = ops, vocab, context, width, draw
        self.now, self.has_table, self.types = now or Now(), has_table, types

    def parameters(self):
        lengths = {"tokens": self.vocab} | ({"positions": self.context} if self.has_table else {})
        lengths |= {"types": self.types} if self.types else {}
        return [
            Parameter(name, (length, self.width), self.draw, True, role="embedding")
            for name, length in lengths.items()
        ]

    def output_shape(self, shape):
        return (*shape, self.width)

    def forward(self, w, x, arena):
        rows = self._rows_of_tables(x, arena)
        positions = None if "positions" in rows else w.get("positions")
        y, saved = self.ops.embedding(x, w["tokens"], positions, arena)
        return y, Lookups(saved, self._looked_up(w, rows, y, arena))

    def forward_next(self, w, x, past, arena):
        y, _ = self.ops.embedding(x, w["tokens"], None, arena)
        if self.has_table:
            self._looked_up(w, {"positions": past.positions}, y, arena)
        return y

    def _rows_of_tables(self, x, arena):
        """Return {table: the row of each token, (B, T)} of the tables to look up beside the tokens'."""
        places, rows = self.now.places, {}
        if places is not None and self.has_table:
            rows["positions"] = places.own
        if self.types and places is not None and places.types is not None:
            rows["types"] = places.types
        elif self.types:
            rows["types"] = arena.take(x.shape, np.int32)
            rows["types"].fill(0)
        return rows

    def _looked_up(self, w, rows, y, arena):
        """Look up rows of tables, add them to y unless it is None, and return the states."""
        states = {}
        for name, numbers in rows.items():
            vectors, states[name] = self.ops.embedding(numbers, w[name], None, arena)
            if y is not None:
                self.ops.add(y, vectors, y, arena)
        return states

    def backward_input(self, w, dy, saved, arena):
        return None, (dy, saved)

    def backward_weight(self, pending, dw, arena):
        dy, saved = pending
        for name, looked_up in {"tokens": saved.tokens, **saved.others}.items():
            if name in dw:
                self.ops.embedding_backward_table(
                    dy, looked_up, dw[name].array, dw[name].claim(), arena
                )
        if "positions" in dw and "positions" not in saved.others:
            self.ops.embedding_backward_positions(
                dy, dw["positions"].array, dw["positions"].claim(), arena
            )


class Rotary(NamedTuple):
    """Rotary positions: the base of the angles, a bound of the positions, and Llama 3's scaling:

    factor, low and high frequency factors, and the earlier context.
    """

    theta: float
    context: int
    scaling: tuple[float, ...] = ()


class Attention:
    """Multi-head attention, (B, T, (H + 2 G) D) -> (B, T, H D), without parameters.

    heads     number of query heads on this rank, H
    kv_heads  number of key and value heads on this rank, G
    drop      dropout of the probabilities, or None
    now       of the layer factory; a query sees no key of another document of `now.places`
    rotary    how queries and keys are turned by their positions, or None
    causal    whether a query sees no later key
    window    the most keys that a query sees, the last up to its own; 0: there is no window
    rows      how whole sequences come of the rows between layers
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
        now: Now | None = None,
        rotary: Rotary | None = None,
        causal: bool = True,
        window: int = 0,
        rows: WholeRows = ALL_ROWS,
        first: int = 0,
        every: int = 0,
    ):
        self.ops, self.heads, self.kv_heads = ops, heads, kv_heads or heads
        self.drop, self.now, self.rotary, self.causal = drop, now or Now(), rotary, causal
        self.window, self.rows = window, rows
        self.first, self.every = first, every or heads

    def parameters(self):
        return []

    def output_shape(self, shape):
        return self.rows.as_sequences((*shape[:-1], self._width(shape)))

    def _width(self, shape):
        """Return the columns of the queries, H D, for the shape of x."""
        return shape[-1] // (self.heads + 2 * self.kv_heads) * self.heads

    def forward(self, w, x, arena):
        x, places = self.rows.sequences(x), self.now.places
        width = self._width(x.shape)
        if self.rotary:
            x = self._turned(x, 1, places and places.positions, arena)
        q, kv = x[..., :width], x[..., width:]
        offset = 0 if self.causal else x.shape[1] - 1
        seen = Seen(places and places.starts, offset, self.window, closed=not self.causal)
        if self.drop and self.drop.layers.now.trains:
            now = self.drop.layers.now
            first, drop = now.row * self.every + self.first, self.drop
            mask = drop.key, now.step, first, self.every, drop.rate
            return self.ops.attention_dropout(q, kv, self.heads, *mask, arena, seen)
        return self.ops.attention(q, kv, self.heads, arena, seen)

    def forward_next(self, w, x, past, arena):
        width = self._width(x.shape)
        if self.rotary:
            x = self._turned(x, 1, past.positions, arena)
        keys, values = past.arrays(self.kv_heads, width // self.heads, x.dtype)
        q, kv = x[..., :width], x[..., width:]
        return self.ops.attention_next(
            q, kv, keys, values, past.lengths, self.heads, arena, self.window
        )

    def backward_input(self, w, dy, saved, arena):
        ops, dy, width = self.ops, self.rows.sequences(dy), dy.shape[-1]
        backward = ops.attention_dropout_backward if self.drop else ops.attention_backward
        columns = width // self.heads * (self.heads + 2 * self.kv_heads)
        dx = arena.take((*dy.shape[:-1], columns), dy.dtype)
        backward(dy, saved, dx[..., :width], dx[..., width:], arena)
        if self.rotary:
            places = self.now.places
            self._turned(dx, -1, places and places.positions, arena, dx)
        return dx, None

    def _turned(self, x, direction, positions, arena, out=None):
        """Return x with its queries and keys turned; positions are those of the tokens, or None."""
        rotary: Any = self.rotary
        heads, turned = self.heads + 2 * self.kv_heads, self.heads + self.kv_heads
        return self.ops.rotate(x, heads, turned, *rotary, direction, arena, positions, out)

    def backward_weight(self, pending, dw, arena):
        """Do nothing: there are no parameters."""


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
    """The layer factory of one rank (as torch.nn): its layers are not split over ranks.

    With layout.tp above 1 a `Trainer` passes a factory with the same constructors, for split
    layers. Linear layers map (..., inputs) to (..., outputs). `draw` makes the weight, of shape
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

    Attributes
    ----------
    now : Now
        The step and rows that the layers compute; for layers that draw random numbers.
    """

    _embedding: type[Embedding] = Embedding
    _column: type[Linear] = Linear
    _row: type[Linear] = Linear
    _held = ALONE
    """As of `Norm`, for the tensors that layout.tp does not split."""

    def __init__(
        self, ops: Ops, keys: Model | None = None, memory: Memory | None = None, seed: int = 0
    ):
        self.ops, self.now = ops, Now()
        self.keys, self.memory = keys or Model(), memory or Memory()
        self.seed = seed
        self.made = set[str]()  # constructors that a key changes and that have been called
        self.windows = set[int]()  # of the attention layers
        self._dropouts = 0

    @property
    def _source(self) -> Any:
        """The first argument of the layers' classes."""
        return self.ops

    def row_numbers(self, shape: Sequence[int]) -> range | np.ndarray:
        """Return the numbers within the global batch of the rows of an activation (..., C).

        Rows are samples, or the tokens of sequences. It is a range, but with layout.cp.
        """
        return self.now.numbers(math.prod(shape[:-1]))

    def embedding(
        self, vocab: int, context: int, width: int, positions: bool = True, types: int = 0
    ) -> Embedding:
        """Return an embedding, tokens (B, T) to (B, T, width), by default with learned positions.

        All tables are drawn with deviation 0.02. types: number of token types.
        """
        return self._embedding(
            self._source, vocab, context, width, normal(0.02), self.now, positions, types
        )

    def norm(self, width: int, epsilon: float = 1e-5) -> Norm:
        """Return a LayerNorm over the last dim, of length `width`, with gain 1 and bias 0."""
        return Norm(self.ops, width, epsilon, True, self._held)

    def rms_norm(self, width: int, epsilon: float = 1e-5) -> Norm:
        """Return a root mean square norm over the last dim, of length `width`, with gain 1."""
        return Norm(self.ops, width, epsilon, False, self._held)

    def swiglu(self) -> Activation:
        """Return a gated activation, (..., 2 N) to (..., N), for two outputs of `joined_linear`."""
        return Activation(self.ops.swiglu, self.ops.swiglu_backward, 2)

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
        joined = self._joined(inputs, counts, each, draw, noun, bias)
        ends = pairwise([0, *accumulate(count * each for count in counts)])
        joined.joined = {name: range(*run) for name, run in zip(names, ends, strict=False)}
        return joined

    def _joined(
        self, inputs: int, counts: Sequence[int], each: int, draw: Draw, noun: str, bias: bool
    ) -> Linear:
        return Linear(self.ops, inputs, sum(counts) * each, draw, None, bias)

    def qkv(
        self, width: int, heads: int, draw: Draw, kv_heads: int | None = None, bias: bool = True
    ) -> Linear:
        """Return a linear layer from width to the queries, keys and values of all heads.

        Keys and values have as many heads, or kv_heads, which groups of query heads share (GQA).

        raises  ConfigError if heads does not divide width, or kv_heads does not divide heads
        """
        shared = heads if kv_heads is None else kv_heads
        each = divided(width, heads, f"heads do not divide a width of {width}")
        divided(heads, shared, f"key and value heads do not divide {heads} heads")
        return self.joined_linear(width, (heads, shared, shared), each, draw, "heads", bias, "qkv")

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
        own = self._own_columns(columns)
        return Dropout(self, rate, self._dropouts, own.start, columns)

    def _own_columns(self, columns: int) -> range:
        """Return this rank's columns of an output of `column_linear`."""
        return range(columns)

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
    ) -> Layer:
        """Return attention, from the output of `qkv` to (B, T, width).

        dropout  rate of dropout of the probabilities
        rotary   turns queries and keys by their positions; heads are of even width
        causal   whether later tokens are hidden
        window   the most tokens that each sees, up to itself; 0: all
        raises   ConfigError if heads or kv_heads do not divide, or a window is not causal
        """
        divided(width, heads, f"heads do not divide a width of {width}")
        shared = heads if kv_heads is None else kv_heads
        divided(heads, shared, f"key and value heads do not divide {heads} heads")
        self.made.add("attention")
        if dropout:
            self.made.add("attention dropout")
        if not causal:
            self.made.add("attention to later tokens")
        if window and not causal:
            raise ConfigError(
                f"A window of attention ends at each token, but this one of {window} has no causal mask.",
                "Leave out `causal`, or the window.",
            )
        if window:
            self.made.add("a window")
        self.windows.add(window)
        drop = self.dropout(dropout) if dropout else None
        attention = self._heads(heads, shared, drop, self.now, rotary, causal, window)
        return Recomputed(attention) if self.memory.recompute == "attention" else attention

    def _heads(self, heads: int, kv_heads: int, *rest: Any) -> Attention:
        """Return attention of this rank's heads, of so many; the arguments are those of `Attention`."""
        return Attention(self.ops, heads, kv_heads, *rest)

    def column_linear(
        self,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
    ) -> Linear:
        """Return a linear layer; layout.tp splits its outputs. activation: gelu, relu or None."""
        return self._column(self._source, inputs, outputs, draw, activation, bias)

    def row_linear(
        self,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
    ) -> Linear:
        """Return a linear layer; layout.tp splits its inputs."""
        return self._row(self._source, inputs, outputs, draw, activation, bias)

    def linear(
        self, inputs: int, outputs: int, draw: Draw, activation: str | None = None
    ) -> Linear:
        """Return a linear layer that layout.tp does not split."""
        return Linear(self.ops, inputs, outputs, draw, activation, True, self._held)

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
        """Return a linear layer, from rows (..., width) to logits (..., vocab)."""
        self.made.add("head")
        head = Linear(self.ops, width, vocab, draw, bias=bias, role="head")
        chunks = self.memory.logit_chunks
        return ChunkedHead(head, chunks) if chunks > 1 else head

    def loss(self) -> Loss:
        """Return the loss of model.loss."""
        return LOSSES[self.keys.loss].make(self.ops, self.keys.label_smoothing)


def divided(whole: int, count: int, law: str) -> int:
    """Return whole / count; raise ConfigError with the nearest divisor if count is not one."""
    if count < 1 or whole % count:
        near = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - count))
        raise ConfigError(f"{count} {law}.", f"Nearest that does: {near}.")
    return whole // count


def flat_rows(x):
    """Return (..., C) reshaped to (rows, C)."""
    return x.reshape(-1, x.shape[-1])
