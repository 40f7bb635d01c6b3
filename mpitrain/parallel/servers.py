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

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from mpitrain import config
from mpitrain.layers.flat import Bucket, Span, dealt
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.parallel.buckets import Buckets
from mpitrain.parallel.grid import Grid
from mpitrain.parallel.replica import SINGLE_RANKS, Replica, Sizes, StepResult, compact, spread
from mpitrain.regions import Piece
from mpitrain.transport.base import Request, Transport

NUMBERS = 10
"""Numbers in the header of a message to or from a server."""


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
        self.transport.wait_until(request.test, what=request)

    def wait_for_header(self, numbers: np.ndarray) -> int:
        """Sleep until a header of any rank has arrived, and return that rank."""
        request = self.transport.start_recv(numbers, None, self._headers)
        self.wait(request)
        return request.source


class Roles:
    """The workers, the servers, and the messages between them.

    pieces   {server: the pieces of the flat buffer that it stores}
    answers  {server: the header of its answer}
    """

    def __init__(self, grid: Grid, spans: Sequence[Span]):
        axes = grid.axes
        first = axes.ranks - axes.servers
        self.workers, self.servers = range(first), range(first, axes.ranks)
        self.pieces = dict(zip(self.servers, dealt(spans, axes.servers), strict=True))
        self.line = PushPull(grid.world.transport)
        self.answers = {server: header() for server in self.servers}

    def views(self, flat: Any) -> dict[int, list[Any]]:
        return {server: spread(flat, pieces) for server, pieces in self.pieces.items()}


class Worker(Replica):
    """A worker of synchronous servers: it pushes gradients and loss, and pulls result and parameters.

    Each gradient is sent to its server as soon as it is complete.
    """

    help = "parameter servers, which compute no rows, update"
    needs = SINGLE_RANKS
    variants = {update: f"replication.update={update}" for update in ("sync", "async", "bounded")}

    @staticmethod
    def memory(sizes: Sizes) -> float:
        """All servers share one replica's state, workers have none.

        Synchronous servers receive the workers' gradients in a separate buffer.
        """
        master, dp = sizes.master, sizes.axes.dp
        workers = dp * (2 * master + sizes.mirror)
        frozen = dp * sizes.fixed
        arriving = 0 if Worker.updates_early(sizes.settings) else master
        trained = (workers + 2 * master + arriving + sizes.state) * sizes.length
        return (trained + frozen) / sizes.axes.ranks

    @classmethod
    def kept(cls, sizes: Sizes) -> float:
        """All workers and all servers together have the parameters."""
        axes, parameters = sizes.axes, sizes.master * sizes.length
        return super().kept(sizes) - parameters * (1 - (axes.dp + 1) / axes.ranks)

    @staticmethod
    def updates_early(settings: config.Replication) -> bool:
        return settings.update == "async" or (
            settings.update == "bounded" and settings.staleness > 0
        )

    @staticmethod
    def servers(settings: config.Replication) -> int:
        return settings.servers

    @staticmethod
    def records(settings: config.Replication) -> Sequence[str]:
        return ("lead", "staleness") if settings.update != "sync" else ()

    @classmethod
    def of_rank(cls, is_server: bool, settings: config.Replication) -> type[Replica]:
        return Server if is_server else Worker

    def build(self, optimizer: config.Optimizer) -> None:
        self.roles = Roles(self.grid, self.storage.spans)
        self._line, self._answers = self.roles.line, self.roles.answers
        super().build(optimizer)
        self._pull, self._report = self.roles.views(self.parameters), header()

    def make_gradients(self) -> None:
        super().make_gradients()
        self.members = self.grid.tp.transport.members
        self._spans = spans = self.storage.spans
        self._push = [
            [
                (server, view)
                for server, pieces in self.roles.pieces.items()
                for view in spread(self.gradient_buffer, by_span([span], pieces))
            ]
            for span in spans
        ]
        self._unpushed, self._pushes = [*range(len(spans))], list[Request]()

    def cut(self, firsts: Sequence[int] = ()) -> Sequence[Bucket]:
        return ()

    def pieces(self) -> Sequence[Piece]:
        return ()

    def counted(self) -> Sequence[Piece]:
        return ()

    def ready(self, unit: int, is_last: bool) -> None:
        super().ready(unit, is_last)
        if is_last and self.settings.overlap:
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

    def agree(self, *numbers: float) -> Sequence[float]:
        """Report loss, stop requests and targets to all servers, and receive the sums, with the
        parameters that the servers have updated.
        """
        loss, _, _, stop, ignored = numbers
        line, answers = self._line, self._answers
        self._report[:4] = loss, stop, ignored, self.targets
        with self.exposed:
            requests = [
                *(
                    line.start_recv(answers[server], self._pull[server], server)
                    for server in answers
                ),
                *(line.start_send(self._report, [], server) for server in answers),
            ]
            for request in chain(*requests):
                request.wait()
        self.loaded()
        first, *_ = answers.values()  # all servers send the same numbers
        return first[:5].tolist()


class Server(Replica):
    """A synchronous server: it stores its pieces of the parameters, concatenated, and makes one
    update from the sum of the gradients that all workers push to it, in the order of the workers.
    """

    def build(self, optimizer: config.Optimizer) -> None:
        servers, self.own_rows = self.grid.servers, range(0)
        assert servers is not None
        self.roles, self._among = Roles(self.grid, self.storage.spans), servers
        self._line, self._heard = self.roles.line, header()
        super().build(optimizer)
        # The three numbers are squares, non-finite elements, and stop requests of servers.
        self._squares = np.zeros(3)
        self._agree_on_squares = servers.bind(self._squares)
        self._reports, self._answer = {worker: header() for worker in self.roles.workers}, header()

    def pieces(self) -> Sequence[Piece]:
        return self.roles.pieces[self.grid.world.rank]

    def make_parameters(self) -> None:
        storage, allocate = self.storage, self.grid.world.transport.allocate
        pieces, self.mirrors = self.pieces(), {}
        self.make_frozen(())
        length = sum(piece.stop - piece.start for piece in pieces)
        self.parameters = allocate(length, storage.dtype)
        if self.device.mirror:
            allocate(0, self.computed)  # it is collective: workers allocate their mirrors here
        self.parameter_arrays = [self.parameters]
        self.owned = dict(zip(pieces, compact(self.parameters, pieces), strict=True))

    def make_gradients(self) -> None:
        storage, pieces = self.storage, self.pieces()
        length = sum(piece.stop - piece.start for piece in pieces)
        self.gradient_buffer = self.grid.world.transport.allocate(length, storage.dtype)
        self.gradient_arrays = [self.gradient_buffer]
        self.members = self._among.transport.members
        self.summed = dict(zip(pieces, compact(self.gradient_buffer, pieces), strict=True))
        self.squared = [self.gradient_buffer]
        self._leaves = []
        self.buckets = Buckets(self.grid.copies, self.gradient_buffer, (), ())
        self.receive_apart()

    def receive_apart(self) -> None:
        """Allocate the buffer into which the gradients of all workers but the first arrive."""
        arrived = self.device.backend.zeros(len(self.gradient_buffer), self.storage.dtype)
        self.gradient_arrays.append(arrived)
        parts = by_span(self.storage.spans, self.pieces())
        self._sums, self._arriving = (
            compact(flat, parts) for flat in (self.gradient_buffer, arrived)
        )
        self._add = self._among.arithmetic.combining(self.gradient_buffer, "add")

    def cut(self, firsts: Sequence[int] = ()) -> Sequence[Bucket]:
        return ()

    def wait(self) -> None:
        """Receive the gradients and sum them in the order of the workers.

        The gradient of the next worker arrives while that of the previous worker is added.
        """
        workers, line = self.roles.workers, self._line
        begun = line.start_recv_pieces(self._sums, workers[0])
        arriving = [
            request
            for worker in workers[1:2]
            for request in line.start_recv_pieces(self._arriving, worker)
        ]
        for request in begun:
            line.wait(request)
        for worker in workers[1:]:
            following: list[Request] = []
            for request, summed, arrived in zip(arriving, self._sums, self._arriving, strict=True):
                line.wait(request)
                self._add(summed, arrived)
                if worker + 1 in workers:
                    following += line.start_recv_pieces([arrived], worker + 1)
            arriving = following

    def agree(self, *numbers: float) -> Sequence[float]:
        """Return the sums over all workers, which report loss, ignored and all targets, and over all
        servers, which have the squares.
        """
        _, squares, own_nonfinite, stop, _ = numbers
        with self.exposed:
            for _ in self._reports:
                source = self._line.wait_for_header(self._heard)
                self._reports[source][:] = self._heard
        loss, stops, ignored = (
            sum(float(report[number]) for report in self._reports.values()) for number in range(3)
        )
        self.targets = int(self._reports[0][3])
        self._squares[:] = squares, own_nonfinite, stop
        self._agree_on_squares.run()
        squares, nonfinite, servers_stop = self._squares.tolist()
        return loss, squares, nonfinite, stops + servers_stop, ignored

    def finish(self, totals: Sequence[float]) -> StepResult:
        """Update, and answer all workers with the sums and the parameters."""
        result = super().finish(totals)
        self._answer[:5] = totals
        views = [*self.owned.values()]
        answers = [self._line.start_send(self._answer, views, worker) for worker in self._reports]
        for request in chain(*answers):
            request.wait()  # the next update must not overwrite parameters still being sent
        return result

    def loaded(self) -> None:
        """Do nothing: a server has no mirror."""

    def parameter_state(self) -> list[StateBuffer]:
        return [StateBuffer("parameters", self.parameters, self.pieces())]
