"""Context parallelism: each rank of a group has some tokens of every row, and attention exchanges them.

All layers but attention compute each token by itself, so they need no messages. With `ulysses` an
all-to-all before attention gives each rank all tokens of some heads, and one after it goes back.
For T = 8 tokens, H = 4 heads and n = 2:

                 around attention               inside                         around attention

    rank 0       tokens 0-3, heads 0-3 --+----> tokens 0-7, heads 0-1 --+----> tokens 0-3, heads 0-3
    rank 1       tokens 4-7, heads 0-3 --+----> tokens 0-7, heads 2-3 --+----> tokens 4-7, heads 0-3

B batch, T tokens, C channels, H query heads, G key and value heads, D channels of a head, n ranks.
source  Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from mpitrain.collectives.group import Group
from mpitrain.layers.base import Gradients, Weights
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.parallel.tensor.rows import ReplicatedRows

Pairs = Iterable[tuple[Any, Any]]
"""Parts of a buffer of messages, each with the part of an activation that it carries."""


class Ulysses:
    """Attention of tokens that the ranks divide, (B, T / n, (H + 2 G) D) -> (B, T / n, H D).

    inner            attention of 1 / n of the heads, over whole rows
    heads, kv_heads  H and G, or multiples of them
    rows             the rows between layers of the tensor-parallel group
    context          the context-parallel group
    traffic          a rank sends (n - 1) / n^2 of B T (2 H + 2 G) D numbers forward, and as many
                     backward
    """

    output_is_free = True

    def __init__(self, inner: Any, heads: int, kv_heads: int, rows: ReplicatedRows, context: Group):
        self._inner, self._rows, self._context = inner, rows, context
        self._counts = heads, kv_heads, kv_heads

    def parameters(self) -> list[Any]:
        return []

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = self._rows.as_sequences(shape)
        return (*shape[:-1], self._widths(shape[-1])[0])

    def _widths(self, columns: int) -> list[int]:
        """Return the columns of queries, keys and values, of `columns` together."""
        return [columns * count // sum(self._counts) for count in self._counts]

    def forward(self, w: Weights, x: Any, arena: Arena) -> tuple[Any, Any]:
        x = self._rows.sequences(x)
        y, saved = self._inner.forward(
            w, self._to_heads(x, self._widths(x.shape[-1]), arena), arena
        )
        return self._to_tokens(y, [y.shape[-1] * self._context.size], arena), saved

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        dy = self._to_heads(self._rows.sequences(dy), [dy.shape[-1]], arena)
        dx, pending = self._inner.backward_input(w, dy, saved, arena)
        return self._to_tokens(dx, self._widths(dx.shape[-1] * self._context.size), arena), pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Do nothing: there are no parameters."""

    def _to_heads(self, x: Any, widths: Sequence[int], arena: Arena) -> Any:
        """Return all tokens of this rank's heads, (B, T, columns / n).

        x       (B, T / n, columns)
        widths  of the runs of columns: the heads of queries, of keys and of values
        """
        (batch, tokens, columns), n = x.shape, self._context.size
        y = arena.take((batch, n * tokens, columns // n), x.dtype)
        sent, received = partial(_by_heads, x, widths), partial(_by_tokens, y)
        self._exchange((n, batch, tokens, columns // n), x.dtype, sent, received)
        return y

    def _to_tokens(self, y: Any, widths: Sequence[int], arena: Arena) -> Any:
        """Return all heads of this rank's tokens: the inverse of `_to_heads`."""
        (batch, tokens, columns), n = y.shape, self._context.size
        x = arena.take((batch, tokens // n, n * columns), y.dtype)
        sent, received = partial(_by_tokens, y), partial(_by_heads, x, widths)
        self._exchange((n, batch, tokens // n, columns), y.dtype, sent, received)
        return x

    def _exchange(
        self,
        shape: Sequence[int],
        dtype: Any,
        sent: Callable[[Any], Pairs],
        received: Callable[[Any], Pairs],
    ) -> None:
        """Run an all-to-all between buffers of this shape: [rank, batch, token, column]."""
        outgoing, incoming = (self._context.exchange(shape, dtype) for _ in range(2))
        for message, part in sent(outgoing.array):
            copy_rows(message, part)
        outgoing.bound_all_to_all(incoming).run()
        for message, part in received(incoming.array):
            copy_rows(part, message)


def _by_tokens(y: Any, buffer: Any) -> Pairs:
    """Pair the chunk of each rank with its tokens of y, (B, T, columns / n)."""
    tokens = buffer.shape[2]
    for rank, chunk in enumerate(buffer):
        yield chunk, y[:, rank * tokens : (rank + 1) * tokens]


def _by_heads(x: Any, widths: Sequence[int], buffer: Any) -> Pairs:
    """Pair parts of the chunk of each rank with its heads of x, (B, T / n, columns)."""
    n, first = len(buffer), 0
    for width in widths:
        each = width // n
        for rank, chunk in enumerate(buffer):
            begin = first + rank * each
            yield chunk[..., first // n : first // n + each], x[..., begin : begin + each]
        first += width


def all_tokens(x: Any, context: Group, arena: Arena) -> Any:
    """All-gather the tokens of every rank, (B, T, C), from those of this one, (B, T / n, C)."""
    batch, tokens, columns = x.shape
    lease = context.exchange((context.size, *x.shape), x.dtype)
    copy_rows(lease.array[context.rank], x)
    lease.bound_all_gather().run()
    whole = arena.take((batch, context.size * tokens, columns), x.dtype)
    for message, part in _by_tokens(whole, lease.array):
        copy_rows(part, message)
    return whole
