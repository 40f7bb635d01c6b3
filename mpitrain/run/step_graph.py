"""The forward and backward passes of a step as one launch: a CUDA graph."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from mpitrain.errors import KernelError, say
from mpitrain.machine.backend import Arena, address
from mpitrain.parallel.replica import Replica
from mpitrain.pipeline.pipeline import LossGradient, MicroBatch, Pipeline

UNSETTLED = 6
"""Steps in a row whose key is new, after which the run is told why it has no graph."""

CHANGES = (
    "The shapes or addresses of its arrays change from step to step.",
    "The weights of targets or the loss scale change from step to step.",
    "What is kept between steps changes from step to step, and so do the buffers that are free.",
)
"""Why no two keys in a row are equal, for each part of a key."""


class StepGraph:
    """A graph of the launches of a step, made once, and launched again while its key is the same.

    The key has everything that the launches depend on: shapes, numbers, and the addresses of arrays
    outside the arena. The leases of a step have the same addresses in each step, if the same
    buffers of the arena are free when the step begins. So the key has those, too. With a new key a
    step runs as without a graph; with the same key again it is captured.

    captured  a function as `CudaBackend.captured`
    """

    def __init__(
        self,
        captured: Callable[[Callable[[], None]], Callable[[], None]],
        pipe: Pipeline,
        replica: Replica,
        arena: Arena,
        placed: tuple[Callable[[Any], Any], Callable[[Any], Any]],
    ):
        """placed: copies inputs, and copies targets, to the device"""
        self._captured, self._pipe, self._replica, self._arena = captured, pipe, replica, arena
        self._placed = placed
        self._refused = self._has_missed = False
        self._key: tuple[Hashable, ...] = (None,) * len(CHANGES)
        self._new_keys = 0  # in a row
        self._launch: Callable[[], None] | None = None

    def train(self, micros: Sequence[MicroBatch], loss: LossGradient) -> None:
        """Run the passes of a step that has begun, as `Pipeline.train`, or launch the graph of them."""
        if any(micro.now.places for micro in micros):
            self.miss()
            self._pipe.train(micros, loss)
            return
        # Copies of host memory cannot be part of a graph.
        place_inputs, place_targets = self._placed
        inputs = [place_inputs(micro.inputs) for micro in micros]
        targets = [place_targets(micro.targets) for micro in micros]
        weights = [micro.now.weight for micro in micros if micro.now.weight is not None]
        micros = [
            micro._replace(inputs=x, targets=y)
            for micro, x, y in zip(micros, inputs, targets, strict=True)
        ]
        self._run(partial(self._pipe.train, micros, loss), [*inputs, *targets, *weights])

    def _run(self, passes: Callable[[], None], of_rows: Sequence[Any]) -> None:
        """Run passes, or launch the graph of them.

        of_rows  the arrays of this step that the passes read, on the device
        """
        key = self._key_of(of_rows)
        if key != self._key:
            self._new_keys += 1
            if self._new_keys == UNSETTLED:
                parts = zip(CHANGES, key, self._key, strict=True)
                self.miss(" ".join(why for why, new, old in parts if new != old))
            self._key, self._launch = key, None
            passes()
            return
        self._new_keys = 0
        if self._launch is None and not self._refused:
            try:
                self._launch = self._captured(passes)
            except KernelError as error:
                self._refused = True
                _say_without_graph(error.law)
                self._replica.prepare()  # takes back what the unfinished passes did on the host
        if self._launch is not None:
            self._launch()
            return
        passes()

    def miss(self, reason: str = "Documents and padding need the host within a step.") -> None:
        """Say, the first time, why a step is not in the graph."""
        if not self._has_missed:
            self._has_missed = True
            _say_without_graph(reason)

    def _key_of(self, of_rows: Sequence[Any]) -> tuple[Hashable, ...]:
        replica, arena = self._replica, self._arena
        kept = *replica.parameter_arrays, *replica.gradient_arrays, replica.losses
        arrays = tuple((array.shape, array.dtype, address(array)) for array in (*of_rows, *kept))
        numbers = *replica.weights, replica.skips.loss_scale
        return arrays, numbers, (arena.allocations, arena.free)


def with_graph(trainer: Any) -> Pipeline | StepGraph:
    """Return the graph of device.graph, or the trainer's pipeline if there can be none; rank 0 says why.

    trainer  a Trainer, which imports this file
    """
    config, backend, transport = trainer.config, trainer.backend, trainer.transport
    reasons = {
        f"device.kind is {backend.kind}.": backend.kind != "cuda",
        "The host drives the messages of several ranks.": transport.size > 1,
        "run.trace records each of them.": transport.recorder.is_on,
        "run.inject fails within a step.": config.run.inject,
        "memory.release_every gives back the memory of a graph.": config.memory.release_every,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if not reason:
        place_targets = partial(backend.from_host, arena=trainer.arena)
        placed = trainer.placed, place_targets
        return StepGraph(backend.captured, trainer.pipe, trainer.replica, trainer.arena, placed)
    if transport.rank == 0:
        _say_without_graph(reason)
    return trainer.pipe


def _say_without_graph(reason: str) -> None:
    say(f"note: device.graph is auto, but each kernel is launched by itself. {reason}")
