"""The sets of layers that a trainer hands out: the plain one, and the same constructors for layers that ranks share."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from mpitrain.collectives.group import Group
from mpitrain.config import Layout
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Loss, Unit
from mpitrain.layers.initial import Draw, normal
from mpitrain.layers.plain import Plain
from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops
from mpitrain.parallel.grid import share
from mpitrain.parallel.tensor.linear import (
    Column,
    ColumnParallelLinear,
    Head,
    HeadAttention,
    ReplicatedLinear,
    ReplicatedNorm,
    RowParallelLinear,
    part,
)
from mpitrain.parallel.tensor.sequence import ReplicatedRows, SequenceSharded
from mpitrain.parallel.tensor.vocabulary import VocabParallelCrossEntropy, VocabParallelEmbedding


class LayerFactory(Plain):
    """The plain layers, with what sharded ones in a list of one's own ask for. rows: of a group of one."""

    def __init__(self, ops: Ops, rows: ReplicatedRows):
        super().__init__(ops)
        self.rows = rows

    def whole(self, logits: Any, arena: Arena) -> Any:
        """All columns of what the last layer has returned, on every rank."""
        return logits

    def columns(self, own: int) -> int:
        """How many columns `whole` has, where this rank has so many of its own."""
        return own


class ShardedLayerFactory(LayerFactory):
    """The constructors of `Plain`, for layers of which each rank of a group holds a part.

    Heads, and the widths between a column- and a row-parallel layer, must divide by the ranks; a vocabulary is split raggedly.
    raises  ConfigError, by every constructor that splits what does not divide
    """

    _split: VocabParallelCrossEntropy | None = None

    def embedding(self, vocab: int, context: int, width: int) -> VocabParallelEmbedding:
        """Its rows are split, and the positions held by all."""
        return VocabParallelEmbedding(self, vocab, context, width, normal(0.02))

    def norm(self, width: int) -> ReplicatedNorm:
        """Held by all."""
        return ReplicatedNorm(self, width)

    def qkv(self, width: int, heads: int, draw: Draw) -> Column:
        """Queries, keys and values of this rank's heads: three runs of the outputs."""
        mine, each = part(self.rows.group, heads, "heads"), width // heads
        runs = [
            range(start + mine.start * each, start + mine.stop * each)
            for start in (0, width, 2 * width)
        ]
        return Column(self, runs, width, 3 * width, draw)

    def attention(self, width: int, heads: int) -> HeadAttention:
        """Of this rank's heads."""
        super().attention(width, heads)
        return HeadAttention(self, heads)

    def column_linear(
        self, inputs: int, outputs: int, draw: Draw, activation: str | None = None
    ) -> ColumnParallelLinear:
        """Its outputs are split."""
        return ColumnParallelLinear(self, inputs, outputs, draw, activation)

    def row_linear(
        self, inputs: int, outputs: int, draw: Draw, activation: str | None = None
    ) -> RowParallelLinear:
        """Its inputs are split."""
        return RowParallelLinear(self, inputs, outputs, draw, activation)

    def linear(
        self, inputs: int, outputs: int, draw: Draw, activation: str | None = None
    ) -> ReplicatedLinear:
        """Held whole by all."""
        return ReplicatedLinear(self.ops, inputs, outputs, draw, activation)

    def head(self, width: int, vocab: int, draw: Draw) -> Head:
        """Logits of this rank's part of the vocabulary; from now on `loss` and `whole` take these."""
        group = self.rows.group
        if vocab < group.size:
            raise ConfigError(
                f"{group.size} ranks share a vocabulary, but it has {vocab} entries.",
                f"Set layout.tp to at most {vocab}.",
            )
        self._split = VocabParallelCrossEntropy(self, vocab)
        return Head(self, [share(vocab, group.rank, group.size)], width, vocab, draw)

    def loss(self) -> Loss:
        """Of logits of which each rank has a part, if `head` has made them; else of whole ones, which every rank has."""
        return self._split or super().loss()

    def whole(self, logits: Any, arena: Arena) -> Any:
        return self._split.whole(logits, arena) if self._split else logits

    def columns(self, own: int) -> int:
        return self._split.vocab if self._split else own


class Seat(NamedTuple):
    """A rank among so many, without the others."""

    rank: int
    size: int


def layers_for(ops: Ops, group: Group, layout: Layout) -> LayerFactory:
    """The set of layers that this group's ranks share: the plain one for a single rank."""
    if group.size == 1:
        return LayerFactory(ops, ReplicatedRows(group))
    return ShardedLayerFactory(
        ops,
        SequenceSharded(group, layout.keep_gathered)
        if layout.sequence_parallel
        else ReplicatedRows(group),
    )


def described(ops: Ops, layout: Layout) -> LayerFactory:
    """The set of layers of the last of the ranks that share them, which holds most: it says what is held, and nothing else."""
    return layers_for(ops, cast(Group, Seat(layout.tp - 1, layout.tp)), layout)


def check_units(units: Sequence[Unit], rows: ReplicatedRows) -> None:
    """ConfigError if units cannot be trained together.

    The loss writes over the last one's output; ranks that share layers compute none as if they were alone there; and where they
    have rows of their own between layers, one of them has divided the model's input.
    rows  of the set of layers
    """
    ranks, last = rows.group.size, units[-1]
    if not last.layer.output_is_free:
        raise ConfigError(
            f"The loss writes its gradient over the last output, but {last.name} needs that for its backward.",
            "End with a layer that has no activation, such as `head` or `linear`.",
        )
    if not rows.context:
        raise ConfigError(
            "With layout.sequence_parallel an embedding leaves each rank its own rows, but no unit is one.",
            "Begin with `embedding` of the set of layers, or set layout.sequence_parallel to false.",
        )
    for unit in units if ranks > 1 else ():
        for parameter in unit.layer.parameters():
            if parameter.slices is None and not parameter.holders:
                raise ConfigError(
                    f"With layout.tp {ranks} a tensor is a rank's part or marked as held by all, but {parameter.name} of unit "
                    f"{unit.name} is neither.",
                    "Make all units from the set of layers that a Trainer passes to its argument `units`, or set layout.tp to 1.",
                )
