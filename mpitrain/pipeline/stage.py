"""`Stage` computes one chunk of the model on its rank, and saves activations for each micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Layer, Now, Unit, backward
from mpitrain.layers.recomputed import Segment, saved_again, segment_of
from mpitrain.machine.arena import Arena
from mpitrain.parallel.replica import Replica
from mpitrain.trace.recorder import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SILENT,
    Recorder,
)


class Stage:
    """Stage that trains one chunk of the model.

    Before a unit computes, the stage gets its parameters by `open` of the replica.
    After the unit's gradients are written, the stage calls `ready` of the replica.

    A micro-batch goes forward, then backward: through the two halves, or through both at once. As
    soon as a call has used an activation that an earlier call saved, its buffer goes back to the
    arena.

    Of a recomputed segment (layers/recomputed.py) the stage saves only the input. The backward of
    the segment's last unit first computes the other activations of the segment again.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        replica: Replica,
        arena: Arena,
        first: int = 0,
        poll: Callable[[], object] = lambda: None,
        recorder: Recorder = SILENT,
        lowest: int = 0,
    ):
        """Bind the stage to its units.

        first   number of the first unit, as the replica counts the units of this rank
        poll    called between layers, to progress messages
        lowest  number of the first unit with a backward; all units before are frozen and save no
                activations
        """
        self._layers: list[tuple[int, Any]] = [
            (first + index, unit.layer) for index, unit in enumerate(units)
        ]
        self._lowest = lowest
        self._order_backward()
        self._names = [unit.name for unit in units]
        self._replica = replica
        self._arena, self._poll = arena, poll
        # These functions begin and end a unit's span in the trace. After an error the span stays open.
        names = {first + index: recorder.name(unit.name) for index, unit in enumerate(units)}
        self._pass = recorder.compute, self._poll, recorder.end, names
        self._segments = [segment_of(unit) for unit in units]
        # The names of the units before the first forward, which checks their outputs.
        self._unseen = self._names
        # Both map a micro-batch to a list with the saved activations of each unit.
        self._saved: dict[int, list[Any]] = {}
        self._pending: dict[int, list[Any]] = {}
        self._rows: Mapping[int, Now] = {}
        self._left = 0

    def replace_layers(self, replaced: Callable[[Any, str], Any]) -> None:
        """Let others compute in place of the layers.    replaced: (layer, name of its unit) -> layer"""
        self._layers = [
            (number, replaced(layer, name))
            for (number, layer), name in zip(self._layers, self._names, strict=True)
        ]
        self._order_backward()

    def _order_backward(self) -> None:
        self._backward = [
            (index, *each) for index, each in enumerate(self._layers) if each[0] >= self._lowest
        ][::-1]

    def begin(self, micro_batches: int, rows: Mapping[int, Now]) -> None:
        """Begin a step of this many micro-batches; the last one's backward completes the gradients.

        rows  of each micro-batch, which layers read in a forward
        """
        self._left, self._rows = micro_batches, rows

    def forward(self, micro: int, x: Any) -> Any:
        """Run the forward of a micro-batch; return the output of the last unit."""
        replica, save, arena = self._replica, self._saving(micro), self._arena
        now = self._rows[micro]
        begin, poll, end, names = self._pass
        for index, (number, layer) in enumerate(self._layers):
            segment = self._segments[index]
            if segment and self._begins_segment(index):
                save((x, now))
            span = begin(names[number], FORWARD, number, micro)
            y, saved = layer.forward(replica.open(number, micro), x, now, arena)
            if self._unseen:
                check_output(self._unseen[index], layer, x, y)
            x = y
            poll()
            end(span)
            if segment or number < self._lowest:
                del saved
            else:
                save(saved)
        self._unseen = []
        return x

    def _begins_segment(self, index: int) -> bool:
        return index == 0 or self._segments[index - 1] is not self._segments[index]

    def _save_again(self, micro: int, index: int, segment: Segment, saved: list[Any]) -> None:
        """Replace the saved input of a segment by the activations of its units.

        index  of a unit of this segment; unless it is the last one, nothing is done
        """
        if index + 1 < len(self._layers) and self._segments[index + 1] is segment:
            return
        replica, (x, now) = self._replica, saved.pop()
        now = now._replace(is_again=True)
        for number, layer in self._layers[index + 1 - segment.size : index]:
            x, state = layer.forward(replica.open(number, micro), x, now, self._arena)
            saved.append(state)
            self._poll()
        number, layer = self._layers[index]
        saved.append(saved_again(layer, replica.open(number, micro), x, now, self._arena))

    def _saving(self, micro: int) -> Callable[[Any], object]:
        saved = self._saved[micro] = []
        return saved.append

    def backward_input(self, micro: int, dy: Any) -> Any:
        """Run the half of the backward pass that computes input gradients.

        Return the gradient of the chunk's input; None if the input is tokens.
        """
        replica, saved, pending = self._replica, self._saved.pop(micro), []
        begin, poll, end, names = self._pass
        for index, number, layer in self._backward:
            span = begin(names[number], BACKWARD_INPUT, number, micro)
            if segment := self._segments[index]:
                self._save_again(micro, index, segment, saved)
            dy, state = layer.backward_input(
                replica.open(number, micro), dy, saved.pop(), self._arena
            )
            poll()
            end(span)
            pending.append(state)
        self._pending[micro] = pending[::-1]
        return dy

    def backward_weight(self, micro: int) -> None:
        """Run the weight half: accumulate the gradients of the parameters."""
        replica, pending = self._replica, self._pending.pop(micro)
        begin, poll, end, names = self._pass
        self._left -= 1
        for _, number, layer in self._backward:
            span = begin(names[number], BACKWARD_WEIGHT, number, micro)
            layer.backward_weight(pending.pop(), replica.gradients(number), self._arena)
            replica.ready(number, self._left == 0)
            poll()
            end(span)

    def backward(self, micro: int, dy: Any) -> Any:
        """Run both halves, unit by unit; return the same as `backward_input`."""
        replica, saved = self._replica, self._saved.pop(micro)
        begin, poll, end, names = self._pass
        self._left -= 1
        for index, number, layer in self._backward:
            span = begin(names[number], BACKWARD, number, micro)
            if segment := self._segments[index]:
                self._save_again(micro, index, segment, saved)
            dy = backward(
                layer,
                replica.open(number, micro),
                dy,
                saved.pop(),
                replica.gradients(number),
                self._arena,
            )
            replica.ready(number, self._left == 0)
            poll()
            end(span)
        return dy


def check_output(name: str, layer: Layer, x: Any, y: Any) -> None:
    """Raise ConfigError unless the output of a unit has the shape that its layer states.

    The output must also have the dtype of the input, unless the input is tokens.
    """
    shape, dtype = layer.output_shape(x.shape), getattr(y, "dtype", x.dtype)
    if getattr(y, "shape", None) != tuple(shape):
        law = f"its output_shape says {tuple(shape)}, but its forward returns "
        law += f"{y.shape}" if hasattr(y, "shape") else f"{y!r:.60}"
    elif x.dtype.kind not in "iu" and dtype != x.dtype:
        law = f"its input is {x.dtype}, but its forward returns {dtype}"
    else:
        return
    raise ConfigError(
        f"The layer of unit {name} ({type(layer).__name__}) must return what it states: {law}.",
        "Correct its forward, or its output_shape.",
    )


class ForwardOnly(Stage):
    """Stage for evaluation: runs forwards only, and saves no activations."""

    def _saving(self, micro: int) -> Callable[[Any], object]:
        return lambda saved: None
