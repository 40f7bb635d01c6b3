"""Data parallelism by a master: rank 0 owns the model, the other ranks compute for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain import config
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.data import Source
from mpitrain.layers.base import Weights
from mpitrain.layers.flat import Bucket
from mpitrain.machine.backend import copy_rows
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.parallel.replica import SINGLE_RANKS, Replica, Sizes, whole
from mpitrain.regions import Piece, shares

ROOT = 0


class Master(Replica):
    """Master-worker data parallelism (as torch.nn.DataParallel).

    Rank 0 scatters rows and broadcasts parameters. It gathers all logits, takes the loss, and sends
    back the gradients of the logits. It updates from the sum of all gradients, and only rank 0 has
    optimizer state. The next step begins with a broadcast of the parameters. Broadcasts and sums use
    binomial trees.

    A step of n ranks sends the following bytes, without the control message. The parameters have S
    bytes. Rank r has X(r) bytes of rows, targets included, L(r) of logits and Y(r) of targets.

    rank 0 sends  S ceil(lg n) + sum over r > 0 of X(r) + L(r)
    rank r sends  S + L(r) + Y(r), and S for each child in the tree
    rank 0 holds  the logits of all rows of a micro-batch
    """

    help = "rank 0 alone updates"
    needs = SINGLE_RANKS

    @staticmethod
    def memory(sizes: Sizes) -> float:
        return sizes.replica - sizes.state * sizes.length * (1 - 1 / sizes.axes.ranks)

    def build(self, optimizer: config.Optimizer) -> None:
        self._transport = transport = self.grid.copies.transport
        self._is_root = transport.rank == ROOT
        super().build(optimizer)
        self._broadcast = self.grid.copies.bind_broadcast(self.parameters, ROOT)
        self._is_current = True  # all ranks have the parameters of rank 0
        self._opened = 0  # the micro-batch of the last call of `open`
        with transport.recorder.called("rows"):
            self._rows_tag = transport.claim_tag()
        with transport.recorder.called("logits or their gradient"):
            self._logits_tag = transport.claim_tag()
        # The two entries are dtype and shape of a row of inputs, and of targets.
        self._forms: list[tuple[str, list[int]]] = []

    def pieces(self) -> Sequence[Piece]:
        return whole(self.storage) if self._is_root else []

    def counted(self) -> Sequence[Piece]:
        return self.pieces()

    def bind(self, bucket: Bucket, gradients: Any) -> Reduction:
        return self.grid.copies.bind_reduce(gradients, root=ROOT)

    def read(
        self, source: Source, step: int, rows: range, before: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        with self.exposed:
            seed, size, transport = self.run.seed, self.size, self._transport
            full = source.batch(seed, step, size, range(size), before) if self._is_root else ()
            if not self._forms:
                self._forms = transport.gather_text(
                    [(array.dtype.name, array.shape[1:]) for array in full]
                )[ROOT]
            if self._is_root:
                own_arrays, *others = [
                    [np.ascontiguousarray(array[own.start : own.stop]) for array in full]
                    for own in shares(size, transport.size)
                ]
                sends = [
                    transport.start_send(array, peer, self._rows_tag)
                    for peer, arrays in enumerate(others, 1)
                    for array in arrays
                ]
                for send in sends:
                    send.wait()
            else:
                own_arrays = [np.empty((len(rows), *shape), dtype) for dtype, shape in self._forms]
                for array in own_arrays:
                    transport.recv(array, ROOT, self._rows_tag)
        inputs, targets = own_arrays
        return inputs, targets

    def prepare(self) -> None:
        super().prepare()
        with self.exposed:
            self.sync()

    def open(self, unit: int, micro: int) -> Weights:
        self._opened = micro
        return super().open(unit, micro)

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        """Compute the loss of all ranks' logits on rank 0.

        returns  the summed loss of all ranks on rank 0, and 0 on other ranks; the gradient of this
                 rank's logits, written over the logits
        """
        transport, tag, exposed = self._transport, self._logits_tag, self.exposed
        if not self._is_root:
            with exposed:
                packed = self._packed(logits)
                transport.send(packed, ROOT, tag)
                transport.send(targets, ROOT, tag)
                transport.recv(packed, ROOT, tag)
                if packed is not logits:
                    copy_rows(logits, packed)
            return 0.0, logits
        arena, bounds = self.arena, self._bounds(len(logits))
        everyone = arena.take((bounds[-1].stop, logits.shape[1]), logits.dtype)
        wanted = arena.take((len(everyone),), targets.dtype)
        with exposed:
            requests = [
                transport.start_recv(array[own.start : own.stop], peer, tag)
                for peer, own in enumerate(bounds[1:], 1)
                for array in (everyone, wanted)
            ]
            copy_rows(everyone[: len(logits)], logits)
            wanted[: len(logits)] = targets
            for request in requests:
                request.wait()
        loss, gradient = super().loss(everyone, wanted, scale)
        with exposed:
            sends = [
                transport.start_send(gradient[own.start : own.stop], peer, tag)
                for peer, own in enumerate(bounds[1:], 1)
            ]
            copy_rows(logits, gradient[: len(logits)])
            for send in sends:
                send.wait()
        return loss, logits

    def _packed(self, logits: Any) -> Any:
        if logits.flags.c_contiguous:
            return logits
        packed = self.arena.take(logits.shape, logits.dtype)
        copy_rows(packed, logits)
        return packed

    def _bounds(self, root_logits: int) -> list[range]:
        """Return the rows of each rank among all logits of this micro-batch.

        root_logits  number of rows of rank 0's logits
        """
        rows = [
            len(shares(len(own), self.micro_batches)[self._opened])
            for own in shares(self.size, self._transport.size)
        ]
        stops = np.cumsum(rows) * (root_logits // rows[ROOT])
        return [
            range(start, stop)
            for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True)
        ]

    def apply(self, scale: float, lr: float, step: int) -> None:
        super().apply(scale, lr, step)
        self._is_current = False

    def sync(self) -> None:
        if not self._is_current:
            self._broadcast.run()
            self._is_current = True
            if not self.owned:
                self.loaded()  # the update has already written rank 0's mirror

    def parameter_state(self) -> list[StateBuffer]:
        self.sync()
        return super().parameter_state()
