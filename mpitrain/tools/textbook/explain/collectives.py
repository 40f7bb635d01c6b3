"""Topics of collectives: the steps that `plan all-reduce` prints, run on buffers of symbols."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.plans import exchanges, ring
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.errors import Sentence
from mpitrain.tools.plan.collective import ChunkMessage, Collective, collective
from mpitrain.tools.plan.collective_picture import draw
from mpitrain.tools.plan.traffic import FORMULAS, numbers
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)
from mpitrain.tools.textbook.explain.links import Network, SlowTransport
from mpitrain.tools.textbook.explain.toy import Symbols
from mpitrain.transport.threads import ThreadTransport, run_ranks

LETTERS = "abcdefgh"
SLOWED_BYTES = 1 << 20
"""Smallest buffer on slow links, in bytes, so that bandwidth matters as well as latency."""


def record(
    algorithm: str, plan: Callable[..., Plan], sentences: Sequence[str], setting: TopicSetting
) -> Explanation:
    """Record an all-reduce.

    plan       function that makes its steps, shown as source
    sentences  the idea, a sentence each
    """
    n, network = setting.ranks, Network(setting.link) if setting.link else None
    symbols = Symbols([f"{LETTERS[chunk]}{rank}" for chunk in range(n) for rank in range(n)])
    per_chunk = symbols.size
    if network:
        per_chunk *= -(-SLOWED_BYTES // (8 * n * symbols.size))
    steps = collective("allreduce", algorithm, ("host",) * n)
    states: list[list[_State]] = run_ranks(n, _run, steps, network, symbols, per_chunk)
    frames = [
        Frame(
            Sentence("step {k}", k=step) if step else "start",
            tuple(state.cells for state in of_ranks),
            tuple(_arrow(m, len(steps.bounds)) for m in steps.steps[step - 1]) if step else (),
            tuple(state.nbytes for state in of_ranks),
            max(state.seconds for state in of_ranks) if network and step else None,
        )
        for step, of_ranks in enumerate(zip(*states, strict=True))
    ]
    formula, nbytes = FORMULAS["allreduce", algorithm], 8 * n * per_chunk
    *_, all_ranks, busiest = formula.value(numbers(steps.hosts))
    return Explanation(
        [Sentence(sentence, n=n, half=n - 1) for sentence in sentences],
        "a1 is chunk a of rank 1; a0+a1 is the sum of chunk a of ranks 0 and 1.",
        [Sentence("rank {r}", r=rank) for rank in range(n)],
        [Columns("chunks", tuple(LETTERS[:n]))],
        frames,
        [
            CountedFormula(
                Sentence(
                    "bytes that the busiest rank sends (S is {size:,}: {n} chunks of {count:,} float64, for {symbols} symbols)",
                    size=nbytes,
                    n=n,
                    count=per_chunk,
                    symbols=symbols.size,
                ),
                max(frames[-1].sent),
                formula.busiest,
                float(busiest * nbytes),
            ),
            CountedFormula(
                "bytes of all ranks",
                sum(frames[-1].sent),
                formula.all_ranks,
                float(all_ranks * nbytes),
            ),
        ],
        [SourceLines.of(plan), SourceLines.of(Execution)],
        f"mpitrain launch -n {n} -- bench all-reduce --algorithm {algorithm}",
        ("tests/laws/collectives.py", "tests/laws/traffic.py"),
        chart=partial(draw, steps),
    )


def _arrow(message: ChunkMessage, chunks: int) -> tuple[int, int, int]:
    """Return a message of a Frame. That of a whole buffer, or of several chunks, is of no column."""
    is_chunk = message.last - message.first == 1 < chunks
    return message.source, message.target, message.first if is_chunk else -1


class _State(NamedTuple):
    cells: tuple[str, ...]
    nbytes: int
    seconds: float


def _run(
    inner: ThreadTransport,
    steps: Collective,
    network: Network | None,
    symbols: Symbols,
    per_chunk: int,
) -> list[_State]:
    transport = SlowTransport(inner, network) if network else inner
    rank, n = transport.rank, transport.size
    array = np.concatenate(
        [symbols.cell(f"{LETTERS[chunk]}{rank}", per_chunk) for chunk in range(n)]
    )
    tag = transport.claim_tag()
    states = [_State(symbols.read_all(array, n), 0, 0.0)]
    for step in range(len(steps.steps)):
        execution = Execution(transport, array, "add", _plan(steps, step, rank, array.size), tag)
        transport.barrier()
        began = time.perf_counter()
        execution.run()
        seconds = time.perf_counter() - began
        states.append(_State(symbols.read_all(array, n), transport.traffic.nbytes, seconds))
        transport.barrier()
    return states


def _plan(steps: Collective, step: int, rank: int, size: int) -> Plan:
    """Return the messages of a rank in one step, for an array of `size` elements."""

    def part(peer: int, first: int, last: int) -> Transfer:
        start, stop = steps.bounds[first][0], steps.bounds[last - 1][1]
        return Transfer(peer, start * size // steps.elements, stop * size // steps.elements)

    sent = [m for m in steps.steps[step] if m.source == rank]
    received = [m for m in steps.steps[step] if m.target == rank]
    return Plan(
        (
            Step(
                tuple(part(m.target, m.first, m.last) for m in sent),
                tuple(part(m.source, m.first, m.last) for m in received),
                any(m.combine for m in received),
            ),
        )
    )


TOPICS = {
    "ring": Topic(
        "Ring all-reduce: the sum of all ranks, in chunks",
        partial(
            record,
            "ring",
            ring.all_reduce,
            (
                "Every rank has a buffer of {n} chunks, and all ranks need the sum.",
                "In each step a rank sends one chunk to the next rank, and adds the chunk received.",
                "After {half} steps each rank has one chunk of the sum (reduce-scatter).",
                "In {half} more steps the sums travel round the ring (all-gather).",
                "No rank sends more than another, and all links work in every step.",
            ),
        ),
        timed=True,
    ),
    "star": Topic(
        "Star all-reduce: rank 0 adds everything",
        partial(
            record,
            "star",
            exchanges.star_all_reduce,
            (
                "Every rank has a buffer of {n} chunks, and all ranks need the sum.",
                "In step 1 all ranks send their buffer to rank 0, which adds them.",
                "In step 2 rank 0 sends the sum to all ranks.",
                "In training a0 is a gradient that the loss has divided by the rows, so the sum is the mean.",
                "The link of rank 0 carries everything: it sends (n-1) S, a worker only S.",
            ),
        ),
        timed=True,
    ),
}
