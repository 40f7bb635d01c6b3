"""Asynchronous parameter servers: each gradient is applied on arrival, to parameters that may be
newer than those that it was computed from.

A ticket is one worker's share of the rows of one step; each step has one ticket per worker. A
worker draws a ticket from the first server, and pulls the parameters from all servers. It
computes the rows of the ticket, and pushes the gradient to all servers, which apply it at once.
`WorkQueue` has the rules for tickets. A worker waits for other workers only at the bound of
`replication.staleness`, and at a pause, where all ranks synchronize. Each worker clips by the norm
of its own gradient, and skips an update if its own gradient is not finite.

source  Recht et al. 2011, Hogwild, NIPS 24; Ho et al. 2013, More Effective Distributed ML via a
        Stale Synchronous Parallel Parameter Server, NIPS 26
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain import config
from mpitrain.parallel.replica import Replica, StepResult, whole
from mpitrain.parallel.servers import Server, Worker, header
from mpitrain.regions import Piece, share
from mpitrain.transport.base import Request


class Report(NamedTuple):
    """A worker's report of a ticket, after all servers have applied or skipped its gradient.

    counted    targets of the ticket that count
    loss       mean over these targets
    grad_norm  norm of the ticket's gradient, before clipping
    nonfinite  elements of the gradient that are infinite or NaN
    updated    whether the servers have applied the gradient
    stop       whether the worker or a server has received a request to stop
    staleness  the largest number of updates on any server between the worker's pull and its push
    """

    ticket: int
    counted: int
    loss: float
    grad_norm: float
    lr: float
    nonfinite: int
    updated: bool
    stop: bool
    staleness: int


class WorkQueue:
    """The rules that grant tickets, from step `first` on (stale-synchronous parallel, Ho et al.
    2013).

    bound  a worker begins step k when every worker has finished step k - 1 - bound; None: any
           worker gets the next ticket
    pause  (finished steps) -> the number of finished steps at the next pause
    """

    def __init__(self, workers: int, first: int, bound: int | None, pause: Callable[[int], int]):
        self._workers, self._bound, self._pause = workers, bound, pause
        self._limit, self._highest = pause(first), first - 1
        self._next = first * workers
        # For each worker, `_begun` is its next step, and `_ended` its first unfinished step.
        self._begun, self._ended = [first] * workers, [first] * workers
        self._outstanding = 0
        self._reports: dict[int, list[Report]] = {}
        self._first_open = first
        self._leads: dict[int, int] = {}
        self._stops = False

    def grant(self, worker: int) -> int | None:
        """Return the worker's next ticket; None if it must wait."""
        ticket = self._next if self._bound is None else self._begun[worker] * self._workers + worker
        step = ticket // self._workers
        lead = step - min(self._ended)
        if step >= self._limit or (self._bound is not None and lead > self._bound):
            return None
        self._next += 1
        self._begun[worker] = step + 1
        self._highest = max(self._highest, step)
        self._outstanding += 1
        self._leads[step] = max(self._leads.get(step, 0), lead)
        return ticket

    def report(self, worker: int, report: Report) -> None:
        self._outstanding -= 1
        step = report.ticket // self._workers
        self._ended[worker] = step + 1
        reports = self._reports.setdefault(step, [])
        reports.append(report)
        self._stops |= report.stop
        is_empty = len(reports) == self._workers and not any(each.counted for each in reports)
        if report.stop or is_empty or (report.counted and not report.updated):
            self.withhold()

    def stop(self) -> None:
        self._stops = True
        self.withhold()

    def withhold(self) -> None:
        """Let no further step begin."""
        self._limit = min(self._limit, max(self._highest, self._first_open) + 1)

    @property
    def is_pause(self) -> bool:
        """Whether every step that has begun is finished, and none may begin."""
        return self._outstanding == 0 and self._next >= self._limit * self._workers

    def go_on(self) -> None:
        self._limit = self._pause(self._first_open)

    def outcomes(self) -> list[tuple[int, StepResult]]:
        """Return (step, result) of each step that has finished since the last call, in order.

        A step without an update waits for a pause, since the run may end on it.
        """
        finished = []
        while len(reports := self._reports.get(self._first_open, ())) == self._workers:
            outcome = _of_step(sorted(reports), self._leads[self._first_open])
            if not outcome.updated and not self.is_pause:
                break
            del self._reports[self._first_open], self._leads[self._first_open]
            self._first_open += 1
            is_last = self._first_open == self._limit
            finished.append((self._first_open - 1, outcome._replace(stop=self._stops and is_last)))
        return finished


def _of_step(reports: list[Report], lead: int) -> StepResult:
    staleness = max(report.staleness for report in reports)
    used = [report for report in reports if report.counted]
    if not used:
        lr = reports[0].lr
        return StepResult(
            *(math.nan, math.nan, 0, lr, False, False),
            counted=0.0,
            extras={"lead": lead, "staleness": staleness},
        )
    counted = sum(report.counted for report in used)
    return StepResult(
        sum(report.counted / counted * report.loss for report in used),
        sum(report.grad_norm for report in used) / len(used),
        sum(report.nonfinite for report in used),
        used[0].lr,
        all(report.updated for report in used),
        False,
        extras={"lead": lead, "staleness": staleness},
    )


DRAW, PULL, SETTLE, PUSH, LEAVE_OUT, TELL = range(6)
"""The kinds of messages, the first number of their header. Only answers to pulls and pushes have no
kind. SETTLE is the last pull before a pause, LEAVE_OUT a push without its gradient, which is
skipped, and TELL the result of a step.
"""

NO_TICKET = -1


def _filled(*numbers: float) -> np.ndarray:
    filled = header()
    filled[: len(numbers)] = numbers
    return filled


def _numbers(step: int, outcome: StepResult) -> tuple[float, ...]:
    """Pack a step's result into the numbers of a header; `updated` is -1 if no target counts."""
    return (
        step,
        outcome.loss,
        outcome.grad_norm,
        outcome.nonfinite,
        outcome.lr,
        outcome.updated - (outcome.counted == 0),
        outcome.stop,
        outcome.extras["lead"],
        outcome.extras["staleness"],
    )


def _outcome(numbers: Sequence[float]) -> tuple[int, StepResult]:
    step, loss, norm, nonfinite, lr, updated, stop, lead, staleness = numbers[:9]
    return int(step), StepResult(
        loss,
        norm,
        int(nonfinite),
        lr,
        updated > 0,
        stop > 0,
        counted=float(updated >= 0),
        extras={"lead": int(lead), "staleness": int(staleness)},
    )


class AsyncWorker(Worker):
    """An asynchronous worker: it draws tickets, pulls parameters, pushes gradients.

    ticket  None: the worker has no ticket at present
    """

    ticket: int | None

    @classmethod
    def of_rank(cls, is_server: bool, settings: config.Replication) -> type[Replica]:
        if not cls.updates_early(settings):
            return super().of_rank(is_server, settings)
        return AsyncServer if is_server else AsyncWorker

    def build(self, optimizer: config.Optimizer) -> None:
        super().build(optimizer)
        self._hold(None)
        self._push_all = self.roles.views(self.gradient_buffer)
        self._report[:2] = DRAW, NO_TICKET
        self._versions = dict.fromkeys(self.roles.servers, 0)
        self._known: dict[int, StepResult] = {}
        self._is_current = True

    def counted(self) -> Sequence[Piece]:
        return whole(self.storage)

    def _hold(self, ticket: int | None) -> None:
        """Hold this ticket from now on, and compute its rows."""
        worker = self.grid.coords.dp if ticket is None else ticket % len(self.roles.workers)
        self.ticket, self.own_rows = ticket, share(self.size, worker, len(self.roles.workers))
        self.rows_of_update = len(self.own_rows)

    def push(self, unit: int = 0) -> None:
        """Do nothing: `finish` sends all gradients, with the ticket."""

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        self._is_current = False
        while step not in self._known:
            if self.ticket is None:
                self._hold(self._draw())  # this also receives results, perhaps of this step
                continue
            self._pull_as(PULL)
            yield self.ticket // len(self.roles.workers)

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        return self._known.pop(step)._replace(comm_s=self.exposed.take())

    def agree(self, *numbers: float) -> Sequence[float]:
        return numbers  # a worker decides alone about its gradient

    def finish(self, totals: Sequence[float]) -> StepResult:
        assert self.ticket is not None
        own, scale = self.result_of(totals, self.targets)
        requests = []
        for server in self.roles.servers:
            kind, version = PUSH if own.updated else LEAVE_OUT, self._versions[server]
            message = _filled(kind, self.ticket, scale, self.lr, version)
            requests += self._line.start_recv(self._answers[server], [], server)
            requests += self._line.start_send(
                message, self._push_all[server] if own.updated else [], server
            )
        self._wait(requests)
        staleness, servers_stop = (
            max(float(answer[number]) for answer in self._answers.values()) for number in (0, 1)
        )
        report = Report(
            self.ticket,
            self.targets - sum(self.ignored),
            own.loss,
            own.grad_norm,
            own.lr,
            own.nonfinite,
            own.updated,
            bool(own.stop or servers_stop),
            int(staleness),
        )
        self._report = _filled(DRAW, *report)
        self._hold(None)
        return own

    def _draw(self) -> int | None:
        """Report the finished ticket and receive the next one.

        returns  None at a pause, when all steps that have begun are finished
        """
        first = self.roles.servers[0]
        self._wait(self._line.start_send(self._report, [], first))
        self._report = _filled(DRAW, NO_TICKET)
        answer = header()
        while True:
            self._wait(self._line.start_recv(answer, [], first))
            if answer[0] != TELL:
                return None if answer[1] == NO_TICKET else int(answer[1])
            step, outcome = _outcome(answer[1:].tolist())
            self._known[step] = outcome

    def _pull_as(self, kind: int) -> None:
        asked = _filled(kind)
        requests = []
        for server in self.roles.servers:
            requests += self._line.start_recv(self._answers[server], self._pull[server], server)
            requests += self._line.start_send(asked, [], server)
        self._wait(requests)
        self.loaded()
        self._versions = {server: int(answer[0]) for server, answer in self._answers.items()}
        # After `sync` this number is equal on all servers.
        self.skips.number = int(self._answers[self.roles.servers[0]][1])

    def _wait(self, requests: Sequence[Request]) -> None:
        with self.exposed:
            for request in requests:
                request.wait()

    def sync(self) -> None:
        if not self._is_current:
            self._pull_as(SETTLE)
            self._is_current = True


class AsyncServer(Server):
    """An asynchronous server: it applies each gradient on arrival.

    The first server also has the work queue.
    """

    def build(self, optimizer: config.Optimizer) -> None:
        super().build(optimizer)
        self._gradients_of_pieces = [*self.summed.values()]
        self._number = self._among.rank
        self._bound = self.settings.staleness if self.settings.update == "bounded" else None
        # `_updates` counts the updates of this process, and `_applied_before` all earlier ones.
        # The latter is -1 until the first step, which makes it known.
        self._updates = 0
        self._applied_before = -1
        self._tickets: WorkQueue | None = None  # only the first server has one
        self._waiting: list[int] = []
        self._untold: dict[int, list[tuple[int, StepResult]]] = {
            worker: [] for worker in self.roles.workers
        }
        self._known: dict[int, StepResult] = {}
        self._pulls: list[Request] = []
        self._answers: list[Request] = []
        self._is_current, self._stops = True, False
        # This counts workers. One may settle before this server learns that a pause has begun.
        self._settled = 0

    def receive_apart(self) -> None:
        """Do nothing: each gradient is applied by itself."""

    def wait(self) -> None:
        """Do nothing: each gradient is applied on arrival."""

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        self._is_current = False
        if self._applied_before < 0:
            self._applied_before = step * len(self.roles.workers) - self.skips.number
        if self._tickets is None and self._number == 0:
            self._tickets = WorkQueue(len(self.roles.workers), step, self._bound, self.next_pause)
        if self._tickets and self._tickets.is_pause:
            self._tickets.go_on()
        while step not in self._known:
            self._stops |= stop_requested()
            self._serve()
        return iter(())

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        return self._known.pop(step)

    def _serve(self) -> None:
        source = self._line.wait_for_header(self._heard)
        asked, *numbers = self._heard.tolist()
        self._answers = [request for request in self._answers if not request.test()]
        if asked in (PULL, SETTLE):
            self._settled += asked == SETTLE
            self._pulls += self._line.start_send(
                _filled(self._updates, self.skips.number), [*self.owned.values()], source
            )
        elif asked == DRAW:
            self._take(source, numbers)
        elif asked == TELL:
            step, outcome = _outcome(numbers)
            self._known[step] = outcome
        else:
            staleness = self._update_from(source, numbers) if asked == PUSH else 0
            self.skips.number += asked == LEAVE_OUT
            self._tell_one(source, staleness, self._stops)

    def _tell_one(self, to: int, *numbers: float) -> None:
        self._answers += self._line.start_send(_filled(*numbers), [], to)

    def _update_from(self, worker: int, numbers: Sequence[float]) -> int:
        _, scale, lr, version = numbers[:4]  # the first number is the ticket
        for request in self._line.start_recv_pieces(self._gradients_of_pieces, worker):
            request.wait()
        for request in self._pulls:
            request.wait()  # the update must not overwrite parameters that are still being sent
        self._pulls = []
        staleness = self._updates - int(version)
        self._updates += 1
        lr *= self._lr_factor(staleness)
        self.apply(scale, lr, self._applied_before + self._updates)
        return staleness

    def _lr_factor(self, staleness: int) -> float:
        chosen = self.settings.async_lr
        named = {"1/workers": 1 / len(self.roles.workers), "staleness": 1 / (1 + staleness)}
        return named[chosen] if chosen in named else float(chosen)

    def _take(self, worker: int, numbers: Sequence[float]) -> None:
        assert self._tickets is not None
        ticket, counted, loss, norm, lr, nonfinite, updated, stop, staleness = numbers[:9]
        if ticket != NO_TICKET:
            self._tickets.report(
                worker,
                Report(
                    int(ticket),
                    int(counted),
                    loss,
                    norm,
                    lr,
                    int(nonfinite),
                    updated > 0,
                    stop > 0,
                    int(staleness),
                ),
            )
        if self._stops:
            self._tickets.stop()
        self._waiting.append(worker)
        is_pause = self._tickets.is_pause
        if is_pause and len(self._waiting) < len(self.roles.workers):
            return
        self._tell()
        for waiting in [*self._waiting]:
            granted = NO_TICKET if is_pause else self._tickets.grant(waiting)
            if granted is None:
                continue
            for step, outcome in self._untold[waiting]:
                self._tell_one(waiting, TELL, *_numbers(step, outcome))
            self._untold[waiting] = []
            self._tell_one(waiting, DRAW, granted)
            self._waiting.remove(waiting)

    def _tell(self) -> None:
        assert self._tickets is not None
        for step, outcome in self._tickets.outcomes():
            self._known[step] = outcome
            for server in self.roles.servers[1:]:
                self._tell_one(server, TELL, *_numbers(step, outcome))
            for untold in self._untold.values():
                untold.append((step, outcome))

    def sync(self) -> None:
        if not self._is_current:
            while self._settled < len(self.roles.workers):
                self._serve()
            self._settled = 0
            for request in (*self._pulls, *self._answers):
                request.wait()
            self._pulls, self._answers = [], []
            self._is_current = True
