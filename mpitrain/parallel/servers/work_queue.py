"""The work queue of asynchronous parameter servers: tickets for workers, and results of steps.

Ticket t is the (t mod workers)-th run of the rows of step t // workers. A step is finished when the
gradients of all its tickets are applied. The queue withholds tickets before a pause. A pause
follows a request to stop or a non-finite gradient. It also follows the last step before a
checkpoint, an evaluation or the end. All steps that have begun are finished before the pause.

This module sends no messages.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from mpitrain.parallel.replication.records import StepResult


class Report(NamedTuple):
    """A worker's report of a finished ticket. All servers have applied its gradient, or skipped it
    as non-finite.

    counted    targets of the ticket that count
    loss       mean over them
    grad_norm  norm of this gradient, before clipping
    staleness  the largest number of updates on any server between its pull and its push
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

    bound  a worker starts step k when every worker has finished step k - 1 - bound; None: any
           worker takes the next ticket
    pause  (step) -> the next number of finished steps at which all ranks synchronize
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
        """Record a finished ticket."""
        self._outstanding -= 1
        step = report.ticket // self._workers
        self._ended[worker] = step + 1
        self._reports.setdefault(step, []).append(report)
        self._stops |= report.stop
        if report.stop or (report.counted and not report.updated):
            self.withhold()

    def stop(self) -> None:
        """Record a request to stop, and withhold further steps."""
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
        """End the pause."""
        self._limit = self._pause(self._first_open)

    def outcomes(self) -> list[tuple[int, StepResult]]:
        """Return the newly finished steps and their results, in order.

        A step with a skipped update waits for the pause, since the run may end on it.
        """
        finished = []
        while len(reports := self._reports.get(self._first_open, ())) == self._workers:
            outcome = _outcome(sorted(reports), self._leads[self._first_open])
            if outcome.counted and not outcome.updated and not self.is_pause:
                break
            del self._reports[self._first_open], self._leads[self._first_open]
            self._first_open += 1
            is_last = self._first_open == self._limit
            finished.append((self._first_open - 1, outcome._replace(stop=self._stops and is_last)))
        return finished


def _outcome(reports: list[Report], lead: int) -> StepResult:
    """Return the result of a step: means over its targets, or over its gradients."""
    staleness = max(report.staleness for report in reports)
    used = [report for report in reports if report.counted]
    if not used:
        lr = reports[0].lr
        return StepResult(
            math.nan, math.nan, 0, lr, False, False, lead=lead, staleness=staleness, counted=0.0
        )
    counted = sum(report.counted for report in used)
    return StepResult(
        sum(report.counted / counted * report.loss for report in used),
        sum(report.grad_norm for report in used) / len(used),
        sum(report.nonfinite for report in used),
        used[0].lr,
        all(report.updated for report in used),
        False,
        lead=lead,
        staleness=staleness,
    )
