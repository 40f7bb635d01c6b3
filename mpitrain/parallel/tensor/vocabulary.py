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

from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.ops import Ops
from mpitrain.parallel.tensor.rows import ReplicatedRows


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
