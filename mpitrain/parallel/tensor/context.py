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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

from mpitrain.collectives.group import ActivationBuffer, Group
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Gradients, Now, Places, TokenShare, Weights
from mpitrain.layers.plain import Attention
from mpitrain.machine.backend import Arena, copy_rows
from mpitrain.ops.reference.attention import Seen

Pairs = Iterable[tuple[Any, Any]]
"""Parts of a buffer of messages, each with the part of an activation that it carries."""


class Ulysses:
    """Attention of tokens that the ranks divide, (B, T / n, (H + 2 G) D) -> (B, T / n, H D).

    inner            attention of 1 / n of the heads, over whole rows
    heads, kv_heads  H and G, or multiples of them
    context          the context-parallel group
    traffic          a rank sends (n - 1) / n^2 of B T (2 H + 2 G) D numbers forward, and as many
                     backward
    """

    output_is_free = True

    def __init__(self, inner: Any, heads: int, kv_heads: int, context: Group):
        self._inner, self._context = inner, context
        self._counts = heads, kv_heads, kv_heads

    def parameters(self) -> list[Any]:
        return []

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], self._widths(shape[-1])[0])

    def _widths(self, columns: int) -> list[int]:
        """Return the columns of queries, keys and values, of `columns` together."""
        return [columns * count // sum(self._counts) for count in self._counts]

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        y, saved = self._inner.forward(
            w, self._to_heads(x, self._widths(x.shape[-1]), arena), now, arena
        )
        return self._to_tokens(y, [y.shape[-1] * self._context.size], arena), saved

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        dy = self._to_heads(dy, [dy.shape[-1]], arena)
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


class RingAttention(Attention):
    """Attention of tokens that the ranks divide, with keys and values that go around the ring.

    In step s rank r attends to the tokens of rank r - s, while those of the next step travel. In the
    backward the gradients of keys and values follow them, one step later, and come home last. With a
    window only the steps of near neighbours are left, which are s = 1 and, of the ends of rows,
    s = n - 1; keys and values of steps without a part skip a rank.

    context  the context-parallel group
    traffic  a rank sends k / n of B T 2 G D numbers forward, and twice as many backward, in k of the
             n - 1 steps after its own (`TokenShare.steps`)
    source   Liu et al. 2023, arXiv:2310.01889; zigzag: Brandon et al. 2023, arXiv:2311.09431
    raises   ConfigError for dropout of the probabilities, and without the causal mask
    """

    def __init__(self, context: Group, *arguments: Any):
        super().__init__(*arguments)
        self._context, self._share = context, TokenShare(context.rank, context.size, True)
        if self.drop:
            raise ConfigError(
                "With layout.cp_mode ring no rank has whole rows of probabilities, but attention has dropout "
                f"{self.drop.rate:g}.",
                "Set model.attention_dropout to 0, or layout.cp_mode to ulysses.",
            )
        if not self.causal:
            raise ConfigError(
                "With layout.cp_mode ring no query sees later tokens, but attention has no causal mask.",
                "Set layout.cp_mode to ulysses.",
            )

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        if self.rotary:
            x = self._turned(x, 1, now.places and now.places.own, arena)
        width = x.shape[-1] // self.vectors * self.heads
        q, kv = (_contiguous(part, arena) for part in (x[..., :width], x[..., width:]))
        del x
        here, joined = self._lease(kv, kv), None
        for step, ahead, queries, keys, seen in self._steps(kv.shape[1], now.places):
            own = (here.array if step else kv)[:, keys]
            with self._shifted((here, ahead)) as (there,):
                if queries.start < queries.stop:
                    y, joined = self.ops.attention_part(
                        q[:, queries], own, self.heads, arena, seen, joined
                    )
            here = there
        return y, (q, kv, joined, now.places)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        q, kv, joined, places = saved
        here, sums, last = self._lease(kv, kv), None, 0
        for step, ahead, queries, keys, seen in self._steps(kv.shape[1], places):
            part, dkv = arena.take(q.shape, q.dtype), self._lease(kv)
            part.fill(0)
            dkv.array.fill(0)
            with self._shifted((here, ahead), (sums, step - last)) as (there, arrived):
                if queries.start < queries.stop:
                    self.ops.attention_part_backward(
                        dy[:, queries],
                        joined,
                        q[:, queries],
                        here.array[:, keys],
                        part[:, queries],
                        dkv.array[:, keys],
                        arena,
                        seen,
                    )
            here, last = there, step
            if step == 0:
                dq, own = part, dkv
                continue
            self.ops.add(dq, part, dq, arena)
            if arrived:
                self.ops.add(dkv.array, arrived.array, dkv.array, arena)
            sums = dkv
        width, dx = q.shape[2], arena.take((*q.shape[:2], q.shape[2] + kv.shape[2]), q.dtype)
        with self._shifted((sums, self._context.size - last)) as (arrived,):
            copy_rows(dx[..., :width], dq)
        if arrived:
            self.ops.add(own.array, arrived.array, own.array, arena)
        copy_rows(dx[..., width:], own.array)
        if self.rotary:
            self._turned(dx, -1, places and places.own, arena, dx)
        return dx, None

    def _steps(
        self, own: int, places: Places | None
    ) -> Iterator[tuple[int, int, slice, slice, Seen]]:
        """Yield each step, the ranks ahead of which the next step needs these keys and values, or 0,
        the queries and keys of this step, and what these see of those.

        own  number of tokens that each rank has
        """
        ranks, share = self._context.size, self._share
        window = self.seen.window
        firsts = places and places.firsts.get(window)
        steps = share.steps(ranks * own, window)
        for step, after in zip_longest(steps, steps[1:]):
            source = (self._context.rank - step) % ranks
            # Own tokens that lie a window apart in the row do so among themselves, or farther.
            bounds = self.seen._replace(offset=own, window=0) if step else self.seen
            seen = bounds._replace(starts=firsts and firsts[source])
            yield step, (after or step) - step, *share.seen(source, own, window), seen

    def _lease(self, like: Any, content: Any = None) -> ActivationBuffer:
        lease = self._context.exchange(like.shape, like.dtype)
        if content is not None:
            copy_rows(lease.array, content)
        return lease

    @contextmanager
    def _shifted(self, *leases: tuple[ActivationBuffer | None, int]) -> Iterator[list[Any]]:
        """Send buffers so many ranks ahead while the block computes; yield those that arrive.

        Of no buffer, or of no rank ahead, None arrives.
        """
        arrived = [self._lease(lease.array) if lease and n else None for lease, n in leases]
        pairs = zip(leases, arrived, strict=True)
        moving = [lease.bound_shift(b, n) for (lease, n), b in pairs if lease and b]
        with self._context.beside(*moving):
            yield arrived


def _contiguous(x: Any, arena: Arena) -> Any:
    copy = arena.take(x.shape, x.dtype)
    copy_rows(copy, x)
    return copy


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


def all_tokens(x: Any, context: Group, share: TokenShare, arena: Arena) -> Any:
    """All-gather the tokens of every rank, (B, T, C), from those of this one, (B, T / n, C)."""
    batch, tokens, columns = x.shape
    lease = context.exchange((context.size, *x.shape), x.dtype)
    copy_rows(lease.array[context.rank], x)
    lease.bound_all_gather().run()
    whole = arena.take((batch, context.size * tokens, columns), x.dtype)
    for rank, chunk in enumerate(lease.array):
        first = 0
        for run in share._replace(rank=rank).runs(whole.shape[1]):
            part = chunk[:, first : first + len(run)]
            copy_rows(whole[:, run.start : run.stop], part)
            first += len(run)
    return whole
