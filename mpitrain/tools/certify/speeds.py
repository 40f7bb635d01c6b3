"""The speed of each rank: matrix products and memory. Ranks that share cores take turns."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from mpitrain.tools.certify.evidence import Facts, Speeds
from mpitrain.transport.base import Transport

SIDE = 384
"""M, K and N of the matrix product."""
COPIED = 32 << 20
"""Bytes that one copy reads. Another 32 MiB are written; together they exceed most caches."""
SECONDS = 0.2
"""Shortest sample, in seconds. A limit on processor time acts within 0.1 s, so a sample shows it."""

Sampler = Callable[[], tuple[float, float]]
"""Returns one sample: operations per second, and bytes per second."""


def sampler(seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter) -> Sampler:
    """Allocate the operands, and return a function that takes one sample."""
    a, b = np.ones((SIDE, SIDE), np.float32), np.ones((SIDE, SIDE), np.float32)
    c = np.empty_like(a)
    source, target = np.ones(COPIED, np.uint8), np.empty(COPIED, np.uint8)

    def rate(run: Callable[[], object], amount: int) -> float:
        """Repeat `run`, which does `amount` of work, for the given time; return work per second."""
        start, runs = clock(), 0
        while (spent := clock() - start) < seconds or not runs:
            run()
            runs += 1
        return runs * amount / max(spent, 1e-9)

    def sample() -> tuple[float, float]:
        return (
            rate(lambda: np.matmul(a, b, out=c), 2 * SIDE**3),
            rate(lambda: np.copyto(target, source), 2 * COPIED),
        )

    return sample


def turns(facts: Sequence[Facts]) -> list[list[int]]:
    """Return groups of ranks that measure at the same time. No two ranks of a group share a core."""
    groups: list[list[int]] = []
    used: list[set[tuple[str, int]]] = []
    for rank, fact in enumerate(facts):
        cores = {(fact.machine, core) for core in fact.cores}
        for turn, busy in zip(groups, used, strict=True):
            if not cores & busy:
                turn.append(rank)
                busy |= cores
                break
        else:
            groups.append([rank])
            used.append(cores)
    return groups


def measure(
    transport: Transport, order: Sequence[Sequence[int]], rounds: int, sample: Sampler
) -> list[Speeds]:
    """Take a sample of each listed rank in each round; collective. Return all samples, by rank.

    order  the turns of a round; ranks wait asleep while others measure
    """
    samples = Speeds([], [])
    for _ in range(rounds):
        for turn in order:
            transport.gather_text(None)
            if transport.rank in turn:
                gemm, memory = sample()
                samples.gemm.append(gemm)
                samples.memory.append(memory)
    return [Speeds(*own) for own in transport.gather_text(samples)]


def with_more(speeds: Sequence[Speeds], more: Sequence[Speeds]) -> list[Speeds]:
    return [
        Speeds([*own.gemm, *new.gemm], [*own.memory, *new.memory])
        for own, new in zip(speeds, more, strict=True)
    ]
