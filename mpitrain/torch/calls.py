"""The collectives of a process group in progress: a queue that runs them in order, and PyTorch's Work.

A call runs in the thread that waits for it, or else in a thread of its group, beside the program.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from mpitrain.errors import CommError
from mpitrain.transport.base import Transport

TURN = 1e-3
"""Seconds after which a waiting thread looks again whether it may run the calls itself."""


class Call:
    """One collective of a group.

    number    of this call within its group, from 0
    name      the method of the process group, with what must be the same on all ranks
    run       performs it, and blocks
    tensors   the result: the tensors that PyTorch passed
    deadline  on time.monotonic
    """

    def __init__(
        self,
        number: int,
        name: str,
        run: Callable[["Call"], object],
        tensors: Sequence,
        seconds: float,
    ):
        self.number, self.name, self.tensors = number, name, list(tensors)
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.error: BaseException | None = None
        self._run: Callable[[Call], object] | None = run
        self._ended, self._future = threading.Event(), None
        self._lock = threading.Lock()

    def execute(self) -> None:
        assert self._run is not None
        try:
            self._run(self)
        except BaseException as error:
            self.error = error
        self._run = None  # It may hold large tensors.
        with self._lock:
            self._ended.set()
            if self._future is not None:
                self._settle(self._future)

    def fail(self, error: BaseException) -> None:
        """End a call that never ran."""

        def refuse(call: "Call") -> None:
            raise error

        self._run = refuse
        self.execute()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def pause(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def future(self) -> Future:
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self.has_ended:
                    self._settle(self._future)
            return self._future

    def _settle(self, future: Future) -> None:
        if self.error is None:
            future.set_result(self.tensors)
        else:
            future.set_exception(self.error)

    def __str__(self) -> str:
        return f"{self.name} (call {self.number} of its group)"


class CallQueue:
    """The calls of a group that have not ended. They run one after another, in their order."""

    def __init__(self, transport: Transport):
        self._recorder, self._members = transport.recorder, transport.members
        self._calls: deque[Call] = deque()
        self._driving = threading.Lock()
        self._condition, self._is_wanted = threading.Condition(), False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def add(self, call: Call, in_background: bool) -> None:
        """Append a call; `in_background` asks the group's thread to run it, whoever waits for it."""
        self._calls.append(call)
        if in_background:
            with self._condition:
                self._is_wanted = True
                self._condition.notify()
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="process group", daemon=True
                    )
                    self._thread.start()

    def wait(self, call: Call, seconds: float | None = None) -> None:
        """Run the calls up to this one, or wait for the thread that runs them; raise its error."""
        late = None if seconds is None else time.monotonic() + seconds
        if late is not None:
            call.deadline = min(call.deadline, late)
        recorder = self._recorder
        wait = recorder.wait(recorder.name(call.name, self._members)) if recorder.is_on else 0
        while not call.has_ended:
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(call)
                finally:
                    self._driving.release()
            else:
                call.pause(TURN)
        recorder.go_on(wait)
        if call.error is not None:
            raise call.error

    def drain(self) -> None:
        """Run all calls that are left; their own waits raise their errors."""
        with self._driving:
            self._drive(None)

    def _drive(self, last: Call | None) -> None:
        while self._calls and not (last and last.has_ended):
            call = self._calls[0]
            if self.error is None:
                call.execute()
                # After a failure the ranks no longer agree on the messages in flight.
                self.error = call.error
            else:
                refusal = CommError(
                    f"{call} cannot run: an earlier call of this process group has failed.",
                    "Read the first error; then make a new group, or end the job.",
                )
                refusal.__cause__ = self.error
                call.fail(refusal)
            self._calls.popleft()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_wanted)
                self._is_wanted = False
            self.drain()


class CallWork(dist.Work):
    """A call in progress, as PyTorch's `Work`."""

    def __init__(self, queue: CallQueue, call: Call):
        super().__init__()
        self._queue, self._call = queue, call

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._queue.wait(self._call, timeout.total_seconds() or None)
        return True

    def get_future(self) -> Future:
        return self._call.future()

    def is_completed(self) -> bool:
        return self._call.has_ended

    def is_success(self) -> bool:
        return self._call.has_ended and self._call.error is None

    def exception(self) -> BaseException | None:
        return self._call.error

    def result(self) -> list:
        return self._call.tensors

    def synchronize(self) -> None:
        self.wait()


class MessageWork(dist.Work):
    """A point-to-point message in progress, as PyTorch's `Work`.

    finish   called once when the message is complete
    """

    def __init__(
        self,
        request: Any,
        wait: Callable[[Any, float | None], None],
        finish: Callable[[], None],
        tensors: Sequence[torch.Tensor],
    ):
        super().__init__()
        self._request, self._wait, self._finish = request, wait, finish
        self._tensors, self._lock, self._has_ended = list(tensors), threading.Lock(), False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            if not self._has_ended:
                self._wait(self._request, timeout.total_seconds() or None)
                self._end()
        return True

    def is_completed(self) -> bool:
        with self._lock:
            if not self._has_ended and self._request.test():
                self._end()
            return self._has_ended

    def _end(self) -> None:
        self._finish()
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
        future: Future = Future()

        def settle() -> None:
            try:
                self.wait()
                future.set_result(self._tensors)
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=settle, daemon=True).start()
        return future
