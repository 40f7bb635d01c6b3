"""Logits in slices of rows: the last product, the loss and their gradients, one slice at a time.

The logits of all M rows are often the largest array of a step: (M, V). A `ChunkedHead` returns
`ChunkedLogits` in their place. `ChunkedLoss` then computes, for each slice of rows:

    logits  = x W^T + b        (M / N, V)
    dlogits = the gradient of the loss, written over the logits
    dx      = dlogits W        (M / N, C), a slice of (M, C)
    dW     += dlogits^T x      (V, C)
    db     += sum of dlogits   (V,), if the head has a bias

So a micro-batch needs memory for (M / N, V) and (V, C) numbers in place of (M, V). dW stays in a
buffer, as db does, until the weight half adds it to the gradient. No product is computed twice.

M rows, C channels, V vocabulary, N slices.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.layers.base import Gradients, Loss, Now, Parameter, Weights, flat_rows
from mpitrain.machine.backend import Arena, copy_rows, on_device
from mpitrain.ops import Ops
from mpitrain.regions import share


class ChunkedHead:
    """Output head of a model; the loss computes its product x W^T + b.

    head    a linear layer
    count   N, the number of slices
    """

    output_is_free = is_rowwise = True

    def __init__(self, head: Any, count: int):
        self.head, self.count = head, count

    def parameters(self) -> list[Parameter]:
        return self.head.parameters()

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.head.output_shape(shape)

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        """Return logits that are not computed yet, and the shape of x."""
        rows = flat_rows(self.head.rows.whole(x))
        shape = self.output_shape(x.shape)
        return ChunkedLogits(self, w["weight"], w.get("bias"), rows, shape), x.shape

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        """Return the gradient of x, which the loss has computed, and those of weight and bias."""
        return dy.dx.reshape(saved), {"weight": dy.dw, "bias": dy.db}

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        for name in dw:
            target, found = dw[name], pending[name]
            if target.claim():
                self.head.ops.add(target.array, found, target.array, arena)
            else:
                target.array[...] = found


class ChunkedLogits:
    """Logits (..., V) that are computed slice by slice; they take the place of an array of logits.

    rows    (M, C): the input of the product
    weight  (V, C), valid until the stage opens another unit
    bias    (V,), or None
    shape   of the logits
    """

    def __init__(self, layer: ChunkedHead, weight: Any, bias: Any, rows: Any, shape: Sequence[int]):
        self.layer, self.weight, self.bias = layer, weight, bias
        self.rows, self.shape = rows, tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: Any) -> ChunkedLogits:
        return self

    def cut(self, lengths: Sequence[int], arena: Arena) -> ChunkedLogits:
        """Return the first lengths[i] rows along each dim i, with the whole vocabulary."""
        if tuple(lengths) == self.shape[:-1]:
            return self
        rows = self.rows.reshape(*self.shape[:-1], -1)[tuple(map(slice, lengths))]
        own = arena.take(rows.shape, rows.dtype)
        copy_rows(own, rows)
        shape = (*lengths, self.shape[-1])
        own = own.reshape(-1, own.shape[-1])
        return ChunkedLogits(self.layer, self.weight, self.bias, own, shape)

    def computed(self, arena: Arena) -> Any:
        y, _ = self.layer.head.product(self.rows, self.weight, self.bias, arena)
        return y.reshape(self.shape)

    def slices(self, arena: Arena) -> Iterator[tuple[slice, Any, Any]]:
        """Yield each slice of rows, its logits (M / N, V), and the saved state of its product."""
        count, product = len(self.rows), self.layer.head.product
        for number in range(self.layer.count):
            rows = share(count, number, self.layer.count)
            if rows:
                own = slice(rows.start, rows.stop)
                yield own, *product(self.rows[own], self.weight, self.bias, arena)


@dataclass
class ChunkedGradient:
    """The backward of `ChunkedLogits`: gradients of x, W and b in place of one of the logits.

    dx  the gradient of x, which the ranks of layout.tp have summed
    dw  (V, C): the gradient of the weight
    db  (V,): the gradient of the bias, or None
    """

    dx: Any
    dw: Any
    db: Any

    def reshape(self, *shape: Any) -> ChunkedGradient:
        return self


class ChunkedLoss:
    """A loss of `ChunkedLogits`, which applies another loss to each slice of rows.

    Its `value` and `correct` take one slice of logits.

    whole  the loss of an array of logits
    """

    def __init__(self, whole: Loss, ops: Ops):
        self._gradient, self._ops = whole.gradient, ops
        self.value, self.correct = whole.value, whole.correct

    def gradient(self, logits: Any, targets: Any, scale: float, arena: Arena) -> tuple[Any, Any]:
        """Return the summed loss, and the gradient as a `ChunkedGradient`."""
        head, ops, dtype = logits.layer.head, self._ops, logits.rows.dtype
        stored = "float64" if dtype == "float64" else "float32"
        dw = arena.take(logits.weight.shape, stored)
        db = None if logits.bias is None else arena.take(logits.bias.shape, stored)

        def product(dx: Any, *terms: None) -> tuple[Any, Any]:
            """Write this rank's summand of the gradient of x, slice by slice; return the loss, too."""
            total, dx = None, arena.take(logits.rows.shape, dtype) if dx is None else dx
            for rows, y, saved in logits.slices(arena):
                value, dy = self._gradient(y, targets[rows], scale, arena)
                _, pending = ops.linear_backward_input(dy, logits.weight, saved, arena, dx[rows])
                ops.linear_backward_weight(pending, dw, total is not None, arena)
                if db is not None:
                    ops.linear_backward_bias(pending, db, total is not None, arena)
                total = value if total is None else self._plus(total, value, arena)
                del y, saved, dy, pending  # the next slice uses the same buffers
            return dx, total

        shape = *logits.shape[:-1], head.inputs
        dx, total = head.rows.summed(product, shape, dtype, arena)
        return total, ChunkedGradient(dx, dw, db)

    def _plus(self, total: Any, value: Any, arena: Arena) -> Any:
        """Return the sum of two numbers, or of two arrays without dims on a device."""
        if not on_device(total):
            return total + value
        self._ops.add(total, value, total, arena)
        return total


def sliced(logits: Any, arena: Arena) -> Iterator[tuple[slice, Any]]:
    """Yield slices of rows and their logits (rows, V): a single slice for an array of logits."""
    if isinstance(logits, ChunkedLogits):
        for rows, y, _ in logits.slices(arena):
            yield rows, y
            del y
    else:
        yield slice(None), logits.reshape(-1, logits.shape[-1])


def computed(logits: Any, arena: Arena) -> Any:
    return logits.computed(arena) if isinstance(logits, ChunkedLogits) else logits
