"""The key-value store of PyTorch's process groups over MPI, and the rendezvous that hands it out.

Rank 0 keeps the keys. A thread of rank 0 answers the requests of the other ranks, so no socket is
opened. A request and its answer are a message with the length, then one with the pickled words.
"""

import atexit
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from mpitrain.errors import ConfigError
from mpitrain.machine import process
from mpitrain.transport.base import Transport
from mpitrain.transport.mpi import MpiTransport, connect
from mpitrain.transport.objects import recv_bytes, recv_object, send_object

LONGEST_PAUSE = 5e-3
"""Seconds between two looks of a rank that waits for a key, and of rank 0 for a request."""


@cache
def world() -> MpiTransport:
    """Connect to all ranks of the MPI job, once; collective."""
    process.yield_crowded_cores()
    closing = threading.Event()
    # Registered before `connect` registers the end of a rank, which waits for the other ranks.
    atexit.register(closing.set)
    transport = connect("multiple")  # Each group has a thread, and all of them call MPI.
    if transport.size > 1 and transport.MPI.Query_thread() < transport.MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "Several threads of a process group call MPI at the same time, but this MPI was started for one at a time.",
            "Call init_process_group before mpitrain.connect(), or set mpi4py.rc.thread_level = 'multiple' first.",
        )
    transport.admit_thread()
    tags = transport.claim_tag(), transport.claim_tag()
    if transport.size > 1 and transport.rank == 0:
        threading.Thread(
            target=_serve, args=(transport, tags, closing), name="store", daemon=True
        ).start()
    _TAGS[:] = tags
    return transport


_TAGS: list[int] = []
KEYS = dist.HashStore()
"""The keys of this process; those of rank 0 are the store of the job."""
KEYS.set_timeout(timedelta(milliseconds=1))  # A call that would wait is not made.


def _serve(transport: Transport, tags: Sequence[int], closing: threading.Event) -> None:
    ask, answer = tags
    length, pause = np.empty(1, np.int64), 1e-5
    request = transport.start_recv_any(length, ask)
    while not closing.is_set():
        if not request.test():
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
            continue
        rank, pause = request.source, 1e-5
        name, *arguments = recv_bytes(transport, int(length[0]), rank, ask)
        try:
            value: Any = getattr(KEYS, name)(*arguments)
        except Exception as error:
            value = RuntimeError(f"{name} of the store: {error}")
        send_object(transport, value, rank, answer)
        request = transport.start_recv_any(length, ask)


class MpiStore(dist.Store):
    """A store of PyTorch whose keys are on rank 0 of the MPI job.

    Its methods are those of `torch.distributed.Store`; C++ knows two of them by other names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._transport = world()

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self._transport.rank == 0:
            return getattr(KEYS, name)(*arguments)
        ask, answer = _TAGS
        with _ASKING:
            send_object(self._transport, (name, *arguments), 0, ask)
            value = recv_object(self._transport, 0, answer)
        if isinstance(value, RuntimeError):
            raise value
        return value

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
        while not self.check(keys):
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

_ASKING = threading.Lock()
"""Held from a request to its answer: several threads of a rank may ask."""


def rendezvous_by_mpi() -> None:
    """Let `init_process_group` without an address find the ranks by MPI.

    It asks the handler of env://, which this replaces. The old one still answers where MPI started
    no other rank and the environment names more than one, as torchrun does.
    """
    by_environment = _rendezvous_handlers["env"]

    def by_mpi(
        url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        transport = world()
        if transport.size == 1 and int(process.environment().get("WORLD_SIZE", "1")) > 1:
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
