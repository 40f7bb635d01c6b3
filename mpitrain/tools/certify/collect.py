"""The measurements of a certificate, one after the other, on all ranks."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.machine import process
from mpitrain.machine.process import processor
from mpitrain.tools.bench.collectives.operations import OPERATIONS
from mpitrain.tools.bench.collectives.sweep import Sweep, SweepRequest
from mpitrain.tools.bench.pairs import BETWEEN, Pair, merged
from mpitrain.tools.bench.pairs import measure as measure_pairs
from mpitrain.tools.certify.arithmetic import step_digests
from mpitrain.tools.certify.evidence import Evidence, Facts, ProbeFinding, Speeds, WrongCollective
from mpitrain.tools.certify.limits import Limits
from mpitrain.tools.certify.repeats import repeat
from mpitrain.tools.certify.speeds import Sampler, measure, turns, with_more
from mpitrain.tools.certify.verdict import slow_ranks
from mpitrain.transport.base import Transport

AGAIN = 3
"""Number of times that slow ranks are measured again, alone, before they count as slow."""
SIZES = (4 << 10, 1 << 20)
"""Bytes of the arrays of the collectives."""
SHORT, LONG = 8, 4 << 20
"""Bytes of the messages between two nodes."""


def facts() -> Facts:
    """Return the facts about this rank; the caller sets its node."""
    blas: dict[str, Any] = next(
        (pool for pool in threadpool_info() if pool["user_api"] == "blas"), {}
    )
    named = [str(blas.get(key) or "") for key in ("internal_api", "version", "architecture")]
    return Facts(
        "",
        process.machine(),
        process.own_cores(),
        processor().name,
        " ".join(filter(None, named)) or "unknown",
        process.shared_memory(),
    )


def collect(
    transport: Transport,
    limits: Limits,
    work: Path,
    rounds: int,
    sample: Sampler,
    examine: Callable[[], Sequence[ProbeFinding]],
    absent: dict[str, str],
    own: Callable[[], Facts] = facts,
) -> Iterator[Evidence]:
    """Yield the evidence before each measurement, and at the end; collective, equal on all ranks.

    work     a new directory for short runs, on the file system of the user's runs
    sample   takes a sample of this rank's speed
    examine  returns the problems that `doctor` finds; collective
    absent   {node: reason} of nodes that did not answer
    own      returns the facts about this rank
    """
    everyone = [
        Facts(*values)._replace(node=host)
        for values, host in zip(transport.gather_text(own()), transport.hosts, strict=True)
    ]
    known = Evidence(everyone, absent=absent, awaits="probes of doctor")
    yield known
    known = known._replace(findings=examine(), awaits="the same step alone on every rank")
    yield known
    known = known._replace(
        steps=[(digests[0], digests[1]) for digests in step_digests(transport)],
        awaits=f"matrix products and memory, {rounds} rounds of {len(turns(everyone))} turn(s)",
    )
    yield known
    known = known._replace(
        speeds=_speeds(transport, everyone, limits, rounds, sample),
        awaits="links of all pairs of nodes",
    )
    yield known
    known = known._replace(pairs=links(transport), awaits="every collective")
    yield known
    checked, wrong = collectives(transport)
    known = known._replace(
        collectives=checked,
        wrong=wrong,
        awaits="a training run, on other nodes, and resumed from a checkpoint",
    )
    yield known
    yield known._replace(jobs=repeat(transport, work), awaits="")


def _speeds(
    transport: Transport, everyone: Sequence[Facts], limits: Limits, rounds: int, sample: Sampler
) -> list[Speeds]:
    """Measure all ranks, then the slow ones again while all others sleep."""
    speeds = measure(transport, turns(everyone), rounds, sample)
    for _ in range(AGAIN):
        slow = slow_ranks(everyone, speeds, limits)
        if not slow:
            break
        more = measure(transport, [[rank] for rank in slow], rounds, sample)
        speeds = with_more(speeds, more)
    return speeds


def links(transport: Transport) -> list[Pair]:
    """Measure the links between the first ranks of all nodes; collective. No pair for one node."""
    first = transport.hosts.index(transport.hosts[transport.rank])
    leaders = transport.split(0 if first == transport.rank else None)
    pairs: list[Pair] = []
    if leaders is not None:
        measured = measure_pairs(leaders, SHORT, LONG, places=(BETWEEN,))
        pairs = merged([pair for one_round in measured for pair in one_round])
        leaders.close()
    return [Pair(*pair) for pair in transport.gather_text(pairs)[0]]


def collectives(transport: Transport) -> tuple[int, list[WrongCollective]]:
    """Run every algorithm of every collective; return their number and those with wrong elements.

    Collective.
    """
    checked, wrong = 0, []
    for operation in OPERATIONS:
        request = SweepRequest(
            operation, (), SIZES, np.dtype("float32"), 2, 1, ("window", "plain"), 1
        )
        for row in Sweep(transport, request, DEFAULT):
            checked += 1
            if row.wrong:
                wrong.append(WrongCollective(operation, row.algorithm, row.wrong))
    return checked, wrong
