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
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.layers.flat import Span, dealt
from mpitrain.parallel.mode import NUMBERS
from mpitrain.parallel.replication.protocol import (
    GradientReducer,
    ParameterStore,
    Replication,
    ReplicationContext,
    StateBuffer,
    StepInput,
    StepResult,
    compact,
    spread,
)
from mpitrain.parallel.replication.step_end import AgreeAndUpdate
from mpitrain.parallel.replication.whole import LocalGradients, ReplicaRows, WholeParameters
from mpitrain.regions import Piece
from mpitrain.transport.base import Request, Transport


def header() -> np.ndarray:
    """Return a header of zeros, (NUMBERS,) float64.

    It is in host memory, because a rank can receive from any sender only there.
    """
    return np.zeros(NUMBERS)


def by_span(spans: Sequence[Span], pieces: Sequence[Piece]) -> list[Piece]:
    """Split pieces at the boundaries of spans, into one piece per span.

    The last span is first: gradients become complete in this order.
    """
    return [
        Piece(span.start, span.stop, piece.offset + span.start - piece.start)
        for span in reversed(spans)
        for piece in pieces
        if piece.start <= span.start < span.stop <= piece.stop
    ]


class PushPull:
    """Messages between workers and servers: a header of numbers, and the pieces that belong to it.

    Sender and receiver pass the same pieces in the same order.
    """

    def __init__(self, transport: Transport):
        self.transport = transport
        with transport.recorder.called("a header"):
            self._headers = transport.claim_tag()
        with transport.recorder.called("parameters or gradients"):
            self._pieces = transport.claim_tag()

    def start_send(self, numbers: np.ndarray, views: Sequence[Any], to: int) -> list[Request]:
        """Start to send a header and its pieces; the caller changes neither until the requests end."""
        return [
            self.transport.start_send(numbers, to, self._headers),
            *self.start_send_pieces(views, to),
        ]

    def start_send_pieces(self, views: Sequence[Any], to: int) -> list[Request]:
        return [self.transport.start_send(view, to, self._pieces) for view in views]

    def start_recv(self, numbers: np.ndarray, views: Sequence[Any], source: int) -> list[Request]:
        return [
            self.transport.start_recv(numbers, source, self._headers),
            *self.start_recv_pieces(views, source),
        ]

    def start_recv_pieces(self, views: Sequence[Any], source: int) -> list[Request]:
        """Start to receive pieces that an earlier header has announced, or that arrive in every
        step.
        """
        return [self.transport.start_recv(view, source, self._pieces) for view in views]

    def wait(self, request: Request) -> None:
        self.transport.wait_any([request])

    def wait_for_header(self, numbers: np.ndarray) -> int:
        """Sleep until a header of any rank has arrived, and return that rank."""
        request = self.transport.start_recv_any(numbers, self._headers)
        self.transport.wait_any([request])
        return request.source


class Roles:
    """The workers, the servers, and the messages between them.

    pieces   {server: the pieces of the flat buffer that it stores}
    answers  {server: the header of its answer}
    """

    def __init__(self, replica: ReplicationContext):
        axes = replica.grid.axes
        first = axes.ranks - axes.servers
        self.workers, self.servers = range(first), range(first, axes.ranks)
        self.pieces = dict(
            zip(self.servers, dealt(replica.storage.spans, axes.servers), strict=True)
        )
        self.line = PushPull(replica.grid.world.transport)
        self.answers = {server: header() for server in self.servers}

    def views(self, flat: Any) -> dict[int, list[Any]]:
        return {server: spread(flat, pieces) for server, pieces in self.pieces.items()}


class PushedGradients(LocalGradients):
    """Gradients of a worker, each sent to its server as soon as it is complete."""

    def __init__(self, replica: ReplicationContext, roles: Roles):
        super().__init__(replica, (), ())
        self._line, self._overlap = roles.line, replica.config.replication.overlap
        self._spans = spans = replica.storage.spans
        self._push = [
            [
                (server, view)
                for server, pieces in roles.pieces.items()
                for view in spread(self.buffer, by_span([span], pieces))
            ]
            for span in spans
        ]
        self._unpushed, self._pushes = [*range(len(spans))], list[Request]()

    def ready(self, unit: int, is_last: bool) -> None:
        super().ready(unit, is_last)
        if is_last and self._overlap:
            self.push(unit)

    def push(self, unit: int = 0) -> None:
        """Start to send the gradients of this unit and of all later unsent ones, the last unit
        first.
        """
        while self._unpushed and self._spans[self._unpushed[-1]].unit >= unit:
            for server, view in self._push[self._unpushed.pop()]:
                self._pushes += self._line.start_send_pieces([view], server)

    def poll(self) -> None:
        self._pushes = [push for push in self._pushes if not push.test()]

    def wait(self) -> None:
        self.push()
        for push in self._pushes:
            push.wait()
        self._unpushed, self._pushes = [*range(len(self._push))], []


class PushAndPull(AgreeAndUpdate):
    """A synchronous worker's step end: it pushes its loss, and pulls result and parameters."""

    reducer: PushedGradients

    def __init__(self, replica: ReplicationContext, roles: Roles):
        store, reducer = WholeParameters(replica, ()), PushedGradients(replica, roles)
        super().__init__(replica, store, reducer)
        self._line, self._answers = roles.line, roles.answers
        self._pull, self._report = roles.views(store.parameters), header()

    def finish(self, step_input: StepInput) -> StepResult:
        began = time.perf_counter()
        line, answers = self._line, self._answers
        self.reducer.push()
        loss = self.replica.gradient_stats(step_input, ())[0]
        self._report[:4] = loss, step_input.stop, step_input.ignored, step_input.targets
        pulls = [line.start_recv(answers[server], self._pull[server], server) for server in answers]
        ends = [line.start_send(self._report, [], server) for server in answers]
        self.reducer.wait()
        for request in chain(*ends, *pulls):
            request.wait()
        self.store.loaded()
        first, *_ = answers.values()  # all servers send the same numbers
        outcome, _ = self.result_of(step_input, first[:5].tolist())
        return self.skips.conclude(outcome._replace(comm_s=time.perf_counter() - began))


class ServedParameters(ParameterStore):
    """A server's pieces of the parameters, concatenated.

    views  the pieces, in their order
    """

    mirror: Any = None
    frozen: Any = None
    sharing: Sequence[Group] = ()

    def __init__(self, replica: ReplicationContext, pieces: Sequence[Piece]):
        storage, allocate = replica.storage, replica.grid.world.transport.allocate
        length = sum(piece.stop - piece.start for piece in pieces)
        self._pieces, self.parameters = pieces, allocate(length, storage.dtype)
        if replica.device.mirror:
            allocate(0, replica.computed)  # it is collective: workers allocate their mirrors here
        storage.initialize(self.parameters, replica.config.run.seed, replica.device.backend, pieces)
        self.arrays, self.views = [self.parameters], compact(self.parameters, pieces)
        self.owned = dict(zip(pieces, self.views, strict=True))

    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        for piece, view in self.owned.items():
            apply(piece, view, None)

    def state(self) -> list[StateBuffer]:
        return [StateBuffer("parameters", self.parameters, self._pieces)]


class ServedGradients(GradientReducer):
    """The gradients that a server receives for its pieces, concatenated."""

    def __init__(self, replica: ReplicationContext, pieces: Sequence[Piece]):
        storage, servers = replica.storage, replica.grid.servers
        assert servers is not None
        length = sum(piece.stop - piece.start for piece in pieces)
        self.buffer = replica.grid.world.transport.allocate(length, storage.dtype)
        self.arrays = [self.buffer]
        self.members: Sequence[int] = servers.transport.members
        self.summed = dict(zip(pieces, compact(self.buffer, pieces), strict=True))
        self.squared = [self.buffer]


class CollectedGradients(ServedGradients):
    """The sum of the gradients that all workers push to a server, in the order of the workers."""

    def __init__(self, replica: ReplicationContext, roles: Roles, pieces: Sequence[Piece]):
        super().__init__(replica, pieces)
        servers = replica.grid.servers
        assert servers is not None
        arrived = replica.device.backend.zeros(len(self.buffer), replica.storage.dtype)
        self.arrays.append(arrived)
        parts = by_span(replica.storage.spans, pieces)
        self._sums, self._arriving = (compact(flat, parts) for flat in (self.buffer, arrived))
        self._add = servers.arithmetic.combining(self.buffer, "add")
        self._workers, self._line = roles.workers, roles.line

    def wait(self) -> None:
        """Receive the gradients and sum them in the order of the workers.

        The gradient of the next worker arrives while that of the previous worker is added.
        """
        first, second = self._workers[0], self._workers[1:2]
        begun = self._line.start_recv_pieces(self._sums, first)
        arriving = [
            request
            for worker in second
            for request in self._line.start_recv_pieces(self._arriving, worker)
        ]
        for request in begun:
            self._line.wait(request)
        for worker in self._workers[1:]:
            following: list[Request] = []
            for request, summed, arrived in zip(arriving, self._sums, self._arriving, strict=True):
                self._line.wait(request)
                self._add(summed, arrived)
                if worker + 1 in self._workers:
                    following += self._line.start_recv_pieces([arrived], worker + 1)
            arriving = following


class ServedUpdate(AgreeAndUpdate):
    """A synchronous server's step end: one update, from the sum of all workers' gradients."""

    store: ServedParameters

    def __init__(self, replica: ReplicationContext, roles: Roles):
        pieces, servers = roles.pieces[replica.grid.world.rank], replica.grid.servers
        assert servers is not None
        store = ServedParameters(replica, pieces)
        super().__init__(replica, store, CollectedGradients(replica, roles, pieces))
        # The three numbers are squares, non-finite elements, and stop requests of servers.
        self._squares = np.zeros(3)
        self._agree_on_squares = servers.bind(self._squares)
        self._line, self._heard = roles.line, header()
        self._reports, self._answer = {worker: header() for worker in roles.workers}, header()

    def finish(self, step_input: StepInput) -> StepResult:
        """Sum the gradients, agree on the result, update, and answer all workers with the
        parameters.
        """
        began = time.perf_counter()
        line, workers = self._line, self._reports
        self.reducer.wait()
        for _ in workers:
            source = line.wait_for_header(self._heard)
            self._reports[source][:] = self._heard
        comm_s = time.perf_counter() - began
        loss, stop, ignored = (
            sum(float(report[number]) for report in self._reports.values()) for number in range(3)
        )
        step_input = step_input._replace(targets=int(self._reports[0][3]))  # a server has no rows
        _, squares, own_nonfinite = self.replica.gradient_stats(None, self.reducer.squared)
        self._squares[:] = squares, own_nonfinite, step_input.stop
        self._agree_on_squares.run()
        squares, nonfinite, servers_stop = self._squares.tolist()
        totals = self._answer[:5] = (loss, squares, nonfinite, stop + servers_stop, ignored)
        outcome, scale = self.result_of(step_input, totals)
        if outcome.updated:
            self.apply(scale, step_input.lr, step_input.number + 1 - self.skips.number)
        answers = [line.start_send(self._answer, self.store.views, worker) for worker in workers]
        for request in chain(*answers):
            request.wait()  # the next update must not overwrite parameters still being sent
        return self.skips.conclude(outcome._replace(comm_s=comm_s))


class NoRows(ReplicaRows):
    """The rows of a server: none."""

    def share(self, rows: int) -> range:
        return range(0)


def synchronous(replica: ReplicationContext) -> Replication:
    roles = Roles(replica)
    if replica.grid.is_server:
        return Replication(replica, ServedUpdate(replica, roles), NoRows(replica))
    return Replication(replica, PushAndPull(replica, roles), ReplicaRows(replica))
