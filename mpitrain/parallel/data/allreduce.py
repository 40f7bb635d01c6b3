"""Data parallelism by bucketed all-reduce (as DDP)."""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group
from mpitrain.layers.flat import Bucket, Piece
from mpitrain.optim import Optimizer
from mpitrain.parallel.data.buckets import Buckets, bucket_bytes
from mpitrain.parallel.data.unsharded_buffers import ShardedGradients
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult, clipping, outcome_of
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.trace.ring_buffer import UPDATE


class AllReduce(Replication):
    """Data parallelism by all-reduce (as torch's DistributedDataParallel): each rank computes its
    rows.

    `Buckets` reduces the flat gradient buffer bucket by bucket, in place. The order is from the
    last unit to the first, while earlier layers still compute. Replicas end equal bit for bit, also
    with a lossy wire format.

    source  Li et al. 2020, PyTorch Distributed, VLDB 13(12)
    """

    def __init__(self, replica: ReplicationContext):
        config, grid, storage, _, device, arena, *_ = self.replica = replica
        # A tensor-parallel group must cut its replicated tensors into the same buckets.
        # Otherwise its ranks would sum them in different orders.
        self._bucket_bytes = max(
            grid.tp.transport.gather_text(bucket_bytes(config, self._peers(), storage))
        )
        super().__init__(replica)
        self._overlap, self._clip = config.replication.overlap, config.optimizer.clip
        self.optimizer = Optimizer(
            config.optimizer,
            storage,
            self._owned(),
            device.ops,
            device.backend,
            arena,
            grid.fact_sums(*self._sharding(), grid.tp),
        )
        self.buckets = self._reductions()
        self._control = np.zeros(4)  # the control message always lies on the host
        self._recorder = recorder = grid.transport.recorder
        with recorder.called("the control message"):
            self._agree = grid.world.bind(self._control)
        self._gradients_name = recorder.name(
            "the sums of gradients", self._peers().transport.members
        )
        self._norm_name, self._update_name = (
            recorder.name("the norm"),
            recorder.name("the parameters"),
        )
        self._exchanged_s = 0.0  # `begin` copies tp.exchanged_s to here
        # Padding may contain non-finite numbers: blocks of wire formats include it.
        self._is_spoiled = False
        self._squared = [self._gradients_of(piece) for piece in self._counted()]

    @cached_property
    def _cut(self) -> Sequence[Bucket]:
        """The buckets of the flat buffer, in the order of their reduction."""
        return self.replica.storage.buckets(self._bucket_bytes)

    def _reductions(self) -> Buckets | ShardedGradients:
        """Return the reductions of all buckets."""
        config, _, storage, wire, *_ = self.replica
        return Buckets(
            self._peers(),
            storage,
            self._cut,
            self.gradient_buffer,
            config,
            wire,
            self._sum,
            list(self._parts()),
        )

    def _peers(self) -> Group:
        """Return the group over which gradients are summed: all replicas."""
        return self.replica.grid.dp

    def _sharding(self) -> Sequence[Group]:
        """Return the groups over which the pieces of a tensor are divided, besides tp."""
        return ()

    def _owned(self) -> Sequence[Piece]:
        """Return the pieces of the flat buffer that this rank updates: here all of it."""
        return [Piece(0, self.replica.storage.length, 0)]

    def _sum(self, gradients: np.ndarray) -> Reduction:
        """Bind the reduction that sums one bucket over the peers."""
        return self._peers().bind(gradients)

    def _parts(self) -> Iterator[Reduction]:
        """Yield the sums of partial gradients over their tied groups, one for each group.

        They run once a step, before the reduction over replicas.
        """
        for (holders, partial), found in groupby(
            self.replica.storage.spans, lambda span: (span.holders, span.partial)
        ):
            if partial:
                spans = list(found)
                yield self.replica.grid.holders[holders].bind(
                    self.gradient_buffer[spans[0].start : spans[-1].stop]
                )

    def _counted(self) -> Sequence[Piece]:
        """Return the pieces of the reduced gradient that this rank squares for the norm.

        The replicas divide the squaring evenly: each element is squared on one rank.
        """
        shares = [(piece.start, self.share(piece.stop - piece.start)) for piece in self._runs()]
        return [Piece(start + own.start, start + own.stop, 0) for start, own in shares]

    def _runs(self) -> Sequence[Piece]:
        """Return the runs of the flat buffer that this rank, and no other of its replica, counts in
        norms.
        """
        runs: list[list[int]] = []
        for span in self.replica.storage.spans:
            if not self.replica.grid.counts(span.holders):
                continue
            if runs and runs[-1][1] == span.start:
                runs[-1][1] = span.stop
            else:
                runs.append([span.start, span.stop])
        return [Piece(start, stop, 0) for start, stop in runs]

    def _parameters_of(self, piece: Piece) -> Any:
        return self.parameters[piece.start : piece.stop]

    def _mirror_of(self, piece: Piece) -> Any:
        return None if self.mirror is None else self.mirror[piece.start : piece.stop]

    def _gradients_of(self, piece: Piece) -> Any:
        return self.gradient_buffer[piece.start : piece.stop]

    def begin(self, step: int) -> None:
        super().begin(step)
        self._exchanged_s = self.replica.grid.tp.exchanged_s
        if self._is_spoiled:
            self.gradient_buffer.fill(0)
            self._is_spoiled = False
        self.buckets.begin(step)

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        super().gradient_ready(unit, is_last)
        if self._overlap:
            self.buckets.ready(unit, is_last)

    def poll(self) -> None:
        self.buckets.poll()

    def total(self, *numbers: float) -> list[float]:
        self._control[:] = numbers
        self._agree.run()
        return self._control.tolist()

    def _agreed(self, *numbers: float) -> list[float]:
        """Sum the control message over all ranks: loss, squares, non-finite elements and stop
        requests.
        """
        return self.total(*numbers)

    def _sum_gradients(self, mine: StepInput | None) -> tuple[float, float, int, float]:
        """Wait for the summed gradients.

        returns  this rank's loss, its squares and its non-finite elements for the norm, and the
                 seconds of exposed communication
        """
        began = time.perf_counter()
        wait = self._recorder.wait(self._gradients_name)
        if self._overlap:
            self.buckets.wait()
        else:
            self.buckets.run()
        self._recorder.go_on(wait)
        comm_s = time.perf_counter() - began + self.replica.grid.tp.exchanged_s - self._exchanged_s
        span = self._recorder.compute(self._norm_name)
        loss, squares, nonfinite = self.replica.gradient_stats(mine, self._squared)
        self._recorder.end(span)
        return loss, squares, nonfinite, comm_s

    def finish(self, mine: StepInput) -> StepResult:
        loss, squares, nonfinite, comm_s = self._sum_gradients(mine)
        began = time.perf_counter()
        totals = self._agreed(loss, squares / self.loss_scale**2, nonfinite, mine.stop)
        outcome = outcome_of(mine, totals, comm_s + time.perf_counter() - began)
        if outcome.updated:
            span = self._recorder.compute(self._update_name, UPDATE)
            self._update(clipping(self._clip, outcome.grad_norm) / self.loss_scale, mine)
            self._recorder.end(span)
        self._is_spoiled = not outcome.updated
        return self._concluded(outcome)

    def _update(self, scale: float, mine: StepInput) -> None:
        """Update this rank's pieces of the parameters from `scale` times their gradients.

        mine  supplies the learning rate and the number of the step
        """
        self._sum_facts(scale, mine)
        for piece in self.optimizer.pieces:
            self._update_piece(piece, scale, mine)

    def _sum_facts(self, scale: float, mine: StepInput) -> None:
        """Sum over whole tensors, if the update rule needs that; before the first piece."""
        self.optimizer.sum_facts(
            lambda piece: (self._parameters_of(piece), self._gradients_of(piece)),
            scale,
            mine.lr,
            mine.number - self._skipped,
            self.buckets.delay,
        )

    def _update_piece(self, piece: Piece, scale: float, mine: StepInput) -> None:
        self.optimizer.update(
            piece,
            self._parameters_of(piece),
            self._gradients_of(piece),
            scale,
            mine.lr,
            mine.number - self._skipped,
            delayed=self.buckets.delay,
            mirror=self._mirror_of(piece),
        )

    def kept(self) -> list[StateBuffer]:
        return [
            *super().kept(),
            *(StateBuffer.of(array) for array in self.optimizer.arrays()),
            *self.buckets.kept(),
        ]
