"""Artificial failures and delays of a run, for run.inject and run.delay; imported only if a key is set.

The run calls `Injector.passes` at each of its points. A failure within a pass of the layers and a
delay need a subclass of the replica (`failing`, `late`), which the trainer gets from `disturbed`. A
lost message needs the transport's `start_send`.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from mpitrain.config import Run
from mpitrain.config.faults import KINDS, delay_s, delays, injection
from mpitrain.errors import say
from mpitrain.layers.base import Gradient, Weights
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replica import Replica
from mpitrain.trace.recorder import SEND
from mpitrain.transport.base import FIRST_CLAIMED_TAG, Request, Several, Transport

TAG = FIRST_CLAIMED_TAG - 1
"""The tag of the messages that two deadlocked ranks wait for; no other message has it."""


def partner(transport: Transport, rank: int) -> int:
    """Return the rank that deadlocks with `rank`: the next one."""
    return (rank + 1) % transport.size


def kill(transport: Transport, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(transport: Transport, rank: int) -> None:
    ctypes.string_at(0)


def stop(transport: Transport, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(transport: Transport, rank: int) -> NoReturn:
    """End the program as Python does: handlers run, and mpi4py calls MPI_Finalize."""
    sys.exit(0)


def vanish(transport: Transport, rank: int) -> NoReturn:
    """End the process at once: no handler runs, and MPI is not finalized."""
    os._exit(0)


def fail(transport: Transport, rank: int) -> NoReturn:
    raise RuntimeError(f"run.inject raises an exception on rank {rank}")


def exhaust(transport: Transport, rank: int) -> None:
    """Ask NumPy for more memory than any machine has; NumPy raises MemoryError."""
    np.empty(1 << 60, np.uint8)


def fill_disk(transport: Transport, rank: int) -> None:
    """Let every write of this process that makes a file larger fail with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def deadlock(transport: Transport, rank: int) -> None:
    """Wait for a message of the partner, which waits for one of this rank."""
    next_one = partner(transport, rank)
    transport.recv(np.empty(1), next_one if transport.rank == rank else rank, TAG)


def mismatch(transport: Transport, rank: int) -> None:
    """Enter a barrier that no other rank enters."""
    transport.barrier()


FAILURES: dict[str, Callable[[Transport, int], object]] = {
    "kill": kill,
    "segfault": segfault,
    "stop": stop,
    "exit": leave,
    "_exit": vanish,
    "raise": fail,
    "oom": exhaust,
    "disk": fill_disk,
    "deadlock": deadlock,
    "mismatch": mismatch,
}
"""Failures outside the layers: (transport of all ranks, rank of the failure); called on that rank."""


def set_nan(backend: Backend, element: Any) -> None:
    element.fill(np.nan)


def flip_bit(backend: Backend, element: Any) -> None:
    """Change the lowest bit of the exponent: the element doubles or halves."""
    number = backend.to_host(element).copy()
    bits = number.view(f"u{number.itemsize}")
    bits ^= bits.dtype.type(1 << np.finfo(number.dtype).nmant)
    backend.put(element, number)


ELEMENT_FAILURES: dict[str, Callable[[Backend, Any], None]] = {"nan": set_nan, "bitflip": flip_bit}
"""Failures of one element of a gradient: (backend, array of the element)."""


class Injector:
    """The failure of one run on this rank; it happens once.

    loses  whether the next message of this rank is lost
    """

    def __init__(self, text: str, transport: Transport):
        """text: run.inject, which is not empty."""
        failure = injection(text)
        assert failure
        self.failure, self.loses, self._transport = failure, False, transport
        # An injection that does not fit the ranks is refused after the start.
        fits = failure.rank < transport.size >= KINDS[failure.kind].ranks
        ranks = [failure.rank]
        if failure.kind == "deadlock":
            ranks.append(partner(transport, failure.rank))
        self._is_due = fits and transport.rank in ranks

    def loses_messages_of(self, transport: Transport) -> None:
        """Let this transport, and all that are split from it, drop the first send after `loses` becomes True.

        The sender sees a complete request, and the trace a send, as if the network had lost it.
        """
        if self.failure.kind != "lose":
            return
        for name in ("start_send", "split", "subset"):  # A split transport may be a copy.
            vars(transport).pop(name, None)
        start_send, split, subset = transport.start_send, transport.split, transport.subset

        def send(array: np.ndarray, to: int, tag: int = 0) -> Request:
            if not self.loses:
                return start_send(array, to, tag)
            self.loses = False
            if transport.recorder.is_on:
                _, _, span = transport.begin_message(SEND, array, tag, transport.members[to])
                transport.recorder.end(span)
            return Several([])

        def lossy(part: Transport | None) -> Any:
            if part is not None:
                self.loses_messages_of(part)
            return part

        changed: Any = transport
        changed.start_send = send
        changed.split = lambda *arguments, **more: lossy(split(*arguments, **more))
        changed.subset = lambda ranks: lossy(subset(ranks))

    def is_due(self, point: str, step: int) -> bool:
        """Return whether the failure happens now, and print that; True only once.

        point  a name of `POINTS`
        step   from 1, or 0 at the start
        """
        failure = self.failure
        if not self._is_due or point != failure.point or step < failure.step:
            return False
        self._is_due = False
        within = "" if point == "step" else f"{point} of "
        where = f"{within}step {step}" if step else "the start"
        say(f"rank {self._transport.rank}: run.inject: {failure.kind} at {where}")
        return True

    def passes(self, point: str, step: int) -> None:
        """Fail if the failure is due; arguments as in `is_due`."""
        if not self.is_due(point, step):
            return
        if self.failure.kind == "lose":
            self.loses = True
        else:
            FAILURES[self.failure.kind](self._transport, self.failure.rank)


def _leaves(gradients: Any) -> Iterator[Gradient]:
    for entry in gradients.values():
        if isinstance(entry, Gradient):
            yield entry
        else:
            yield from _leaves(entry)


def disturbed(
    kind: type[Replica], run: Run, transport: Transport, backend: Backend
) -> type[Replica]:
    """Return the class of replicas, made late as run.delay says, and made to fail as run.inject says."""
    kind = late(kind, run, transport) if run.delay else kind
    return failing(kind, run.inject, transport, backend) if run.inject else kind


def late(kind: type[Replica], run: Run, transport: Transport) -> type[Replica]:
    """Return the class of replicas, made to sleep when a step begins; a replica without rows does not."""
    recorder, all_delays = transport.recorder, delays(run.delay)
    name = recorder.name("run.delay")

    class Late(kind):  # type: ignore[valid-type, misc]
        def begin(self, step: int, *rest: Any) -> None:
            super().begin(step, *rest)
            if rows := self.own_rows:
                span = recorder.compute(name)
                place = rows.start, self.grid.coords.tp, self.grid.coords.pp
                time.sleep(delay_s(all_delays, transport.rank, run.seed, step, *place))
                recorder.end(span)

    return Late


def failing(
    kind: type[Replica], text: str, transport: Transport, backend: Backend
) -> type[Replica]:
    """Return the class of replicas, made to fail if run.inject names a forward or a backward.

    It fails at the first unit of that pass. A changed gradient is changed before its reduction.
    """
    injector = Injector(text, transport)
    if injector.failure.point not in ("forward", "backward"):
        return kind
    change = ELEMENT_FAILURES.get(injector.failure.kind)

    class Failing(kind):  # type: ignore[valid-type, misc]
        _step = 0

        def begin(self, step: int, *rest: Any) -> None:
            self._step = step + 1
            super().begin(step, *rest)

        def open(self, unit: int, micro: int) -> Weights:
            # An evaluation before the first step opens units, too.
            if self._step:
                injector.passes("forward", self._step)
            return super().open(unit, micro)

        def ready(self, unit: int, is_last: bool) -> None:
            if change is None:
                injector.passes("backward", self._step)
            elif is_last:
                leaves = _leaves(self.gradients(unit))
                written = next((leaf.array for leaf in leaves if leaf.filled), None)
                if written is not None and injector.is_due("backward", self._step):
                    change(backend, written.reshape(-1)[:1])
            super().ready(unit, is_last)

    return Failing
