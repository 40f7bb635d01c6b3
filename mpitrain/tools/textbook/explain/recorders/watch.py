"""The diary of one rank of a training job: the contents of its buffers after each event."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.regions import Piece
from mpitrain.run.trainer import Trainer
from mpitrain.tools.textbook.explain.explanation import UNDER_WAY, Text, sentence
from mpitrain.tools.textbook.explain.recorders.toy import Pass
from mpitrain.tools.textbook.explain.symbols import Symbols

Key = tuple[int, ...]
"""The order of an event: step, phase, micro-batch, direction, unit."""

COMPUTED, SUMMED, UPDATED, ENDED = range(4)
"""Phases of a step."""


class WatchedState(NamedTuple):
    """The rank after an event.

    title    of the event
    cells    {group of columns: contents}
    nbytes   sent since the start
    seconds  since the start of the step
    """

    title: Text
    cells: Mapping[str, tuple[str, ...]]
    nbytes: int
    seconds: float


class Watch:
    """The diary of one rank; the layers and the trainer of a toy job call it.

    names  of the units
    cells  of each unit
    kinds  passes of layers that make an entry of their own
    """

    def __init__(
        self,
        symbols: Symbols,
        names: Sequence[str],
        cells: int,
        kinds: Collection[str],
        micro_batches: int,
    ):
        self._symbols, self._names, self._cells, self._kinds = symbols, names, cells, kinds
        self._micro_batches, self.entries = micro_batches, dict[Key, WatchedState]()
        self._trainer: Trainer | None = None
        self._step, self._passes = 0, dict[str, int]()
        self._opened: Mapping[int, tuple[str, ...]] = {}
        self._written: dict[int, tuple[str, ...]] = {}
        self._ready: list[int] = []
        self._first_messages = self._first_bytes = 0
        self.clock: Callable[[], float] = lambda: 0.0

    @property
    def trainer(self) -> Trainer:
        """The trainer of this rank, once `begin` has been called."""
        assert self._trainer is not None
        return self._trainer

    def begin(self, trainer: Trainer) -> None:
        """Watch a trainer: make the first entry, and one before and after each update."""
        self._trainer = trainer
        # A later call of `kept` would end messages in flight; the arrays stay the same.
        self._buffers = {buffer.name: buffer for buffer in trainer.replication.kept()}
        self._first_bytes = trainer.transport.traffic.nbytes
        self._stored = self._read_parameters()
        self._note((0,), sentence("start"))
        store = trainer.replication.store
        update = store.update

        def watched(apply: Callable[[Piece, Any, Any], None]) -> None:
            self._opened = {}
            self._read_gradients()
            self._note((self._step, SUMMED), sentence("gradients complete"))
            update(partial(self._applied, apply))
            self._note((self._step, UPDATED), sentence("update"))

        store.update = watched  # type: ignore[method-assign]

    def _applied(
        self, apply: Callable[[Piece, Any, Any], None], piece: Piece, parameters: Any, mirror: Any
    ) -> None:
        """Update a piece. Other pieces may be in flight already, so only this one is read."""
        apply(piece, parameters, mirror)
        own = self._placed(parameters, [piece._replace(offset=0)])
        pairs = zip(own, self._stored["parameters"], strict=True)
        stored = self._read_buffers()
        self._stored = {**stored, "parameters": tuple(new or old for new, old in pairs)}

    def step(self, number: int) -> None:
        """Begin a step, from 1."""
        self._step, self._ready, self._written = number, [], {}
        self._passes = {"forward": 0, "weight": 0}
        self._first_messages = self.trainer.transport.traffic.messages

    def end(self) -> None:
        """End a step, after the parameters are current."""
        self._opened = {}
        self._stored = self._read_parameters()
        self._note((self._step, ENDED), sentence("end of the step"))

    def seen(self, layer_pass: Pass) -> None:
        """Make an entry of a layer's pass."""
        if self._trainer is None or not self._passes:
            return
        count = len(self._names)
        if layer_pass.kind == "input":
            self._opened = {layer_pass.unit: self._read(layer_pass.array)}
            return
        micro, at = divmod(self._passes[layer_pass.kind], count)
        self._passes[layer_pass.kind] += 1
        if layer_pass.kind == "forward":
            self._opened = {layer_pass.unit: self._read(layer_pass.array)}
            title = sentence("forward of {unit}", unit=self._names[layer_pass.unit])
        else:
            self._written[layer_pass.unit] = self._read(layer_pass.array)
            title = sentence("backward of {unit}", unit=self._names[layer_pass.unit])
        if self._micro_batches > 1:
            title = sentence("micro-batch {k}: {event}", k=micro, event=title)
        if layer_pass.kind in self._kinds:
            self._note((self._step, COMPUTED, micro, int(layer_pass.kind == "weight"), at), title)
        if layer_pass.kind == "weight" and micro == self._micro_batches - 1:
            self._ready.append(layer_pass.unit)

    def _note(self, key: Key, title: Text) -> None:
        cells = dict(self._stored)
        parameters = [*cells["parameters"]]
        for unit, contents in self._opened.items():
            parameters[unit * self._cells : (unit + 1) * self._cells] = contents
        cells["parameters"] = tuple(parameters)
        is_computing = len(key) > 1 and key[1] == COMPUTED
        cells["gradients"] = tuple(
            cell + UNDER_WAY * (is_computing and self._is_under_way(unit))
            for unit in range(len(self._names))
            for cell in self._written.get(unit, ("",) * self._cells)
        )
        traffic = self.trainer.transport.traffic
        self.entries[key] = WatchedState(
            title, cells, traffic.nbytes - self._first_bytes, self.clock()
        )

    def _is_under_way(self, unit: int) -> bool:
        """Return whether the unit's gradient is complete, and this step has sent messages."""
        reducer: Any = self.trainer.replication.reducer
        if self.trainer.transport.traffic.messages == self._first_messages:
            return False
        buckets = getattr(reducer, "buckets", None)
        if buckets is None:
            return unit in self._ready and not type(reducer).__name__.startswith("Local")
        return any(unit in bucket.units and {*bucket.units} <= {*self._ready} for bucket in buckets)

    def _read(self, array: np.ndarray) -> tuple[str, ...]:
        return self._symbols.read_all(array, self._cells)

    def _read_parameters(self) -> dict[str, tuple[str, ...]]:
        buffers = self._buffers
        stored = buffers.get("own_parameters", buffers["parameters"])
        return {**self._read_buffers(), "parameters": self._placed(stored.array, stored.pieces)}

    def _read_buffers(self) -> dict[str, tuple[str, ...]]:
        """Return the contents of the first buffer of optimizer state; {} if there is none."""
        states = [b for name, b in self._buffers.items() if not name.endswith("parameters")]
        if not states:
            return {}
        return {"optimizer state": self._placed(states[0].array, states[0].pieces)}

    def _read_gradients(self) -> None:
        """Read the gradients that this rank stores after their reduction."""
        reducer: Any = self.trainer.replication.reducer
        buffer = np.asarray(reducer.buffer)
        shards = getattr(reducer, "shards", None)
        pieces = shards.owned if shards else self._whole(buffer)
        contents = self._placed(buffer, pieces)
        self._written = {
            unit: contents[unit * self._cells : (unit + 1) * self._cells]
            for unit in range(len(self._names))
        }

    def _whole(self, buffer: np.ndarray) -> Sequence[Piece]:
        """Return the pieces of a buffer that has all elements, or those of a server."""
        pieces = self._buffers["parameters"].pieces
        if sum(piece.stop - piece.start for piece in pieces) == buffer.size:
            return pieces
        return [Piece(0, buffer.size, 0)]

    def _placed(self, array: Any, pieces: Sequence[Piece]) -> tuple[str, ...]:
        """Return the contents of all cells; empty where the pieces have no element of a cell."""
        length = self.trainer.storage.length // (len(self._names) * self._cells)
        contents = []
        for cell in range(len(self._names) * self._cells):
            start, stop = cell * length, (cell + 1) * length
            parts = [
                np.asarray(array)[p.offset + max(p.start, start) - p.start :][
                    : min(p.stop, stop) - max(p.start, start)
                ]
                for p in pieces
                if max(p.start, start) < min(p.stop, stop)
            ]
            contents.append(self._symbols.read(np.concatenate(parts)) if parts else "")
        return tuple(contents)
