"""The Replication record, the protocols of its four parts, and the state that checkpoints save.

A mode of replication has one implementation of each part. The functions in the table MODES
(modes.py) combine them:

    parameter store   WholeParameters       each rank stores all of its units
                      BroadcastParameters   rank 0 updates and sends
                      AveragedParameters    each worker has its own, and their average
                      GatheredAfterUpdate   ZeRO-1, ZeRO-2: each rank updates a shard of each bucket
                      GatheredOnUse         ZeRO-3: each rank stores a shard of each unit
                      ServedParameters      a parameter server's units
                      StashedParameters     several versions, for asynchronous pipelines
    gradient reducer  LocalGradients        no reduction
                      Buckets               for each bucket one all-reduce or reduce-scatter a step
                      ShardedGradients      for each bucket a reduce-scatter in each micro-batch
                      PushedGradients       each unit is sent to its server
                      ServedGradients       the gradient that a server receives
                      CollectedGradients    the sum of the gradients that a server receives
    step end          AgreeAndUpdate        all ranks agree, then each updates its own pieces
                      BroadcastAndUpdate    all ranks agree, then rank 0 updates and broadcasts
                      LocalUpdate           each worker updates; workers average
                      PushAndPull, AsyncWork, ServedUpdate, AsyncServing       workers and servers
                      StageUpdate           each pipeline stage updates without a flush
    rows              ReplicaRows           an even share of the batch, and variants

`tests/laws/replication.py` has the laws of each protocol.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from mpitrain.collectives.engine.arithmetic import Wire
from mpitrain.collectives.group import Group
from mpitrain.config import Config
from mpitrain.data import Source
from mpitrain.layers.base import Gradients, Loss, Weights
from mpitrain.layers.flat import Entry, Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import copy_rows
from mpitrain.ops.device import Device
from mpitrain.optim.state import StateArray
from mpitrain.parallel.grid import Grid
from mpitrain.regions import Piece
from mpitrain.trace.recorder import ExposedTime


class StepInput(NamedTuple):
    """One rank's input to `Replication.finish`, after its backward pass.

    number   of the step, from 0
    losses   summed losses of its micro-batches, perhaps an array that the device still computes;
             empty if other ranks report the loss
    lr       learning rate
    stop     whether this rank has received a request to stop
    weights  factor of each loss, as `weight_of`; empty: all factors are 1
    ignored  targets of this rank's rows that do not count; 0 if other ranks report the loss
    targets  number of all targets of the update, over all ranks
    """

    number: int
    losses: Any
    lr: float
    stop: bool = False
    weights: Sequence[float] = ()
    ignored: int = 0
    targets: int = 1

    @property
    def loss(self) -> float:
        """This rank's summand of the global batch's mean loss; reading waits for the device."""
        weights = self.weights or [1.0] * len(self.losses)
        return sum(weight * float(loss) for weight, loss in zip(weights, self.losses, strict=False))


class StepResult(NamedTuple):
    """The result of a training step, equal on all ranks except for `comm_s` and `ended`.

    With local SGD and gossip, loss and grad_norm are the worker's own until the end of a period.

    loss        mean over the targets of the global batch that count
    grad_norm   2-norm of the global gradient, before clipping
    nonfinite   gradient elements that are infinite or NaN
    lr          learning rate of the step
    updated     whether the parameters were updated
    stop        whether any rank has received a request to stop
    comm_s      seconds of the step in which this rank was blocked on communication
    lead        asynchronous servers: the largest number of steps by which a worker was ahead of the
                slowest worker when it began the step
    staleness   asynchronous servers: the largest number of updates between a worker's pull of the
                parameters and the push of the gradient from them
    loss_scale  float16: factor of this step's loss
    overflows   float16: consecutive skipped steps, this one included, whose gradients overflowed
                under a finite loss
    counted     the targets that count, as a fraction of all targets of the update; the update is
                skipped if it is 0
    ended       asynchronous pipelines: this rank's `perf_counter` at the end of the step, which all
                ranks learn some steps later
    is_spike    whether the update was skipped because of a spike of the loss, as run.on_spike
    """

    loss: float
    grad_norm: float
    nonfinite: int
    lr: float
    updated: bool
    stop: bool
    comm_s: float = 0.0
    lead: int = 0
    staleness: int = 0
    loss_scale: float = 1.0
    overflows: int = 0
    counted: float = 1.0
    ended: float | None = None
    is_spike: bool = False


class StateBuffer(NamedTuple):
    """An array of this rank that checkpoints save, and into which loading writes.

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

    @classmethod
    def of(cls, state: StateArray) -> "StateBuffer":
        return cls(state.name, state.array, state.pieces, entries=state.entries)


def spread(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """Return the view of each piece in a flat buffer of all elements: from its `start` on."""
    return [flat[piece.start : piece.stop] for piece in pieces]


def compact(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """Return the view of each piece in its owner's buffer of pieces alone: from its `offset` on."""
    return [flat[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces]


class ParameterStore(Protocol):
    """The parameters that a rank stores, and access to parameters that other ranks store.

    Methods that return None do nothing by default.

    Attributes
    ----------
    parameters : array
        Flat, 1-D, in the storage's dtype. A sharded store has this rank's pieces concatenated.
    mirror : array or None
        Flat. In half precision: the rounded parameters, with which layers compute.
    arrays : list of array
        All arrays that this store has allocated.
    owned : dict
        {piece: its parameters}, for the pieces that this rank updates.
    sharing : sequence of Group
        The groups over which elements of a tensor are divided, besides the tensor-parallel group.
    frozen : FrozenParameters or None
        The parameters that are not trained; None on a server, which has none.
    is_sharded : bool
        Whether `open` gathers the parameters of a unit from other ranks.
    """

    is_sharded: bool = False

    parameters: Any
    mirror: Any
    arrays: list[Any]
    owned: dict[Piece, Any]
    sharing: Sequence[Group]
    frozen: Any

    def open(self, unit: int, micro: int) -> Weights:
        """Return views of a unit's parameters for micro-batch `micro`, valid until the next `poll`.

        The call waits for parameters that are being gathered.
        """
        raise AssertionError("a server computes no rows")

    @abstractmethod
    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        """Update the pieces that this rank owns, and start to send them to other ranks.

        Parameters
        ----------
        apply : callable
            (piece, parameters, mirror) -> None: updates the flat views of one piece in place.
            The mirror is None where there is none, or where the store writes it itself.
        """

    def poll(self) -> None:
        """Progress gathers in flight."""
        return

    def sync(self) -> None:
        """Make the parameters current on all ranks; collective."""
        return

    def loaded(self) -> None:
        """Continue from new contents of `parameters`, which the caller has written; collective."""
        return

    @abstractmethod
    def state(self) -> list[StateBuffer]:
        """Return the parameters for checkpoints, current on all ranks; collective."""


class GradientReducer(Protocol):
    """The gradients of a rank, and their sum over replicas.

    Methods that return None do nothing by default.

    Attributes
    ----------
    buffer : array
        The gradients, flat, 1-D. A sharded reducer has this rank's pieces concatenated.
    arrays : list of array
        All arrays that this reducer has allocated.
    members : sequence of int
        The ranks whose gradients this reducer sums.
    summed : dict
        {piece: its summed gradient}, for the pieces that this rank updates, after `wait`.
    squared : list of array
        Views of the sum which this rank squares for the norm. No other rank squares the same
        element.
    delayed : bool
        Whether the reductions of this step leave errors to later steps (error feedback).
    """

    buffer: Any
    arrays: list[Any]
    members: Sequence[int]
    summed: dict[Piece, Any]
    squared: list[Any]
    delayed: bool = False

    def begin(self, step: int) -> None:
        """Begin a step, counted from 0: mark all gradients as empty."""
        return

    def gradients(self, unit: int) -> Gradients:
        """Return the leaves in which a unit's gradients of one micro-batch are summed."""
        raise AssertionError("a server computes no rows")

    def ready(self, unit: int, is_last: bool) -> None:
        """Report a unit's gradient of one micro-batch as complete on this rank (as DDP's autograd
        hook).

        `is_last` marks the unit's last micro-batch of the step. Its reduction may then start, and
        tensors that no layer has written in this step are set to zero. Otherwise the gradient of
        the previous step would remain there.
        """
        return

    def poll(self) -> None:
        """Progress the started reductions."""
        return

    def wait(self) -> None:
        """Block until all gradients are reduced; all units must have been reported as ready."""
        return

    def state(self) -> list[StateBuffer]:
        """Return the state that reductions keep between steps, for checkpoints; by default none."""
        return []


class StepEnd(Protocol):
    """How a step ends: ranks agree on its result, and update the parameters.

    Attributes
    ----------
    store : ParameterStore
        The parameters that are updated.
    reducer : GradientReducer
        The gradients from which they are updated.
    skips : SkippedUpdates
        The count of skipped updates, and the loss scale.
    control : ControlMessage
        Sums up to five numbers over all ranks.
    """

    store: ParameterStore
    reducer: GradientReducer
    skips: Any
    control: Any

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        """Yield the steps that this rank must compute until step `step` is finished.

        The caller computes each step before it takes the next one. By default only `step`.
        Asynchronous workers may compute several other steps first; servers compute none.

        stop_requested  () -> whether this rank has received a request to stop. A rank that computes
                        rows passes the same fact to `finish`.
        """
        return iter((step,))

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        """Return the result of a step that `steps` has finished; by default that of `finish`.

        own  what `finish` returned for the last step that this rank computed; None if it computed
             none
        """
        assert own is not None
        return own

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin a step, from 0."""

    def ignore(self, targets: Sequence[int], predictions: int) -> None:
        """Report this rank's ignored targets of the step, by micro-batch.

        `predictions` is the number of targets in one row. If a step has one update, the call has no
        effect, since `finish` receives the sum.
        """
        return

    def poll(self) -> None:
        """Progress the control messages that have started."""
        return

    @abstractmethod
    def finish(self, step_input: StepInput) -> StepResult:
        """Wait for the gradients, agree on the result, and update the parameters; collective.

        The result is equal on all ranks, with the exceptions that `StepResult` states.
        """

    @abstractmethod
    def sync(self) -> None:
        """Make the parameters current on all ranks; collective."""

    @abstractmethod
    def state(self) -> list[StateBuffer]:
        """Return the state of the optimizer, for checkpoints."""


class Rows(Protocol):
    """The rows of the global batch that a rank computes, and their loss."""

    def share(self, rows: int) -> range:
        """Return this rank's rows of a batch of `rows` over all replicas; empty on a server."""

    def batch(
        self, source: Source, step: int, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of this rank's rows of a step's global batch, on the host.

        The first dim is the row; `before` is as in `Source.batch`. It raises ConfigError if a
        plugin's source returns anything else.
        """

    def of_update(self, micro: int) -> int:
        """Return the rows, over all ranks, of the update that micro-batch `micro` belongs to."""

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        """Return the summed loss of a micro-batch, and `scale` times the gradient of its logits.

        logits   (N, V); the gradient may overwrite them
        targets  (N,)
        returns  the unscaled sum over the N rows, a number or an array without dims; (N, V)
        """


@dataclass(frozen=True)
class ReplicationContext:
    """The argument of the function that makes a replication mode: the context of one rank.

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
        """Return a step's loss, and the gradients' sum of squares and non-finite elements.

        These numbers are copied from the device in one read, the only blocking read of a step. The
        host adds those of other ranks and decides about the update, so a skipped update launches no
        kernel.

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
        Ends a step: agrees on the result of the step, and updates the parameters.
    rows : Rows
        Selects the rows of this rank, and computes their loss.
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

        Activations do not count. The caller must call `step_end.sync` first.
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
"""{attribute of `Replication` in version 0.1: (part, attribute of the part)}.

A plugin's subclass may read or override these attributes through version 0.2. Version 0.3 removes
this table, `_former`, and the loop in `Replication.__post_init__`.
"""


def _former(part: str, attribute: str) -> property:
    def read(replication: Replication) -> Any:
        inner = getattr(replication, part)
        # A method is taken from the class, because the instance may have an override.
        method = getattr(type(inner), attribute, None)
        return method.__get__(inner) if callable(method) else getattr(inner, attribute)

    return property(read)


for _name, _place in FORMER.items():
    setattr(Replication, _name, _former(*_place))
