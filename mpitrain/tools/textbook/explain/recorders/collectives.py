"""Topics of collectives: a plan runs step by step, on buffers of symbols."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.plans import exchanges, ring
from mpitrain.collectives.plans.steps import Plan
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Text,
    sentence,
)
from mpitrain.tools.textbook.explain.links import Network, Watched
from mpitrain.tools.textbook.explain.symbols import Symbols
from mpitrain.tools.textbook.explain.topic import TopicSetting
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

LETTERS = "abcdefgh"
SLOWED_BYTES = 1 << 20
"""Smallest buffer on slow links, in bytes, so that bandwidth matters as well as latency."""


class ShownCollective(NamedTuple):
    """A collective to show.

    plan       (rank, ranks, elements) -> steps
    sentences  the idea
    words      formula of the bytes that the busiest rank sends
    value      (ranks, bytes) -> the same as a number
    algorithm  its name in `mpitrain bench`
    """

    plan: Callable[[int, int, int], Plan]
    sentences: tuple[Text, ...]
    words: str
    value: Callable[[int, int], float]
    algorithm: str


RING = ShownCollective(
    ring.all_reduce,
    (
        sentence("Every rank has a buffer of {n} chunks, and all ranks need the sum."),
        sentence(
            "In each step a rank sends one chunk to the next rank, and adds the chunk received."
        ),
        sentence("After {half} steps each rank has one chunk of the sum (reduce-scatter)."),
        sentence("In {half} more steps the sums travel round the ring (all-gather)."),
        sentence("No rank sends more than another, and all links work in every step."),
    ),
    "2 (n-1)/n S",
    lambda n, nbytes: 2 * (n - 1) / n * nbytes,
    "ring",
)

STAR = ShownCollective(
    exchanges.star_all_reduce,
    (
        sentence("Every rank has a buffer of {n} chunks, and all ranks need the sum."),
        sentence("In step 1 all ranks send their buffer to rank 0, which adds them."),
        sentence("In step 2 rank 0 sends the sum to all ranks."),
        sentence("The link of rank 0 carries everything: it sends (n-1) S, a worker only S."),
    ),
    "(n-1) S",
    lambda n, nbytes: (n - 1) * nbytes,
    "star",
)


def recorder(shown: ShownCollective, title: Text) -> Callable[[str, TopicSetting], Explanation]:
    def record(name: str, setting: TopicSetting) -> Explanation:
        n, network = setting.ranks, Network(setting.link)
        symbols = Symbols([f"{LETTERS[chunk]}{rank}" for chunk in range(n) for rank in range(n)])
        per_chunk = symbols.size
        if setting.link:
            per_chunk *= -(-SLOWED_BYTES // (8 * n * symbols.size))
        states = run_ranks(n, _run, shown.plan, network, symbols, per_chunk)
        frames = [*_frames(states, network, n, bool(setting.link))]
        nbytes = 8 * n * per_chunk
        busiest = max(frames[-1].sent)
        return Explanation(
            name,
            title,
            [sentence(text.english, n=n, half=n - 1) for text in shown.sentences],
            sentence("a1 is chunk a of rank 1; a0+a1 is the sum of chunk a of ranks 0 and 1."),
            [sentence("rank {r}", r=rank) for rank in range(n)],
            [Columns(sentence("chunks"), tuple(LETTERS[:n]))],
            frames,
            [
                CountedFormula(
                    sentence("bytes that the busiest rank sends"),
                    busiest,
                    shown.words,
                    shown.value(n, nbytes),
                ),
                CountedFormula(
                    sentence("bytes of all ranks"),
                    sum(frames[-1].sent),
                    "2 (n-1) S",
                    2 * (n - 1) * nbytes,
                ),
            ],
            [SourceLines.of(shown.plan), SourceLines.of(Execution)],
            f"mpitrain launch -n {n} -- bench allreduce --algorithm {shown.algorithm}",
            ("tests/laws/collectives.py", "tests/laws/traffic.py"),
        )

    return record


class _State(NamedTuple):
    """A rank after a step: contents, bytes sent so far, seconds of the step."""

    cells: tuple[str, ...]
    nbytes: int
    seconds: float


def _run(
    inner: Transport,
    plan: Callable[[int, int, int], Plan],
    network: Network,
    symbols: Symbols,
    per_chunk: int,
) -> list[_State]:
    transport = Watched(inner, network)
    rank, n = transport.rank, transport.size
    array = np.concatenate(
        [symbols.cell(f"{LETTERS[chunk]}{rank}", per_chunk) for chunk in range(n)]
    )
    tag = transport.claim_tag()
    states = [_State(symbols.read_all(array, n), 0, 0.0)]
    for step in plan(rank, n, array.size).steps:
        execution = Execution(transport, array, "add", Plan((step,)), tag)
        transport.barrier()
        began = time.perf_counter()
        execution.run()
        seconds = time.perf_counter() - began
        states.append(_State(symbols.read_all(array, n), transport.traffic.nbytes, seconds))
        transport.barrier()
    return states


def _frames(
    states: Sequence[Sequence[_State]], network: Network, n: int, is_timed: bool
) -> list[Frame]:
    frames: list[Frame] = []
    first, log = 0, network.log
    for step, of_ranks in enumerate(zip(*states, strict=True)):
        sent = tuple(state.nbytes for state in of_ranks)
        stop, total = first, sum(frames[-1].sent) if frames else 0
        while stop < len(log) and total < sum(sent):
            total, stop = total + log[stop].nbytes, stop + 1
        frames.append(
            Frame(
                sentence("step {k}", k=step) if step else sentence("start"),
                tuple(state.cells for state in of_ranks),
                tuple(sorted(log[first:stop])),
                sent,
                max(state.seconds for state in of_ranks) if is_timed and step else None,
            )
        )
        first = stop
    return frames
