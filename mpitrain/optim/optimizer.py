"""The optimizer of a rank: the state of its update rule, the update of its parameters, and the
learning rate: a linear warm-up, a constant rate, and a decay at the end of the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpitrain import config
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Arena, Backend
from mpitrain.ops import Ops
from mpitrain.optim.rule import Arrays, BlockWise, ElementWise, Update, group_of
from mpitrain.optim.rules import RULES
from mpitrain.optim.state import ALONE, FactSums, StateBuffer, layout_of
from mpitrain.regions import Piece


class GroupRun(NamedTuple):
    """Elements [start, stop) of a piece, all of one parameter group.

    lr            factor of the learning rate
    weight_decay  a number; for one launch over several groups, what `weight_decays` returned
    """

    start: int
    stop: int
    lr: float
    weight_decay: Any


def launches(operation: Callable[..., None], runs: Sequence[GroupRun]) -> Sequence[GroupRun]:
    """Return the runs for which an operation is called: one for all groups if a kernel takes them.

    operation  as `ElementWise.op`; `weight_decays` is a method of those that take several groups
    runs       ascending; their starts differ by multiples of 32. Elements between two runs are
               padding, all 0, and may be updated with the earlier run
    """
    if not runs or not hasattr(operation, "weight_decays"):
        return runs
    return [GroupRun(runs[0].start, runs[-1].stop, 1.0, operation.weight_decays(runs))]


class ElementUpdates:
    """Updates of an element-wise rule over the pieces of a rank.

    state  {name: buffer of all pieces, concatenated}, in the order of the operation's arguments
    """

    def __init__(
        self,
        step: ElementWise,
        settings: config.Optimizer,
        storage: Storage,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        ops: Ops,
    ):
        self._arguments, self._state = step.arguments, list(state.values())
        self._operation, groups = getattr(ops, step.op), partial(group_of, settings)
        self._runs = {
            piece: launches(
                self._operation,
                [
                    GroupRun(start - piece.start, stop - piece.start, *group)
                    for start, stop, group in storage.runs(piece.start, piece.stop, groups)
                ],
            )
            for piece in pieces
        }

    def update(
        self, piece: Piece, parameters: Any, gradients: Any, mirror: Any, update: Update
    ) -> None:
        along = slice(piece.offset, piece.offset + piece.stop - piece.start)
        arrays = [parameters, gradients, *(buffer[along] for buffer in self._state)]
        arguments = self._arguments(update)
        for start, stop, lr, weight_decay in self._runs[piece]:
            self._operation(
                *(array[start:stop] for array in arrays),
                scale=update.scale,
                lr=update.lr * lr,
                weight_decay=weight_decay,
                arena=update.arena,
                **arguments,
                **({} if mirror is None else {"mirror": mirror[start:stop]}),
            )


def state_bytes(name: str, storage: Storage) -> float:
    """Return the bytes of optimizer state of rule `name` for all trained tensors of a storage."""
    rule = RULES[name]
    if isinstance(rule.step, BlockWise):
        from mpitrain.optim.coded import coded_bytes

        return coded_bytes(storage, len(rule.state))
    itemsize = storage.dtype.itemsize
    others = rule.other_elements(entry.parameter for entry in storage.entries)
    return rule.nbytes(itemsize) * storage.length + itemsize * others


class Optimizer:
    """The update rule of a rank, for its pieces of the flat buffer (as torch.optim.Optimizer).

    pieces  the pieces that this rank updates
    state   {name: buffer}, 1-D. Its contents depend on the shape in `Rule.state`:
            elements    the state of each element of all pieces. The state of element
                        `piece.start` of the flat buffer is at `piece.offset`.
            ElementsOf  the same, for some of the tensors
            any other   one small whole array for each tensor with an element in a piece
    """

    def __init__(
        self,
        settings: config.Optimizer,
        storage: Storage,
        pieces: Sequence[Piece],
        ops: Ops,
        backend: Backend,
        arena: Arena,
        sums: Callable[[], FactSums] = lambda: ALONE,
    ):
        """Allocate the state; collective with a tensor-wise rule.

        sums  () -> the all-reduce over the ranks with other elements of the same tensors
        """
        self.settings, self.pieces, self._ops, self._arena = settings, list(pieces), ops, arena
        rule = RULES[settings.name]
        self._layouts = {
            name: layout_of(shape, storage, self.pieces) for name, shape in rule.state.items()
        }
        self._updates: Any
        self._sum_facts: Callable[[Arrays, Update], None] | None = None
        if isinstance(rule.step, BlockWise):
            from mpitrain.optim.coded import CodedUpdates

            self._updates = CodedUpdates(rule.step, settings, storage, pieces, ops, backend)
            self.state: Mapping[str, Any] = self._updates.state
            return
        self.state = {
            name: backend.zeros(layout.length, storage.dtype)
            for name, layout in self._layouts.items()
        }
        if isinstance(rule.step, ElementWise):
            self._updates = ElementUpdates(rule.step, settings, storage, pieces, self.state, ops)
        else:
            from mpitrain.optim.tensors import TensorUpdates

            views = {
                name: layout.views(self.state[name])
                for name, layout in self._layouts.items()
                if layout.tensors is not None
            }
            self._updates = TensorUpdates(
                rule.step, settings, storage, pieces, self.state, views, backend, sums()
            )
            self._sum_facts = self._updates.sum_facts

    def arrays(self) -> list[StateBuffer]:
        return [
            StateBuffer(
                name, array, self._layouts[name].pieces, entries=self._layouts[name].entries
            )
            for name, array in self.state.items()
        ]

    def update(
        self,
        arrays: Arrays,
        scale: float,
        lr: float,
        step: int,
        delayed: bool = False,
        updated: Callable[[Piece], object] = bool,
    ) -> None:
        """Update the parameters of all pieces in place, from `scale` times their gradients; collective
        with a tensor-wise rule.

        arrays   of all pieces; a mirror receives the rounded parameters in the same pass
        step     number of this update, as `Update.step`
        delayed  as `Update.delayed`
        updated  called after each piece
        """
        update = Update(self.settings, self._ops, self._arena, scale, lr, step, delayed)
        if self._sum_facts:
            self._sum_facts(arrays, update)
        for piece, (parameters, gradients, mirror) in arrays.items():
            self._updates.update(piece, parameters, gradients, mirror, update)
            updated(piece)


class Decay(NamedTuple):
    """The decay of a schedule.

    factor  (progress of the decay from 0 to 1, final) -> factor of the peak rate
    first   (warmup, steps) -> first step of the decay, if optimizer.decay_steps is 0
    """

    factor: Callable[[float, float], float]
    first: Callable[[int, int], int]


def _linear(progress: float, final: float) -> float:
    return 1.0 - (1 - final) * progress


def _cosine(progress: float, final: float) -> float:
    return final + (1 - final) / 2 * (1 + math.cos(math.pi * progress))


def _after_warmup(warmup: int, steps: int) -> int:
    return warmup


def _last_fifth(warmup: int, steps: int) -> int:
    """Return the start of the decay that Hägele et al. 2024 (arXiv:2405.18392) find sufficient."""
    return steps - steps // 5


DECAYS: dict[str, Decay | None] = {
    "constant": None,
    "linear": Decay(_linear, _after_warmup),
    "cosine": Decay(_cosine, _after_warmup),
    "wsd": Decay(_linear, _last_fifth),
}
"""{optimizer.schedule: its decay}; None: no decay. wsd is warm-up, stable, decay (Hu et al. 2024,
MiniCPM, arXiv:2404.06395).
"""


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`.

    The decay ends with the run, at optimizer.final times the peak.
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    decay = DECAYS[settings.schedule]
    if not decay:
        return settings.lr
    length = settings.decay_steps
    first = steps - length if length else decay.first(settings.warmup, steps)
    first = max(first, settings.warmup)
    progress = min(1.0, max(0, step - first) / max(1, steps - first))
    return settings.lr * decay.factor(progress, settings.final)
