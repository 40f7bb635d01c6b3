"""What lies between sharded layers: all rows on every rank, or its share of them; and the messages that take one to the other.

B batch, T tokens, C channels, n ranks of the group.
source  Shoeybi et al. 2019, arXiv:1909.08053; with rows of its own Korthikanti et al. 2022, arXiv:2205.05198
"""

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.collectives.activations import ActivationBuffer, TimedReduction
from mpitrain.collectives.group import Group
from mpitrain.config import Config
from mpitrain.errors import ConfigError, multiples_near
from mpitrain.machine.arena import Arena
from mpitrain.parallel.grid import Axes


class ReplicatedRows:
    """Between sharded layers all ranks have all rows: these enter a layer as they are, and leave it as a sum over the ranks.

    partial  whether each rank sees only part of the gradient of a norm that all of them hold: no, they see the same
    context  T of every sequence, but of one alone, which may be shorter
    """

    partial = False
    context = 1

    def __init__(self, group: Group):
        self.group = group

    def lease(self, shape: Sequence[int], dtype: Any) -> ActivationBuffer:
        """Where this rank writes what will be summed."""
        return self.group.exchange(shape, dtype)

    def reduction(self, lease: ActivationBuffer) -> TimedReduction:
        """What sums it."""
        return lease.all_reduce()

    def ends(self, lease: ActivationBuffer, arena: Arena) -> tuple[Any, Any]:
        """The sum, once it is made, and where it may be written to with what is added to it; these may be one array."""
        return lease.array, lease.array

    def summed(self, lease: ActivationBuffer, arena: Arena) -> Any:
        """The sum, once it is made, with nothing added."""
        sums, y = self.ends(lease, arena)
        if y is not sums:
            y[...] = sums
        return y

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

    def filled(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a model's input, at least this one, whose rows the ranks can have between layers."""
        return tuple(shape)


class SequenceSharded(ReplicatedRows):
    """Between sharded layers each rank has B T / n of the rows of (B T, C): they enter a layer gathered, and leave it scattered.

    source   Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198
    """

    partial = True

    def __init__(self, group: Group, keep_gathered: bool):
        """keep_gathered: keep what a layer has gathered for its backward, instead of gathering it again."""
        super().__init__(group)
        self._keeps, self.context = keep_gathered, 0  # until an embedding says it

    def reduction(self, lease: ActivationBuffer) -> TimedReduction:
        return lease.reduce_scatter()

    def ends(self, lease: ActivationBuffer, arena: Arena) -> tuple[Any, Any]:
        own = lease.own_rows
        return own, arena.take(own.shape, own.dtype)  # a view would keep the memory of all rows

    def whole(self, x: Any) -> Any:
        lease = self.group.exchange(self.entered(x.shape), x.dtype)
        lease.own_rows[...] = x
        lease.all_gather().run()
        return lease.array

    def kept(self, saved: Any, x: Any) -> Any:
        return saved if self._keeps else _with_input(saved, x)

    def regained(self, saved: Any) -> Any:
        return saved if self._keeps else _with_input(saved, self.whole(_input_of(saved)))

    def as_sequences(self, shape: Sequence[int]) -> tuple[int, ...]:
        rows = math.prod(shape[:-1])
        length = min(self.context, rows)
        return (rows // length, length, shape[-1])

    def entered(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (math.prod(shape[:-1]) * self.group.size, shape[-1])

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
    """The least number of sequences of so many tokens whose rows the ranks can divide: its multiples are all such numbers."""
    return ranks // math.gcd(tokens, ranks)


def sequences_of(config: Config) -> int:
    """The number of which every micro-batch of training has a multiple."""
    return (
        sequences_together(config.model.context, config.layout.tp)
        if config.layout.sequence_parallel
        else 1
    )


def check_rows(config: Config, axes: Axes) -> None:
    """Refuse micro-batches of training whose rows the ranks that share layers cannot divide.

    config  with batch.micro_batches settled
    raises  ConfigError with the nearest numbers that work
    """
    size, tokens, fitting, parts = (
        config.batch.size,
        config.model.context,
        sequences_of(config),
        config.batch.micro_batches,
    )
    shares = [rows for whole in _shares(size, axes.dp) for rows in _shares(whole, parts)]
    odd = [rows for rows in shares if rows % fitting]
    if not odd:
        return
    ways = [
        f"batch.size to {multiples_near(size, fitting * axes.dp * parts)}",  # of equal shares
        f"model.context to {multiples_near(tokens, sequences_together(math.gcd(*shares), axes.tp))}",
    ]
    most, left = divmod(size, fitting * axes.dp)
    if not left and axes.pp == 1:
        smaller = [count for count in range(1, math.isqrt(most) + 1) if most % count == 0]
        counts = sorted([*smaller, *(most // count for count in smaller)])
        ways.append(f"batch.micro_batches to {min(counts, key=lambda count: abs(count - parts))}")
    raise ConfigError(
        f"With layout.sequence_parallel {axes.tp} ranks divide the rows of each micro-batch, but one of {odd[0]} sequence(s) of "
        f"{tokens} tokens has {odd[0] * tokens}.",
        f"Set {', '.join(ways)}, or layout.sequence_parallel to false.",
    )


def _shares(count: int, parts: int) -> tuple[int, int]:
    """How long shares of so many rows are: the shortest and the longest, one apart at most."""
    return count // parts, -(-count // parts)


def _input_of(saved: Any) -> Any:
    """The input of a linear operation in what it saved, which is the input, or a tuple whose first entry is such."""
    return _input_of(saved[0]) if isinstance(saved, tuple) else saved


def _with_input(saved: Any, x: Any) -> Any:
    """What a linear operation saved, with this input."""
    return (_with_input(saved[0], x), *saved[1:]) if isinstance(saved, tuple) else x
