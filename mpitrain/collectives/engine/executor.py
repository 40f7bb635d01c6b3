"""Collectives bound to buffers: what the ranks agree on when they bind, the executor of plans, and progress.

Binding compares arguments, makes views of the array and allocates scratch. A run does none of these.
Started reductions progress when they are polled, between layers, or in a background thread.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.plans.exchanges import barrier
from mpitrain.collectives.plans.steps import Plan, Step, Transfer, pieces
from mpitrain.errors import CommError, ConfigError, MpitrainError
from mpitrain.trace.recorder import REDUCTION, SILENT, Recorder
from mpitrain.transport.base import Request, Transport, named
from mpitrain.transport.device import aside

OPS: dict[str, np.ufunc] = {
    function.__name__: function
    for function in (
        *(np.add, np.multiply, np.maximum, np.minimum),
        *(np.bitwise_and, np.bitwise_or, np.bitwise_xor),
    )
}
"""Reduction operators; NumPy's universal functions also dispatch to CuPy arrays."""

Combine = Callable[[Any, Any], None]
"""(target, received): replaces the target by the element-wise reduction of both."""

BETWEEN_HOSTS = 60 << 10
"""Bytes of the longest message between hosts; longer transfers are cut into several messages.

The limit is just below 64 KiB, up to which MPI's TCP transports use the eager protocol. A longer
message waits for a reply to its announcement, and several short ones use the link better.
"""

WINDOW = 8
"""Messages in flight at once in each direction, to all peers together.

They are enough to fill a link, and few enough not to queue in front of it.
"""


PAUSE = 2e-4
"""Shortest pause between two rounds of polls, in seconds: a round may take the lock from the main thread."""

TURN = 2e-4
"""Seconds after which Python passes the interpreter lock to a thread that waits for it.

Python's default of 5 ms leaves links idle whenever the main thread is between two long operations.
"""


class ExposedTime:
    """The seconds that a rank is blocked on communication; a `with` block adds its duration."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Return the seconds since the last call of this method."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Reduction:
    """Collective bound to a buffer, as an MPI-4 persistent collective: the base of all of them.

    Every run applies the same collective to the present contents of the buffer. A subclass defines
    `_steps`. The base records runs and waits in a trace. A reduction is a Request, too, so one may
    wait for others.

    Attributes
    ----------
    algorithm : str
        Name of the algorithm in use: the choice of "auto", or the substitute for a missing one. ""
        for operations that have no choice of algorithm.
    is_messages : bool
        Whether any thread may poll this reduction, one thread at a time. If so, it consists only of
        point-to-point messages and local work.
    scratch_bytes : int
        Bytes allocated for the lifetime of this reduction, without its buffer and its state.
    state : dict or None
        State of a lossy wire format between runs, for checkpoints. `residual` and `prediction` have
        the layout of the buffer. The residual differs between ranks; all other arrays are the same
        on all ranks.
    learn : callable or None
        Function that updates `state` with a sum by another reduction, an array with the layout of
        the buffer.
    exposed : ExposedTime or None
        Where `run` and `wait` add the seconds in which this rank is blocked.

    Notes
    -----
    A run lasts from `start` until `wait` returns, or until `poll` returns True. Do not touch the
    buffer meanwhile.

    Several reductions may be in flight at once, and may be polled in any order. `wait` progresses
    only its own reduction, so all ranks must wait for several reductions in the same order.

    Either all ranks call `run`, or all ranks call `start`. The algorithms "shared" and "native"
    synchronise differently in the two cases. Both raise CommError if the last run has not ended.
    """

    algorithm = ""
    is_messages = True
    scratch_bytes = 0
    state: dict[str, np.ndarray] | None = None
    learn: Callable[[np.ndarray], None] | None = None
    exposed: ExposedTime | None = None
    source = -1
    # The run under way: the request that it waits for, None between runs, and those that follow.
    _awaited: Request | None = None
    _left: Iterator[Request] = iter(())
    # In the trace: no record, until `noted_as` names it.
    _recorder: Recorder = SILENT
    _name = _nbytes = _span = 0

    def noted_as(self, recorder: Recorder, name: int, nbytes: int) -> None:
        """Record the runs and waits from now on under a name of the recorder."""
        self._recorder, self._name, self._nbytes = recorder, name, nbytes

    def run(self) -> None:
        """Run the collective: `start`, then `wait`."""
        if self._awaited is not None:
            raise _started_twice()
        with self.exposed or nullcontext():
            if self._recorder.is_on:
                self._run_noted()
            else:
                self._run()

    def start(self) -> None:
        """Start a run, and send the messages that need no other message first."""
        if self._awaited is not None:
            raise _started_twice()
        if self._recorder.is_on:
            self._span = self._recorder.begin(REDUCTION, self._name, nbytes=self._nbytes)
        self._left = self._steps()
        self._awaited = next(self._left, NO_MESSAGE)

    def poll(self) -> bool:
        """Progress the run as far as possible without blocking.

        Return True once the result is in the buffer, and before the first start.
        """
        while self._awaited is not None and self._awaited.test():
            self._awaited = FAILED  # unless the next line brings another
            self._awaited = next(self._left, None)
        if self._span and self._awaited is None:
            self._recorder.end(self._span)
            self._span = 0
        return self._awaited is None

    test = poll

    def order(self) -> bool:
        """Progress the run as `poll`, for a caller that launches work on a GPU: its host need not wait.

        Either all ranks end a run by `order`, or none.

        Returns
        -------
        bool
            True once work that is launched from now on finds the result in the buffer. A GPU may
            still be at work on it.
        """
        return self.poll()

    def wait(self) -> None:
        """Block until the result is in the buffer."""
        wait = self._recorder.wait(self._name)
        with self.exposed or nullcontext():
            while not self.poll():
                assert self._awaited is not None
                self._awaited.wait()
        self._recorder.go_on(wait)

    def _steps(self) -> Iterator[Request]:
        """Do one run; yield each request that must end before the rest of it."""
        raise NotImplementedError

    def _run(self) -> None:
        """Do one run, and block."""
        for request in self._steps():
            request.wait()

    def _run_noted(self) -> None:
        """Do one run, and block, with its records in the trace."""
        recorder, name = self._recorder, self._name
        span, wait = recorder.begin(REDUCTION, name, nbytes=self._nbytes), recorder.wait(name)
        self._run()
        recorder.go_on(wait)
        recorder.end(span)


NO_MESSAGE = Reduction()
"""The request that is left of a run without messages, which has ended in `start`: one never started."""


class Failed:
    """The request that is left of a run which an error has ended: its buffer has no result."""

    source = -1

    def test(self) -> bool:
        raise CommError(
            "A reduction cannot end: an error has ended its run before.",
            "Act on the first error: end the job, or bind the reduction again.",
        )

    def wait(self) -> None:
        self.test()


FAILED = Failed()


def _started_twice() -> CommError:
    return CommError(
        "A reduction was started again before its last run had ended.",
        "Call wait() first, or bind one reduction per buffer.",
    )


class Agreed(NamedTuple):
    """The agreement of all ranks on the arguments of one binding.

    tag   of the collective
    owns  for each rank, the facts that it passed to `agree` as `own`
    """

    tag: int
    owns: list[Any]


def agree(
    transport: Transport,
    operation: str,
    array: np.ndarray,
    known: tuple[str, ...],
    algorithm: str,
    own: Any = None,
    compares: bool = True,
    **settings: Any,
) -> Agreed:
    """Compare the arguments of a binding over all ranks; collective, in at most one gather.

    array     the array to bind
    known     names of the algorithms that exist
    own       facts of this rank for the others, serialisable as JSON; None: there are none
    compares  False: the caller knows that the arguments are equal, so only `own` is gathered
    settings  other arguments that must be the same on all ranks
    raises    CommError on every rank if any argument differs, or if any rank's array is not one
              contiguous, writable block of numbers;
              ConfigError on every rank for an unknown op or algorithm
    """
    problem, tag = unfit(array), transport.claim_tag()
    owns: Sequence[Any] = ()
    if compares:
        arguments = {"operation": operation, "problem": problem, "algorithm": algorithm, **settings}
        arguments["tag"] = tag
        if problem is None:
            arguments |= {"count": array.size, "dtype": array.dtype.name}
        everyone, owns = zip(*transport.gather_text([arguments, own]), strict=True)
        _check_equal(transport, operation, everyone)
    elif problem is not None:
        raise _unfit_error(transport, operation, transport.rank, problem)
    elif own is not None:
        owns = transport.gather_text(own)
    check_name(f"{operation} algorithm", algorithm, known)
    check_name("op", settings.get("op", "add"), OPS)
    return Agreed(tag, [*owns])


def _check_equal(transport: Transport, operation: str, everyone: Sequence[dict[str, Any]]) -> None:
    """Raise CommError, on every rank, if the arguments of the ranks differ, or an array is unfit."""
    for rank, facts in enumerate(everyone):
        if facts["problem"] is not None:
            raise _unfit_error(transport, operation, rank, facts["problem"]).on_every_rank()
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = [facts.get(name) for facts in everyone]
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise CommError(
                f"rank {transport.rank}: {operation} needs one {name} on every rank, but it is {listed}.",
                "All ranks must bind the same collectives, on equal arrays, in the same order.",
            ).on_every_rank()


def _unfit_error(transport: Transport, operation: str, rank: int, problem: str) -> CommError:
    return CommError(
        f"rank {transport.rank}: {operation} needs contiguous arrays of plain numbers on every rank, but rank {rank} "
        f"passed {problem}.",
        "Bind numpy.ascontiguousarray(array), or the buffer that the array is a view of.",
    )


def unfit(array: Any) -> str | None:
    """Describe why an object cannot be reduced, in words that follow "passed"; None if it can."""
    if not hasattr(array, "flags") or not hasattr(array, "dtype"):
        return f"a {type(array).__name__}, which is no array"
    if array.dtype.name != "bfloat16" and (
        array.dtype.kind not in "biuf" or array.dtype.itemsize > 8
    ):
        return f"elements of type {array.dtype}"
    if not array.dtype.isnative:
        return f"{array.dtype.str}, whose bytes are in another order than this machine's"
    if not array.flags.c_contiguous:
        return f"an array with gaps (shape {array.shape}, strides {array.strides})"
    if not getattr(array.flags, "writeable", True):
        return "an array that is read-only"
    return None


def check_name(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(
            f"{what} must be one of {', '.join(known)}, but it is {name!r}."
        ).on_every_rank()


def by_numpy(array: Any, op: str) -> Combine:
    """Return the Combine of `op` by NumPy.

    Results that are not finite cause no error and no warning: the caller checks the sum.
    """
    function = OPS[op]

    @np.errstate(over="ignore", invalid="ignore")
    def combine(target: Any, received: Any) -> None:
        function(target, received, out=target)

    return combine


class _BoundStep(NamedTuple):
    """Step, or slice of a long step, with views of arrays in place of element bounds.

    after            number of bound steps that must have ended before this one begins
    sends, receives  (array, peer)
    copies           (target, source): messages from this rank to itself
    combines         (target, received)
    """

    after: int
    sends: list[tuple[np.ndarray, int]]
    receives: list[tuple[np.ndarray, int]]
    copies: list[tuple[np.ndarray, np.ndarray]]
    combines: list[tuple[np.ndarray, np.ndarray]]


class Execution(Reduction):
    """Plan bound to an array and a tag.

    array     receives and reductions write to it
    outgoing  sends read from it; None: from `array`
    """

    def __init__(
        self,
        transport: Transport,
        array: np.ndarray,
        op: str,
        plan: Plan,
        tag: int,
        outgoing: np.ndarray | None = None,
        combining: Callable[[Any, str], Combine] = by_numpy,
    ):
        self._transport, self._combine, self._tag = transport, combining(array, op), tag
        flat = array.reshape(-1)
        self._bound, scratch = _bound_steps(
            transport, plan, flat if outgoing is None else outgoing.reshape(-1), flat
        )
        self.scratch_bytes = sum(array.nbytes for array in scratch)
        self._requests: deque[list[Request]] = deque()  # of each step that has begun
        self._aside = aside(transport, array) if self._bound else None

    def __str__(self) -> str:
        return named(request for requests in self._requests for request in requests)

    def _steps(self) -> Iterator[Request]:
        return self._aside.around(self._messages()) if self._aside else self._messages()

    def _messages(self) -> Iterator[Request]:
        bound, requests, posted = self._bound, self._requests, 0
        for ended, step in enumerate(bound):
            while posted < len(bound) and bound[posted].after <= ended:
                requests.append(self._post(bound[posted]))
                posted += 1
            yield from requests[0]
            requests.popleft()
            for target, received in step.combines:
                self._combine(target, received)

    def _post(self, step: _BoundStep) -> list[Request]:
        transport, tag = self._transport, self._tag
        requests = [transport.start_recv(view, peer, tag) for view, peer in step.receives]
        requests += [transport.start_send(view, peer, tag) for view, peer in step.sends]
        for target, source in step.copies:
            target[...] = source
        return requests


def _bound_steps(
    transport: Transport, plan: Plan, source: np.ndarray, flat: np.ndarray
) -> tuple[list[_BoundStep], list[np.ndarray]]:
    """Return the plan's steps as views of these arrays, and the scratch that it allocates.

    Steps with long transfers between hosts become several bound steps.

    source  1-D array that sends read
    flat    1-D array that receives and combines write to
    """
    longest = max(
        (sum(t.stop - t.start for t in step.receives) for step in plan.steps if step.combine),
        default=0,
    )
    none = flat[:0]
    scratch = [np.empty_like(flat, shape=longest) if longest else none for _ in range(plan.depth)]
    bound: list[_BoundStep] = []
    ends: list[int] = []
    for i, step in enumerate(plan.steps):
        before, used = ends[i - plan.depth] if i >= plan.depth else 0, 0
        for part in _cut(step, transport, max(1, BETWEEN_HOSTS // flat.itemsize)):
            after = max(
                before,
                len(bound) + 1 - max(2, WINDOW // max(1, len(part.sends), len(part.receives))),
            )
            bound.append(
                _bound_step(
                    part, after, transport.rank, source, flat, scratch[i % plan.depth][used:]
                )
            )
            used += sum(t.stop - t.start for t in part.receives)
        ends.append(len(bound))
    return bound, scratch


def _cut(step: Step, transport: Transport, limit: int) -> list[Step]:
    """Split a step so that no transfer between hosts is longer than `limit` elements."""
    host, hosts = transport.hosts[transport.rank], transport.hosts
    if all(t.stop - t.start <= limit for t in (*step.sends, *step.receives)):
        return [step] if step.sends or step.receives else []

    def parts(transfer: Transfer) -> list[Transfer]:
        length = transfer.stop - transfer.start
        if length <= limit or hosts[transfer.peer] == host:
            return [transfer]
        return [
            Transfer(transfer.peer, *part)
            for part in pieces(transfer.start, transfer.stop, -(-length // limit))
        ]

    sends, receives = ([parts(t) for t in transfers] for transfers in (step.sends, step.receives))
    return [
        Step(
            tuple(s[i] for s in sends if i < len(s)),
            tuple(r[i] for r in receives if i < len(r)),
            step.combine,
        )
        for i in range(max(map(len, sends + receives), default=0))
    ]


def _bound_step(
    step: Step, after: int, rank: int, source: np.ndarray, flat: np.ndarray, scratch: np.ndarray
) -> _BoundStep:
    sends = [(source[t.start : t.stop], t.peer) for t in step.sends if t.peer != rank]
    targets = [(flat[t.start : t.stop], t.peer) for t in step.receives if t.peer != rank]
    own_targets = [flat[t.start : t.stop] for t in step.receives if t.peer == rank]
    own_sources = [source[t.start : t.stop] for t in step.sends if t.peer == rank]
    copies = list(zip(own_targets, own_sources, strict=True))
    if not step.combine:
        return _BoundStep(after, sends, targets, copies, [])
    receives, combines, used = [], [], 0
    for target, peer in targets:
        received = scratch[used : used + target.size]
        receives.append((received, peer))
        combines.append((target, received))
        used += target.size
    return _BoundStep(after, sends, receives, copies, combines)


Phase = Sequence[tuple[Combine, np.ndarray, np.ndarray]]
"""Copies and sums of one rank, (function, target, source), in this order."""


class SharedMemory(Reduction):
    """Collective through shared memory: phases of local work, with a barrier between two of them.

    turns  the phases of a run; or those of two runs, which take turns. One list has three phases:
           the second barrier comes before any rank may overwrite an array that others read. Of two
           lists each has copies of its own, and one barrier a run is enough: a rank that enters it
           has read the copies of the run before
    """

    is_messages = False

    def __init__(self, transport: Transport, tag: int, turns: Sequence[Sequence[Phase]]):
        self._transport, self._tag, self._turns = transport, tag, cycle(turns)

    @cached_property
    def _meeting(self) -> Execution:
        """The barrier of a run in the background, made at the first: most activations have none."""
        transport = self._transport
        steps = barrier(transport.rank, transport.size)
        return Execution(transport, np.empty(0, np.uint8), "add", steps, self._tag)

    def _run(self) -> None:
        for _ in self._phases():
            self._transport.barrier()

    def _steps(self) -> Iterator[Request]:
        for _ in self._phases():
            yield from self._meeting._messages()

    def _phases(self) -> Iterator[None]:
        """Do the phases of a run; yield between two of them, where all ranks must have done the first."""
        if self._transport.windows.closed:  # The run would write to memory that has been unmapped.
            raise CommError(
                f"rank {self._transport.rank}: a reduction through shared memory needs its window, but the transport "
                "it was split from is closed.",
                "Close it when all reductions have ended.",
            )
        for number, phase in enumerate(next(self._turns)):
            if number:
                yield
            for work, target, source in phase:
                work(target, source)


class ProgressEngine:
    """Drives the reductions of one transport from their start to their end.

    It works while its caller is inside one of its methods. One thread calls it, in the same order on
    all ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._started: list[Reduction] = []

    def start(self, reduction: Reduction) -> None:
        """Start the reduction, and drive it until it has ended."""
        reduction.start()
        self._started.append(reduction)

    def poll(self, awaited: Reduction | None = None) -> bool:
        """Progress all started reductions without blocking; return whether `awaited` has ended, or all if None."""
        for reduction in tuple(self._started):
            if reduction.poll():
                self._started.remove(reduction)
        return not self._started if awaited is None else awaited not in self._started

    def wait(self, reduction: Reduction | None = None) -> None:
        """Block until `reduction` has ended, or all started ones if None.

        All started reductions progress meanwhile.
        """
        self._transport.wait_until(partial(self.poll, reduction))

    def leave(self) -> None:
        """Stop driving the started reductions; the caller waits for each of them itself."""
        self._started = []


class ProgressThread(ProgressEngine):
    """Progress engine with a background thread, which lives from the first start to the wait.

    The thread calls the transport only to poll started reductions that have not ended. Reductions
    add in the order of their plans, so the result is bitwise equal to a polled run. The thread also
    ends when the thread that started it ends. So a job that fails between start and wait can exit.

    raises  any error of the thread, at the next call; an error of an unexpected type becomes a
            CommError that names the rank
    """

    def __init__(self, transport: Transport):
        super().__init__(transport)
        self._unclaimed: list[Reduction] = []  # started, and the caller has not waited for them
        self._thread: threading.Thread | None = None
        self._stop = False
        self._error: Exception | None = None

    def start(self, reduction: Reduction) -> None:
        self.poll()
        super().start(reduction)
        self._unclaimed.append(reduction)
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        self._stop = False
        sys.setswitchinterval(min(TURN, sys.getswitchinterval()))
        self._transport.admit_thread()
        self._thread = threading.Thread(
            target=self._run, args=(threading.current_thread(),), name="mover"
        )
        self._thread.start()

    def poll(self, awaited: Reduction | None = None) -> bool:
        if self._error is not None:
            raise self._error
        return False

    def wait(self, reduction: Reduction | None = None) -> None:
        has_ended = reduction is not None and reduction not in self._started
        still = [] if reduction is None else self._unclaimed
        self._unclaimed = [one for one in still if one is not reduction]
        if not (has_ended and self._unclaimed):
            self._end()
        self.poll()
        if not has_ended:
            self._transport.wait_until(partial(super().poll, reduction))
        if self._unclaimed and self._thread is None:
            self._begin()

    def leave(self) -> None:
        self._end()
        self.poll()
        super().leave()
        self._unclaimed = []

    def _end(self) -> None:
        if self._thread is not None:
            self._stop = True
            self._thread.join()
            self._thread = None

    def _run(self, owner: threading.Thread) -> None:
        drive = super().poll

        def is_over() -> bool:
            if not self._stop:
                drive()
            return self._stop or not owner.is_alive()

        try:
            self._transport.wait_until(is_over, PAUSE)
        except MpitrainError as error:
            self._error = error
        except Exception as error:
            self._error = CommError(
                f"rank {self._transport.rank}: the progress thread of the reductions failed: "
                f"{type(error).__name__}: {error}"
            )
            self._error.__cause__ = error
        finally:
            self._transport.dismiss_thread()


def mover(transport: Transport, reductions: Sequence[Reduction]) -> ProgressEngine:
    """Return the progress engine for these reductions: a thread, or one that is polled.

    A thread needs a transport that admits it, and reductions whose `is_messages` is True. If
    all ranks are on one host, the engine polls, because a thread would hide little time there.
    """
    is_far = len({*transport.hosts}) > 1 and transport.admits_threads
    if is_far and all(reduction.is_messages for reduction in reductions):
        return ProgressThread(transport)
    return ProgressEngine(transport)
