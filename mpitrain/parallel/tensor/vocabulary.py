"""Vocabulary parallelism (as Megatron-LM's): an embedding and a loss with a split vocabulary.

Rank r owns a run of the V entries. The runs need not be equal. Training never gathers whole logits;
`whole` does, for callers that need them. For V = 10 and n = 3 ranks:

    entries of the vocabulary     0   1   2 | 3   4   5 | 6   7   8   9
    owner                          rank 0   |  rank 1   |    rank 2

    tokens (V, C)                  rows of the table
    positions (context, C)         replicated; rank 0 adds them
    logits (M, V)                  columns

    embedding      each rank looks up its own tokens, zero elsewhere; all-reduce (B, T, C)
    loss, per row  all-reduce of the maximum, then of two sums:
                   exp(logit - maximum), and the target's logit - maximum

B batch, T tokens, C channels, V vocabulary, M = B T rows of logits, n ranks of the group.
source  Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053
"""

from typing import Any

from mpitrain.collectives.activations import ActivationBuffer
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Now
from mpitrain.layers.chunked_logits import ChunkedHead, ChunkedLogits
from mpitrain.layers.plain import Embedding, Lookups, flat_rows
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.parallel.grid import share
from mpitrain.parallel.tensor.linear import Layers
from mpitrain.parallel.tensor.rows import ReplicatedRows


class VocabParallelEmbedding(Embedding):
    """A vocabulary-parallel embedding, tokens (B, T) -> (B, T, C).

    Each rank has its rows of the token table, and all positions and token types. Only rank 0 adds
    these, but every rank computes their whole gradient.
    """

    def __init__(
        self,
        layers: Layers,
        vocab: int,
        context: int,
        width: int,
        draw: Any,
        now: Now | None = None,
        has_table: bool = True,
        types: int = 0,
    ):
        super().__init__(layers.ops, vocab, context, width, draw, now, has_table, types)
        self._rows = layers.rows
        self._rows.context = context // self.now.tokens.ranks
        self._entries = share(vocab, self._rows.group.rank, self._rows.group.size)

    def parameters(self):
        tokens, *positions = super().parameters()
        rows = (slice(self._entries.start, self._entries.stop), slice(0, self.width))
        return [tokens._replace(slices=(rows,)), *(p._replace(holders="tp") for p in positions)]

    def output_shape(self, shape):
        return self._rows.left(super().output_shape(shape))

    def forward(self, w, x, arena):
        if self._rows.as_sequences((*x.shape, self.width))[:2] != x.shape:
            raise ConfigError(
                f"With layout.sequence_parallel several sequences have model.context {self.context} tokens each, "
                f"but these {x.shape[0]} have {x.shape[1]}.",
                "Pass one at a time, or longer ones.",
            )
        lease = self._rows.lease((*x.shape, self.width), w["tokens"].dtype)
        rows, is_first = self._rows_of_tables(x, arena), not self._rows.group.rank
        positions = w.get("positions") if is_first and "positions" not in rows else None
        _, saved = self.ops.embedding(
            x, w["tokens"], positions, arena, self._entries.start, lease.array
        )
        others = self._looked_up(w, rows, lease.array if is_first else None, arena)
        self._rows.reduction(lease).run()
        return self._rows.summed(lease, arena), Lookups(saved, others)

    def forward_next(self, w, x, past, arena):
        lease = self._rows.lease((*x.shape, self.width), w["tokens"].dtype)
        self.ops.embedding(x, w["tokens"], None, arena, self._entries.start, lease.array)
        if self.has_table and not self._rows.group.rank:
            self._looked_up(w, {"positions": past.positions}, lease.array, arena)
        self._rows.reduction(lease).run()
        return self._rows.summed(lease, arena)

    def backward_input(self, w, dy, saved, arena):
        return None, (self._rows.sequences(self._rows.whole(dy)), saved)


class ChunkedParallelHead(ChunkedHead):
    """A `ChunkedHead` of this rank's columns; one reduction sums the gradients of x of all rows."""

    def __init__(self, head: Any, count: int, rows: ReplicatedRows):
        super().__init__(head, count)
        self._rows = rows

    def gathered(self, x: Any) -> Any:
        return flat_rows(self._rows.whole(x))

    def sums(self, logits: ChunkedLogits, arena: Arena) -> tuple[ActivationBuffer, Any]:
        lease = self._rows.lease((*logits.shape[:-1], self.head.inputs), logits.rows.dtype)
        return lease, flat_rows(lease.array)

    def summed(self, sums: ActivationBuffer, arena: Arena) -> Any:
        self._rows.reduction(sums).run()
        return self._rows.summed(sums, arena)


class VocabParallelCrossEntropy:
    """Softmax cross-entropy of vocabulary-parallel logits: the `Loss` of a sharded head.

    Three numbers a row are all-reduced: one maximum and two sums. Every rank returns the loss of
    whole rows, bit for bit the same.

    vocab      entries of the whole vocabulary
    smoothing  of the targets in training
    """

    def __init__(self, layers: Layers, vocab: int, smoothing: float):
        self._ops, self._group, self.vocab = layers.ops, layers.rows.group, vocab
        self._first = share(vocab, self._group.rank, self._group.size).start
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
