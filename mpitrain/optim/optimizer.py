"""The optimizer of a rank: what an update rule is, its state on a rank, and the update of the parameters.

A rule is a row of `RULES` (rules.py). An element-wise rule is one operation over runs of a flat
buffer. Block-wise rules, with state in codes of 8 bits, are in coded.py, and tensor-wise rules,
which need sums over whole tensors, in tensors.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter
from mpitrain.layers.flat import Entry, Storage
from mpitrain.machine.backend import Arena, Backend
from mpitrain.ops import Ops
from mpitrain.regions import Piece
from mpitrain.transport.base import Transport

Shape = Callable[[Parameter], tuple[int, ...] | None]
"""(tensor) -> shape of its state in one buffer, or of one of its facts; None: it has none."""


def elements(tensor: Parameter) -> tuple[int, ...]:
    """Return the tensor's own shape: a rank stores the state of the elements that it updates.

    State of any other shape, except `ElementsOf`, is small. Each rank that updates an element of
    the tensor stores this state whole.
    """
    return tensor.shape


def rows(tensor: Parameter) -> tuple[int, ...]:
    """Return the tensor's shape without the last dim."""
    return tensor.shape[:-1]


def columns(tensor: Parameter) -> tuple[int, ...]:
    """Return (N,) for a last dim of N elements."""
    return tensor.shape[-1:]


def scalar(tensor: Parameter) -> tuple[int, ...]:
    """Return (), the shape of a single number for each tensor."""
    return ()


SETTINGS = config.Optimizer.model_fields
EVERY = ("name", "lr", "clip", "warmup", "schedule", "final", "decay_steps", "groups")
"""The keys of [optimizer] that the training step reads with every rule."""

TUNED, TUNED_ADAPTERS = 40, 10
"""What the learning rate is divided by if a run starts from a model: with adamw it is then 5e-5, and
2e-4 of adapters.
"""

Arrays = Mapping[Piece, tuple[Any, Any, Any]]
"""{piece: its parameters, gradients and mirror, as long as the piece}; a mirror of None: there is none."""


class Update(NamedTuple):
    """The arguments of one update that are the same for all pieces of a rank.

    For a tensor-wise rule lr and settings.weight_decay are those of the tensor's parameter group.

    scale    factor of all gradients: it clips, and undoes the loss scale
    lr       learning rate
    step     number of this update, from 1; skipped updates do not count
    delayed  whether a lossy wire format with error feedback delays gradients: parts of earlier
             gradients arrive in this step, and parts of this step's gradients arrive later
    """

    settings: config.Optimizer
    ops: Ops
    arena: Arena
    scale: float
    lr: float
    step: int
    delayed: bool = False

    def of_adam(self) -> Mapping[str, float]:
        """Return the arguments that the operations of Adam and its variants share."""
        settings = self.settings
        return {
            "beta1": settings.beta1_delayed if self.delayed else settings.beta1,
            "beta2": settings.beta2,
            "eps": settings.epsilon,
            "step": self.step,
        }


class UpdateStep(Protocol):
    """How a rule updates: `ElementWise`, `BlockWise` in coded.py, or `TensorWise` in tensors.py."""

    @property
    def optimizer(self) -> "type[Optimizer]":
        """The class of a rank's optimizer."""


class ElementWise(NamedTuple):
    """The step of a rule that updates each element by itself, in one pass over memory.

    op         name of the operation (p, g, *state, scale, lr, weight_decay, arena, mirror=None);
               state: the buffers in the order of `Rule.state`, all of shape `elements`
    arguments  (update) -> the operation's other arguments, by name
    """

    op: str
    arguments: Callable[[Update], Mapping[str, float]]

    @property
    def optimizer(self) -> "type[Optimizer]":
        return Optimizer


class TorchClass(NamedTuple):
    """The class of torch.optim with the same update, for the peers in `mpitrain compare`.

    arguments  (settings) -> arguments of the class, except learning rate and weight decay
    """

    name: str
    arguments: Callable[[config.Optimizer], Mapping[str, Any]]


class Rule(NamedTuple):
    """The row of an update rule in the table `RULES`.

    help      one phrase for the help of optimizer.name
    reads     the hyper-parameters of the rule, keys of [optimizer]; it refuses those of other rules
    state     {buffer: its shape}, in the order of the operation's arguments
    step      one operation over elements or blocks, or rounds of facts
    defaults  {key of [optimizer]: default of this rule}, where it differs from the section's
    needs     {section.key: the value that the rule needs}; other values are refused
    torch     the same rule in PyTorch, or None
    """

    help: str
    reads: Sequence[str]
    state: Mapping[str, Shape]
    step: UpdateStep
    defaults: Mapping[str, float] = {}
    needs: Mapping[str, Any] = {}
    torch: TorchClass | None = None

    def nbytes(self, itemsize: int) -> float:
        """Return the bytes per parameter of all buffers of the shape `elements`.

        For a block-wise rule this holds for tensors with codes. Small tensors and embeddings have
        no codes and need more bytes.

        itemsize  bytes of a parameter
        """
        each = self.step.optimizer.element_bytes(itemsize)
        return each * sum(shape is elements for shape in self.state.values())

    def unread_keys(self, settings: config.Optimizer) -> list[str]:
        """Return the keys that the rule does not read, and that do not have their defaults."""
        return [
            key
            for key, field in SETTINGS.items()
            if key not in (*EVERY, *self.reads) and getattr(settings, key) != field.default
        ]

    def with_defaults(self, settings: config.Optimizer, divisor: int = 1) -> config.Optimizer:
        """Return a copy in which hyper-parameters that are not set have the rule's own defaults.

        divisor  of the learning rate if it is not set: TUNED or TUNED_ADAPTERS for a run that starts
                 from a model
        """
        unset = {*SETTINGS} - settings.model_fields_set
        own = {key: default for key, default in self.defaults.items() if key in unset}
        if divisor > 1 and "lr" in unset:
            own["lr"] = own.get("lr", settings.lr) / divisor
        return settings.model_copy(update=own)


class HyperParameters(NamedTuple):
    """The values of a parameter group: hyper-parameters in which tensors may differ.

    lr            factor of the learning rate
    weight_decay  0: no decay
    """

    lr: float
    weight_decay: float


def group_of(settings: config.Optimizer, tensor: Parameter) -> HyperParameters:
    """Return the values of the first of optimizer.groups that matches the tensor's full name.

    Without a match, matrices and embeddings have optimizer.weight_decay; vectors have no decay.
    """
    decay = settings.weight_decay if tensor.decayed else 0.0
    for group in settings.groups:
        if fnmatchcase(tensor.name, group.match):
            own = group.weight_decay
            return HyperParameters(group.lr, decay if own is None else own)
    return HyperParameters(1.0, decay)


def check_groups(settings: config.Optimizer, names: Iterable[str]) -> None:
    """Raise ConfigError unless each of optimizer.groups is the first match of a parameter.

    names  full names of all parameters of the model
    """
    names = list(names)
    left = {*names}
    for group in settings.groups:
        matched = {name for name in names if fnmatchcase(name, group.match)}
        if not matched & left:
            reason = "all its matches are in earlier groups" if matched else "nothing matches"
            raise ConfigError(
                f"Each of optimizer.groups matches a parameter first, but of {group.match!r} "
                f"{reason}.",
                "Put it before these groups."
                if matched
                else f"Full names are {names[0]} to {names[-1]}; a * matches dots, too.",
            )
        left -= matched


class FactSums(NamedTuple):
    """The all-reduce of a tensor-wise rule's facts, such as squared norms of tensors.

    It runs over the ranks with other elements of the same tensors. Ranks with the same elements add
    in the same order.

    bind    (vector) -> run; collective. The vector is (count,) float64 in the memory of the backend.
            `run`, which is collective as well, replaces the vector by the sum.
    counts  (`Parameter.holders` of a tensor) -> whether this rank adds the terms of its elements.
            If several of these ranks have the same elements, one rank adds them.
    shards  the ranks among which ZeRO divides tensors; None: ZeRO divides none
    """

    bind: Callable[[Any], Callable[[], None]]
    counts: Callable[[str], bool]
    shards: Transport | None = None


ALONE = FactSums(lambda vector: lambda: None, lambda holders: True)
"""The `FactSums` of a rank that has all elements of its tensors."""


class StateBuffer(NamedTuple):
    """An array of a rank that checkpoints save, and into which loading writes.

    name     "parameters", "residual", or an optimizer buffer such as "first_moment"
    array    1-D, in the memory of the backend
    pieces   runs of the flat buffer and their offsets in `array`; may be empty
    kind     "agreed": equal on all ranks that store the same elements of a tensor
             "own": different on each rank; a new number of replicas preserves the sum over ranks
             "mean": different on each rank; a new number of replicas, or an "agreed" buffer of the
                     same name, starts from the mean over ranks
             "bound": valid only for the same rank of the same layout; other layouts start it anew
    needed   whether loading fails if the checkpoint lacks this "agreed" buffer;
             otherwise the buffer starts as in a new run
    like     name of an "agreed" buffer whose copy this buffer is at first, if the checkpoint lacks
             this buffer, or has it "bound" to another layout
    entries  the tensors in `array`, if they are not those of the flat buffer; `pieces` then refers
             to `array`
    """

    name: str
    array: Any
    pieces: Sequence[Piece] = ()
    kind: Literal["agreed", "own", "mean", "bound"] = "agreed"
    needed: bool = True
    like: str = ""
    entries: Sequence[Entry] = ()

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements in files: float32 for 16 bits, which not all tools read."""
        is_half = self.array.dtype.itemsize == 2 and self.array.dtype.kind in "fV"
        return np.dtype(np.float32) if is_half else self.array.dtype


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


class UpdateCall(NamedTuple):
    """A call of an operation, the same in each update but for scale, learning rate and step.

    arrays  parameters, gradients and state
    lr      factor of the learning rate
    named   arguments of this call alone, such as weight_decay
    """

    operation: Callable[..., None]
    arrays: Sequence[Any]
    lr: float
    named: Mapping[str, Any]


class Optimizer:
    """The update rule of a rank, for its pieces of the flat buffer (as torch.optim.Optimizer).

    This is the class of element-wise rules. The step of another rule names a subclass.

    bound  what `update` runs through: the `UpdateCall`s of each piece
    state  {name: buffer}, 1-D: the state of each element of all pieces. That of element
           `piece.start` of the flat buffer is at `piece.offset`
    """

    def __init__(
        self,
        rule: Rule,
        settings: config.Optimizer,
        storage: Storage,
        arrays: Arrays,
        ops: Ops,
        backend: Backend,
        arena: Arena,
        sums: Callable[[], FactSums] = lambda: ALONE,
    ):
        """Allocate the state; collective with a tensor-wise rule.

        arrays  of all pieces that this rank updates; a mirror receives the rounded parameters
        sums    () -> the all-reduce over the ranks with other elements of the same tensors
        """
        self.settings, self.storage, self.pieces = settings, storage, [*arrays]
        self.ops, self.backend, self.arena = ops, backend, arena
        self.rule = rule
        self.step: Any = rule.step
        self.allocate(sums)
        self.bound = self.bind(arrays)

    @staticmethod
    def element_bytes(itemsize: int) -> float:
        """Return the bytes of one buffer of the state per parameter of `itemsize` bytes."""
        return itemsize

    @classmethod
    def state_bytes(cls, rule: Rule, storage: Storage) -> float:
        """Return the bytes of optimizer state for all trained tensors of a storage."""
        return rule.nbytes(storage.dtype.itemsize) * storage.length

    def allocate(self, sums: Callable[[], FactSums]) -> None:
        length = sum(piece.stop - piece.start for piece in self.pieces)
        self.state: Mapping[str, Any] = {
            name: self.backend.zeros(length, self.storage.dtype) for name in self.rule.state
        }

    def bind(self, arrays: Arrays) -> Mapping[Piece, Sequence[Any]]:
        """Return `bound` for these arrays of all pieces."""
        operation, groups = getattr(self.ops, self.step.op), partial(group_of, self.settings)
        bound: dict[Piece, list[UpdateCall]] = {}
        for piece, (parameters, gradients, mirror) in arrays.items():
            along = slice(piece.offset, piece.offset + piece.stop - piece.start)
            whole = [parameters, gradients, *(buffer[along] for buffer in self.state.values())]
            runs = [
                GroupRun(start - piece.start, stop - piece.start, *group)
                for start, stop, group in self.storage.runs(piece.start, piece.stop, groups)
            ]
            bound[piece] = []
            for start, stop, lr, weight_decay in launches(operation, runs):
                named = {"weight_decay": weight_decay}
                if mirror is not None:
                    named["mirror"] = mirror[start:stop]
                own = [array[start:stop] for array in whole]
                bound[piece].append(UpdateCall(operation, own, lr, named))
        return bound

    def buffers(self) -> list[StateBuffer]:
        """Return the state for checkpoints."""
        return [StateBuffer(name, array, self.pieces) for name, array in self.state.items()]

    def update(
        self,
        scale: float,
        lr: float,
        step: int,
        delayed: bool = False,
        updated: Callable[[Piece], object] | None = None,
    ) -> None:
        """Update the parameters of all pieces in place, from `scale` times their gradients; collective
        with a tensor-wise rule.

        updated  called after each piece; the others are fields of `Update`
        """
        update = Update(self.settings, self.ops, self.arena, scale, lr, step, delayed)
        arguments = self.step.arguments(update)
        for piece, launches in self.bound.items():
            for operation, arrays, factor, named in launches:
                operation(
                    *arrays, scale=scale, lr=lr * factor, arena=self.arena, **named, **arguments
                )
            if updated:
                updated(piece)


class Decay(NamedTuple):
    """The decay of a schedule.

    factor  (progress of the decay from 0 to 1, final) -> factor of the peak rate
    part    if optimizer.decay_steps is 0, the decay takes the last 1 / part of all steps
    """

    factor: Callable[[float, float], float]
    part: int = 1


def _linear(progress: float, final: float) -> float:
    return 1.0 - (1 - final) * progress


def _cosine(progress: float, final: float) -> float:
    return final + (1 - final) / 2 * (1 + math.cos(math.pi * progress))


DECAYS: dict[str, Decay | None] = {
    "constant": None,
    "linear": Decay(_linear),
    "cosine": Decay(_cosine),
    "wsd": Decay(_linear, 5),
}
"""{optimizer.schedule: its decay, after the warm-up}; None: no decay. wsd is warm-up, stable, decay
(Hu et al. 2024, MiniCPM, arXiv:2404.06395), with the part that Hägele et al. 2024 (arXiv:2405.18392)
find sufficient.
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
    first = max(settings.warmup, steps - (settings.decay_steps or steps // decay.part))
    progress = min(1.0, max(0, step - first) / max(1, steps - first))
    return settings.lr * decay.factor(progress, settings.final)
