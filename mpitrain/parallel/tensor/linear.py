"""Tensor-parallel linear layers (as Megatron-LM's): each rank stores a slice of every weight.

A linear layer computes y = x W^T + b, with W of shape (O, I): O outputs, I inputs. "Column" and
"row" refer to W^T, as in Megatron. So a column-parallel layer splits the rows of W, and a
row-parallel layer the columns. For n = 2 ranks:

    ColumnParallelLinear                         RowParallelLinear

                I                                        I
        +---------------+                        +-------+-------+
        |    rank 0     |  O / n rows            |       |       |
    O   +---------------+                    O   | rank0 | rank1 |
        |    rank 1     |  O / n rows            |       |       |
        +---------------+                        +-------+-------+
                                                   I / n columns each

    b         O / n elements on each rank        replicated
    x         (..., I), on every rank            (..., I / n) on each rank
    y         (..., O / n) on each rank          (..., O), on every rank
    forward   y_r = x W_r^T + b_r                y    = ALL-REDUCE(x_r W_r^T) + b
    backward  dx  = ALL-REDUCE(dy_r W_r)         dx_r = dy W_r

The output of a column-parallel layer is the input of a row-parallel one. So the pair needs one
all-reduce forward and one backward. With layout.sequence_parallel an all-gather and a
reduce-scatter replace each all-reduce: see rows.py.

source  Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053

B batch, T tokens, C channels, n ranks of the group.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Sequence
from typing import Any, Protocol

from mpitrain.collectives.activations import ActivationBuffer
from mpitrain.collectives.group import Group
from mpitrain.errors import ConfigError, multiples_near
from mpitrain.layers.base import Fusion, Gradients, Parameter, Weights
from mpitrain.layers.initial import Draw, zeros
from mpitrain.layers.plain import Linear, flat_rows
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.ops import Ops
from mpitrain.parallel.grid import share
from mpitrain.parallel.tensor.rows import ReplicatedRows


class Layers(Protocol):
    """The part of a layer factory that sharded layers need."""

    ops: Ops
    rows: ReplicatedRows


class Column(Linear):
    """The base of column-parallel layers: activation(x W^T + b), with some outputs on each rank.

    runs  this rank's outputs: runs of rows of the whole weight
    """

    is_rowwise = True  # is not inherited: `forward` is overridden

    def __init__(
        self,
        layers: Layers,
        runs: Sequence[range],
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
        role: str = "",
    ):
        own = sum(map(len, runs))
        super().__init__(layers.ops, inputs, own, draw, activation, bias, role=role)
        self._rows, self._runs, self._whole = layers.rows, runs, outputs

    @property
    def fusion(self) -> Fusion:
        return self._cut()

    def _base(self) -> list[Parameter]:
        parameters = []
        for p in super()._base():
            rest = p.shape[1:]
            slices = tuple(
                (slice(run.start, run.stop), *(slice(0, length) for length in rest))
                for run in self._runs
            )
            parameters.append(p._replace(shape=(self._whole, *rest), slices=slices))
        return parameters

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*self._rows.entered(shape)[:-1], self.outputs)

    def forward(  # type: ignore[override]  # no residual: see `fusion`
        self, w: Weights, x: Any, arena: Arena
    ) -> tuple[Any, Any]:
        y, saved = super().forward(w, self._rows.whole(x), arena)
        return y, self._rows.kept(saved, x)

    def saved_again(self, w: Weights, x: Any, arena: Arena) -> Any:
        if self.activation:
            return self.forward(w, x, arena)[1]
        return self._rows.kept(super().saved_again(w, self._rows.whole(x), arena), x)

    def backward_input(  # type: ignore[override]  # no slope: see `fusion`
        self, w: Weights, dy: Any, saved: Any, arena: Arena
    ) -> tuple[Any, Any]:
        lease, pending = self._summands(w, dy, saved, arena)
        self._rows.reduction(lease).run()
        return self._rows.summed(lease, arena), pending

    def backward(self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena) -> Any:
        """Return the gradient of the input; its reduction overlaps with the weight half."""
        lease, pending = self._summands(w, dy, saved, arena)
        with self._rows.group.beside(self._rows.reduction(lease)):
            self.backward_weight(pending, dw, arena)
        return self._rows.summed(lease, arena)

    def _summands(self, w: Any, dy: Any, saved: Any, arena: Arena) -> tuple[ActivationBuffer, Any]:
        """Return a lease with this rank's summand of x's gradient, and `pending` of `backward_weight`."""
        saved = self._rows.regained(saved)
        lease = self._rows.lease((*dy.shape[:-1], self.inputs), dy.dtype)
        _, pending = self._multiply_backward(w, flat_rows(dy), saved, arena, flat_rows(lease.array))
        return lease, pending


class ColumnParallelLinear(Column):
    """A linear layer with its outputs split over the ranks of layout.tp (as Megatron's).

    Rank r stores the r-th run of outputs / n rows of the weight. Every rank has all of x (...,
    inputs) and returns its outputs / n columns of y.

    Parameters
    ----------
    layers : Plain
        The layer factory that a `Trainer` passes to its argument `units`.
    inputs, outputs : int
        Columns of the whole input and output, over all n ranks.
    draw : callable
        (generator, shape) to the whole weight (outputs, inputs), such as `normal` returns.
    activation : str, optional
        "gelu", "relu" or None.
    bias : bool
        Whether to add a bias, which is 0 at first.
    gather_output : bool
        Whether to return all outputs on every rank. Not allowed with layout.sequence_parallel.

    Raises
    ------
    ConfigError
        If n does not divide outputs, or if gather_output is True with sequence_parallel.
    """

    is_rowwise = True  # is not inherited: `forward` is overridden

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
            [own_run(layers.rows.group, outputs, "outputs")],
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
    def fusion(self) -> Fusion:
        return Fusion() if self._gathers else self._cut()

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*self._rows.entered(shape)[:-1], self._whole if self._gathers else self.outputs)

    def forward(  # type: ignore[override]  # no residual: see `fusion`
        self, w: Weights, x: Any, arena: Arena
    ) -> tuple[Any, Any]:
        y, saved = super().forward(w, x, arena)
        return _gathered(self._rows.group, y, arena) if self._gathers else y, saved

    def _summands(self, w, dy, saved, arena):
        return super()._summands(
            w, _own(self._rows.group, dy, arena) if self._gathers else dy, saved, arena
        )


class RowParallelLinear(Linear):
    """A linear layer with its inputs split over the ranks of layout.tp (as Megatron's).

    Rank r stores the r-th run of inputs / n columns of the weight, and takes these columns of x. An
    all-reduce sums the products, and every rank returns all outputs. The bias is replicated.

    Parameters
    ----------
    layers, inputs, outputs, draw, activation, bias
        As in `ColumnParallelLinear`.
    input_is_parallel : bool
        True: x has this rank's columns, as a column-parallel layer returns them. False: x has all
        columns. False is not allowed with layout.sequence_parallel.

    Raises
    ------
    ConfigError
        If n does not divide inputs, or if input_is_parallel is False with sequence_parallel.
    """

    is_rowwise = True  # is not inherited: `forward` is overridden

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
        self._run = own_run(layers.rows.group, inputs, "inputs")
        super().__init__(layers.ops, len(self._run), outputs, draw, bias=False)
        self._rows, self._whole = layers.rows, inputs
        self._has_bias, self._is_parallel = bias, input_is_parallel
        self.output_is_free = activation is None
        self._activation = {
            None: None,
            "gelu": (layers.ops.gelu, layers.ops.gelu_backward),
            "relu": (layers.ops.relu, layers.ops.relu_backward),
        }[activation]

    def _base(self) -> list[Parameter]:
        (weight,) = super()._base()
        columns = (slice(0, self.outputs), slice(self._run.start, self._run.stop))
        weight = weight._replace(shape=(self.outputs, self._whole), slices=(columns,))
        bias = Parameter("bias", (self.outputs,), zeros, decayed=False, holders="tp")
        return [weight, bias] if self._has_bias else [weight]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._rows.left((*shape[:-1], self.outputs))

    @property
    def fusion(self) -> Fusion:
        takes_gelu = self._is_parallel and not self.low_rank
        return Fusion(adds_to_output=self.output_is_free, takes_gelu=takes_gelu)

    def forward(self, w: Weights, x: Any, arena: Arena, residual: Any = None) -> tuple[Any, Any]:
        if not self._is_parallel:
            x = _own(self._rows.group, x, arena)
        lease = self._rows.lease((*x.shape[:-1], self.outputs), x.dtype)
        _, saved = self._multiply(w, flat_rows(x), None, arena, flat_rows(lease.array))
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

    def saved_again(self, w: Weights, x: Any, arena: Arena) -> Any:
        # Without an activation the backward needs no output, so there is no all-reduce.
        if self._activation:
            return self.forward(w, x, arena)[1]
        if not self._is_parallel:
            x = _own(self._rows.group, x, arena)
        return self._state(w, flat_rows(x), None, arena), None

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, slope: Any = None
    ) -> tuple[Any, Any]:
        saved, own_slope = saved
        if self._activation:
            dy = self._activation[1](dy, own_slope, arena)
        dy = self._rows.whole(dy)
        dx, pending = super().backward_input(w, dy, saved, arena, slope)
        return dx if self._is_parallel else _gathered(self._rows.group, dx, arena), pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        super().backward_weight(pending, dw, arena)
        if "bias" in dw:
            self.ops.linear_backward_bias(pending, dw["bias"].array, dw["bias"].claim(), arena)


class Head(Column):
    """The output head: a column-parallel linear layer.

    Returns logits of shape (B, T, columns of this rank), also if the input is sequence-parallel.
    """

    is_rowwise = True  # is not inherited: `forward` is overridden

    def __init__(
        self,
        layers: Layers,
        runs: Sequence[range],
        width: int,
        vocab: int,
        draw: Draw,
        bias: bool = False,
    ):
        super().__init__(layers, runs, width, vocab, draw, bias=bias, role="head")

    def output_shape(self, shape):
        return self._rows.as_sequences(super().output_shape(shape))

    def forward(self, w, x, arena):  # type: ignore[override]  # no residual: see `fusion`
        y, saved = super().forward(w, x, arena)
        return self._rows.sequences(y), saved


def own_run(group: Group, count: int, what: str) -> range:
    """Return the numbers of this rank's things, of `count` things that the ranks share equally.

    what    plural of the things for the message, such as "heads"
    raises  ConfigError if `count` does not divide by the number of ranks
    """
    n = group.size
    if count % n:
        raise ConfigError(
            f"{n} ranks share the {what} of a layer, but {count} do not divide by {n}.",
            f"Nearest that do: {multiples_near(count, n)}.",
        )
    return share(count, group.rank, n)


def _check_rows(rows: ReplicatedRows, needs_all: bool, what: str) -> None:
    """Raise ConfigError if a layer needs all columns of all rows, but rows are sequence-parallel."""
    if needs_all and rows.partial:
        raise ConfigError(
            f"With layout.sequence_parallel each rank has rows of its own between layers, but {what} all columns.",
            "Leave the argument out, or set layout.sequence_parallel to false.",
        )


def _gathered(group: Group, own: Any, arena: Arena) -> Any:
    """All-gather the columns of an array (..., K / n) to (..., K)."""
    rows, width = flat_rows(own).shape
    lease = group.exchange((group.size, rows, width), own.dtype)
    copy_rows(lease.array[group.rank], flat_rows(own))
    lease.bound_all_gather().run()
    whole = arena.take((*own.shape[:-1], group.size * width), own.dtype)
    for rank in range(group.size):
        columns = slice(rank * width, (rank + 1) * width)
        copy_rows(flat_rows(whole)[:, columns], lease.array[rank])
    return whole


def _own(group: Group, whole: Any, arena: Arena) -> Any:
    """Return this rank's K / n columns of an array (..., K)."""
    columns = share(whole.shape[-1], group.rank, group.size)
    own = arena.take((*whole.shape[:-1], len(columns)), whole.dtype)
    copy_rows(flat_rows(own), flat_rows(whole)[:, columns.start : columns.stop])
    return own
