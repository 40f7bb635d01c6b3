"""What tensor-parallel ranks exchange: the activations between layers, and facts of the loss.

Inside a tensor-parallel layer every rank has all B x T rows and some of the columns. Each
rank has the following rows in the forward pass, for B x T = 8 and n = 2:

                             between                inside                     between
                             layers                 a layer                    layers

    SequenceSharded  rank 0  rows 0-3 -all-gather-> rows 0-7 -reduce-scatter-> rows 0-3
                     rank 1  rows 4-7 -all-gather-> rows 0-7 -reduce-scatter-> rows 4-7

    ReplicatedRows   rank 0  rows 0-7 ------------> rows 0-7 -all-reduce-----> rows 0-7
                     rank 1  rows 0-7 ------------> rows 0-7 -all-reduce-----> rows 0-7

The default is ReplicatedRows. With layout.sequence_parallel it is SequenceSharded. Backward is the
mirror image: SequenceSharded gathers the gradient of the output, and scatters that of the input.

The vocabulary is divided, too (as Megatron-LM's). Rank r owns a run of the V entries; the runs need
not be equal. Training never gathers whole logits; `whole` does, for callers that need them. For V = 10 and n = 3 ranks:

    entries of the vocabulary     0   1   2 | 3   4   5 | 6   7   8   9
    owner                          rank 0   |  rank 1   |    rank 2

    tokens (V, C)                  rows of the table
    positions (context, C)         replicated; rank 0 adds them
    logits (M, V)                  columns

    embedding      each rank looks up its own tokens, zero elsewhere; all-reduce (B, T, C)
    loss, per row  all-reduce of the maximum, then of two sums:
                   exp(logit - maximum), and the target's logit - maximum

B batch, T tokens, C channels, V vocabulary, M = B T rows of logits, n ranks of the group.
source  Shoeybi et al. 2019, arXiv:1909.08053; SequenceSharded: Korthikanti et al. 2022,
        arXiv:2205.05198
"""

from __future__ import annotations  # help() then prints signatures as they are written here

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import ActivationBuffer, Group
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Now, WholeRows, flat_rows
from mpitrain.layers.recomputed import input_of, with_input
from mpitrain.machine.backend import Arena, copy_rows
from mpitrain.ops import Ops


class ReplicatedRows(WholeRows):
    """Replicated activations: every rank has all rows, and an all-reduce sums each output.

    A layer begins with `whole`, which returns all rows of its input. It ends with `summed`, which
    adds the ranks' partial sums and returns this rank's rows of the output. `entered` returns the
    shape of that input with all rows, and `left` the shape of this rank's rows of the output.
    """

    holders = "tp"

    def __init__(self, group: Group):
        super().__init__(group.rank, group.size)
        self.group = group

    def cross_entropy(
        self, ops: Ops, vocab: int, smoothing: float
    ) -> VocabParallelCrossEntropy | None:
        return VocabParallelCrossEntropy(ops, self, vocab, smoothing)

    def reduction(self, lease: ActivationBuffer) -> Reduction:
        """Return the reduction of the ranks' partial sums in the leased buffer."""
        return lease.bound_all_reduce()

    def ends(self, lease: ActivationBuffer, arena: Arena) -> tuple[Any, Any]:
        """Return the finished sum, and a buffer for the output, perhaps the same array."""
        return lease.array, lease.array

    def summed(
        self,
        product: Callable[..., tuple[Any, Any]],
        shape: Sequence[int],
        dtype: Any,
        arena: Arena,
        *,
        bias: Any = None,
        residual: Any = None,
        add_bias: Callable[..., None] | None = None,
        beside: Callable[[Any], None] | None = None,
    ) -> tuple[Any, Any]:
        lease = self.group.exchange(shape, dtype)
        _, state = product(flat_rows(lease.array), None, None)
        if beside is None:
            self.reduction(lease).run()
        else:
            with self.group.beside(self.reduction(lease)):
                beside(state)
        sums, y = self.ends(lease, arena)
        if add_bias and (bias is not None or residual is not None):
            add_bias(sums, bias, y, arena, residual)
        elif y is not sums:
            copy_rows(y, sums)
        return y, state

    def gathered(self, own: Any, arena: Arena) -> Any:
        rows, width = flat_rows(own).shape
        lease = self.group.exchange((self.ranks, rows, width), own.dtype)
        copy_rows(lease.array[self.rank], flat_rows(own))
        lease.bound_all_gather().run()
        whole = arena.take((*own.shape[:-1], self.ranks * width), own.dtype)
        for rank in range(self.ranks):
            columns = slice(rank * width, (rank + 1) * width)
            copy_rows(flat_rows(whole)[:, columns], lease.array[rank])
        return whole

    def columns_of(self, whole: Any, arena: Arena) -> Any:
        columns = self.share(whole.shape[-1])
        own = arena.take((*whole.shape[:-1], len(columns)), whole.dtype)
        copy_rows(flat_rows(own), flat_rows(whole)[:, columns.start : columns.stop])
        return own


@dataclass
class AllRows:
    """The gathered input of a layer that is computed again, in place of this rank's rows."""

    array: Any


class SequenceSharded(ReplicatedRows):
    """Sequence-parallel activations: between layers each rank has 1 / n of the B x T rows.

    An all-gather brings all rows into a layer, and a reduce-scatter leaves each rank its rows of the
    output. The norms and residuals between layers then need 1 / n of the activation memory.

    source  Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
            arXiv:2205.05198
    """

    partial = True

    def __init__(self, group: Group, keep_gathered: bool, context: int):
        """Bind the rows to the group that divides them.

        keep_gathered  save all rows of a layer's input for backward, not only this rank's rows
        context        T of every sequence; a single sequence may be shorter
        """
        super().__init__(group)
        self._keeps, self.context = keep_gathered, context

    def reduction(self, lease: ActivationBuffer) -> Reduction:
        return lease.bound_reduce_scatter()

    def ends(self, lease: ActivationBuffer, arena: Arena) -> tuple[Any, Any]:
        own = lease.own_rows
        # A view of `own` would keep the buffer of all rows alive, so this returns a new array.
        return own, arena.take(own.shape, own.dtype)

    def whole(self, x: Any) -> Any:
        lease = self.group.exchange(self.entered(x.shape), x.dtype)
        copy_rows(lease.own_rows, x)
        lease.bound_all_gather().run()
        return lease.array

    def summed(
        self, product: Callable[..., tuple[Any, Any]], shape: Sequence[int], *rest: Any, **more: Any
    ) -> tuple[Any, Any]:
        rows = math.prod(shape[:-1])
        if rows and len(shape) > 2 and self._as_sequences(rows) != shape[:-1]:
            raise ConfigError(
                "With layout.sequence_parallel several sequences have model.context tokens each, "
                f"{self.context} of them on this rank, but these {shape[0]} have {shape[1]}.",
                "Pass one at a time, or longer ones.",
            )
        return super().summed(product, shape, *rest, **more)

    def own(self, x: Any) -> Any:
        rows = self.share(len(x))
        return x[rows.start : rows.stop]

    def kept(self, saved: Any, x: Any, now: Now) -> Any:
        if self._keeps:
            return saved
        return with_input(saved, AllRows(input_of(saved)) if now.is_again else x)

    def regained(self, saved: Any) -> Any:
        if self._keeps:
            return saved
        x = input_of(saved)
        return with_input(saved, x.array if isinstance(x, AllRows) else flat_rows(self.whole(x)))

    def entered(self, shape: Sequence[int]) -> tuple[int, ...]:
        rows = math.prod(shape[:-1]) * self.group.size
        return (*self._as_sequences(rows), shape[-1])

    def _as_sequences(self, rows: int) -> tuple[int, int]:
        """Return (B, T) of so many rows."""
        length = max(1, min(self.context, rows))
        return rows // length, length

    def left(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (math.prod(shape[:-1]) // self.group.size, shape[-1])

    def filled(self, shape: Sequence[int]) -> tuple[int, ...]:
        (sequences, length), n = shape, self.group.size
        length = max(
            length, min(self.context, -(-length // n) * n) if sequences == 1 else self.context
        )
        fitting = sequences_together(length, n)
        return (-(-sequences // fitting) * fitting, length)


def sequences_together(tokens: int, ranks: int) -> int:
    """Return the smallest number of sequences whose rows divide among the ranks.

    tokens  number of tokens of each sequence; each token is a row
    """
    return ranks // math.gcd(tokens, ranks)


class VocabParallelCrossEntropy:
    """Softmax cross-entropy of vocabulary-parallel logits: the `Loss` of a sharded head.

    Three numbers a row are all-reduced: one maximum and two sums. Every rank returns the loss of
    whole rows, bit for bit the same.

    vocab      entries of the whole vocabulary
    smoothing  of the targets in training
    """

    def __init__(self, ops: Ops, rows: ReplicatedRows, vocab: int, smoothing: float):
        self._ops, self._group, self.vocab = ops, rows.group, vocab
        self._first = rows.share(vocab).start
        self._smoothed = (smoothing, smoothing / vocab) if smoothing else ()

    def gradient(
        self, logits: Any, targets: Any, scale: float, arena: Arena, smoothed: Any = None
    ) -> tuple[Any, Any]:
        smoothed = self._smoothed if smoothed is None else smoothed
        maxima = self._maxima(logits, arena)
        facts = self._group.exchange((2, len(logits)), _dtype_of_facts(logits))
        ops, first = self._ops, self._first
        ops.row_exponentials(logits, targets, first, maxima, arena, facts.array, *smoothed)
        facts.bound_all_reduce().run()
        return ops.cross_entropy_split(
            logits, targets, first, maxima, facts.array, scale, arena, *smoothed
        )

    def value(self, logits: Any, targets: Any, arena: Arena) -> Any:
        copy = arena.take(logits.shape, logits.dtype)
        copy_rows(copy, logits)
        return self.gradient(copy, targets, 1.0, arena, ())[0]

    def correct(self, logits: Any, targets: Any, arena: Arena) -> Any:
        places = self._group.exchange((len(logits),), _dtype_of_facts(logits))
        self._ops.row_argmax(logits, self._first, self._maxima(logits, arena), arena, places.array)
        places.bound_all_reduce("maximum").run()
        return self._ops.count_correct_split(places.array, targets, arena)

    def _maxima(self, logits: Any, arena: Arena) -> Any:
        """Return the maximum of each row of logits over the whole vocabulary, (M,)."""
        maxima = self._group.exchange((len(logits),), _dtype_of_facts(logits))
        self._ops.row_maximum(logits, arena, maxima.array)
        maxima.bound_all_reduce("maximum").run()
        return maxima.array

    def whole(self, logits: Any, arena: Arena) -> Any:
        """Return all columns of the logits, (..., V), on every rank."""
        lease = self._group.exchange((*logits.shape[:-1], self.vocab), logits.dtype)
        lease.array[...] = 0
        columns = slice(self._first, self._first + logits.shape[-1])
        copy_rows(lease.array[..., columns], logits)
        lease.bound_all_reduce().run()
        # The caller gets a copy: a lease would have to end at the same time on all ranks.
        whole = arena.take(lease.array.shape, logits.dtype)
        copy_rows(whole, lease.array)
        return whole


def _dtype_of_facts(logits: Any) -> str:
    return "float64" if logits.dtype == "float64" else "float32"
