"""What lies between sharded layers: all rows on every rank, or its share of them; and the messages that take one to the other.

B batch, T tokens, C channels, n ranks of the group.
source  Shoeybi et al. 2019, arXiv:1909.08053; with rows of its own Korthikanti et al. 2022, arXiv:2205.05198
"""

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.collectives.exchange import Exchange
from mpitrain.collectives.execute import Reduction
from mpitrain.collectives.group import Group
from mpitrain.machine.arena import Arena


class WholeRows:
    """Between sharded layers all ranks have all rows: these enter a layer as they are, and leave it as a sum over the ranks.

    partial  whether each rank sees only part of the gradient of a norm that all of them hold: no, they see the same
    context  T of every sequence, but of one alone, which may be shorter
    """

    partial = False
    context = 1

    def __init__(self, group: Group):
        self.group = group

    def lease(self, shape: Sequence[int], dtype: Any) -> Exchange:
        """Where this rank writes what will be summed."""
        return self.group.exchange(shape, dtype)

    def reduction(self, lease: Exchange) -> Reduction:
        """What sums it."""
        return lease.all_reduce()

    def summed(self, lease: Exchange, arena: Arena) -> Any:
        """The sum, once it is made."""
        return lease.array

    def whole(self, x: Any) -> Any:
        """All rows, of what lies between layers."""
        return x

    def kept(self, saved: Any, x: Any) -> Any:
        """What a product saved of all rows of x, until the backward."""
        return saved

    def regained(self, saved: Any) -> Any:
        """What the product saved, again."""
        return saved

    def sequences(self, x: Any) -> Any:
        """(..., C) of all rows as (B, T, C)."""
        return x.reshape(self.as_sequences(x.shape))

    def as_sequences(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape (B, T, C), of one of all rows."""
        return tuple(shape)

    def entered(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of all rows, of one between layers."""
        return tuple(shape)

    def left(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape between layers, of one of all rows."""
        return tuple(shape)


class OwnRows(WholeRows):
    """Between sharded layers each rank has B T / n of the rows of (B T, C): they enter a layer gathered, and leave it scattered.

    source   Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198
    """

    partial = True

    def __init__(self, group: Group, keep_gathered: bool):
        """keep_gathered: keep what a layer has gathered for its backward, instead of gathering it again."""
        super().__init__(group)
        self._keeps = keep_gathered

    def reduction(self, lease: Exchange) -> Reduction:
        return lease.reduce_scatter()

    def summed(self, lease: Exchange, arena: Arena) -> Any:
        own = arena.take(lease.own_rows.shape, lease.array.dtype)    # a view would keep the memory of all rows
        own[...] = lease.own_rows
        return own

    def whole(self, x: Any) -> Any:
        lease = self.group.exchange(self.entered(x.shape), x.dtype)
        lease.own_rows[...] = x
        lease.all_gather().run()
        return lease.array

    def kept(self, saved: Any, x: Any) -> Any:
        return saved if self._keeps else (_with_input(saved, None), x)

    def regained(self, saved: Any) -> Any:
        return saved if self._keeps else _with_input(saved[0], self.whole(saved[1]))

    def as_sequences(self, shape: Sequence[int]) -> tuple[int, ...]:
        rows = math.prod(shape[:-1])
        length = min(self.context, rows)
        return (rows // length, length, shape[-1])

    def entered(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (math.prod(shape[:-1]) * self.group.size, shape[-1])

    def left(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (math.prod(shape[:-1]) // self.group.size, shape[-1])


def _with_input(saved: Any, x: Any) -> Any:
    """What a linear operation saved, which is its input or begins with it, with this input."""
    return (x, *saved[1:]) if isinstance(saved, tuple) else x
