"""The Replication record: the four parts by which the training step drives a mode of replication.

`ReplicationContext` is the argument from which every mode is constructed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import Wire
from mpitrain.config import Config
from mpitrain.layers.base import Loss
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.ops.device import Device
from mpitrain.parallel.grid import Grid
from mpitrain.parallel.replication.components import (
    GradientReducer,
    ParameterStore,
    Rows,
    StepEnd,
)
from mpitrain.parallel.replication.records import ExposedTime, StepInput
from mpitrain.parallel.replication.state import StateBuffer


@dataclass(frozen=True)
class ReplicationContext:
    """The constructor argument of every replication mode: the context of one rank.

    storage  layout of this rank's tensors in a flat buffer
    wire     wire format of the gradients
    loss     the loss of this rank's logits
    chunks   with several model chunks on this stage: the units of each chunk, numbered as in
             `storage`; otherwise empty
    first    the first unit of this rank with a backward: all units before are frozen
    exposed  the time that this rank has been blocked on communication in the current step
    """

    config: Config
    grid: Grid
    storage: Storage
    wire: Wire
    device: Device
    arena: Arena
    loss: Loss
    chunks: Sequence[range] = ()
    first: int = 0
    exposed: ExposedTime = field(default_factory=ExposedTime)

    @property
    def computed(self) -> np.dtype:
        """The dtype in which layers compute, and the dtype of activations."""
        return self.device.half or self.storage.dtype

    def gradient_stats(
        self, step_input: StepInput | None, gradients: Sequence[np.ndarray]
    ) -> tuple[float, float, int]:
        """Return a step's loss, the sum of squares of the arrays, and their number of non-finite
        elements.

        All these numbers are copied from the device in one read, the only blocking read of a step.
        The host combines them with the numbers of other ranks. A skipped update therefore launches
        no kernel.

        step_input  None if the step has no loss on this rank
        gradients   flat arrays on the device, of any lengths
        """
        ops, losses = self.device.ops, step_input.losses if step_input else ()
        if not len(losses) and not len(gradients):
            return 0.0, 0.0, 0
        numbers = self.arena.take((len(losses) + 2 * len(gradients),), np.float64)
        if len(losses):
            copy_rows(numbers[: len(losses)], losses)
        for place, gradient in enumerate(gradients):
            at = len(losses) + 2 * place
            numbers[at : at + 2] = ops.gradient_facts(gradient, self.arena)
        read = self.device.backend.to_host(numbers).tolist()
        loss = step_input._replace(losses=read[: len(losses)]).loss if step_input else 0.0
        return loss, sum(read[len(losses) :: 2]), int(sum(read[len(losses) + 1 :: 2]))


@dataclass(frozen=True, eq=False)
class Replication:
    """A mode of replication (as DDP, or FSDP's runtime): the four parts that a training step calls.

    In all calls `unit` is an index in this rank's list of units, `micro` the index of a
    micro-batch, and `step` the number of a step from 0.

    Attributes
    ----------
    replica : ReplicationContext
        The context of this rank.
    step_end : StepEnd
        Ends a step: agrees on its result and updates the parameters.
    rows : Rows
        Chooses the rows of this rank, and computes their loss.
    store : ParameterStore
        The parameters; by default those of `step_end`.
    reducer : GradientReducer
        Sums the gradients; by default that of `step_end`.

    Notes
    -----
    The calls of one step, in their order:

        step_end.begin, ignore
        each micro-batch, unit by unit   forward: store.open
        at the end of the model          rows.loss
        each micro-batch, unit by unit   backward: store.open, reducer.gradients, reducer.ready
        step_end.finish

    Between units, `poll` of store, reducer and step end.
    """

    replica: ReplicationContext
    step_end: StepEnd
    rows: Rows
    store: ParameterStore = None  # type: ignore[assignment]
    reducer: GradientReducer = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for part in ("store", "reducer"):
            if getattr(self, part) is None:
                object.__setattr__(self, part, getattr(self.step_end, part))
        for name, (part, attribute) in FORMER.items():
            if getattr(type(self), name) is not getattr(Replication, name):
                setattr(getattr(self, part), attribute, getattr(self, name))

    def kept(self) -> list[StateBuffer]:
        """Return the state that checkpoints save. The caller must call `step_end.sync` first.

        Loading a checkpoint writes into the arrays of this list.
        """
        return [*self.store.state(), *self.step_end.state(), *self.reducer.state()]

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Continue from a checkpoint, whose arrays `kept` already has; collective.

        scalars  `step_end.skips.scalars()` of that checkpoint
        """
        self.step_end.skips.restore(scalars)
        if self.store.frozen:
            self.store.frozen.loaded()
        self.store.loaded()

    def held_by_kind(self) -> dict[str, int]:
        """Return this rank's bytes of `parameters`, `gradients`, optimizer `state`, and `scratch`
        of reductions.

        They include buffers of running reductions, but no activations. The caller must call
        `step_end.sync` first.
        """
        counted = set[int]()

        def nbytes(arrays: Iterable[Any]) -> int:
            new = {id(array): array.nbytes for array in arrays if id(array) not in counted}
            counted.update(new)
            return sum(new.values())

        return {
            "parameters": nbytes(self.store.arrays),
            "gradients": nbytes(self.reducer.arrays),
            "state": nbytes(buffer.array for buffer in self.kept()),
            "scratch": self.replica.grid.scratch_bytes,
        }


FORMER = {
    "parameters": ("store", "parameters"),
    "open": ("store", "open"),
    "gradient_buffer": ("reducer", "buffer"),
    "gradient_ready": ("reducer", "ready"),
    "share": ("rows", "share"),
    "batch": ("rows", "batch"),
    "loss": ("rows", "loss"),
    "steps": ("step_end", "steps"),
    "begin": ("step_end", "begin"),
    "ignore": ("step_end", "ignore"),
    "finish": ("step_end", "finish"),
    "outcome": ("step_end", "outcome"),
    "sync_parameters": ("step_end", "sync"),
}
"""{name: part and attribute} of the Replication of version 0.1, which a plugin's subclass may read or
override; for one version.
"""


def _former(part: str, attribute: str) -> property:
    def read(replication: Replication) -> Any:
        inner = getattr(replication, part)
        method = getattr(
            type(inner), attribute, None
        )  # of the class: an instance may have an override
        return method.__get__(inner) if callable(method) else getattr(inner, attribute)

    return property(read)


for _name, _place in FORMER.items():
    setattr(Replication, _name, _former(*_place))
