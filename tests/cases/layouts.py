"""A small model on any number of ranks, in layouts that differ in what each rank holds, as checkpoints see it."""

import zlib
from typing import NamedTuple

import numpy as np

from mpitrain.layers.base import Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import HostBackend
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.regions import Piece, share
from mpitrain.run.checkpoint import loading
from mpitrain.run.checkpoint.manifest import Done, Manifest
from mpitrain.run.checkpoint.saving import begin

HEADS, WIDTH, VOCABULARY = 4, 8, 7


class Described:
    """A layer that is nothing but its description."""

    def __init__(self, **parameters):
        self._parameters = [
            Parameter(name, shape, None, len(shape) > 1, slices)
            for name, (shape, *slices) in (
                (name, (*found, None)[:2]) for name, found in parameters.items()
            )
            for slices in slices
        ]

    def parameters(self):
        return self._parameters


class Layout(NamedTuple):
    """How many ranks, and on how many axes: tp varies fastest; `stages` of units; parameters and state whole or in shards."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    shards: tuple[str, ...] = ()

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp

    @property
    def facts(self):
        """What a checkpoint says of it: whole numbers, as of a trainer's axes."""
        return {**self._asdict(), "shards": len(self.shards)}


LAYOUTS = {
    **{f"whole on {n}": Layout(dp=n) for n in (1, 2, 3, 4)},
    **{f"state in {n} shards": Layout(dp=n, shards=("state",)) for n in (1, 2, 3, 4)},
    **{f"all in {n} shards": Layout(dp=n, shards=("state", "parameters")) for n in (2, 3)},
    **{f"rectangles on {n}": Layout(tp=n) for n in (2, 3)},
    "rectangles on 2, twice": Layout(dp=2, tp=2),
    "rectangles on 2, state in 2 shards": Layout(dp=2, tp=2, shards=("state",)),
    **{f"{n} stages": Layout(pp=n) for n in (2, 3)},
    "2 stages in 2 shards": Layout(dp=2, pp=2, shards=("state", "parameters")),
}


def units(layout, rank):
    """What a rank has of the model: a tied table, queries, keys and values in three rectangles, columns, rows, and the rest."""
    tp, stage = rank % layout.tp, rank // (layout.tp * layout.dp)
    some = share(VOCABULARY, tp, layout.tp)
    heads = share(HEADS, tp, layout.tp)
    table = ((slice(some.start, some.stop), slice(0, WIDTH)),)
    qkv = tuple(
        (slice(start + 2 * heads.start, start + 2 * heads.stop), slice(0, WIDTH))
        for start in (0, 8, 16)
    )
    columns = ((slice(0, WIDTH), slice(8 * tp // layout.tp, 8 * (tp + 1) // layout.tp)),)
    everything = [
        Unit("embedding", Described(table=((VOCABULARY, WIDTH), table), positions=((5, WIDTH),))),
        Unit(
            "block",
            Described(
                gain=((WIDTH,),), qkv=((24, WIDTH), qkv), down=((WIDTH, 8), columns), scale=((),)
            ),
        ),
        Unit(
            "head",
            Described(weight=((VOCABULARY, WIDTH), table), bias=((VOCABULARY,),)),
            {"weight": "embedding.table"},
        ),
    ]
    mine = share(3, stage, layout.pp)
    chosen = everything[mine.start : mine.stop]
    if layout.pp > 1 and stage == layout.pp - 1:  # the table of the tied weight lies here as well
        chosen = [Unit("embedding", Described(table=((VOCABULARY, WIDTH), table))), *chosen]
    return chosen


def logical(name, tensor, shape):
    """A whole tensor of what is kept under a name, with a NaN and a negative zero somewhere."""
    generator = np.random.default_rng(zlib.crc32(f"{name} {tensor}".encode()))
    whole = generator.standard_normal(shape).astype("f4")
    whole.reshape(-1)[:2] = np.float32([np.nan, -0.0])[: whole.size]
    return whole


def shards(storage, layout, rank):
    """The rank's n-th of every bucket, one after the other."""
    pieces, place = [], 0
    for bucket in storage.buckets(300):
        mine = share(bucket.stop - bucket.start, rank // layout.tp % layout.dp, layout.dp)
        pieces.append(Piece(bucket.start + mine.start, bucket.start + mine.stop, place))
        place += len(mine)
    return pieces


def kept(layout, rank):
    """Storage, and what a rank keeps, as it must be: "parameters" and two buffers agreed on, residuals, and what is bound."""
    storage = Storage(units(layout, rank), "f4", layout.dp)
    found = []
    for name, kind in (
        ("parameters", "parameters"),
        ("first_moment", "state"),
        ("second_moment", "state"),
    ):
        flat = np.zeros(storage.length, "f4")
        for entry in storage.entries:
            entry.view(flat)[...] = entry.parameter.part_of(
                logical(name, entry.name, entry.parameter.shape)
            )
        pieces = (
            shards(storage, layout, rank)
            if kind in layout.shards
            else [Piece(0, storage.length, 0)]
        )
        found.append(
            StateBuffer(
                name, np.concatenate([flat[piece.start : piece.stop] for piece in pieces]), pieces
            )
        )
    if layout.tp == layout.pp == 1:
        owed = np.zeros(storage.length, "f4")
        for entry in storage.entries:
            entry.view(owed)[...] = np.random.default_rng([rank, entry.start]).standard_normal(
                entry.parameter.shape
            )
        found += [
            StateBuffer(
                "residual",
                owed[bucket.start : bucket.stop],
                [Piece(bucket.start, bucket.stop, 0)],
                "own",
            )
            for bucket in storage.buckets(300)
        ]
    found.append(StateBuffer("factors/0", np.full(5, rank + 1, "f4"), kind="bound"))
    return storage, found


def save(transport, folder, layout, step=1, run="run", room=None):
    """Write what the ranks of a layout keep; with `room` from copies, in a thread."""
    storage, found = kept(layout, transport.rank)
    manifest = Manifest(Done(step, 12 * step, run), layout.facts, {"scale": 0.5})
    never = lambda step: False  # noqa: E731
    begun = begin(folder, found, storage, transport, HostBackend(), manifest, 9, never, room)
    assert begun.is_copied == bool(room)
    if room:
        for one in found:
            one.array.fill(-1)  # The steps go on.
        begun.start(lambda point, step: None)
    begun.wait()
    return begun.path


def load(transport, path, layout):
    """What the ranks of a layout hold after loading into zeros, and what they should: storage, both."""
    storage, wanted = kept(layout, transport.rank)
    empty = [one._replace(array=np.zeros_like(one.array)) for one in wanted]
    found = loading.read_beside(transport, path)
    loading.load(found, empty, storage, transport, HostBackend(), layout.facts)
    return storage, empty, wanted
