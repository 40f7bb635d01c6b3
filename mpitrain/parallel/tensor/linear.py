"""Sharded layers: every rank of a group holds part of each layer, and they compute on the same rows together.

A column-parallel layer has all inputs and some outputs on each rank, a row-parallel one some inputs and all outputs, so that a
row-parallel layer takes what a column-parallel one returns: one sum forward and one backward for the two of them.
source  Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053

B batch, T tokens, C channels, n ranks of the group.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Sequence
from typing import Any, Protocol

from mpitrain.collectives.activations import ActivationBuffer
from mpitrain.collectives.group import Group
from mpitrain.errors import ConfigError, multiples_near
from mpitrain.layers.base import Gradients, Parameter, Weights
from mpitrain.layers.initial import Draw, zeros
from mpitrain.layers.plain import Attention, FusedLinear, LayerNorm, Linear, flat_rows
from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops
from mpitrain.parallel.grid import share
from mpitrain.parallel.tensor.sequence import ReplicatedRows


class Layers(Protocol):
    """What sharded layers need of a set of layers: a `Trainer` hands in one that has it."""

    ops: Ops
    rows: ReplicatedRows


class Column(Linear):
    """activation(x weight^T + bias), of which each rank has some outputs; every rank has all of x.

    runs  this rank's outputs: some of the rows of the weight
    """

    def __init__(
        self,
        layers: Layers,
        runs: Sequence[range],
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
    ):
        super().__init__(layers.ops, inputs, sum(map(len, runs)), draw, activation, bias)
        self._rows, self._runs, self._whole = layers.rows, runs, outputs

    def parameters(self) -> list[Parameter]:
        """This rank's rows of the weight and of the bias."""
        found = []
        for p in super().parameters():
            rest = p.shape[1:]
            slices = tuple(
                (slice(run.start, run.stop), *(slice(0, length) for length in rest))
                for run in self._runs
            )
            found.append(p._replace(shape=(self._whole, *rest), slices=slices))
        return found

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*self._rows.entered(shape)[:-1], self.outputs)

    def forward(self, w: Weights, x: Any, arena: Arena) -> tuple[Any, Any]:
        y, saved = super().forward(w, self._rows.whole(x), arena)
        return y, self._rows.kept(saved, x)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        lease, pending = self._summands(w, dy, saved, arena)
        self._rows.reduction(lease).run()
        return self._rows.summed(lease, arena), pending

    def backward(self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena) -> Any:
        """Both halves of backward: the weight half is computed while the input's gradient is summed."""
        lease, pending = self._summands(w, dy, saved, arena)
        with self._rows.reduction(lease).beside():
            self.backward_weight(pending, dw, arena)
        return self._rows.summed(lease, arena)

    def _summands(self, w: Any, dy: Any, saved: Any, arena: Arena) -> tuple[ActivationBuffer, Any]:
        """This rank's part of the gradient of the input, and what the weight half needs."""
        saved = self._rows.regained(saved)
        lease = self._rows.lease((*dy.shape[:-1], self.inputs), dy.dtype)
        _, pending = self.product_backward_input(
            flat_rows(dy), w["weight"], saved, arena, flat_rows(lease.array)
        )
        return lease, pending


class ColumnParallelLinear(Column):
    """A linear layer whose outputs are split over the ranks of layout.tp (as Megatron's).

    Every rank has all of x (..., inputs); rank r returns the r-th run of outputs / n columns.

    Parameters
    ----------
    layers : Plain
        The set of layers that a `Trainer` passes to its argument `units`.
    inputs, outputs : int
        Columns of the whole input and output, over all n ranks.
    draw : callable
        (generator, shape) to the whole weight (outputs, inputs), such as `normal` returns.
    activation : str, optional
        "gelu", "relu" or None.
    bias : bool
        Whether a bias, at first 0, is added.
    gather_output : bool
        Return all outputs on every rank; not with layout.sequence_parallel.

    Raises
    ------
    ConfigError
        If n does not divide outputs.
    """

    def __init__(
        self,
        layers: Layers,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
        *,
        gather_output: bool = False,
    ):
        super().__init__(
            layers,
            [part(layers.rows.group, outputs, "outputs")],
            inputs,
            outputs,
            draw,
            activation,
            bias,
        )
        _check_rows(layers.rows, gather_output, "gather_output=True returns")
        self._gathers = gather_output
        self.output_is_free |= gather_output

    @property
    def without_gelu(self) -> Linear | None:
        """This layer without its GELU; None if it gathers, or has another activation or none."""
        return None if self._gathers else super().without_gelu

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*self._rows.entered(shape)[:-1], self._whole if self._gathers else self.outputs)

    def forward(self, w: Weights, x: Any, arena: Arena) -> tuple[Any, Any]:
        y, saved = super().forward(w, x, arena)
        return _gathered(self._rows.group, y, arena) if self._gathers else y, saved

    def _summands(self, w, dy, saved, arena):
        return super()._summands(
            w, _own(self._rows.group, dy, arena) if self._gathers else dy, saved, arena
        )


class RowParallelLinear(Linear):
    """A linear layer whose inputs are split over the ranks of layout.tp (as Megatron's).

    Rank r takes the r-th run of inputs / n columns; every rank returns all outputs. The other parameters are
    those of `ColumnParallelLinear`.

    Parameters
    ----------
    input_is_parallel : bool
        x is this rank's columns, as a column-parallel layer returns them; False: all columns, which is not
        possible with layout.sequence_parallel.

    Raises
    ------
    ConfigError
        If n does not divide inputs.
    """

    def __init__(
        self,
        layers: Layers,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
    ):
        _check_rows(layers.rows, not input_is_parallel, "input_is_parallel=False takes")
        self._run = part(layers.rows.group, inputs, "inputs")
        super().__init__(layers.ops, len(self._run), outputs, draw, bias=False)
        self._rows, self._whole, self._has_bias, self._is_parallel = (
            layers.rows,
            inputs,
            bias,
            input_is_parallel,
        )
        self.output_is_free = self.adds_to_output = activation is None
        self.takes_gelu = input_is_parallel
        self._activation = {
            None: None,
            "gelu": (layers.ops.gelu, layers.ops.gelu_backward),
            "relu": (layers.ops.relu, layers.ops.relu_backward),
        }[activation]

    def parameters(self) -> list[Parameter]:
        """This rank's columns of the weight, and the whole bias."""
        (weight,) = super().parameters()
        columns = (slice(0, self.outputs), slice(self._run.start, self._run.stop))
        weight = weight._replace(shape=(self.outputs, self._whole), slices=(columns,))
        bias = Parameter("bias", (self.outputs,), zeros, decayed=False, holders="tp")
        return [weight, bias] if self._has_bias else [weight]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._rows.left((*shape[:-1], self.outputs))

    def forward(self, w: Weights, x: Any, arena: Arena, residual: Any = None) -> tuple[Any, Any]:
        if not self._is_parallel:
            x = _own(self._rows.group, x, arena)
        lease = self._rows.lease((*x.shape[:-1], self.outputs), x.dtype)
        _, saved = self.ops.linear(flat_rows(x), w["weight"], None, arena, flat_rows(lease.array))
        self._rows.reduction(lease).run()
        if self._has_bias or residual is not None:
            sums, y = self._rows.ends(lease, arena)
            self.ops.add_bias(sums, w.get("bias"), y, arena, residual)
        else:
            y = self._rows.summed(lease, arena)
        slope = None
        if self._activation:
            y, slope = self._activation[0](y, arena)
        return y, (saved, slope)

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, gelu: Any = None
    ) -> tuple[Any, Any]:
        saved, slope = saved
        if self._activation:
            dy = self._activation[1](dy, slope, arena)
        dy = self._rows.whole(dy)
        if gelu is not None:
            return self.backward_input_through_gelu(w, dy, saved, gelu, arena)
        dx, pending = super().backward_input(w, dy, saved, arena)
        return dx if self._is_parallel else _gathered(self._rows.group, dx, arena), pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        super().backward_weight(pending, dw, arena)
        if self._has_bias:
            self.ops.linear_backward_bias(pending, dw["bias"].array, dw["bias"].claim(), arena)


class Head(Column):
    """A column-parallel layer without bias whose outputs are logits of sequences."""

    def __init__(self, layers: Layers, runs: Sequence[range], width: int, vocab: int, draw: Draw):
        super().__init__(layers, runs, width, vocab, draw, bias=False)
        self.product = layers.ops.logits

    def output_shape(self, shape):
        return self._rows.as_sequences(super().output_shape(shape))

    def forward(self, w, x, arena):
        y, saved = super().forward(w, x, arena)
        return self._rows.sequences(y), saved


class HeadAttention(Attention):
    """Causal attention of this rank's heads, over whole sequences."""

    def __init__(self, layers: Layers, heads: int):
        super().__init__(layers.ops, len(part(layers.rows.group, heads, "heads")))
        self._rows = layers.rows

    def output_shape(self, shape):
        return self._rows.as_sequences(super().output_shape(shape))

    def forward(self, w, x, arena):
        return super().forward(w, self._rows.sequences(x), arena)

    def backward_input(self, w, dy, saved, arena):
        return super().backward_input(w, self._rows.sequences(dy), saved, arena)


class ReplicatedLinear(FusedLinear):
    """A linear layer that all ranks of the group hold whole, and compute alike."""

    def parameters(self):
        """Marked as held by all."""
        return [p._replace(holders="tp") for p in super().parameters()]


class ReplicatedNorm(LayerNorm):
    """A LayerNorm that all ranks of the group hold."""

    def __init__(self, layers: Layers, width: int):
        super().__init__(layers.ops, width)
        self._partial = layers.rows.partial

    def parameters(self):
        """Marked as held by all."""
        return [p._replace(holders="tp", partial=self._partial) for p in super().parameters()]


def part(group: Group, count: int, what: str) -> range:
    """This rank's run of `count` things; ConfigError if they do not divide by the ranks."""
    n = group.size
    if count % n:
        raise ConfigError(
            f"{n} ranks share the {what} of a layer, but {count} do not divide by {n}.",
            f"Nearest that do: {multiples_near(count, n)}.",
        )
    return share(count, group.rank, n)


def _check_rows(rows: ReplicatedRows, needs_all: bool, what: str) -> None:
    """ConfigError for whole rows of whole columns, where ranks have rows of their own. what: needs them, said with a verb."""
    if needs_all and rows.partial:
        raise ConfigError(
            f"With layout.sequence_parallel each rank has rows of its own between layers, but {what} all columns.",
            "Leave the argument out, or set layout.sequence_parallel to false.",
        )


def _gathered(group: Group, own: Any, arena: Arena) -> Any:
    """All columns of an array (..., K), of which each rank has K / n."""
    rows, width = flat_rows(own).shape
    lease = group.exchange((group.size, rows, width), own.dtype)
    lease.array[group.rank] = flat_rows(own)
    lease.all_gather().run()
    whole = arena.take((*own.shape[:-1], group.size * width), own.dtype)
    whole.reshape(rows, group.size, width)[...] = lease.array.swapaxes(0, 1)
    return whole


def _own(group: Group, whole: Any, arena: Arena) -> Any:
    """This rank's K / n columns of an array (..., K)."""
    mine = share(whole.shape[-1], group.rank, group.size)
    own = arena.take((*whole.shape[:-1], len(mine)), whole.dtype)
    own[...] = whole[..., mine.start : mine.stop]
    return own
