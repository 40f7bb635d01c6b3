"""The key-value store of PyTorch's process groups over MPI, and the rendezvous that hands it out.

Rank 0 keeps the keys. A thread of rank 0 answers the requests of the other ranks, so no socket is
opened. A request and its answer are a message with the length, then one with the pickled words.
"""

import atexit
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from mpitrain.errors import ConfigError, PeerLost, say
from mpitrain.machine import process
from mpitrain.torch.calls import within_cpp
from mpitrain.transport import ulfm
from mpitrain.transport.base import Request, Transport
from mpitrain.transport.mpi import MpiTransport, connect, join_world
from mpitrain.transport.objects import recv_bytes, send_object, start_send_object

LONGEST_PAUSE = 5e-3
"""Seconds between two looks of a rank that waits for a key, and of rank 0 for a request."""


@contextmanager
def checked_launch() -> Iterator[None]:
    """In this context an error about the launcher is printed with the line of the program, which ends with exit code 2.

    The tracebacks of all processes would hide the message between those that such a launcher prints itself.
    """
    try:
        yield
    except ConfigError as error:
        if not error.agreed:
            raise
        say(f"{error.named()}\n{own_line()}")
        sys.exit(error.exit_code)


def own_line() -> str:
    """Return the line of the user's program that runs, as in a traceback."""
    paths = sysconfig.get_paths()
    packages = (*(paths[name] for name in ("stdlib", "purelib", "platlib")), PACKAGE, "<frozen ")
    own = [f for f in traceback.extract_stack() if not f.filename.startswith(packages)]
    return "".join(traceback.format_list(own[-1:])).rstrip()


PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


@cache
def world() -> MpiTransport:
    """Connect to all ranks of the MPI job, once; collective."""
    process.poll_without_yielding()
    # Registered before `connect` registers the end of a rank, which waits for the other ranks.
    atexit.register(lambda: [store.closing.set() for store in _SERVED])
    transport = connect("multiple")  # Each group has a thread, and all of them call MPI.
    if transport.size > 1 and transport.MPI.Query_thread() < transport.MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "Several threads of a process group call MPI at the same time, but this MPI was started for one at a time.",
            "Call init_process_group before mpitrain.connect(), or set mpi4py.rc.thread_level = 'multiple' first.",
        )
    open_store(transport)
    return transport


class Served(NamedTuple):
    """The store of the ranks that are connected now.

    keys     of this process; those of rank 0 are the store of the job
    closing  ends the thread of rank 0 that answers the others
    """

    keys: dist.HashStore
    closing: threading.Event


_SERVED: list[Served] = []


def open_store(transport: MpiTransport) -> None:
    """Begin a store without keys; collective."""
    served = Served(dist.HashStore(), threading.Event())
    served.keys.set_timeout(timedelta(milliseconds=1))  # A call that would wait is not made.
    _SERVED[:] = [served]
    transport.joins = False
    transport.admit_thread()
    tags = transport.claim_tag(), transport.claim_tag()
    if transport.size > 1 and transport.rank == 0:
        arguments = transport, tags, served
        threading.Thread(target=_serve, args=arguments, name=SERVING, daemon=True).start()
    _LINES[:] = [Line(transport, *tags)]


def close_store(transport: MpiTransport) -> None:
    """End the threads of a store after a loss; no message is sent."""
    transport.job.is_abandoned = True
    ulfm.revoke(transport.job)
    if not _SERVED:
        return
    _SERVED.pop().closing.set()
    for thread in threading.enumerate():
        if thread.name == SERVING:
            thread.join(ulfm.ENDING)
    transport.dismiss_thread()


SERVING = "store"
"""The name of the thread of rank 0 that answers the others."""


def _serve(transport: Transport, tags: Sequence[int], served: Served) -> None:
    with suppress(PeerLost):
        _answer(transport, tags, served)


def _answer(transport: Transport, tags: Sequence[int], served: Served) -> None:
    ask, answer = tags
    length, pause = np.empty(1, np.int64), 1e-5
    request = transport.start_recv(length, None, ask)
    while not served.closing.is_set():
        if not request.test():
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
            continue
        rank, pause = request.source, 1e-5
        number, name, *arguments = recv_bytes(transport, int(length[0]), rank, ask)
        try:
            with within_cpp():
                value: Any = getattr(served.keys, name)(*arguments)
        except Exception as error:
            value = RuntimeError(f"{name} of the store: {error}")
        send_object(transport, (number, value), rank, answer)
        request = transport.start_recv(length, None, ask)


class Line:
    """The requests of this rank to rank 0, one at a time; several threads of a rank may ask.

    An answer that comes after its time limit is left out by the next request.
    """

    def __init__(self, transport: Transport, ask: int, answer: int):
        self._transport, self._ask, self._answer = transport, ask, answer
        self._lock, self._number = threading.Lock(), 0
        self._length = np.empty(1, np.int64)
        self._awaited: Request | None = None

    def ask(self, seconds: float, name: str, *arguments: Any) -> Any:
        deadline = time.monotonic() + seconds
        late = dist.DistStoreError(
            f"rank {self._transport.rank}: rank 0, which keeps the store, has not answered {name} within {seconds:g} s"
        )
        if not self._lock.acquire(timeout=seconds):
            raise late
        try:
            self._number += 1
            request = self._number, name, *arguments
            sent, number = start_send_object(self._transport, request, 0, self._ask), -1
            while number != self._number:
                number, value = self._next(deadline, late)
            for message in sent:
                message.wait()
        finally:
            self._lock.release()
        if isinstance(value, RuntimeError):
            raise value
        return value

    def _next(self, deadline: float, late: Exception) -> Any:
        """Receive one answer."""
        if self._awaited is None:
            self._awaited = self._transport.start_recv(self._length, 0, self._answer)
        request = self._awaited

        def poll() -> bool:
            if not request.test() and time.monotonic() > deadline:
                raise late
            return request.test()

        self._transport.wait_until(poll, what=request)
        self._awaited = None
        return recv_bytes(self._transport, int(self._length[0]), 0, self._answer)


_LINES: list[Line] = []


class MpiStore(dist.Store):
    """A store of PyTorch whose keys are on rank 0 of the MPI job.

    Its methods are those of `torch.distributed.Store`; C++ knows two of them by other names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._transport = world()

    def _ask(self, name: str, *arguments: Any, seconds: float | None = None) -> Any:
        if self._transport.rank == 0:
            return getattr(_SERVED[0].keys, name)(*arguments)
        return _LINES[0].ask(seconds or self.timeout.total_seconds(), name, *arguments)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask("get", key)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self.timeout).total_seconds()
        pause, deadline = 1e-4, time.monotonic() + seconds
        while not self._ask("check", keys, seconds=seconds):
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.check([key])]
                raise dist.DistStoreError(
                    f"rank {self._transport.rank}: wait timeout after {seconds:g} s for the keys {', '.join(missing)}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    def num_keys(self) -> int:
        return self._ask("num_keys")

    deleteKey, getNumKeys = delete_key, num_keys

    def clone(self) -> "MpiStore":
        return self


STORES: list[MpiStore] = []
"""Keeps the stores alive: what PyTorch wraps around a store calls its methods in Python."""


def rendezvous_by_mpi() -> None:
    """Let `init_process_group` without an address find the ranks by MPI.

    It asks the handler of env://, which this replaces. The old one still answers where torchrun has
    started the ranks, or where MPI started no other rank and the environment names more than one:
    PyTorch's own backends connect such ranks.
    """
    by_environment = _rendezvous_handlers["env"]

    def by_mpi(
        url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        is_by_torchrun = process.launched().launcher == "torchrun"
        names_others = int(process.environment().get("WORLD_SIZE", "1")) > 1
        # Such a process may be alone for MPI: `world` refuses it, where another launcher started several.
        with checked_launch():
            is_foreign = is_by_torchrun or (names_others and join_world("multiple").size == 1)
            transport = None if is_foreign else world()
        if transport is None:
            yield from by_environment(url, timeout, **options)
            return
        if transport.size == 1 and sys.stderr.isatty():
            print(
                "mpitrain: this is the only rank; start several with `mpirun -n 4 python ...`.",
                file=sys.stderr,
            )
        store = MpiStore()
        store.set_timeout(timeout)
        STORES.append(store)
        yield store, transport.rank, transport.size
        raise RuntimeError("The ranks of an MPI job cannot meet a second time.")

    _rendezvous_handlers["env"] = by_mpi
