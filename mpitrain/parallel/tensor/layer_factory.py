"""Makes the layer factory of a rank from its groups, and the loss; checks that a model fits the layout."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from mpitrain.collectives.group import Group
from mpitrain.config import Layout, Model
from mpitrain.errors import ConfigError
from mpitrain.layers.base import ALL_ROWS, Layer, Loss, TokenShare, Unit, WholeRows
from mpitrain.layers.chunked_logits import ChunkedLoss
from mpitrain.layers.plain import Attention, Plain
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops
from mpitrain.parallel.tensor.context import RingAttention, Ulysses, all_tokens
from mpitrain.parallel.tensor.rows import ReplicatedRows, SequenceSharded

NO_KEYS = Model()


class ContextParallel(Plain):
    """The layer factory of ranks that divide the tokens of each row (layout.cp).

    context   the group of these ranks
    settings  rows, tokens, keys, memory and seed, as of `Plain`
    """

    def __init__(self, ops: Ops, context: Group, **settings: Any):
        super().__init__(ops, **settings)
        self.context = context

    def attention(
        self, width: int, heads: int, kv_heads: int | None = None, *rest: Any, **more: Any
    ) -> Layer:
        inner = super().attention(width, heads, kv_heads, *rest, **more)
        if self.tokens.is_ring:
            return inner
        shared = heads if kv_heads is None else kv_heads
        return Ulysses(inner, heads, shared, self.context)

    def _heads(self, heads: int, kv_heads: int, *rest: Any) -> Attention:
        """Return attention of this rank's heads; with `ulysses` context-parallel ranks divide these."""
        context, (run, own) = self.context, self._own_heads(heads, kv_heads)
        if self.tokens.is_ring:
            arguments = len(run), len(own), *rest, run.start, heads
            return RingAttention(context, self.ops, *arguments)
        among = WholeRows(context.rank, context.size)
        part = among.run(len(run), "heads")
        run = run[part.start : part.stop]
        own = among.run(len(own), "key and value heads")
        arguments = len(run), len(own), *rest, run.start, heads
        return Attention(self.ops, *arguments)

    def all_tokens(self, x: Any, arena: Arena) -> Any:
        return all_tokens(x, self.context, self.tokens, arena)


class GroupShape(NamedTuple):
    """A rank and a size in place of a Group, for layers that are described but never computed."""

    rank: int
    size: int


def layers_for(
    ops: Ops, group: Group, layout: Layout, context: Group | None = None, **settings: Any
) -> Plain:
    """Return the layer factory of a tensor-parallel group.

    context   the group of the ranks that divide the tokens of each row; None: no ranks do
    settings  keys, memory and seed, as of `Plain`
    """
    rows = ALL_ROWS
    if group.size > 1:
        tokens = settings.get("keys", NO_KEYS).context // layout.cp
        rows = (
            SequenceSharded(group, layout.keep_gathered, tokens)
            if layout.sequence_parallel
            else ReplicatedRows(group)
        )
    if context:
        share = TokenShare(context.rank, context.size, layout.cp_mode == "ring")
        return ContextParallel(ops, context, rows=rows, tokens=share, **settings)
    return Plain(ops, rows=rows, **settings)


def described(ops: Ops, layout: Layout, **settings: Any) -> Plain:
    """Return the layer factory of the last tensor-parallel rank, which has the largest shards.

    Without a group, its layers list their parameters and shapes, but cannot compute.
    settings  as of `layers_for`
    """
    shape = cast(Group, GroupShape(layout.tp - 1, layout.tp))
    return layers_for(ops, shape, layout, **settings)


def filled_shape(layers: Plain, shape: Sequence[int]) -> tuple[int, ...]:
    """Return an input shape (B, T), no smaller than this one, that all ranks can divide."""
    if layers.tokens.ranks == 1:
        return layers.rows.filled(shape)
    ranks, chunks, (sequences, tokens) = layers.tokens.ranks, layers.tokens.chunks, shape
    each = chunks // ranks  # chunks of a rank
    sequences, own = layers.rows.filled((sequences, -(-tokens // chunks) * each))
    if own % each:  # The next multiple of an odd number of tensor-parallel ranks is even.
        sequences, own = layers.rows.filled((sequences, own + 1))
    return sequences, ranks * own


def loss_for(layers: Plain, own: Loss | None = None) -> Loss:
    """Return the user's loss or the loss of `layers`; with memory.logit_chunks as a ChunkedLoss."""
    loss = own or layers.loss()
    return ChunkedLoss(loss, layers.ops) if layers.memory.logit_chunks > 1 else loss


def check_units(units: Sequence[Unit], layers: Plain, attend: str, cp: int) -> None:
    """Check that a trainer can train these units together, with this configuration.

    The loss overwrites the last output, so the last layer's backward must not need it. With several
    tensor-parallel ranks each tensor must be sharded or replicated. With sequence-parallel rows one
    unit must be an embedding, which splits the rows. A key about a layer needs such a layer.

    layers      the factory, after the model has been built with it
    attend, cp  data.attend and layout.cp
    raises      ConfigError
    """
    last = units[-1]
    if not last.layer.output_is_free:
        raise ConfigError(
            f"The loss writes its gradient over the last output, but {last.name} needs that for its backward.",
            "End with a layer that has no activation, such as `head` or `linear`.",
        )
    if layers.rows.partial and "embedding" not in layers.made:
        raise ConfigError(
            "With layout.sequence_parallel an embedding leaves each rank its own rows, but no unit is one.",
            "Begin with `embedding` of the set of layers, or set layout.sequence_parallel to false.",
        )
    if layers.rows.ranks > 1:
        _check_tensors(units, layers.rows.ranks)
    keys, memory = layers.keys, layers.memory
    for key, value, usual, layer in (
        ("model.dropout", keys.dropout, 0, "dropout"),
        ("model.attention_dropout", keys.attention_dropout, 0, "attention with dropout"),
        ("model.window", keys.window, 0, "attention in a window"),
        ("memory.recompute", memory.recompute == "attention" and "attention", "none", "attention"),
        ("memory.logit_chunks", memory.logit_chunks, 1, "head"),
        ("data.attend", attend, "window", "attention"),
        ("layout.cp", cp, 1, "attention"),
    ):
        if value and value != usual and layer not in layers.made:
            raise ConfigError(
                f"{key}={value} needs the layer factory's {layer}, but this model has none.",
                f"Set {key} to {usual}, or make {layer} with the layer factory.",
            )


def _check_tensors(units: Sequence[Unit], ranks: int) -> None:
    for unit in units:
        for parameter in unit.layer.parameters():
            if parameter.slices is None and not parameter.holders:
                raise ConfigError(
                    f"With layout.tp {ranks} a tensor is a rank's part or marked as held by all, but {parameter.name} of unit "
                    f"{unit.name} is neither.",
                    "Make all units from the set of layers that a Trainer passes to its argument `units`, or set layout.tp to 1.",
                )
