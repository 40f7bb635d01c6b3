"""The row of an update rule: its hyper-parameters, its optimizer state, and its step.

A rule is element-wise, block-wise or tensor-wise. An element-wise rule is one operation over runs
of a flat buffer. A block-wise rule is an element-wise rule with state in codes of 8 bits
(coded.py). A tensor-wise rule needs sums over whole tensors, its *facts*, such as squared norms.
The elements of a tensor may be on several ranks, so an update has three phases:

    add     each rank adds the terms of its own elements to a flat float64 vector of all facts
    sum     one all-reduce of this vector, over the ranks with other elements of the same tensors
    apply   each rank updates its elements from the sums, which have the same bits on all ranks

A tensor-wise rule may also compute on whole tensors (`Whole`). One rank computes each tensor.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops
from mpitrain.ops.codes import BLOCK, Map
from mpitrain.regions import Piece

Shape = Callable[[Parameter], tuple[int, ...] | None]
"""(tensor) -> shape of its state in one buffer, or of one of its facts; None: it has none."""


def elements(tensor: Parameter) -> tuple[int, ...]:
    """Return the tensor's own shape: a rank stores the state of the elements that it updates.

    State of any other shape, except `ElementsOf`, is small. Each rank that updates an element of
    the tensor stores this state whole.
    """
    return tensor.shape


@dataclass(frozen=True)
class ElementsOf:
    """The tensor's own shape, as `elements`, for some tensors; other tensors have no such state.

    of  (tensor) -> whether it has such state
    """

    of: Callable[[Parameter], bool]

    def __call__(self, tensor: Parameter) -> tuple[int, ...] | None:
        return tensor.shape if self.of(tensor) else None


def rows(tensor: Parameter) -> tuple[int, ...]:
    """Return the tensor's shape without the last dim."""
    return tensor.shape[:-1]


def columns(tensor: Parameter) -> tuple[int, ...]:
    """Return (N,) for a last dim of N elements."""
    return tensor.shape[-1:]


def scalar(tensor: Parameter) -> tuple[int, ...]:
    """Return (), the shape of a single number for each tensor."""
    return ()


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

    @property
    def number(self) -> int:
        """The name of `step` in version 0.1, for one version."""
        return self.step


class ElementWise(NamedTuple):
    """The step of a rule that updates each element by itself, in one pass over memory.

    op         name of the operation (p, g, *state, scale, lr, weight_decay, arena, mirror=None);
               state: the buffers in the order of `Rule.state`, all of shape `elements`
    arguments  (update) -> the operation's other arguments, by name
    """

    op: str
    arguments: Callable[[Update], Mapping[str, float]]


class BlockWise(NamedTuple):
    """The step of an element-wise rule whose state is in codes of 8 bits, with scales of blocks.

    op         name of the operation (p, g, *codes, *scales, scale, lr, weight_decay, lead, arena,
               mirror=None) on tensors with coded state
    plain      name of the operation on all other tensors, as `ElementWise.op`
    maps       {buffer of the state: its map of codes}, in the order of the arguments
    arguments  (update) -> the other arguments of both operations, by name
    """

    op: str
    plain: str
    maps: Mapping[str, Map]
    arguments: Callable[[Update], Mapping[str, float]]


class MatrixBlock(NamedTuple):
    """Elements [start, stop) of a `TensorPiece`, which form an (R, C) matrix, row-major.

    rows     (R,) indices of its rows in the whole tensor, with all dims but the last flattened;
             in the memory of the backend
    columns  (C,) indices of its columns in the whole tensor, there too
    """

    start: int
    stop: int
    rows: Any
    columns: Any


class TensorPiece(NamedTuple):
    """The elements of one tensor that this rank updates.

    tensor      the whole tensor, and its region on this rank
    parameters  (count,), in place
    gradients   (count,), to be multiplied by `Update.scale`
    mirror      (count,), or None; `apply` writes the rounded parameters to it
    state       {name: buffer}: (count,) if the shape is `elements` or `ElementsOf`; any other
                buffer is whole, in its own shape
    facts       {name: sum over the whole tensor}, float64, of this and all earlier rounds
    blocks      the same `count` elements as matrices; at most three
    result      (count,), the result of `TensorWise.whole`; None if the tensor has none
    """

    tensor: Parameter
    parameters: Any
    gradients: Any
    mirror: Any
    state: Mapping[str, Any]
    facts: Mapping[str, Any]
    blocks: Sequence[MatrixBlock]
    result: Any = None


class Round(NamedTuple):
    """Facts (sums over whole tensors) that one all-reduce sums.

    facts  {name: shape of the sum}
    add    (piece, update): adds the terms of the piece's elements to `piece.facts`, which are 0
           before the first piece. `add` may change the state, and the facts of earlier rounds: an
           update that has begun is not skipped.
    """

    facts: Mapping[str, Shape]
    add: Callable[[TensorPiece, Update], None]


class Whole(NamedTuple):
    """A computation on whole tensors: one rank computes, even if several ranks have the elements.

    of       (tensor) -> whether the computation applies to it
    operand  (piece, update, out): writes the operand of this rank's elements to out (count,). It
             may change state of the shape `elements`
    compute  (operand, update): overwrites an operand, in the tensor's shape, by the result
    """

    of: Callable[[Parameter], bool]
    operand: Callable[[TensorPiece, Update, Any], None]
    compute: Callable[[Any, Update], None]


class TensorWise(NamedTuple):
    """The step of a rule that needs facts (sums over whole tensors), or whole tensors.

    rounds  in the order in which they run; a round has the facts of all earlier rounds
    apply   (piece, update): updates the parameters. It runs once for each tensor of which this rank
            updates an element. State that ranks store whole must be computed only from such state
            and from facts, so that it has the same bits on all ranks.
    whole   its result is `piece.result` in `apply`; such a rule runs without tensor parallelism
    """

    rounds: Sequence[Round]
    apply: Callable[[TensorPiece, Update], None]
    whole: Whole | None = None


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
    step: ElementWise | BlockWise | TensorWise
    defaults: Mapping[str, float] = {}
    needs: Mapping[str, Any] = {}
    torch: TorchClass | None = None

    def nbytes(self, itemsize: int) -> float:
        """Return the bytes per parameter of all buffers of the shape `elements`.

        For a block-wise rule this holds for tensors with codes. Small tensors and embeddings have
        no codes and need more bytes.

        itemsize  bytes of a parameter
        """
        each = 1 + itemsize / BLOCK if isinstance(self.step, BlockWise) else itemsize
        return each * sum(shape is elements for shape in self.state.values())

    def other_elements(self, tensors: Iterable[Parameter]) -> int:
        """Return the elements of all buffers that have any other shape than `elements`."""
        tensors = list(tensors)
        shapes = [
            shape(t) for t in tensors for shape in self.state.values() if shape is not elements
        ]
        return sum(math.prod(shape) for shape in shapes if shape is not None)


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
