"""Latency and bandwidth of every pair of ranks, measured in rounds of disjoint pairs.

In a round every rank has one partner at most, as in a round-robin tournament: n - 1 rounds for an
even number of ranks n, n rounds for an odd one. Pairs that look slow are measured again while all
other ranks rest, so that traffic of other pairs cannot be the reason.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from mpitrain.tools.bench.segments import Segments, segments
from mpitrain.tools.bench.turns import FAR
from mpitrain.tools.text_table import TextColumn, TextTable, figure
from mpitrain.transport.base import Transport

ODD = {"bandwidth": 2.0, "latency": 3.0}
"""Limits of an outlier, here called an odd pair.

The usual value is that of its class of pairs. An odd pair has a bandwidth below 1 / ODD of it, or a
latency above ODD times it.
"""

LOST, FEW_LOST = 1e-3, 10
"""A pair loses frames if more than this part of its segments, and at least so many, are sent again."""
LONGEST_SEGMENT = 1 << 16
"""Upper bound of the bytes of a segment: a host that sent fewer for its messages sent them by other means."""

SECONDS, ALONE, FEWEST, MOST = 0.1, 0.5, 3, 500
"""Seconds for one message size of a pair, among other pairs and alone; least and most round trips.
"""

AGAIN = 16
"""Upper bound of the number of pairs that are measured a second time, alone."""

ONE_HOST, BETWEEN = PLACES = "within a host", "between hosts"

SHOWN = 8
"""Upper bound of the number of odd pairs that are printed; files have all of them."""


class Pair(NamedTuple):
    """The measurements of two ranks. Times are one way, which is half a round trip.

    place          class of the pair: ONE_HOST or BETWEEN
    latency_us     median time of a short message
    fastest_us     least time of a short message
    bandwidth_GBs  bytes of a long message divided by its median time
    best_GBs       bytes of a long message divided by its least time
    wrong          number of elements that arrived wrong
    is_alone       whether it was measured again while the other ranks rested
    sent           segments that the hosts of both ranks sent meanwhile; 0: no counter was asked
    first_resent   segments that the host of the first rank sent again, because frames were lost
    second_resent  segments that the host of the second rank sent again
    """

    first: int
    second: int
    first_host: str
    second_host: str
    place: str
    latency_us: float
    fastest_us: float
    bandwidth_GBs: float
    best_GBs: float
    wrong: int
    is_alone: bool = False
    sent: int = 0
    first_resent: int = 0
    second_resent: int = 0

    @property
    def resent(self) -> int:
        return self.first_resent + self.second_resent

    @property
    def loses_frames(self) -> bool:
        return self.resent >= FEW_LOST and self.resent > LOST * self.sent


class Odd(NamedTuple):
    """A pair whose bandwidth or latency is much worse than usual in its class.

    what   the value that is worse: "bandwidth" or "latency"
    usual  its usual value in the class, in GB/s or microseconds
    """

    pair: Pair
    what: str
    usual: float

    @property
    def value(self) -> tuple[float, str]:
        """The pair's own best value, and its unit."""
        is_rate = self.what == "bandwidth"
        return (self.pair.best_GBs, "GB/s") if is_rate else (self.pair.fastest_us, "us")


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of n ranks, in rounds of disjoint pairs.

    The circle method of tournaments: rank 0 stays in place, the others move on by one each round.
    """
    seats = [*range(n)] + [-1] * (n % 2)  # the partner of -1 rests
    tournament = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        tournament.append([(min(pair), max(pair)) for pair in facing if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in tournament if pairs]


def measure(
    transport: Transport,
    short: int,
    long: int,
    iterations: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    places: Sequence[str] = PLACES,
    count: Callable[[], Segments] = segments,
) -> Iterator[list[Pair]]:
    """Yield the pairs of each round, then the pairs that were measured again. Collective.

    Every rank gets the same pairs.

    short, long  bytes of the messages for latency and for bandwidth
    iterations   round trips of each pair and size; 0: as many as fit in SECONDS
    clock        returns seconds
    places       classes in which odd pairs are measured again
    count        returns the segments of this host so far
    """
    tag, measured_pairs, sizes = transport.claim_tag(), [], (short, long)
    for pairs in rounds(transport.size):
        measured = _round(transport, pairs, sizes, (iterations, SECONDS), clock, tag, count)
        measured_pairs += measured
        yield measured
    suspects = dict.fromkeys(odd.pair[:2] for odd in odd_pairs(measured_pairs, places))
    again = []
    for pair in [*suspects][:AGAIN]:
        (one,) = _round(transport, [pair], sizes, (iterations, ALONE), clock, tag, count)
        again.append(one._replace(is_alone=True))
    yield again


def merged(pairs: Sequence[Pair]) -> list[Pair]:
    """Return one entry for each pair, sorted by ranks, with the better values of two measurements."""
    by_ranks: dict[tuple[int, int], Pair] = {}
    for pair in pairs:
        before = by_ranks.get(pair[:2])
        by_ranks[pair[:2]] = (
            pair
            if before is None
            else pair._replace(
                latency_us=min(before.latency_us, pair.latency_us),
                fastest_us=min(before.fastest_us, pair.fastest_us),
                bandwidth_GBs=max(before.bandwidth_GBs, pair.bandwidth_GBs),
                best_GBs=max(before.best_GBs, pair.best_GBs),
                wrong=before.wrong + pair.wrong,
                sent=before.sent + pair.sent,
                first_resent=before.first_resent + pair.first_resent,
                second_resent=before.second_resent + pair.second_resent,
            )
        )
    return [by_ranks[key] for key in sorted(by_ranks)]


def places_to_judge(hosts: Sequence[str], cores: int) -> tuple[str, ...]:
    """Return the classes of pairs in which a slow pair indicates a slow link.

    Pairs within a host are not such a class if ranks share cores.
    """
    return PLACES if max(map(hosts.count, hosts)) <= cores else (BETWEEN,)


def usual(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the usual bandwidth in GB/s and latency in us: the median over ranks of each rank's best.

    It is right as long as most ranks have a good link, even if one host slows most pairs.
    """
    ranks = sorted({rank for pair in pairs for rank in pair[:2]})
    by_rank = [[pair for pair in pairs if rank in pair[:2]] for rank in ranks]
    fast = median(max(pair.best_GBs for pair in of_rank) for of_rank in by_rank)
    return fast, median(min(pair.fastest_us for pair in of_rank) for of_rank in by_rank)


def odd_pairs(
    pairs: Sequence[Pair], places: Sequence[str] = PLACES, limits: Mapping[str, float] = ODD
) -> list[Odd]:
    """Return the pairs that are much slower than the usual value of their class (see ODD).

    Pairs are judged by their fastest messages, which other work on the machine does not slow.
    """
    odd = []
    for place in places:
        of_class = [pair for pair in pairs if pair.place == place]
        if len(of_class) < 2:
            continue
        fast, soon = usual(of_class)
        slow = [pair for pair in of_class if pair.best_GBs * limits["bandwidth"] < fast]
        late = [pair for pair in of_class if pair.fastest_us > limits["latency"] * soon]
        odd += [Odd(pair, "bandwidth", fast) for pair in slow]
        odd += [Odd(pair, "latency", soon) for pair in late]
    return odd


def bad_everywhere(pairs: Sequence[Pair], bad: Collection[tuple[int, int]]) -> list[int]:
    """Return the ranks whose pairs with all other hosts are bad: the link of their host is bad.

    If all ranks are such ranks, none is returned.

    bad  ranks of each bad pair
    """
    between = [pair[:2] for pair in pairs if pair.place == BETWEEN]
    ranks = sorted({rank for pair in between for rank in pair})
    bad_ranks = [rank for rank in ranks if all(pair in bad for pair in between if rank in pair)]
    return [] if len(bad_ranks) == len(ranks) else bad_ranks


def coded(rank: int, peer: int, nbytes: int) -> np.ndarray:
    """Return the message of a rank to its peer: bytes that encode both ranks and the position."""
    return ((np.arange(nbytes) + 17 * rank + 101 * peer) % 251).astype(np.uint8)


def _round(
    transport: Transport,
    pairs: Sequence[tuple[int, int]],
    sizes: tuple[int, int],
    amount: tuple[int, float],
    clock: Callable[[], float],
    tag: int,
    count: Callable[[], Segments],
) -> list[Pair]:
    pair = next((pair for pair in pairs if transport.rank in pair), None)
    times, wrong, nbytes = [], 0, 0
    before = count()
    for size in sizes:
        transport.barrier()
        if pair:
            seconds, elements, trips = _there_and_back(
                transport, sum(pair) - transport.rank, size, amount, clock, tag
            )
            times.append(seconds)
            wrong += elements
            nbytes += trips * size
    moved = count().since(before)
    if moved.sent * LONGEST_SEGMENT < nbytes:
        moved = Segments(
            0, 0
        )  # The messages went through memory, or by a network without counters.
    gathered, hosts, measured = transport.gather_text((times, wrong, moved)), transport.hosts, []
    for first, second in pairs:
        (small, large), missed = gathered[first][0], gathered[first][1] + gathered[second][1]
        place = ONE_HOST if hosts[first] == hosts[second] else BETWEEN
        latencies = 1e6 * small[0], 1e6 * small[1]
        rates = sizes[1] / large[0] / 1e9, sizes[1] / large[1] / 1e9
        ends = first, second, hosts[first], hosts[second], place
        one = Pair(*ends, *latencies, *rates, missed)
        of_both = Segments(*gathered[first][2]), Segments(*gathered[second][2])
        if place == BETWEEN and all(each.sent for each in of_both):
            own, peers = of_both
            one = one._replace(
                sent=own.sent + peers.sent, first_resent=own.resent, second_resent=peers.resent
            )
        measured.append(one)
    return measured


def _there_and_back(
    transport: Transport,
    peer: int,
    nbytes: int,
    amount: tuple[int, float],
    clock: Callable[[], float],
    tag: int,
) -> tuple[tuple[float, float], int, int]:
    """Return the median and least seconds of a message, and the numbers of wrong elements and of trips.

    A message takes half a round trip, as the lower rank measures it.

    amount  (number of round trips, seconds for them if this number is 0)
    """
    rank, (iterations, seconds) = transport.rank, amount
    outgoing, incoming = coded(rank, peer, nbytes), np.empty(nbytes, np.uint8)
    count = np.array([iterations])

    def trip() -> float:
        start = clock()
        if rank < peer:
            transport.send(outgoing, peer, tag)
            transport.recv(incoming, peer, tag)
        else:
            transport.recv(incoming, peer, tag)
            transport.send(outgoing, peer, tag)
        return clock() - start

    warm = [trip() for _ in range(2)]
    if rank < peer:
        count[0] = iterations or min(MOST, max(FEWEST, int(seconds / max(warm[1], 1e-9))))
        transport.send(count, peer, tag)
    else:
        transport.recv(count, peer, tag)
    incoming[:] = ~coded(peer, rank, nbytes)
    times = [trip() for _ in range(int(count[0]))]
    wrong = int((incoming != coded(peer, rank, nbytes)).sum())
    return (max(1e-9, median(times) / 2), max(1e-9, min(times) / 2)), wrong, len(times)


def hosts_of(pairs: Sequence[Pair]) -> dict[int, str]:
    """Return {rank: its host}."""
    hosts = {pair.first: pair.first_host for pair in pairs}
    return hosts | {pair.second: pair.second_host for pair in pairs}


def report(pairs: Sequence[Pair], width: int, places: Sequence[str] = PLACES) -> list[str]:
    """Return all lines below the header.

    width   characters of a line of the terminal; 0: no limit
    places  classes of pairs in which odd ones are named
    """
    n = max(pair.second for pair in pairs) + 1
    hosts = hosts_of(pairs)
    lines: list[str] = []
    if 6 + 8 * n <= (width or 200):
        lines += matrix("latency, us, one way", n, pairs, latency)
        lines += ["", *matrix("bandwidth, GB/s, one way", n, pairs, bandwidth)]
    else:
        lines.append(
            f"{n} ranks have no room in {width or 200} columns: --json, --csv and --plot have every pair"
        )
    classes = {place: [pair for pair in pairs if pair.place == place] for place in PLACES}
    lines += ["", *CLASSES.lines(each for each in classes.items() if each[1])]
    lossy = {each[:2] for each in pairs if each.loses_frames}
    if noisy := sum("~" in latency(pair) + bandwidth(pair) for pair in pairs):
        why = "frames were lost, or other work ran" if lossy else "other work ran"
        lines += [
            f"~ {noisy} of {len(pairs)} pairs: median above {FAR:g} times the fastest message, so {why}",
            "  meanwhile; links are judged by their fastest messages, and by the frames that they lose",
        ]
    if ONE_HOST not in places:
        lines.append("ranks share cores, so links within a host are not judged")
    odd = odd_pairs(pairs, places)
    slow = {each.pair[:2] for each in odd}
    compared = any(len(classes[place]) > 1 for place in places)
    for rank in bad_everywhere(pairs, slow | lossy):
        faults = [
            text
            for text, bad in (("is slow", slow), ("loses frames", lossy))
            if rank in bad_everywhere(pairs, bad)
        ]
        fault = " and ".join(faults) or "is slow or loses frames"
        lines.append(f"every link of rank {rank} on {hosts[rank]} {fault}: look at that host")
    lines += [sentence(each) for each in odd[:SHOWN]]
    lines += [loss(each) for each in pairs if each.loses_frames][:SHOWN]
    if max(len(odd), len(lossy)) > SHOWN:
        lines.append(f"and {max(len(odd), len(lossy)) - SHOWN} more, in --json and --csv")
    if not slow | lossy and compared:
        lines.append("no link is far from the others of its class")
    between = classes[BETWEEN]
    if between and not any(each.sent for each in between):
        lines.append("lost frames: not asked, as no counter of TCP or InfiniBand saw the messages")
    elif between and not lossy:
        lines.append(
            f"no link loses frames: {sum(each.resent for each in between):,} of "
            f"{sum(each.sent for each in between):,} segments were sent again"
        )
    return [*lines, f"wrong elements {sum(pair.wrong for pair in pairs)}"]


def latency(pair: Pair) -> str:
    """Return a pair's latency as the matrix shows it; a mark follows if its median is spoilt."""
    return figure(pair.latency_us) + "~" * (pair.latency_us > FAR * pair.fastest_us)


def bandwidth(pair: Pair) -> str:
    """Return a pair's bandwidth as the matrix shows it; a mark follows if its median is spoilt."""
    return figure(pair.bandwidth_GBs) + "~" * (pair.bandwidth_GBs * FAR < pair.best_GBs)


def matrix(title: str, n: int, pairs: Sequence[Pair], text: Callable[[Pair], str]) -> list[str]:
    cells = {pair[:2]: text(pair) for pair in pairs}
    columns = [TextColumn(str(rank), "8", rank + 1, gap=0) for rank in range(n)]
    rows = [
        [str(row), *(cells.get((min(row, column), max(row, column))) for column in range(n))]
        for row in range(n)
    ]
    return [title, *TextTable([TextColumn("rank", "6", 0), *columns]).lines(rows)]


CLASSES = TextTable(
    [
        TextColumn("pairs", "<14", 0),
        TextColumn("number", "7", lambda row: len(row[1])),
        TextColumn(
            "us: least, median, most",
            "<24",
            lambda row: _extremes([pair.latency_us for pair in row[1]]),
            gap=3,
        ),
        TextColumn(
            "GB/s: least, median, most",
            "<",
            lambda row: _extremes([pair.bandwidth_GBs for pair in row[1]]),
            gap=3,
        ),
    ]
)
"""A line for each class of pairs: (its name, its pairs)."""


def _extremes(values: list[float]) -> str:
    return ", ".join(figure(pick(values)) for pick in (min, median, max))


def sentence(odd: Odd) -> str:
    (pair, what, usual), (value, unit) = odd, odd.value
    first = f"rank {pair.first} on {pair.first_host}"
    second = f"rank {pair.second} on {pair.second_host}"
    rate = f"{figure(value)} {unit}, where {figure(usual)} {unit} is usual {pair.place}"
    return f"odd link: {first} and {second}: {what} {rate}"


def loss(pair: Pair) -> str:
    """Return a sentence about a pair that loses frames, with the direction if it loses them in one."""
    ends = (pair.first, pair.first_host), (pair.second, pair.second_host)
    (first, second), resent = [f"rank {rank} on {host}" for rank, host in ends], pair.resent
    way = f"{first} and {second}"
    if 10 * pair.second_resent < pair.first_resent:
        way = f"only from {first} to {second}"
    elif 10 * pair.first_resent < pair.second_resent:
        way = f"only from {second} to {first}"
    part = 100 * resent / pair.sent
    return f"lost frames: {way}: {resent:,} of {pair.sent:,} segments were sent again, {part:.2g}%"
