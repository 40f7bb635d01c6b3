"""Measurements of several claims: bytes that collectives and training send, and counted memory.

Ranks are threads of this process, whose transport counts messages. All jobs run on the CPU.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.config import Config, with_settings
from mpitrain.run.choices import parse
from mpitrain.tools.bench.comparison.compare import compare
from mpitrain.tools.bench.turns import Row
from mpitrain.tools.plan.memory import Counted, count
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

SMALL = (
    "device.kind=cpu",
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=8",
    "run.steps=2",
    "run.eval_every=-1",
    "run.eval_rows=1",
    "replication.algorithm=ring",
)
"""Settings of a model that trains in a few milliseconds per step."""

PLAIN_MOMENTUM = (
    "optimizer.name=momentum",
    "optimizer.lr=0.01",
    "optimizer.schedule=constant",
    "optimizer.warmup=0",
    "run.eval_rows=64",
)
"""Settings with which losses are compared: a constant rate."""


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on one core.

    Only one thread at a time has Python's lock, and a lock that moves between cores takes twice the
    time.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def on_ranks(ranks: int, function: Callable[[Transport], Any]) -> list[Any]:
    with one_core():
        return run_ranks(ranks, function)


def sent_by_busiest(operation: str, algorithm: str, ranks: int, count: int) -> int:
    """Return the bytes that the busiest rank sends in a collective.

    operation  method of Group that binds the collective: bind, bind_reduce_scatter or
               bind_all_gather
    count      number of float32 elements
    """

    def sent(transport: Transport) -> int:
        array = np.full(count, transport.rank + 1, np.float32)
        reduction = getattr(Group(transport, algorithm), operation)(array)
        before = transport.traffic.nbytes
        reduction.run()
        return transport.traffic.nbytes - before

    return max(on_ranks(ranks, sent))


def configured(*settings: str) -> Config:
    """Return the configuration SMALL, changed by these `section.key=value`."""
    return parse(with_settings({}, [*SMALL, *settings]))


def typed(*settings: str) -> str:
    """Return the options of a command with the configuration SMALL, changed by these `section.key=value`."""
    changed = {setting.partition("=")[0]: setting for setting in (*SMALL, *settings)}
    return " ".join(f"--set {setting}" for setting in changed.values())


@cache
def trained(ranks: int, *settings: str) -> Row:
    """Train a small job on threads, once for all claims; return its bytes, memory and losses."""
    config = configured(*settings)

    def run(transport: Transport) -> Row:
        return next(iter(compare(transport, {"job": config}, lambda word, loss: None)))

    row: Row = on_ranks(ranks, run)[0]
    return row


def busiest(ranks: int, *settings: str) -> float:
    return max(trained(ranks, *settings).sent_bytes)


def counted(*settings: str) -> Counted:
    return count(configured(*settings))


def memory(counts: Counted) -> float:
    """Return the bytes of a job's fullest stage: its activations, and state as the mean over the
    ranks.
    """
    return counts.state + max(stage.step.peak for stage in counts.stages)
