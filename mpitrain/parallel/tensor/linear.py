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
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Draw, Fusion, Now, Weights, WholeRows
from mpitrain.layers.plain import Linear, Plain
from mpitrain.machine.backend import Arena


class ColumnParallelLinear(Linear):
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
        layers: Plain,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
        *,
        gather_output: bool = False,
    ):
        super().__init__(
            layers.ops, inputs, outputs, draw, activation, bias, "outputs", layers.rows
        )
        _check_rows(layers.rows, gather_output, "gather_output=True returns")
        self._gathers = gather_output
        self.output_is_free |= gather_output

    @property
    def fusion(self) -> Fusion:
        return Fusion() if self._gathers else super().fusion

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        own = super().output_shape(shape)
        return (*own[:-1], self.shape[0]) if self._gathers else own

    def forward(  # type: ignore[override]  # no residual: see `fusion`
        self, w: Weights, x: Any, now: Now, arena: Arena
    ) -> tuple[Any, Any]:
        y, saved = super().forward(w, x, now, arena)
        return self.rows.gathered(y, arena) if self._gathers else y, saved

    def _general_backward(self, w: Any, dy: Any, saved: Any, arena: Arena, *more: Any) -> Any:
        own = self.rows.columns_of(dy, arena) if self._gathers else dy
        return super()._general_backward(w, own, saved, arena, *more)


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
        layers: Plain,
        inputs: int,
        outputs: int,
        draw: Draw,
        activation: str | None = None,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
    ):
        _check_rows(layers.rows, not input_is_parallel, "input_is_parallel=False takes")
        super().__init__(layers.ops, inputs, outputs, draw, activation, bias, "inputs", layers.rows)
        self._is_parallel = input_is_parallel

    @property
    def fusion(self) -> Fusion:
        return super().fusion._replace(takes_gelu=self._is_parallel and not self.low_rank)

    def forward(
        self, w: Weights, x: Any, now: Now, arena: Arena, residual: Any = None
    ) -> tuple[Any, Any]:
        return super().forward(w, self._own(x, arena), now, arena, residual)

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        # Only `forward` takes x with all columns.
        return super().saved_again(w, x if self._after else self._own(x, arena), now, arena)

    def _own(self, x: Any, arena: Arena) -> Any:
        return x if self._is_parallel else self.rows.columns_of(x, arena)

    def _general_backward(self, w: Any, dy: Any, saved: Any, arena: Arena, *more: Any) -> Any:
        dx, pending = super()._general_backward(w, dy, saved, arena, *more)
        return dx if self._is_parallel else self.rows.gathered(dx, arena), pending


def _check_rows(rows: WholeRows, needs_all: bool, what: str) -> None:
    """Raise ConfigError if a layer needs all columns of all rows, but rows are sequence-parallel."""
    if needs_all and rows.partial:
        raise ConfigError(
            f"With layout.sequence_parallel each rank has rows of its own between layers, but {what} all columns.",
            "Leave the argument out, or set layout.sequence_parallel to false.",
        )
