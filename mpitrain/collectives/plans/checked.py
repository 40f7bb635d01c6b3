"""The rules of an algorithm that a user writes: the form of its steps, and their simulation.

A step is `(sends, receives, adds)`. The first two are lists of `(peer, start, stop)`. Nothing here
imports NumPy or MPI: the child that runs a student's file uses these rules.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice, pairwise, product
from types import ModuleType
from typing import Any

from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import Sentence, line_in

TEXT = 200
"""Largest number of characters of an error's text."""
MOST_STEPS = 100_000

Transfer = tuple[int, int, int]
"""Peer, first element, and the element after the last."""
Step = tuple[list[Transfer], list[Transfer], bool]
"""Sends, receives, and whether received elements are added."""


class Wrong(Exception):
    """A rule that the user's file breaks.

    law     sentence with fields in braces
    values  of these fields, as in `Sentence`
    """

    def __init__(self, law: str, **values: Any):
        self.sentence = Sentence(law, **values)
        super().__init__(self.sentence)


def function_of(own: ModuleType, name: str, arguments: str = "") -> Callable[..., Any]:
    """Return a function of the user's file; Wrong if the file does not define it."""
    function = getattr(own, name, None)
    if not callable(function):
        raise Wrong("the file must define {function}", function=name + arguments)
    return function


def reason_of(error: BaseException, path: str) -> Wrong:
    """Return the rule that an exception of a user's file breaks; the exception itself if it is one."""
    if isinstance(error, Wrong):
        return error
    text = " ".join(str(error).split())[:TEXT]
    values = {"kind": type(error).__name__, "text": f": {text}" if text else ""}
    if line := line_in(error, path):
        return Wrong("it raises {kind} in line {line}{text}", line=line, **values)
    return Wrong("it raises {kind}{text}", **values)


def steps_of(
    answer: Any, rank: int, ranks: int, count: int, call: str = "", most: int = MOST_STEPS
) -> list[Step]:
    """Return the steps of a rank in the form of `Step`; Wrong if they are anything else.

    answer  a list, or a generator, which may be endless
    call    the call that returned the answer, for messages
    most    largest number of steps
    """
    call = call or f"all_reduce({rank}, {ranks}, {count})"

    def transfers(side: Any) -> list[Transfer]:
        """Return the sends or the receives of step `number`."""
        checked = []
        for transfer in side if isinstance(side, list | tuple) else [side]:
            if not (
                isinstance(transfer, list | tuple)
                and len(transfer) == 3
                and all(isinstance(one, int) and not isinstance(one, bool) for one in transfer)
            ):
                raise Wrong(
                    "step {step} of {call} must list (peer, start, stop) of integers, but has {found}",
                    step=number,
                    call=call,
                    found=f"{transfer!r:.60}",
                )
            peer, start, stop = transfer
            if not 0 <= peer < ranks or peer == rank:
                law = "step {step} of {call} names peer {peer}, which is no other rank"
                raise Wrong(law, step=number, call=call, peer=peer)
            if not 0 <= start <= stop <= count:
                law = "step {step} of {call} names elements {start} to {stop} of {count}"
                raise Wrong(law, step=number, call=call, start=start, stop=stop, count=count)
            checked.append((int(peer), int(start), int(stop)))
        return checked

    if isinstance(answer, Iterator):
        answer = list(islice(answer, most + 1))
    if not isinstance(answer, list | tuple):
        law = "{call} must return a list of steps, but it is {found}"
        raise Wrong(law, call=call, found=f"{answer!r:.60}")
    if len(answer) > most:
        law = "{call} has {steps:,} steps, more than {most:,}"
        raise Wrong(law, call=call, steps=len(answer), most=most)
    steps = []
    for number, step in enumerate(answer, 1):
        if not (isinstance(step, list | tuple) and len(step) == 3 and isinstance(step[2], bool)):
            raise Wrong(
                "step {step} of {call} must be (sends, receives, adds), but it is {found}",
                step=number,
                call=call,
                found=f"{step!r:.60}",
            )
        sends, receives, adds = transfers(step[0]), transfers(step[1]), step[2]
        if not adds:
            _check_overlap(sends, receives, number, rank)
        steps.append((sends, receives, adds))
    return steps


def _check_overlap(sends: list[Transfer], receives: list[Transfer], step: int, rank: int) -> None:
    """Raise Wrong if received elements replace others that the same step sends or receives."""
    ends = sorted((start, stop) for _, start, stop in receives if start < stop)
    for (_, stop), (start, _) in pairwise(ends):
        if start < stop:
            law = "step {step} of rank {rank} receives element {start} twice"
            raise Wrong(law, step=step, rank=rank, start=start)
    for (_, start, stop), (first, last) in product(sends, ends):
        if max(first, start) < min(last, stop):
            law = "step {step} of rank {rank} sends element {start} and replaces it"
            raise Wrong(law, step=step, rank=rank, start=max(first, start))


def check_depth(steps: Sequence[Step], depth: int, rank: int) -> None:
    """Raise Wrong if a step of a rank needs an earlier one to end that may still be in flight.

    depth  number of steps in flight at once
    """
    for first, (sends, receives, _) in enumerate(steps):
        for second in range(first + 1, min(first + depth, len(steps))):
            later_sends, later_receives, _ = steps[second]
            for (_, start, stop), (_, begin, end) in (
                *product(receives, [*later_sends, *later_receives]),
                *product(sends, later_receives),
            ):
                if max(start, begin) < min(stop, end):
                    raise Wrong(
                        "step {step} of rank {rank} begins before step {before} ends, but both "
                        "have element {start}",
                        step=second + 1,
                        rank=rank,
                        before=first + 1,
                        start=max(start, begin),
                    )


def simulate(
    plans: Sequence[Sequence[Step]],
    count: int,
    workers: Collection[int] | None = None,
    operation: str = "allreduce",
) -> None:
    """Run the plans on symbols; Wrong unless every rank ends with what the operation gives it.

    workers    the ranks that have summands and need the sum; others start with zeros. None: all
    operation  "allreduce": every rank ends with the same sum of all ranks; "reduce-scatter": with
               its chunk of the sum; "all-gather": with the chunk of each rank

    A rank's step ends when all of its messages have been exchanged. Messages of a pair of ranks
    arrive in order. The order of summation must be the same on all ranks: otherwise their results
    differ by rounding. The order of two summands does not matter.
    """
    ranks = len(plans)
    bounds = chunk_bounds(count, ranks)
    cuts = sorted(
        {0, count}
        | {
            cut
            for plan in plans
            for sends, receives, _ in plan
            for _, *ends in (*sends, *receives)
            for cut in ends
        }
        | {stop for _, stop in bounds}
    )
    chunk = {cut: number for number, cut in enumerate(cuts)}
    sums: dict[Any, int] = {}
    # Bit r of the first number: the expression has the value of rank r; of the second: twice or more.
    ranks_of: list[tuple[int, int]] = []

    def symbol(key: Any, once: int, more: int = 0) -> int:
        """Return the number of an expression; equal expressions have one number."""
        if key not in sums:
            sums[key] = len(ranks_of)
            ranks_of.append((once, more))
        return sums[key]

    def add(x: int, y: int) -> int:
        (some, twice), (others, again) = ranks_of[x], ranks_of[y]
        if not (some and others):
            return x if some else y
        return symbol((min(x, y), max(x, y)), some | others, twice | again | some & others)

    used = range(ranks) if workers is None else sorted(workers)
    zero = symbol("zero", 0)
    held = [
        [symbol(rank, 1 << rank) if rank in used else zero] * (len(cuts) - 1)
        for rank in range(ranks)
    ]
    left = [deque(plan) for plan in plans]
    waiting: list[tuple[deque, list] | None] = [None] * ranks
    arrived: list[list[tuple[int, Transfer, list[int]]]] = [[] for _ in range(ranks)]

    def begin(rank: int) -> None:
        """Start the next step that has messages: its sends take the elements of now."""
        while left[rank]:
            sends, receives, _ = left[rank][0]
            if sends or receives:
                data = [held[rank][chunk[start] : chunk[stop]] for _, start, stop in sends]
                waiting[rank] = (deque(zip(sends, data, strict=True)), list(enumerate(receives)))
                return
            left[rank].popleft()
        waiting[rank] = None

    for rank in range(ranks):
        begin(rank)
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            messages = waiting[rank]
            if messages is None:
                continue
            rest: deque = deque()
            blocked: set[int] = set()
            for (peer, start, stop), data in messages[0]:
                theirs = waiting[peer]
                match = theirs and next((r for r in theirs[1] if r[1][0] == rank), None)
                if peer in blocked or not match or theirs is None:
                    blocked.add(peer)
                    rest.append(((peer, start, stop), data))
                    continue
                number, (_, first, last) = match
                if last - first != stop - start:
                    raise Wrong(
                        "rank {rank} sends {sent} elements to rank {peer}, which receives {received}",
                        rank=rank,
                        sent=stop - start,
                        peer=peer,
                        received=last - first,
                    )
                theirs[1].remove(match)
                arrived[peer].append((number, match[1], data))
                moved = True
            waiting[rank] = (rest, messages[1])
        for rank in range(ranks):
            messages = waiting[rank]
            if messages is not None and not any(messages):
                adds = left[rank].popleft()[2]
                for _, (_, start, stop), data in sorted(arrived[rank], key=lambda one: one[0]):
                    first, last = chunk[start], chunk[stop]
                    held[rank][first:last] = (
                        [*map(add, held[rank][first:last], data)] if adds else data
                    )
                arrived[rank] = []
                begin(rank)
                moved = True
    if any(waiting):
        raise Wrong("no message can move: {waits}", waits=_waits(waiting, plans, left))
    every = sum(1 << rank for rank in used)
    for number, (start, _) in enumerate(pairwise(cuts)):
        owner = next(r for r, (first, stop) in enumerate(bounds) if first <= start < stop)
        summands = 1 << owner if operation == "all-gather" else every
        holders = [owner] if operation == "reduce-scatter" else used
        for rank in holders:
            once, more = ranks_of[held[rank][number]]
            if (once, more) != (summands, 0):
                wrong = once ^ summands | more
                other = next(r for r in range(ranks) if wrong >> r & 1)
                raise Wrong(
                    "element {start} of rank {rank} has the value of rank {other} {times} "
                    "times, and must have it {wanted} times",
                    start=start,
                    rank=rank,
                    other=other,
                    times=_times([*sums], other)[held[rank][number]],
                    wanted=summands >> other & 1,
                )
            if held[rank][number] != held[holders[0]][number]:
                raise Wrong(
                    "ranks {rank} and {other} sum element {start} in another order, so their results "
                    "differ by rounding",
                    rank=holders[0],
                    other=rank,
                    start=start,
                )


def _times(expressions: Sequence[Any], rank: int) -> list[int]:
    """Return how often each expression has the value of a rank; a pair is a sum of earlier ones."""
    counts: list[int] = []
    for key in expressions:
        counts.append(
            sum(counts[one] for one in key) if isinstance(key, tuple) else int(key == rank)
        )
    return counts


def _waits(
    waiting: Sequence[Any], plans: Sequence[Any], left: Sequence[Any]
) -> tuple[Sentence, ...]:
    """Return the first message that each rank waits for, of at most four ranks."""
    sentences = []
    for rank, messages in enumerate(waiting):
        if messages is not None:
            at = {"rank": rank, "step": len(plans[rank]) - len(left[rank]) + 1}
            if messages[0]:
                (peer, *_), _ = messages[0][0]
                law = "rank {rank} waits in step {step} to send to rank {peer}"
            else:
                _, (peer, *_) = messages[1][0]
                law = "rank {rank} waits in step {step} to receive from rank {peer}"
            sentences.append(Sentence(law, **at, peer=peer))
    return tuple(sentences[:4])
