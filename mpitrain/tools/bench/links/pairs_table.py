"""The output of `bench pairs`: two matrices if they fit, a summary per class, and odd links."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from mpitrain.tools.bench.links.pairs import (
    BETWEEN,
    ONE_HOST,
    PLACES,
    Odd,
    Pair,
    bad_everywhere,
    odd_pairs,
)
from mpitrain.tools.text_table import figure

SHOWN = 8
"""Upper bound of the number of odd pairs that are printed; files have all of them."""

FAR = 2.0
"""A median is marked above FAR times the fastest message."""


def report(pairs: Sequence[Pair], width: int, places: Sequence[str] = PLACES) -> list[str]:
    """Return all lines after the header.

    width   characters of the terminal; 0: no limit
    places  classes of pairs in which odd ones are named
    """
    n = max(pair.second for pair in pairs) + 1
    hosts = {
        rank: host
        for pair in pairs
        for rank, host in ((pair.first, pair.first_host), (pair.second, pair.second_host))
    }
    lines: list[str] = []
    if 6 + 8 * n <= (width or 200):
        lines += matrix("latency, us, one way", n, pairs, latency)
        lines += ["", *matrix("bandwidth, GB/s, one way", n, pairs, bandwidth)]
    else:
        lines.append(
            f"{n} ranks have no room in {width or 200} columns: --json, --csv and --plot have every pair"
        )
    lines += ["", *classes(pairs)]
    if noisy := sum("~" in latency(pair) + bandwidth(pair) for pair in pairs):
        lines += [
            f"~ {noisy} of {len(pairs)} pairs: median above {FAR:g} times the fastest message, so other work ran",
            "  meanwhile; links are judged by their fastest messages",
        ]
    if ONE_HOST not in places:
        lines.append("ranks share cores, so links within a host are not judged")
    odd = odd_pairs(pairs, places)
    classes_of = Counter(pair.place for pair in pairs)
    compared = any(classes_of[place] > 1 for place in places)
    lines += [
        f"every link of rank {rank} on {hosts[rank]} is slow: look at that host"
        for rank in bad_everywhere(pairs, {each.pair[:2] for each in odd})
    ]
    lines += [sentence(each) for each in odd[:SHOWN]]
    if len(odd) > SHOWN:
        lines.append(f"and {len(odd) - SHOWN} more, in --json and --csv")
    return [
        *lines,
        *(["no link is far from the others of its class"] if compared and not odd else []),
        f"wrong elements {sum(pair.wrong for pair in pairs)}",
    ]


def latency(pair: Pair) -> str:
    """Return the text of a pair's latency in the matrix, with a mark if its median is spoilt."""
    return figure(pair.latency_us) + "~" * (pair.latency_us > FAR * pair.fastest_us)


def bandwidth(pair: Pair) -> str:
    """Return the text of a pair's bandwidth in the matrix, with a mark if its median is spoilt."""
    return figure(pair.bandwidth_GBs) + "~" * (pair.bandwidth_GBs * FAR < pair.best_GBs)


def matrix(title: str, n: int, pairs: Sequence[Pair], text: Callable[[Pair], str]) -> list[str]:
    """Return a line for each rank, with the text of its pair with each other rank."""
    cells = {pair[:2]: text(pair) for pair in pairs}
    lines = [title, f"{'rank':>6}" + "".join(f"{rank:>8}" for rank in range(n))]
    for row in range(n):
        shown = [cells.get((min(row, column), max(row, column)), "-") for column in range(n)]
        lines.append(f"{row:>6}" + "".join(f"{cell:>8}" for cell in shown))
    return lines


def classes(pairs: Sequence[Pair]) -> list[str]:
    """Return a summary line for each class of pairs: within one host, and between hosts."""
    lines = [
        f"{'pairs':<14} {'number':>7}   {'us: least, median, most':<24}   GB/s: least, median, most"
    ]
    for place in (ONE_HOST, BETWEEN):
        if of_class := [pair for pair in pairs if pair.place == place]:
            times, rates = (
                [figure(pick(values)) for pick in (min, median, max)]
                for values in (
                    [pair.latency_us for pair in of_class],
                    [pair.bandwidth_GBs for pair in of_class],
                )
            )
            lines.append(
                f"{place:<14} {len(of_class):>7}   {', '.join(times):<24}   {', '.join(rates)}"
            )
    return lines


def sentence(odd: Odd) -> str:
    """Return a sentence on an odd pair."""
    pair, what, usual = odd
    value, unit = (pair.best_GBs, "GB/s") if what == "bandwidth" else (pair.fastest_us, "us")
    ends = [
        f"rank {rank} on {host}"
        for rank, host in ((pair.first, pair.first_host), (pair.second, pair.second_host))
    ]
    return f"odd link: {ends[0]} and {ends[1]}: {what} {figure(value)} {unit}, where {figure(usual)} {unit} is usual {pair.place}"
