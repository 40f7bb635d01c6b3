"""The decoder of one rank: it runs new tokens through all stages, with a key-value cache."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.layers.base import READING, Now, Unit, Weights
from mpitrain.layers.incremental import FixedArena, Past, forward_next, is_incremental, is_rowwise
from mpitrain.machine.backend import Arena
from mpitrain.parallel.replica import Replica
from mpitrain.pipeline.pipeline import Channel, Executor, MicroBatch, input_shape, own
from mpitrain.pipeline.schedules import forward_alone, with_messages
from mpitrain.transport.base import Transport


class DecodingStage:
    """Stage that runs new tokens through the units of one chunk, with a cache of earlier tokens.

    arena  allocates the activations of a forward
    end    number of units that a forward runs
    """

    def __init__(
        self, units: Sequence[tuple[int, Unit]], replica: Replica, past: Past, arena: Arena
    ):
        """Bind the stage to its units.

        If ZeRO shards the parameters over ranks, each unit's parameters are gathered and copied
        here, once.

        units  (number, unit) of each unit; the replica numbers the units of this rank
        past   the key-value cache
        """
        self._replica, self._past, self.arena = replica, past, arena
        self._layers = [
            (number, unit.layer, self._copy(number) if replica.is_sharded else None)
            for number, unit in units
        ]
        self.end = len(self._layers)

    def _copy(self, number: int) -> Weights:
        return _copied(self._replica.open(number, 0))

    def forward(self, micro: int, now: Now, x: Any) -> Any:
        """Run the first `end` units, and return their output for the new tokens."""
        replica, past, arena = self._replica, self._past, self.arena
        for number, layer, copy in self._layers[: self.end]:
            if copy is None:
                x = forward_next(layer, replica.open(number, micro), x, past, arena)
            else:
                x = forward_next(layer, copy, x, past, arena)
        return x


class Decoder:
    """Incremental decoding of some sequences by the stages of one replica.

    The decoder caches the keys and values of the tokens that `read` has seen. `read` is collective
    over the stages.

    bytes sent  for each new token an activation over each boundary between stages
    """

    def __init__(
        self,
        stage_of: Sequence[int],
        chunks: Sequence[Sequence[Unit]],
        transport: Transport,
        replica: Replica,
        arena: Arena,
        dtype: Any,
        placed: Callable[[np.ndarray], Any],
        sequences: int,
        room: int,
    ):
        """Build this rank's stages; collective over the ranks among which ZeRO shards parameters.

        stage_of   the stage of each chunk
        chunks     the units of each chunk of the model; `is_incremental` is true of every layer
        transport  of the pipeline's stages; its ranks are the stages
        dtype      of the messages between stages
        placed     copies an array of integers to the device
        sequences  number of sequences
        room       largest number of tokens in a window
        """
        here = transport.rank
        self._placed = placed
        self._chunks, self._past = chunks, Past(sequences, room, arena)
        channel = Channel(transport, arena, dtype, partial(input_shape, chunks))
        self._program = with_messages(forward_alone(stage_of))[here]
        self._arena, self._fixed = arena, FixedArena(arena)
        self._read = [-1] * sequences  # cached tokens of each sequence; -1: none was read yet
        self._stages, number = dict[int, Any](), 0
        for chunk in own(stage_of, here):
            units = [*enumerate(chunks[chunk], number)]
            self._stages[chunk] = DecodingStage(units, replica, self._past, arena)
            number += len(units)
        self._executor = Executor(self._stages, len(chunks), channel, placed)
        # The last layer of the model stores nothing if it is row-wise.
        self._unstored = is_rowwise(chunks[-1][-1].layer)
        self._last = self._stages.get(len(chunks) - 1)

    def read(self, windows: Sequence[Sequence[int]]) -> Any:
        """Return the output of the model at the last token of each window: (sequences, 1, V).

        A window that equals the previous call's, or adds one token to it, costs the forward of a
        single token. All tokens of any other window are computed. The result is None on all stages
        but the last.
        """
        lengths = [len(window) for window in windows]
        stale = [
            index
            for index, (length, read) in enumerate(zip(lengths, self._read, strict=True))
            if length not in (read, read + 1)
        ]
        if len(stale) == len(windows):
            self._fill(slice(0, len(windows)), windows)
        else:
            for index in stale:
                self._fill(slice(index, index + 1), [windows[index]])
        self._read = lengths
        tokens = np.array([window[-1:] for window in windows], np.int64)
        return self._run(slice(0, len(windows)), tokens, np.array(lengths) - 1, to_end=True)

    def _fill(self, rows: slice, windows: Sequence[Sequence[int]]) -> None:
        """Cache the keys and values of all tokens of these windows but the last token of each.

        Shorter windows are padded on the right. Later tokens overwrite the cached padding before any
        token attends to it.
        """
        longest = max(map(len, windows)) - 1
        if not longest:
            return
        tokens = np.zeros((len(windows), longest), np.int64)
        for row, window in zip(tokens, windows, strict=True):
            row[: len(window) - 1] = window[:-1]
        self._run(rows, tokens, np.zeros(len(windows), np.int64), to_end=False)

    def _run(self, rows: slice, tokens: np.ndarray, firsts: np.ndarray, to_end: bool) -> Any:
        """Run new tokens (B, T) through all stages, and return the output on the last stage.

        firsts  (B,) the position of the first new token of each sequence
        to_end  whether the output is needed; if not, a last layer that caches nothing is left out
        """
        length = tokens.shape[1]
        positions = np.add.outer(firsts, np.arange(length)) if length > 1 else firsts[:, None]
        self._past.begin(rows, self._placed(firsts), self._placed(positions))
        self._fixed.rewind()
        for stage in self._stages.values():
            stage.arena = self._fixed if to_end else self._arena
        if self._last:
            self._last.end = len(self._chunks[-1]) - (self._unstored and not to_end)
        outputs: list[Any] = []
        batch = MicroBatch(0, READING, tokens)
        self._executor.execute(self._program, [batch], lambda _, y: outputs.append(y))
        return outputs.pop() if outputs else None


def can_decode(chunks: Sequence[Sequence[Unit]]) -> bool:
    return all(is_incremental(unit.layer) for units in chunks for unit in units)


def _copied(weights: Weights) -> Weights:
    return {
        name: _copied(value) if isinstance(value, Mapping) else value.copy()
        for name, value in weights.items()
    }
