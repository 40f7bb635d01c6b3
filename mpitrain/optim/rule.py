"""The row of an update rule: its hyper-parameters, its state, and how it steps.

A rule is element-wise, block-wise or tensor-wise. An element-wise rule is one operation over runs
of a flat buffer. A block-wise rule is one with state in codes of 8 bits (coded.py). A tensor-wise
rule needs sums over whole tensors, whose elements may be on several ranks:

    facts   each rank adds its elements' share to a flat float64 vector, tensor by tensor
    sum     one all-reduce over the ranks with other elements of the same tensors
    apply   each rank updates its elements from the sums, which have the same bits on all of them

A tensor-wise rule may also compute on whole tensors (`Whole`). Each is computed on one rank.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter
from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops
from mpitrain.ops.codes import BLOCK, Map
from mpitrain.regions import Piece

Shape = Callable[[Parameter], tuple[int, ...] | None]
"""(tensor) -> shape of a buffer of its state, or of a sum over it; None: the tensor has none."""


def elements(tensor: Parameter) -> tuple[int, ...]:
    """Return the tensor's own shape. A rank stores the state of the elements that it updates.

    A buffer of any other shape is small: it is whole on each rank that updates an element.
    """
    return tensor.shape


@dataclass(frozen=True)
class ElementsOf:
    """The tensor's own shape, as `elements`, for some tensors; others have no such state.

    of  (tensor) -> whether it has the state
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


Views = Callable[[Piece], tuple[Any, Any]]
"""(piece) -> its parameters and gradients, as long as the piece."""


class Update(NamedTuple):
    """The numbers and the tools of one update.

    A tensor-wise rule gets lr and settings.weight_decay of the tensor's group.

    scale    factor of all gradients: clipping, divided by the loss scale
    lr       learning rate
    step     number of this update, from 1; skipped updates do not count
    delayed  whether some of these gradients belong to earlier steps, and some of this step's
             gradients arrive later
    """

    settings: config.Optimizer
    ops: Ops
    arena: Arena
    scale: float
    lr: float
    step: int
    delayed: bool = False


class ElementWise(NamedTuple):
    """The step of a rule that updates each element by itself, in one pass over memory.

    op         name of the operation (p, g, *state, scale, lr, weight_decay, arena, mirror=None);
               state: the buffers in the order of the row, all of shape `elements`
    arguments  (update) -> the operation's other arguments, by name
    """

    op: str
    arguments: Callable[[Update], Mapping[str, float]]


class BlockWise(NamedTuple):
    """The step of an element-wise rule whose state is in codes of 8 bits, with scales of blocks.

    op         name of the operation (p, g, *codes, *scales, scale, lr, weight_decay, lead, arena,
               mirror=None), on coded tensors
    plain      name of the operation on the other tensors, as `ElementWise.op`
    maps       codes of each buffer of the state by name, in the order of the arguments
    arguments  (update) -> the other arguments of both operations, by name
    """

    op: str
    plain: str
    maps: Mapping[str, Map]
    arguments: Callable[[Update], Mapping[str, float]]


class MatrixBlock(NamedTuple):
    """Elements [start, stop) of a tensor piece, which form a matrix, row-major.

    rows     indices of the matrix' rows in the whole tensor, all dims but the last flattened; (R,)
             in the memory of the backend
    columns  indices of its columns in the whole tensor; (C,)
    """

    start: int
    stop: int
    rows: Any
    columns: Any


class TensorPiece(NamedTuple):
    """The elements of one tensor that this rank updates.

    tensor      the logical tensor and its region on this rank
    parameters  (count,), in place
    gradients   (count,), to be multiplied by `Update.scale`
    mirror      (count,), or None; `apply` writes the rounded parameters to it
    state       buffers by name. A buffer of the shape `elements` has (count,) here; any other
                buffer is whole, in its own shape
    facts       sums by name, of this and all earlier rounds: float64, whole, in their own shape
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
    """Sums over tensors, in one all-reduce.

    facts  shape of each sum by name
    add    (piece, update): add the share of the piece's elements to `piece.facts`, which is 0 before
           the first piece. It may change the state, and the sums of earlier rounds, as no update is
           skipped now.
    """

    facts: Mapping[str, Shape]
    add: Callable[[TensorPiece, Update], None]


class Whole(NamedTuple):
    """A result that follows from a whole tensor; one rank computes it, however elements are divided.

    of       (tensor) -> whether it has such a result
    operand  (piece, update, out): write this rank's elements of the operand to out (count,). It may
             change `elements` of the state
    compute  (operand, update): overwrite an operand in the tensor's shape by the result
    """

    of: Callable[[Parameter], bool]
    operand: Callable[[TensorPiece, Update, Any], None]
    compute: Callable[[Any, Update], None]


class TensorWise(NamedTuple):
    """The step of a rule that needs sums over whole tensors, or whole tensors.

    rounds  in their order; a round sees the sums of all earlier ones
    apply   (piece, update): step the parameters. It runs once for each tensor in which this rank
            updates an element. State that is not `elements` must follow only from state and sums,
            so that it has the same bits on all ranks.
    whole   a result of whole tensors, which `apply` gets; the rule refuses tensor parallelism
    """

    rounds: Sequence[Round]
    apply: Callable[[TensorPiece, Update], None]
    whole: Whole | None = None


class TorchClass(NamedTuple):
    """The class of torch.optim with the same update, as a peer of `mpitrain bench train`.

    arguments  (settings) -> its arguments except learning rate and weight decay
    """

    name: str
    arguments: Callable[[config.Optimizer], Mapping[str, Any]]


def nowhere(settings: config.Config) -> None:
    """Return None: the rule runs with every configuration."""


class Rule(NamedTuple):
    """The row of an update rule in the table `RULES`.

    help      one phrase for the help of optimizer.name
    reads     the keys of [optimizer] that are its hyper-parameters; no other one may be set
    state     shape of each buffer of the state by name, in the order of the operation's arguments
    step      one operation over elements or blocks, or rounds of sums over tensors
    defaults  its own defaults of keys of [optimizer], where they differ from the section's
    refusal   (configuration) -> error that explains why the rule cannot run with it, or None
    torch     its counterpart in PyTorch, or None
    """

    help: str
    reads: Sequence[str]
    state: Mapping[str, Shape]
    step: ElementWise | BlockWise | TensorWise
    defaults: Mapping[str, float] = {}
    refusal: Callable[[config.Config], ConfigError | None] = nowhere
    torch: TorchClass | None = None

    def nbytes(self, itemsize: int) -> float:
        """Return the bytes of optimizer state for each parameter.

        For a rule with codes of 8 bits, this holds for a tensor in codes. Small tensors and
        embeddings have no codes, and take more.

        Buffers that are not `elements` do not count.

        itemsize  of the parameters
        """
        each = 1 + itemsize / BLOCK if isinstance(self.step, BlockWise) else itemsize
        return each * sum(shape is elements for shape in self.state.values())

    def other_elements(self, tensors: Iterable[Parameter]) -> int:
        """Return the elements of all buffers that are not `elements`, for these tensors."""
        tensors = list(tensors)
        shapes = [
            shape(t) for t in tensors for shape in self.state.values() if shape is not elements
        ]
        return sum(math.prod(shape) for shape in shapes if shape is not None)


class HyperParameters(NamedTuple):
    """The hyper-parameters that tensors may have for themselves.

    lr            factor of the learning rate
    weight_decay  0 for tensors without decay
    """

    lr: float
    weight_decay: float


def group_of(settings: config.Optimizer, tensor: Parameter) -> HyperParameters:
    """Return the group of a tensor under its full name: the first match of optimizer.groups.

    Without a match, matrices and embeddings have the decay of the section; vectors have none.
    """
    decay = settings.weight_decay if tensor.decayed else 0.0
    for group in settings.groups:
        if fnmatchcase(tensor.name, group.match):
            own = group.weight_decay
            return HyperParameters(group.lr, decay if own is None else own)
    return HyperParameters(1.0, decay)


def check_groups(settings: config.Optimizer, names: Iterable[str]) -> None:
    """Raise ConfigError for a group that is the first match of no parameter.

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
