"""`bench bandwidth` on threads: who sends to whom, what is in flight at once, what follows from the times."""

import threading
from itertools import product

import pytest

from mpitrain.tools.bench import bandwidth as measuring
from mpitrain.tools.bench.bandwidth import (
    COLUMNS,
    BandwidthRequest,
    BandwidthRow,
    footer,
    measure,
    partners,
)
from mpitrain.tools.text_table import TextTable
from mpitrain.transport.threads import run_ranks


@pytest.mark.parametrize(
    ("n", "pairs"),
    [(1, []), (2, [(0, 1)]), (3, [(0, 1)]), (4, [(0, 2), (1, 3)]), (5, [(0, 2), (1, 3)])],
)
def test_rank_k_meets_rank_k_plus_half(n, pairs):
    assert partners(n, True) == pairs and partners(n, False) == pairs[:1]


def rows_of(n, all_pairs=True, sizes=(1, 64), window=5):
    """What all ranks yield, by clocks on which every window takes a millisecond; and how many sends each began in one."""
    now, most = threading.local(), [0] * n

    def one(transport):
        now.s, now.sends, start = 0.0, 0, transport.start_send

        def noted(array, to, tag=0):
            now.sends += 1
            return start(array, to, tag)

        def clock():
            most[transport.rank], now.s = max(most[transport.rank], now.sends), now.s + 1e-3
            now.sends = 0
            return now.s

        transport.start_send = noted
        return list(measure(transport, BandwidthRequest(sizes, window, all_pairs, 3), clock))

    everyone = run_ranks(n, one)
    assert all(rows == everyone[0] for rows in everyone)
    return everyone[0], most


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_window_is_in_flight_at_once_and_counted_for_all_pairs_and_ways(n, monkeypatch):
    rows, _ = rows_of(n)
    for row in rows:
        messages = (n // 2) * 5 * (2 if row.ways == "both" else 1)
        assert (row.wrong, row.pairs, row.window) == (0, n // 2, 5)
        figures = 1e3, messages / 1e-3, messages * row.bytes / 1e-3 / 1e9
        assert (row.time_us, row.messages_s, row.GBs) == pytest.approx(figures)
    assert [(row.bytes, row.ways) for row in rows] == [*product((1, 64), ("one", "both"))]
    monkeypatch.setattr(measuring, "WAYS", {"one": 1})
    # The first half sends, the second answers, and the rank without a partner rests.
    assert rows_of(n)[1] == [5] * (n // 2) + [1] * (n // 2) + [0] * (n % 2)
    assert rows_of(4, all_pairs=False)[0][0].pairs == 1


def test_of_long_messages_fewer_are_in_flight(monkeypatch):
    monkeypatch.setattr(measuring, "IN_FLIGHT", 256)
    assert [row.window for row in rows_of(2, sizes=[16, 64, 1000])[0][::2]] == [5, 4, 1]


def test_a_message_in_the_place_of_another_is_wrong(monkeypatch):
    messages = measuring._messages

    def swapped(sender, receiver, nbytes, window):
        found = messages(sender, receiver, nbytes, window)
        sends = threading.current_thread().name == f"rank {sender}"
        return found[[1, 0, *range(2, window)]] if sends and window and sender == 0 else found

    monkeypatch.setattr(measuring, "_messages", swapped)
    assert [row.wrong for row in rows_of(2, sizes=[64])[0]] == [128, 128]


def row(ways, rate, time=1.0, fastest=1.0, nbytes=64):
    return BandwidthRow(nbytes, ways, 1, 64, time, fastest, rate, 1e6 * rate, 0)


def test_what_follows_from_rows_leaves_out_those_that_are_marked():
    rows = [row("one", 2.0), row("both", 3.0), row("one", 9.0, time=5.0), row("both", 2.0)]
    assert footer(rows)[0] == "one way    at most 2.00 GB/s at 64 bytes, 2000000 messages/s"
    assert footer(rows)[2].startswith("~ 1 of 4 rows: median above 2 times the fastest window")
    lines = [TextTable(COLUMNS, 80).line(each) for each in rows]
    assert [" 5.00~ " in line for line in lines] == [False, False, True, False]
    assert max(map(len, lines)) <= 80
    assert footer([row("one", 9.0, time=5.0)])[0].startswith("~ 1 of 1")
