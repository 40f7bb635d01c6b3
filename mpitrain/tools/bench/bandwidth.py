"""Bandwidth between ranks with many messages in flight, one way and both ways.

One pair of ranks is measured as by osu_bw and osu_bibw of the OSU micro-benchmarks. With all pairs
(k, k + n/2) at once, it is measured as by osu_mbw_mr.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from mpitrain.tools.bench.pairs import coded
from mpitrain.tools.bench.turns import FAR
from mpitrain.tools.text_table import TextColumn, figure, marked
from mpitrain.transport.base import Request, Transport
from mpitrain.transport.native import native_all_reduce

SECONDS, FEWEST, MOST = 0.25, 5, 500
"""If the number of windows is not set: seconds for a row, and the least and most windows."""

IN_FLIGHT = 1 << 26
"""Largest number of bytes that a rank has in flight; windows of long messages are smaller."""

WAYS = {"one": 1, "both": 2}
"""{directions of messages: their number}; `one` as in osu_bw, `both` as in osu_bibw."""


class BandwidthRequest(NamedTuple):
    """What a bandwidth benchmark shall measure.

    sizes       bytes of a message
    window      number of messages in flight
    all_pairs   True: all pairs (k, k + n/2) at the same time; False: only ranks 0 and n/2
    iterations  windows per row; 0: as many as fit in SECONDS
    """

    sizes: Sequence[int]
    window: int
    all_pairs: bool
    iterations: int


class BandwidthRow(NamedTuple):
    """One measurement.

    time_us, min_us  median and least time of a window of messages, on the slowest pair
    GBs, messages_s  rates, totals over all pairs and directions
    wrong            number of bytes that arrived wrong
    """

    bytes: int
    ways: str
    pairs: int
    window: int
    time_us: float
    min_us: float
    GBs: float
    messages_s: float
    wrong: int

    @property
    def is_spoilt(self) -> bool:
        """Whether most windows took far longer than the fastest, so that the row is invalid."""
        return self.time_us > FAR * self.min_us


COLUMNS = [
    TextColumn("bytes", "12", "bytes"),
    TextColumn("ways", "<5", "ways", gap=2),
    TextColumn("pairs", "5", "pairs", importance=1),
    TextColumn("window", "6", "window", importance=2),
    TextColumn("time", "11", lambda row: marked(figure(row.time_us), row.is_spoilt), unit="us "),
    TextColumn("min", "10", lambda row: figure(row.min_us), unit="us", importance=0),
    TextColumn("bandwidth", "9", lambda row: figure(row.GBs), unit="GB/s"),
    TextColumn("messages/s", "10", lambda row: figure(row.messages_s)),
    TextColumn("#wrong", "7", "wrong"),
]


def partners(n: int, all_pairs: bool) -> list[tuple[int, int]]:
    """Return the pairs (k, k + n // 2) of n ranks: all of them, or only the first.

    If n is odd, the last rank has no partner.
    """
    return [(k, k + n // 2) for k in range(n // 2 if all_pairs else min(1, n // 2))]


def measure(
    transport: Transport, request: BandwidthRequest, clock: Callable[[], float] = time.perf_counter
) -> Iterator[BandwidthRow]:
    """Yield rows as they are measured; every rank gets the same rows. Collective."""
    tag = transport.claim_tag()
    for nbytes in request.sizes:
        for ways in WAYS:
            yield _row(transport, request, nbytes, ways, clock, tag)


def _row(
    transport: Transport,
    request: BandwidthRequest,
    nbytes: int,
    ways: str,
    clock: Callable[[], float],
    tag: int,
) -> BandwidthRow:
    pairs, rank = partners(transport.size, request.all_pairs), transport.rank
    window = max(1, min(request.window, IN_FLIGHT // nbytes))
    pair = next((pair for pair in pairs if rank in pair), None)
    run: Callable[[], None] = lambda: None  # noqa: E731  (the rank rests)
    if pair:
        peer = sum(pair) - rank
        sends, receives = (rank == pair[0] or ways == "both"), (rank == pair[1] or ways == "both")
        outgoing = _messages(rank, peer, nbytes, window * sends)
        right = _messages(peer, rank, nbytes, window * receives)
        incoming = np.empty_like(right)
        run = _window(transport, outgoing, incoming, peer, tag)

    def timed(count: int) -> np.ndarray:
        times = np.zeros(count)
        transport.barrier()
        for i in range(count):
            start = clock()
            run()
            times[i] = clock() - start
        native_all_reduce(transport, times, "maximum")
        return times

    spent = max(1e-9, timed(2).min())
    if pair:
        incoming[:] = ~right
    times = timed(request.iterations or min(MOST, max(FEWEST, int(SECONDS / spent))))
    wrong = sum(transport.gather_text(int((incoming != right).sum()) if pair else 0))
    seconds, messages = max(1e-9, median(times.tolist())), len(pairs) * WAYS[ways] * window
    return BandwidthRow(
        nbytes,
        ways,
        len(pairs),
        window,
        seconds * 1e6,
        float(times.min()) * 1e6,
        messages * nbytes / seconds / 1e9,
        messages / seconds,
        wrong,
    )


def _messages(sender: int, receiver: int, nbytes: int, window: int) -> np.ndarray:
    """Return the messages of a window, (window, nbytes).

    Each message encodes its index, so that messages in the wrong order have wrong bytes.
    """
    places = (7 * np.arange(window) % 251).astype(np.uint8)
    return coded(sender, receiver, nbytes) ^ places[:, None]


def _window(
    transport: Transport, outgoing: np.ndarray, incoming: np.ndarray, peer: int, tag: int
) -> Callable[[], None]:
    """Return a function that sends and receives all messages of one window at once.

    The function returns when the peer has received the messages that this rank sent.
    """
    sent, answer = np.zeros((2, 1), np.uint8)

    def run() -> None:
        requests: list[Request] = [transport.start_recv(message, peer, tag) for message in incoming]
        answers = [transport.start_recv(answer, peer, tag)] if len(outgoing) else []
        requests += [transport.start_send(message, peer, tag) for message in outgoing]
        for request in requests:
            request.wait()
        if len(incoming):
            answers.append(transport.start_send(sent, peer, tag))
        for request in answers:
            request.wait()

    return run


def footer(rows: Sequence[BandwidthRow]) -> list[str]:
    """Return lines below the table: the largest bandwidth of each direction.

    Spoilt rows (see `is_spoilt`) are left out.
    """
    lines: list[str] = []
    for ways in dict.fromkeys(row.ways for row in rows):
        quiet = [row for row in rows if row.ways == ways and not row.is_spoilt]
        if quiet:
            most = max(quiet, key=lambda row: row.GBs)
            lines.append(
                f"{ways + (' way' if ways == 'one' else ' ways'):<10} at most {figure(most.GBs)} GB/s at "
                f"{most.bytes} bytes, {figure(max(row.messages_s for row in quiet))} messages/s"
            )
    if spoilt := sum(row.is_spoilt for row in rows):
        lines += [
            f"~ {spoilt} of {len(rows)} rows: median above {FAR:g} times the fastest window, so other work ran",
            "  meanwhile; left out of what is said here. Measure again",
        ]
    return [*lines, f"wrong elements {sum(row.wrong for row in rows)}"]
