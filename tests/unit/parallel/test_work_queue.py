"""The rules of tickets, on workers that finish in any order: each share once, leads within the bound, what is begun ends."""

import heapq
import random

import pytest

from mpitrain.config.faults import delay_s, delays
from mpitrain.parallel.async_servers import Report, WorkQueue

STEPS = 12


def reported(ticket, updated=True, stop=False):
    return Report(ticket, 2, float(ticket), 1.0, 0.1, 0 if updated else 1, updated, stop, 0)


def play(workers, bound, seed, pause=lambda step: STEPS, bad=(), stop_at=None):
    """Grant and finish at random until all ranks meet; [(event, ...)] in order."""
    chance, tickets = random.Random(seed), WorkQueue(workers, 0, bound, pause)
    idle, busy, events, finished = list(range(workers)), {}, [], [0] * workers
    while not (tickets.is_pause and not busy):
        worker = chance.choice(range(workers))
        if worker in busy:
            ticket = busy.pop(worker)
            finished[worker] = ticket // workers + 1
            tickets.report(worker, reported(ticket, ticket not in bad, ticket == stop_at))
            idle.append(worker)
            events += [("told", step, outcome) for step, outcome in tickets.outcomes()]
        elif (ticket := tickets.grant(worker)) is not None:
            busy[worker] = ticket
            idle.remove(worker)
            events.append(("granted", worker, ticket, [*finished]))
    return events, tickets


@pytest.mark.parametrize("bound", (None, 1, 2, 8))
@pytest.mark.parametrize("workers", (1, 2, 3, 5))
def test_every_ticket_is_granted_once_and_steps_are_told_in_order(workers, bound):
    for seed in range(5):
        events, _ = play(workers, bound, seed)
        assert sorted(e[2] for e in events if e[0] == "granted") == list(range(STEPS * workers))
        told = [e for e in events if e[0] == "told"]
        assert [e[1] for e in told] == list(range(STEPS))
        for _, step, outcome in told:
            assert (
                abs(outcome.loss - sum(range(step * workers, (step + 1) * workers)) / workers)
                <= 1e-12
            )
            assert not outcome.stop
            assert bound is None or outcome.extras["lead"] <= bound


@pytest.mark.parametrize("bound", (1, 2, 3))
def test_a_worker_waits_exactly_as_the_staleness_bound_says(bound):
    most = 0
    for seed in range(20):
        for event in play(3, bound, seed)[0]:
            if event[0] == "granted":
                _, worker, ticket, finished = event
                step = ticket // 3
                assert ticket % 3 == worker and min(finished) >= step - bound
                most = max(most, step - min(finished))
    assert most == bound


@pytest.mark.parametrize("bound", (None, 2))
def test_after_a_stop_started_steps_are_finished(bound):
    for seed in range(10):
        events, tickets = play(3, bound, seed, stop_at=7)
        granted, told = (
            [e[2] for e in events if e[0] == "granted"],
            [e for e in events if e[0] == "told"],
        )
        assert len(told) < STEPS and sorted(granted) == list(range(3 * len(told)))
        assert [outcome.stop for *_, outcome in told] == [False] * (len(told) - 1) + [True]
        assert all(tickets.grant(worker) is None for worker in range(3))


@pytest.mark.parametrize("bound", (None, 2))
def test_a_skipped_gradient_is_reported_and_tickets_continue(bound):
    for seed in range(10):
        events, tickets = play(3, bound, seed, bad=(7,))
        last = max(number for number, event in enumerate(events) if event[0] == "granted")
        wrong = [
            number
            for number, event in enumerate(events)
            if event[0] == "told" and not event[2].updated
        ]
        assert len(wrong) == 1 and wrong[0] > last
        assert tickets.is_pause
        tickets.go_on()
        assert not tickets.is_pause and tickets.grant(0) is not None


def test_tickets_are_withheld_at_a_pause():
    def pause(step):
        return step // 5 * 5 + 5

    events, tickets = play(2, None, 0, pause)
    assert max(e[2] for e in events if e[0] == "granted") == 9 and tickets.grant(1) is None
    tickets.go_on()
    assert tickets.grant(1) == 10


def makespan(bound, delay, seed=0, workers=4, steps=200):
    """Virtual seconds until all steps are finished, of which each takes a worker a second and what `delay` adds."""
    tickets, busy, idle, now, late = (
        WorkQueue(workers, 0, bound, lambda step: steps),
        [],
        list(range(workers)),
        0.0,
        delays(delay),
    )
    finished, version = [0] * workers, 0
    while True:
        for worker in [*idle]:
            if (ticket := tickets.grant(worker)) is not None:
                step, part = divmod(ticket, workers)
                assert bound is None or step - min(finished) <= bound
                idle.remove(worker)
                heapq.heappush(
                    busy,
                    (now + 1.0 + delay_s(late, worker, seed, step, part), worker, ticket, version),
                )
        if not busy:
            assert version == steps * workers
            return now
        now, worker, ticket, pulled = heapq.heappop(busy)
        assert bound is None or version - pulled <= (workers - 1) * (2 * bound + 1)
        tickets.report(worker, reported(ticket))
        finished[worker], version = ticket // workers + 1, version + 1
        idle.append(worker)


def test_a_bound_absorbs_jitter_and_no_bound_absorbs_slowness_too():
    for seed in range(5):
        together, two, eight, free = (
            makespan(bound, "random:1000:0.25", seed) for bound in (0, 2, 8, None)
        )
        assert free <= eight <= two < together
    together, two, eight, free = (makespan(bound, "3:1000") for bound in (0, 2, 8, None))
    assert together == 400 and 0.9 * together <= eight <= two <= together and free < 0.6 * together
