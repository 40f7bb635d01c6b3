"""Synchronous parameter servers: ranks that store and update the parameters, for workers that
compute.

The servers are the last ranks. Whole units are distributed over the servers by size. In each step
every worker pushes its gradient to the servers, unit by unit while earlier layers still compute.
The servers sum the gradients in the order of the workers. They agree on norm and clipping, update
once, and send the new parameters back.

bytes sent  by a worker S a step, with S the bytes of all parameters; by all K servers together S a
            step for each worker
source      Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server, OSDI 11
"""

import time

import numpy as np

from mpitrain.layers.flat import dealt
from mpitrain.optim import Optimizer
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult, clipping, outcome_of
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.parallel.servers.messages import PushPull, by_span, compact, header, spread
from mpitrain.transport.requests import Request


class _Member(Replication):
    """The common base of workers and servers."""

    def _join(self) -> None:
        """Bind the all-reduce of evaluations; collective. The caller must have allocated the
        buffers.
        """
        world, axes = self.replica.grid.world, self.replica.grid.axes
        self._workers, self._servers = (
            range(axes.ranks - axes.servers),
            range(axes.ranks - axes.servers, axes.ranks),
        )
        self._line = PushPull(world.transport)
        self._control = np.zeros(4)
        self._agree = world.bind(self._control)

    def total(self, *numbers: float) -> list[float]:
        self._control[:] = numbers
        self._agree.run()
        return self._control.tolist()


class WorkerBase(_Member):
    """The base of workers: ranks that compute gradients.

    A worker stores whole parameters and gradients, but no optimizer state.
    """

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        self._join()
        self._pieces = dict(
            zip(self._servers, dealt(replica.storage.spans, len(self._servers)), strict=True)
        )
        self._pull = {
            server: spread(self.parameters, self._pieces[server]) for server in self._servers
        }
        self._told = {server: header() for server in self._servers}


class Worker(WorkerBase):
    """A synchronous worker: it pushes a unit's gradient as soon as it is complete, and its loss at
    the end.
    """

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        spans = replica.storage.spans
        self._push = [
            [
                (server, view)
                for server in self._servers
                for view in spread(self.gradient_buffer, by_span([span], self._pieces[server]))
            ]
            for span in spans
        ]
        self._unpushed, self._pushes = [*range(len(spans))], list[Request]()
        self._said = header()

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        super().gradient_ready(unit, is_last)
        if is_last and self.replica.config.replication.overlap:
            self._push_from(unit)

    def _push_from(self, unit: int) -> None:
        """Start to send the gradients of this unit and of all later unsent ones, the last unit
        first.
        """
        while self._unpushed and self.replica.storage.spans[self._unpushed[-1]].unit >= unit:
            for server, view in self._push[self._unpushed.pop()]:
                self._pushes += self._line.start_send_pieces([view], server)

    def poll(self) -> None:
        self._pushes = [push for push in self._pushes if not push.test()]

    def finish(self, mine: StepInput) -> StepResult:
        began = time.perf_counter()
        self._push_from(0)
        self._said[:2] = self.replica.gradient_stats(mine, ())[0], mine.stop
        pulls = [
            self._line.start_recv(self._told[server], self._pull[server], server)
            for server in self._servers
        ]
        ends = [self._line.start_send(self._said, [], server) for server in self._servers]
        for request in [
            *self._pushes,
            *(request for requests in (*ends, *pulls) for request in requests),
        ]:
            request.wait()
        self._unpushed, self._pushes = [*range(len(self._push))], []
        self._write_mirror()
        first = self._told[self._servers[0]]  # all servers send the same numbers
        return self._concluded(outcome_of(mine, first[:4].tolist(), time.perf_counter() - began))


class ServerBase(_Member):
    """The base of servers: ranks that store a shard of parameters, gradients and optimizer state,
    and compute no rows.

    parameters, gradient_buffer  compact: the pieces of `optimizer.pieces`, concatenated
    """

    def __init__(self, replica: ReplicationContext):
        self.replica = replica  # Replication's constructor would allocate whole buffers
        config, grid, storage, _, device, arena, *_ = replica
        assert grid.servers is not None
        self._count_from_zero()
        pieces = dealt(storage.spans, grid.servers.size)[grid.servers.rank]
        length = sum(piece.stop - piece.start for piece in pieces)
        self.parameters = grid.world.transport.allocate(length, storage.dtype)
        if device.mirror:
            # Allocation is collective, and the workers allocate their mirrors here.
            grid.world.transport.allocate(0, replica.computed)
        self.gradient_buffer = grid.world.transport.allocate(length, storage.dtype)
        self._join()
        self.optimizer = Optimizer(
            config.optimizer, storage, pieces, device.ops, device.backend, arena
        )
        self._held, self._gradients_held = (
            compact(flat, pieces) for flat in (self.parameters, self.gradient_buffer)
        )
        storage.initialize(self.parameters, config.run.seed, device.backend, pieces)
        self._heard = header()

    def share(self, rows: int) -> range:
        return range(0)

    def begin(self, step: int) -> None:
        pass

    def _update(self, scale: float, lr: float, number: int) -> None:
        """Update the parameters from `scale` times the gradient buffer."""
        views = dict(
            zip(
                self.optimizer.pieces,
                zip(self._held, self._gradients_held, strict=True),
                strict=True,
            )
        )
        self.optimizer.sum_facts(views.__getitem__, scale, lr, number)
        for piece, (held, gradients) in views.items():
            self.optimizer.update(piece, held, gradients, scale, lr, number)

    def kept(self) -> list[StateBuffer]:
        return [
            StateBuffer("parameters", self.parameters, self.optimizer.pieces),
            *(StateBuffer.of(array) for array in self.optimizer.arrays()),
        ]


class Server(ServerBase):
    """A synchronous server: one update a step, from the sum of all workers' gradients."""

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        servers = replica.grid.servers
        assert servers is not None
        self._arrived = replica.device.backend.zeros(
            len(self.gradient_buffer), replica.storage.dtype
        )
        parts = by_span(replica.storage.spans, self.optimizer.pieces)
        self._summed, self._arriving = (
            compact(flat, parts) for flat in (self.gradient_buffer, self._arrived)
        )
        self._add = servers.arithmetic.combining(self.gradient_buffer, "add")
        # The three numbers are squares, non-finite elements, and stop requests of servers.
        self._squares = np.zeros(3)
        self._agree_on_squares = servers.bind(self._squares)
        self._said, self._told = {worker: header() for worker in self._workers}, header()

    def held(self) -> int:
        """Return the bytes as in all modes, plus the receive buffer for a worker's gradient."""
        return super().held() + self._arrived.nbytes

    def finish(self, mine: StepInput) -> StepResult:
        """Sum the gradients, agree on the result, update, and answer all workers with the
        parameters.
        """
        began = time.perf_counter()
        self._sum()
        for _ in self._workers:
            source = self._line.wait_for_header(self._heard)
            self._said[source][:] = self._heard
        comm_s = time.perf_counter() - began
        loss, stop = (sum(float(said[number]) for said in self._said.values()) for number in (0, 1))
        _, squares, nonfinite = self.replica.gradient_stats(None, [self.gradient_buffer])
        self._squares[:] = squares / self.loss_scale**2, nonfinite, mine.stop
        self._agree_on_squares.run()
        *found, servers_stop = self._squares.tolist()
        totals = self._told[:4] = (loss, *found, stop + servers_stop)
        outcome = outcome_of(mine, totals, comm_s)
        if outcome.updated:
            scale = (
                clipping(self.replica.config.optimizer.clip, outcome.grad_norm) / self.loss_scale
            )
            self._update(scale, mine.lr, mine.number - self._skipped)
        answers = [
            self._line.start_send(self._told, self._held, worker) for worker in self._workers
        ]
        for request in [request for requests in answers for request in requests]:
            request.wait()  # the next update must not overwrite parameters still being sent
        return self._concluded(outcome)

    def _sum(self) -> None:
        """Receive the gradients and sum them in the order of the workers.

        The gradient of the next worker arrives while the previous one is added.
        """
        first, second = self._workers[0], self._workers[1:2]
        begun = self._line.start_recv_pieces(self._summed, first)
        arriving = [
            request
            for worker in second
            for request in self._line.start_recv_pieces(self._arriving, worker)
        ]
        for request in begun:
            self._line.wait(request)
        for worker in self._workers[1:]:
            following: list[Request] = []
            for request, summed, arrived in zip(
                arriving, self._summed, self._arriving, strict=True
            ):
                self._line.wait(request)
                self._add(summed, arrived)
                if worker + 1 in self._workers:
                    following += self._line.start_recv_pieces([arrived], worker + 1)
            arriving = following
