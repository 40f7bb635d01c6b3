"""The collectives of a process group in progress: queues that run them in order, and PyTorch's Work.

A call runs in the thread that waits for it, or else in a thread of its group, beside the program.
The callbacks of a future stand in the queue, too, where `get_future` was called. The calls that they
make run in their place, in a queue of their own. So all ranks run all calls in one order, and a
callback may wait for its calls:

    queue of the group     all-reduce   callbacks of its future   all-reduce   ...
    queue of the callbacks              all-reduce   all-reduce
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from mpitrain.errors import CommError
from mpitrain.transport.base import Transport

TURN = 1e-3
"""Seconds after which a waiting thread looks again whether it may run the calls itself."""

GRACE = 5.0
"""Seconds beyond its time limit in which the thread that runs a call says why it has not ended, and beyond the program
in which threads may leave C++.
"""


class Call:
    """One collective of a group.

    number    of this call within its group, from 0 in the order in which they run; -1 before it runs
    name      the method of the process group, with what must be the same on all ranks
    run       performs it, and blocks
    tensors   the result: the tensors that PyTorch passed
    deadline  on time.monotonic
    device    of its tensors, if that is a GPU, else None
    is_refused  whether it sends nothing, since its arguments have the fault that `error` names; its number is
              that of the call before it
    stream    the stream on which the GPU runs it; after: an event behind its last work. The host has
              started all of it when the call has ended
    """

    device: torch.device | None = None
    is_refused = False
    stream: Any = None
    after: Any = None

    def __init__(
        self, name: str, run: Callable[["Call"], object], tensors: Sequence, seconds: float
    ):
        self.number, self.name, self.tensors = -1, name, list(tensors)
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.error: BaseException | None = None
        self._run: Callable[[Call], object] | None = run
        self._ended = threading.Event()

    def execute(self) -> None:
        assert self._run is not None
        try:
            with torch.no_grad():  # The result may be a parameter.
                self._run(self)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Let go on who waits for the call."""
        self._run = None  # It may hold large tensors.
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def limit(self) -> str:
        return f"its timeout of {self.deadline - self.began:.3g} s"

    def pause(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def result(self) -> list:
        """Return the tensors, which the current stream of their GPU may use from now on; raise the error."""
        if self.error is not None:
            raise self.error
        self.order_behind()
        return self.tensors

    def order_behind(self) -> None:
        """Let the current stream of the GPU go on behind the call; the host does not wait."""
        if self.after is not None:
            torch.cuda.current_stream(self.device).wait_event(self.after)

    def __str__(self) -> str:
        return self.name if self.number < 0 else f"{self.name} (call {self.number} of its group)"


class CallQueue:
    """The calls of a group that have not ended. They run one after another, in their order.

    outer      the queue in which this one stands, or None for the one of a group
    on_failure called with the first call of a group that fails, and with refused ones, by the thread that ran it
    """

    def __init__(
        self,
        transport: Transport,
        outer: "CallQueue | None" = None,
        on_failure: Callable[[Call], object] = bool,
    ):
        self._transport, self._on_failure = transport, on_failure
        self._outer = outer
        self._root: CallQueue = outer._root if outer else self
        self._entries: deque[Call | Callbacks] = deque()
        self._driving = threading.Lock()
        self._condition, self._is_wanted, self.is_closed = threading.Condition(), False, False
        self._thread: threading.Thread | None = None
        # Of the queue of a group:
        self._count, self._is_stuck = 0, False
        self._looking: threading.Thread | None = None
        self.error: BaseException | None = None

    def add(self, call: Call, in_background: bool) -> "CallQueue":
        """Append a call of this thread, and return its queue.

        in_background  ask the group's thread to run it, whoever waits for it
        """
        for queue in (*reversed(_RUNNING.get()), self):
            if queue._root is self and queue._append(call, in_background):
                queue._shorten(call)
                return queue
        raise CommError(
            f"{call} cannot run: its process group was destroyed.",
            "Make it before destroy_process_group, or make a new group.",
        )

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks why they wait in vain for the call that this error has refused."""
        call = Call("a refused call", bool, [], float("inf"))
        call.is_refused, call.error = True, error
        with suppress(CommError):  # The process group was destroyed.
            self.add(call, True)

    def future(self, call: Call) -> Future:
        """Return a future of a call in this queue; its callbacks may make calls, and wait for them."""
        complete, future = future_of(call.result, call.device)
        callbacks = Callbacks(self._transport, self, call, complete)
        queue: CallQueue | None = self
        while queue and not queue._append(callbacks, True):
            queue = queue._outer  # All calls of a closed queue have ended.
        if not queue:
            complete()
        return future

    def _append(self, entry: "Call | Callbacks", in_background: bool) -> bool:
        with self._condition:
            if self.is_closed:
                return False
            self._entries.append(entry)
            if in_background:
                self._is_wanted = True
                self._condition.notify()
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="process group", daemon=True
                    )
                    self._thread.start()
            return True

    def wait(self, call: Call, seconds: float | None = None) -> None:
        """Run the calls up to this one, or wait for the thread that runs them; raise its error."""
        if seconds is not None:
            call.deadline = min(call.deadline, time.monotonic() + seconds)
            self._shorten(call)
        recorder, members = self._transport.recorder, self._transport.members
        wait = recorder.wait(recorder.name(call.name, members)) if recorder.is_on else 0
        while not call.has_ended:
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(call)
                finally:
                    self._driving.release()
            if not call.has_ended:
                call.pause(TURN)
                self._refuse_stuck(call)
        recorder.go_on(wait)
        if call.error is not None:
            raise call.error

    def close(self) -> None:
        """Run what is left, and end the thread."""
        while True:
            with self._driving:
                self._drive(None)
            with self._condition:
                if not self._entries:
                    self.is_closed = True
                    self._condition.notify()
                    return

    def give_up(self, error: BaseException) -> None:
        """Refuse all later calls with an error; an earlier error stays the reason."""
        self.error = self.error or error

    def end_thread(self) -> None:
        """Wait for the call under way, which a loss ends, and end the thread."""
        with self._driving, self._condition:
            self.is_closed = True
            self._condition.notify()

    def _shorten(self, call: Call) -> None:
        """Let no earlier call last longer than this one may, which runs behind them."""
        for entry in self._entries.copy():
            if entry is call:
                return
            if isinstance(entry, Call):
                entry.deadline = min(entry.deadline, call.deadline)

    def _drive(self, last: Call | None) -> None:
        """Run the calls up to `last`; None: all, with all callbacks."""
        while self._entries and not (last and last.has_ended):
            entry = self._entries[0]
            if isinstance(entry, Call):
                self._root._execute(entry)
            elif last:
                return  # A callback may need the thread that waits for the call.
            else:
                entry.run()
            with self._condition:  # `_look` drops entries, but never the first.
                self._entries.popleft()

    def _execute(self, call: Call) -> None:
        if call.is_refused:
            call.number = self._count - 1
            if self.error is None:
                self._on_failure(call)
            call.end()
            return
        call.number, self._count = self._count, self._count + 1
        if self.error is not None:
            call.error = self._refusal(call)
        else:
            call.execute()
        if call.error is not None and self.error is None:
            # The ranks no longer agree on the messages in flight.
            self.error = call.error
            self._on_failure(call)  # Before the program hears of it, and may exit.
        call.end()

    def _refusal(self, call: Call) -> CommError:
        refusal = CommError(
            f"{call} cannot run: an earlier call of this process group has failed.",
            "Read the first error; then make a new group, or end the job.",
        )
        refusal.__cause__ = self._root.error
        return refusal

    def _refuse_stuck(self, call: Call) -> None:
        """Raise an error if the thread that runs the calls is stuck: it keeps no time limit."""
        root = self._root
        if root._is_stuck:
            raise self._refusal(call)
        if time.monotonic() < call.deadline + GRACE:
            return
        raise self._stuck(call)

    def _stuck(self, call: Call) -> CommError:
        """Return the error of a call behind one that does not return; the group has failed."""
        root, first = self._root, next(iter(self._entries.copy()), call)
        error = CommError(
            f"rank {self._transport.members[self._transport.rank]}: {call} has not ended within {call.limit}; "
            + (f"{first} does not return." if first is call else f"it waits for {first}."),
            "Let a callback wait only for calls that it makes itself, or give init_process_group a longer `timeout`.",
        )
        root._is_stuck, root.error = True, root.error or error
        return error

    def look_for_late(self) -> None:
        """Let a thread keep the time limits of this group's calls while callbacks run.

        Who waits for a future waits in C++, where nothing keeps them.
        """
        if self._looking is None:
            self._looking = threading.Thread(target=self._look, name="time limits", daemon=True)
            self._looking.start()

    def _look(self) -> None:
        while not self.is_closed and not self._is_stuck:
            time.sleep(1.0)
            with self._condition:  # Meanwhile the callback may end, but no entry behind it begins.
                first, rest = [*self._entries][:1], [*self._entries][1:]
                late = [
                    e for e in rest if isinstance(e, Call) and time.monotonic() > e.deadline + GRACE
                ]
                if not late or not isinstance(first[0], Callbacks):
                    continue
                late[0].error = self._stuck(late[0])
                self._entries = deque(first)
            self._on_failure(self._give_up(late[0], rest))

    def _give_up(self, call: Call, entries: "Sequence[Call | Callbacks]") -> Call:
        """End the entries behind a callback that does not return, each with an error."""
        for entry in entries:
            if isinstance(entry, Callbacks):
                entry.complete()
            else:
                entry.error = entry.error or self._refusal(entry)
                entry.end()
        return call

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_wanted or self.is_closed)
                if not self._is_wanted:
                    return
                self._is_wanted = False
            with within_cpp(), self._driving:
                self._drive(None)


class Callbacks(CallQueue):
    """The callbacks of a future, in the queue of its call: an entry, and the queue of the calls they make.

    complete  completes the future, and so runs its callbacks
    """

    def __init__(
        self, transport: Transport, outer: CallQueue, call: Call, complete: Callable[[], object]
    ):
        super().__init__(transport, outer)
        self._call, self.complete = call, complete
        # A callback may ask another group for a future; that one's callbacks run in this place, too.
        self._context = copy_context()

    def run(self) -> None:
        self._context.run(self._run)

    def _run(self) -> None:
        _RUNNING.set((*_RUNNING.get(), self))
        self._root.look_for_late()
        self.complete()
        self.close()

    def __str__(self) -> str:
        return f"a callback of {self._call}"


_RUNNING: ContextVar[tuple[Callbacks, ...]] = ContextVar("running", default=())
"""The callbacks that this thread runs, the innermost last."""


def future_of(
    result: Callable[[], Any], device: torch.device | None = None
) -> tuple[Callable[[], object], Future]:
    """Return a function that completes a future, and the future, which has the result or its error.

    C++ sees an error only if a callback has raised it. That of `Future.set_exception` is a value for
    C++, which DistributedDataParallel takes for gradients: a segmentation fault.

    device  GPU of the result; `result` is called on a stream of PyTorch's, behind which all that waits
            for the future goes on
    """

    def value(completed: Future) -> Any:
        try:
            return result()
        except BaseException as error:
            raise RuntimeError(str(error) or repr(error)) from None

    begun: Future = Future() if device is None else Future(devices=[device])

    def complete() -> None:
        with within_cpp():
            begun.set_result(None)

    return complete, begun.then(value)


WITHIN: list[object] = []
"""One entry for each thread that may be within PyTorch's C++."""


@contextmanager
def within_cpp() -> Iterator[None]:
    """Let an exit of the program wait, at most GRACE seconds, until this thread leaves the block.

    Python ends all other threads at an exit. One within C++, in callbacks or the copy of a tensor, would abort
    the process.
    """
    WITHIN.append(None)
    try:
        yield
    finally:
        WITHIN.pop()


@atexit.register
def _let_threads_end() -> None:
    deadline = time.monotonic() + GRACE
    while WITHIN and time.monotonic() < deadline:
        time.sleep(1e-3)


class CallWork(dist.Work):
    """A call in progress, as PyTorch's `Work`."""

    def __init__(self, queue: CallQueue, call: Call):
        super().__init__()
        self._queue, self._call = queue, call

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._queue.wait(self._call, timeout.total_seconds() or None)
        self._call.order_behind()
        return True

    def get_future(self) -> Future:
        return self._queue.future(self._call)

    def is_completed(self) -> bool:
        if not self._call.has_ended:
            return False
        after = self._call.after
        return after is None or bool(after.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._call.error is None

    def exception(self) -> BaseException | None:
        return self._call.error

    def result(self) -> list:
        return self._call.tensors

    def synchronize(self) -> None:
        self.wait()


class MessageWork(dist.Work):
    """A point-to-point message in progress, as PyTorch's `Work`.

    finish   called once when the message is complete, by a thread that may have another stream
    device   of its tensors, if that is a GPU, else None
    """

    def __init__(
        self,
        request: Any,
        wait: Callable[[Any, float | None], None],
        finish: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        device: torch.device | None = None,
    ):
        super().__init__()
        self._device, self._after = device, None
        self._request, self._wait, self._finish = request, wait, finish
        self._tensors, self._lock, self._has_ended = list(tensors), threading.Lock(), False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            if not self._has_ended:
                self._wait(self._request, timeout.total_seconds() or None)
                self._end()
        if self._after is not None:
            torch.cuda.current_stream(self._device).wait_event(self._after)
        return True

    def is_completed(self) -> bool:
        with self._lock:
            if not self._has_ended and self._request.test():
                self._end()
            return self._has_ended and (self._after is None or bool(self._after.query()))

    def _end(self) -> None:
        with torch.no_grad():
            self._finish()
        if self._device is not None:
            self._after = torch.cuda.current_stream(self._device).record_event()
        self._has_ended = True

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._request.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future:
        errors: list[Exception] = []

        def ended() -> list[torch.Tensor]:
            if errors:
                raise errors[0]
            self.wait()
            return self._tensors

        complete, future = future_of(ended, self._device)

        def wait() -> None:
            # Not within the callback: a thread that waits below C++ aborts a process that exits.
            with within_cpp():
                try:
                    self.wait()
                except Exception as error:
                    errors.append(error)
                complete()

        threading.Thread(target=wait, daemon=True).start()
        return future
