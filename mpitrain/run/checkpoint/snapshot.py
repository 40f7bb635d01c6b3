"""Snapshots of the state in host memory, for going back after a spike of the loss, and for copies on other ranks.

    step             41   42   43   44   45   46
    snapshot    40 <- the updates of 41 and 42 are undone
    spike                      43: its update is not made
    after it                        44 goes on from the state of 40

Steps and batches keep their numbers, so the batches of 41 to 43 are left out, as PaLM did (Chowdhery et
al. 2022, section 5.1).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpitrain.optim.optimizer import StateBuffer
from mpitrain.run.trainer import Trainer

KEPT = 2
"""The number of newest snapshots: a spike may come after an update that the newest one has, and a loss
while ranks copy the newest one."""


class Snapshot(NamedTuple):
    """The state of a rank after a step: the scalars of a checkpoint, and `copies` of its arrays."""

    step: int
    scalars: Mapping[str, float]
    copies: list[np.ndarray]


def changed(trainer: Trainer) -> list[StateBuffer]:
    """Return the state that a step changes; collective. Call `sync_parameters` before."""
    frozen = trainer.replica.frozen
    kept = trainer.replica.state()
    return [buffer for buffer in kept if buffer.array is not frozen]


def arrays_of(trainer: Trainer) -> list[Any]:
    """Return the arrays of `changed`, codes of 8 bits and their scales as they are; collective."""
    arrays = [buffer.array for buffer in changed(trainer)]
    return [part for array in arrays for part in getattr(array, "arrays", (array,))]


def values_of(trainer: Trainer) -> list[Any]:
    """Return the arrays of `changed`, decoded, so that any rank can read a copy; collective."""
    return [buffer.array[:] for buffer in changed(trainer)]


class Snapshots:
    """The newest snapshots of a rank's state, in host memory of their own; all calls are collective."""

    def __init__(self, trainer: Trainer, arrays: Callable[[Trainer], list[Any]] = arrays_of):
        """arrays: returns those to copy. `restore` needs `arrays_of`."""
        self._trainer, self._arrays = trainer, arrays
        self._taken: list[Snapshot] = []  # the newest last
        self._returned_at = -1

    def take(self, step: int) -> Snapshot:
        """Copy the state after `step`, over the oldest snapshot, unless there is one of this step."""
        if self._taken and self._taken[-1].step == step:
            return self._taken[-1]
        trainer = self._trainer
        trainer.sync_parameters()
        arrays = self._arrays(trainer)
        copies = (
            self._taken.pop(0).copies
            if len(self._taken) == KEPT
            else [np.empty(array.shape, array.dtype) for array in arrays]
        )
        for copy, array in zip(copies, arrays, strict=True):
            copy[...] = trainer.backend.to_host(array)
        scalars = trainer.replica.skips.scalars()
        self._taken.append(Snapshot(step, scalars, copies))
        return self._taken[-1]

    def restore(self, step: int) -> int:
        """Make the state of a snapshot that of `step`, and return the step of the snapshot.

        It is the newest one, or the one before if the run went back just before this step.
        """
        if self._returned_at == step - 1 and len(self._taken) > 1:
            self._taken.pop()
        before, scalars, copies = self._taken[-1]
        trainer = self._trainer
        trainer.sync_parameters()
        for array, copy in zip(arrays_of(trainer), copies, strict=True):
            trainer.backend.put(array, copy)
        # The updates since then count as skipped, as AdamW's step count leaves them out.
        skipped = scalars["skipped_updates"] + step - before
        scalars = {**scalars, "skipped_updates": skipped}
        trainer.replica.restore(scalars)
        self._taken[-1] = Snapshot(step, scalars, copies)
        self._returned_at = step
        return before
