"""Whole parameters and gradients of all units of a rank, and the rows of its replica."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.data import Source, read_rows
from mpitrain.layers.base import Gradients, Weights
from mpitrain.layers.flat import Storage
from mpitrain.parallel.grid import share
from mpitrain.parallel.replication.protocol import (
    GradientReducer,
    ParameterStore,
    ReplicationContext,
    StateBuffer,
    spread,
)
from mpitrain.regions import Piece, moved, overlap


def whole(storage: Storage) -> list[Piece]:
    """Return the one piece that is the whole flat buffer of trained tensors."""
    return [Piece(0, storage.length, 0)]


class WholeParameters(ParameterStore):
    """The parameters of all units of a rank (as DDP); in half precision also their mirror.

    computed  the flat buffer with which layers compute: the mirror if there is one
    weights   for each unit its named views of `computed`, and of its frozen parameters
    """

    mirror: Any = None
    sharing: Sequence[Group] = ()

    def __init__(self, replica: ReplicationContext, owned: Sequence[Piece]):
        storage, allocate = replica.storage, replica.grid.world.transport.allocate
        self._replica = replica
        self.parameters = self.computed = allocate(storage.length, storage.dtype)
        storage.initialize(self.parameters, replica.config.run.seed, replica.device.backend)
        if replica.device.mirror:
            self.mirror = self.computed = allocate(storage.length, replica.computed)
            replica.device.mirror(self.parameters, self.mirror, replica.arena)
        self.frozen = FrozenParameters(replica)
        self.weights = storage.weights(self.computed, self.frozen.flat)
        self.arrays: list[Any] = [self.parameters, self.computed, self.frozen.flat]
        self.owned = dict(zip(owned, spread(self.parameters, owned), strict=True))

    def open(self, unit: int, micro: int) -> Weights:
        return self.weights[unit]

    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        for piece, parameters in self.owned.items():
            mirror = None if self.mirror is None else self.mirror[piece.start : piece.stop]
            apply(piece, parameters, mirror)

    def loaded(self) -> None:
        if self._replica.device.mirror:
            self._replica.device.mirror(self.parameters, self.mirror, self._replica.arena)

    def state(self) -> list[StateBuffer]:
        own = StateBuffer("parameters", self.parameters, whole(self._replica.storage))
        return [own, *self.frozen.state()]


class FrozenParameters:
    """Parameters that are not trained: no gradient, no optimizer state, no messages.

    flat  1-D, all of this rank or its shards concatenated, in the dtype with which layers compute.
          In half precision there are no float32 masters.
    """

    def __init__(self, replica: ReplicationContext, pieces: Sequence[Piece] | None = None):
        """Allocate and initialise them; not collective.

        pieces  this rank's shards of the flat buffer of frozen tensors; None: the whole buffer
        """
        self._device, self._arena = replica.device, replica.arena
        self._layout = layout = replica.storage.frozen
        self._pieces = [Piece(0, layout.length, 0)] if pieces is None else pieces
        length = sum(piece.stop - piece.start for piece in self._pieces)
        self.flat = replica.device.backend.zeros(length, replica.computed)
        layout.initialize(self.flat, replica.config.run.seed, replica.device.backend, self._pieces)
        self.loaded()

    def loaded(self) -> None:
        if self._device.mirror and not self._device.half and self.flat.size:
            for numbers in self._numbers():
                self._device.mirror(numbers, numbers, self._arena)

    def _numbers(self) -> list[Any]:
        """Return views of all tensors that are not in codes of 8 bits."""
        numbers = [entry for entry in self._layout.entries if not entry.parameter.coded]
        if len(numbers) == len(self._layout.entries):
            return [self.flat]
        views = []
        for piece in self._pieces:
            for entry in numbers:
                if both := overlap(entry, piece):
                    views.append(self.flat[moved(both, piece.offset - piece.start)])
        return views

    def state(self) -> list[StateBuffer]:
        if not self._layout.entries:
            return []
        return [StateBuffer("parameters", self.flat, self._pieces, entries=self._layout.entries)]


class LocalGradients(GradientReducer):
    """The gradients of all units of a rank, without any reduction over ranks."""

    def __init__(
        self, replica: ReplicationContext, owned: Sequence[Piece], counted: Sequence[Piece]
    ):
        """Allocate the gradients; collective.

        owned    the pieces that this rank updates
        counted  the pieces that this rank squares for the norm
        """
        storage = replica.storage
        self.buffer = replica.grid.world.transport.allocate(storage.length, storage.dtype)
        self._gradients, self._leaves = storage.gradients(self.buffer)
        self.arrays = [self.buffer]
        self.members: Sequence[int] = replica.grid.tp.transport.members
        self.summed = dict(zip(owned, spread(self.buffer, owned), strict=True))
        self.squared = spread(self.buffer, counted)

    def begin(self, step: int) -> None:
        for leaf in chain.from_iterable(self._leaves):
            leaf.filled = False

    def gradients(self, unit: int) -> Gradients:
        return self._gradients[unit]

    def ready(self, unit: int, is_last: bool) -> None:
        """Zero the gradients that no layer has written, after the last micro-batch of a step.

        Otherwise these leaves would contain the gradients of the previous step.
        """
        if is_last:
            for leaf in self._leaves[unit]:
                if not leaf.filled:
                    leaf.array.fill(0)


class ReplicaRows:
    """A replica's rows, one of dp nearly equal runs of the global batch; an update uses all rows."""

    def __init__(self, replica: ReplicationContext):
        self._replica = replica
        self._size = replica.config.batch.size

    def share(self, rows: int) -> range:
        grid = self._replica.grid
        return share(rows, grid.coords.dp, grid.axes.dp)

    def batch(
        self, source: Source, step: int, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        config, rows = self._replica.config, self.share(self._size)
        return read_rows(
            config.data.source,
            source,
            len(rows),
            lambda: source.batch(config.run.seed, step, self._size, rows, before),
        )

    def of_update(self, micro: int) -> int:
        return self._size

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        return self._replica.loss.gradient(logits, targets, scale, self._replica.arena)


class OwnRows(ReplicaRows):
    """A replica's rows, as `ReplicaRows`; an update of the replica uses only these rows."""

    def of_update(self, micro: int) -> int:
        return len(self.share(self._size))
