"""Data parallelism by a master: rank 0 owns the model, the other ranks compute for it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.data import Source
from mpitrain.layers.flat import Piece
from mpitrain.parallel.data.allreduce import AllReduce
from mpitrain.parallel.grid import share
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult
from mpitrain.parallel.replication.state import StateBuffer

ROOT = 0


class Master(AllReduce):
    """Master-worker data parallelism (as torch.nn.DataParallel): rank 0 takes the loss and updates.

    Rank 0 scatters rows and broadcasts parameters. It gathers all logits and sends back their
    gradients. It updates from the sum of all gradients, and only rank 0 has optimizer state.
    Broadcasts and sums use binomial trees.

    A step of n ranks sends the following bytes, without the control message. The parameters have S
    bytes. Rank r has X(r) bytes of rows, targets included, L(r) of logits and Y(r) of targets.

    rank 0 sends  S ceil(lg n) + sum over r > 0 of X(r) + L(r)
    rank r sends  S + L(r) + Y(r), and S for each child in the tree
    rank 0 holds  the logits of all rows of a micro-batch
    """

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        dp = replica.grid.dp
        with dp.transport.recorder.called("rows"):
            self._rows_tag = dp.transport.claim_tag()
        with dp.transport.recorder.called("logits or their gradient"):
            self._logits_tag = dp.transport.claim_tag()
        self._broadcast = dp.bind_broadcast(self.parameters, ROOT)
        self._is_current = True  # all ranks have the parameters of rank 0
        # The two entries are dtype and shape of a row of inputs, and of targets.
        self._forms: list[tuple[str, list[int]]] = []
        self._part = 0
        self._waited_s = 0.0

    @property
    def _is_root(self) -> bool:
        return self.replica.grid.dp.rank == ROOT

    def _owned(self) -> Sequence[Piece]:
        return super()._owned() if self._is_root else []

    def _sum(self, gradients: np.ndarray) -> Reduction:
        return self._peers().bind_reduce(gradients, root=ROOT)

    def _counted(self) -> Sequence[Piece]:
        return self._owned()

    def batch(
        self, source: Source, step: int, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scatter the rows of a batch, which rank 0 alone reads; collective."""
        began = time.perf_counter()
        config, dp = self.replica.config, self.replica.grid.dp
        size, transport = config.batch.size, dp.transport
        whole = (
            source.batch(config.run.seed, step, size, range(size), before) if self._is_root else ()
        )
        if not self._forms:
            self._forms = transport.gather_text(
                [(array.dtype.name, array.shape[1:]) for array in whole]
            )[ROOT]
        if self._is_root:
            bounds = [share(size, rank, dp.size) for rank in range(dp.size)]
            mine, *others = [
                [np.ascontiguousarray(array[own.start : own.stop]) for array in whole]
                for own in bounds
            ]
            sends = [
                transport.start_send(array, peer, self._rows_tag)
                for peer, arrays in enumerate(others, 1)
                for array in arrays
            ]
            for send in sends:
                send.wait()
        else:
            rows = len(self.share(size))
            mine = [np.empty((rows, *shape), dtype) for dtype, shape in self._forms]
            for array in mine:
                transport.recv(array, ROOT, self._rows_tag)
        self._waited_s += time.perf_counter() - began
        inputs, targets = mine
        return inputs, targets

    def begin(self, step: int) -> None:
        super().begin(step)
        began = time.perf_counter()
        self.sync_parameters()
        self._waited_s += time.perf_counter() - began

    def open(self, unit: int, part: int) -> Any:
        self._part = part
        return super().open(unit, part)

    def loss(self, logits: np.ndarray, targets: np.ndarray, scale: float) -> tuple[Any, np.ndarray]:
        """Compute the loss of all ranks' logits on rank 0.

        returns  the loss, which is 0 on all other ranks, and the gradient of this rank's logits,
                 written over them
        """
        dp = self.replica.grid.dp
        transport, tag = dp.transport, self._logits_tag
        began = time.perf_counter()
        if not self._is_root:
            packed = self._packed(logits)
            transport.send(packed, ROOT, tag)
            transport.send(targets, ROOT, tag)
            transport.recv(packed, ROOT, tag)
            if packed is not logits:
                logits[...] = packed
            self._waited_s += time.perf_counter() - began
            return 0.0, logits
        arena, bounds = self.replica.arena, self._bounds(len(logits))
        everyone = arena.take((bounds[-1].stop, logits.shape[1]), logits.dtype)
        wanted = arena.take((len(everyone),), targets.dtype)
        requests = [
            transport.start_recv(array[own.start : own.stop], peer, tag)
            for peer, own in enumerate(bounds[1:], 1)
            for array in (everyone, wanted)
        ]
        everyone[: len(logits)], wanted[: len(logits)] = logits, targets
        for request in requests:
            request.wait()
        self._waited_s += time.perf_counter() - began
        loss, gradient = super().loss(everyone, wanted, scale)
        began = time.perf_counter()
        sends = [
            transport.start_send(gradient[own.start : own.stop], peer, tag)
            for peer, own in enumerate(bounds[1:], 1)
        ]
        logits[:] = gradient[: len(logits)]
        for send in sends:
            send.wait()
        self._waited_s += time.perf_counter() - began
        return loss, logits

    def _packed(self, logits: Any) -> Any:
        """Return contiguous logits for a message, without a device's padding between rows."""
        if logits.flags.c_contiguous:
            return logits
        packed = self.replica.arena.take(logits.shape, logits.dtype)
        packed[...] = logits
        return packed

    def _bounds(self, mine: int) -> list[range]:
        """Return the rows of each rank among all logits of this micro-batch.

        mine  number of rank 0's logits
        """
        batch, ranks = self.replica.config.batch, self.replica.grid.dp.size
        rows = [
            len(share(len(share(batch.size, rank, ranks)), self._part, batch.micro_batches))
            for rank in range(ranks)
        ]
        stops = np.cumsum(rows) * (mine // rows[ROOT])
        return [
            range(start, stop)
            for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True)
        ]

    def finish(self, mine: StepInput) -> StepResult:
        outcome = super().finish(mine)
        waited, self._waited_s = self._waited_s, 0.0
        return outcome._replace(comm_s=outcome.comm_s + waited)

    def _update(self, scale: float, mine: StepInput) -> None:
        super()._update(scale, mine)
        self._is_current = False

    def sync_parameters(self) -> None:
        if not self._is_current:
            self._broadcast.run()
            self._is_current = True
            if not self._is_root:
                self._write_mirror()  # the update has already written rank 0's mirror

    def kept(self) -> list[StateBuffer]:
        """Return the state of all modes; only rank 0 has optimizer state."""
        self.sync_parameters()
        return [kept for kept in super().kept() if kept.pieces]
