"""The components of a replication mode: parameter store, gradient reducer, step end, and rows.

A mode takes one of each. These are the implementations. The table MODES (modes.py) combines them:

    parameter store   WholeParameters       each rank stores all of its units
                      BroadcastParameters   rank 0 updates and sends
                      AveragedParameters    each worker has its own, and their average
                      GatheredAfterUpdate   ZeRO-1, ZeRO-2: each rank updates a shard of each bucket
                      GatheredOnUse         ZeRO-3: each rank stores a shard of each unit
                      ServedParameters      a parameter server's units
                      StashedParameters     several versions, for asynchronous pipelines
    gradient reducer  LocalGradients        no reduction
                      Buckets               bucketed all-reduce, or one reduce-scatter a step
                      ShardedGradients      a reduce-scatter for each micro-batch
                      PushedGradients       each unit is sent to its server
                      ServedGradients       the gradient that a server receives
                      CollectedGradients    the sum of the gradients that a server receives
    step end          AgreeAndUpdate        all ranks agree, then each updates its own pieces
                      BroadcastAndUpdate    the same, for parameters that rank 0 sends
                      LocalUpdate           each worker updates; workers average
                      PushAndPull, AsyncWork, ServedUpdate, AsyncServing       workers and servers
                      StageUpdate           each pipeline stage updates without a flush
    rows              ReplicaRows           an even share of the batch, and variants

`tests/laws/replication.py` has the laws of each protocol.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.data import Source
from mpitrain.layers.base import Gradients, Weights
from mpitrain.parallel.replication.records import (
    ControlMessage,
    SkippedUpdates,
    StepInput,
    StepResult,
)
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.regions import Piece


class ParameterStore(Protocol):
    """Storage of the parameters of a rank, and access to those of other ranks.

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
        The groups over which the elements of a tensor are divided, in addition to tensor parallelism.
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

        Parameters that are being gathered are waited for.
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
        """Continue from the contents of `parameters`, which a caller has replaced; collective."""
        return

    @abstractmethod
    def state(self) -> list[StateBuffer]:
        """Return the parameters for checkpoints, current on all ranks; collective."""


class GradientReducer(Protocol):
    """Storage of the gradients of a rank, and their sum over replicas.

    Methods that return None do nothing by default.

    Attributes
    ----------
    buffer : array
        Flat, 1-D. A sharded reducer has this rank's pieces concatenated.
    arrays : list of array
        All arrays that this reducer has allocated.
    members : sequence of int
        The ranks whose gradients it sums.
    summed : dict
        {piece: its summed gradient}, for the pieces that this rank updates, after `wait`.
    squared : list of array
        Views of the sum which this rank squares for the norm. No other rank squares the same
        element.
    delayed : bool
        Whether this step's sums leave state for later steps, such as error feedback.
    """

    buffer: Any
    arrays: list[Any]
    members: Sequence[int]
    summed: dict[Piece, Any]
    squared: list[Any]

    @property
    def delayed(self) -> bool:
        return False

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
        The parameters that it updates.
    reducer : GradientReducer
        The gradients from which it updates.
    skips : SkippedUpdates
        The count of skipped updates, and the loss scale.
    control : ControlMessage
        Sums up to five numbers over all ranks.
    """

    store: ParameterStore
    reducer: GradientReducer
    skips: SkippedUpdates
    control: ControlMessage

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

        `predictions` is the number of targets in one row. A step end with one update for each step
        does nothing: `finish` reports the same number.
        """
        return

    def poll(self) -> None:
        """Progress the control messages that are under way."""
        return

    @abstractmethod
    def finish(self, mine: StepInput) -> StepResult:
        """Wait for the gradients, agree on the result, and update the parameters; collective.

        The result is equal on all ranks, but for the fields that `StepResult` excepts.
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

        The first dim is the row; `before` is as in `Source.batch`. ConfigError if the source of a
        plugin gives anything else.
        """

    def of_update(self, micro: int) -> int:
        """Return the rows, over all ranks, of the update that micro-batch `micro` belongs to."""

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        """Return the summed loss of a micro-batch, and `scale` times the gradient of its logits.

        logits   (N, V); the gradient may overwrite them
        targets  (N,)
        returns  the unscaled sum over the N rows, a number or an array without dims; (N, V)
        """
