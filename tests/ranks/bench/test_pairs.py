"""`bench pairs` on threads: every pair once, in rounds of disjoint pairs; a slow link is the one that is named."""

import threading
from functools import partial

import numpy as np
import pytest

from mpitrain.cli.bench.links import bandwidth, measure_bandwidth, measure_pairs, pairs
from mpitrain.errors import ConfigError
from mpitrain.tools.bench import pairs as measuring
from mpitrain.tools.bench.pairs import (
    BETWEEN,
    ONE_HOST,
    bad_everywhere,
    coded,
    measure,
    merged,
    odd_pairs,
    places_to_judge,
    report,
    rounds,
)
from mpitrain.tools.bench.segments import Segments, segments
from mpitrain.transport.threads import run_ranks

SHORT, LONG = 8, 1 << 12


@pytest.mark.parametrize("n", range(1, 12))
def test_every_pair_is_in_one_round_and_no_rank_twice_in_any(n):
    found = rounds(n)
    assert len(found) == (0 if n == 1 else n - 1 + n % 2)
    assert sorted(pair for pairs in found for pair in pairs) == [
        (a, b) for a in range(n) for b in range(a + 1, n)
    ]
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in found)


def links(seconds, hosts):
    """What ranks on these hosts measure by a clock of their own, on which a message takes seconds(first, second, nbytes)."""
    now = threading.local()

    def one(transport):
        recv, now.s = transport.recv, 0.0

        def late(array, source, tag=0):
            recv(array, source, tag)
            now.s += 2 * seconds(*sorted((transport.rank, source)), array.nbytes)  # there and back

        transport.recv = late
        unasked = Segments(0, 0)
        rounds_of = measure(transport, SHORT, LONG, 3, lambda: now.s, count=lambda: unasked)
        found = [list(pairs) for pairs in rounds_of]
        return len(found), merged([pair for pairs in found for pair in pairs])

    everyone = run_ranks(len(hosts), one, hosts=hosts)
    assert all(found == everyone[0] for found in everyone)
    return everyone[0][1]


def counted(pairs, lost, sent=10_000):
    """The pairs with counters: {(first, second): segments that each of both sent again}."""
    return [
        pair._replace(
            sent=sent,
            first_resent=lost.get(pair[:2], (0, 0))[0],
            second_resent=lost.get(pair[:2], (0, 0))[1],
        )
        for pair in pairs
    ]


def usual(first, second, nbytes, slow=(), times=1.0, late=1.0):
    """2 us and 1 GB/s."""
    is_slow = (first, second) in slow
    return 2e-6 * (late if is_slow else 1) + nbytes * 1e-9 * (times if is_slow else 1)


def test_figures_are_those_of_the_links_and_classes_are_told_apart():
    found = links(usual, "aab")
    assert [pair[:2] for pair in found] == [(0, 1), (0, 2), (1, 2)]
    assert [pair.place for pair in found] == [ONE_HOST, BETWEEN, BETWEEN]
    rate = LONG / (2e-6 + LONG * 1e-9) / 1e9
    for pair in found:
        assert (pair.latency_us, pair.bandwidth_GBs) == pytest.approx((2.008, rate))
        assert pair.wrong == 0 and not pair.is_alone
    assert odd_pairs(found) == []
    assert report(found, 80)[-3] == "no link is far from the others of its class"


@pytest.mark.parametrize("hosts", ["abcd", "abcde", "abc"])
def test_a_slow_link_is_named_with_its_hosts_and_ranks(hosts):
    found = links(lambda *words: usual(*words, slow=[(0, 2)], times=10.0), hosts)
    (odd,) = odd_pairs(found)
    assert odd.pair[:4] == (0, 2, "a", "c") and odd.what == "bandwidth" and odd.pair.is_alone
    assert sum(pair.is_alone for pair in found) == 1, "measured again, alone"
    said = "\n".join(report(found, 80))
    assert "0 on a and rank 2" in said
    assert "every link" not in said


def test_pairs_names_a_late_link_and_a_slow_host():
    (late,) = odd_pairs(links(lambda *words: usual(*words, slow=[(1, 3)], late=5.0), "aaaa"))[-1:]
    assert late.pair[:2] == (1, 3) and late.what == "latency" and late.usual == pytest.approx(2.008)
    for hosts in ("abc", "abcd"):
        slow = [(first, 2) for first in range(2)] + [(2, 3)]
        found = links(lambda *words, slow=slow: usual(*words, slow=slow, times=20.0), hosts)
        odd = odd_pairs(found)
        assert [each.pair[:2] for each in odd] == slow[: len(hosts) - 1], hosts
        assert bad_everywhere(found, {each.pair[:2] for each in odd}) == [2]
        assert "every link of rank 2 on c is slow: look at that host" in report(found, 80)


def test_within_a_host_whose_ranks_share_cores_no_link_is_judged():
    assert places_to_judge("aab", 2) == (ONE_HOST, BETWEEN)
    assert places_to_judge("aaab", 2) == (BETWEEN,)
    found = links(lambda *words: usual(*words, slow=[(0, 1)], times=10.0), "aaa")
    assert len(odd_pairs(found)) == 1 and odd_pairs(found, [BETWEEN]) == []
    assert report(found, 80, [BETWEEN])[-2:] == [
        "ranks share cores, so links within a host are not judged",
        "wrong elements 0",
    ]
    lines = report(links(usual, "aa"), 80)
    assert not any("no link is far" in line for line in lines), "there is no other link"


def test_a_link_that_is_as_slow_as_all_is_not_odd():
    every = {(first, second) for second in range(4) for first in range(second)}
    for hosts, slow in (("abcd", every), ("aabb", every - {(0, 1), (2, 3)})):
        found = links(lambda *words, slow=slow: usual(*words, slow=slow, times=9.0), hosts)
        assert odd_pairs(found) == []


def test_what_arrives_wrong_is_counted(monkeypatch):
    def spoilt(rank, peer, nbytes):
        sent = coded(rank, peer, nbytes)
        if threading.current_thread().name == "rank 1" and (rank, nbytes) == (1, LONG):
            sent[-3:] += 1
        return sent

    monkeypatch.setattr(measuring, "coded", spoilt)
    found = links(usual, "aaa")
    assert [pair.wrong for pair in found] == [3, 0, 3]
    assert report(found, 80)[-1] == "wrong elements 6"
    assert not np.array_equal(coded(0, 1, 64), coded(1, 0, 64))


def test_matrices_fit_80_columns_or_are_left_to_the_files():
    found = links(usual, "ab" * 4)
    lines = report(found, 80)
    assert max(map(len, lines)) <= 80 and any(line.startswith("     7") for line in lines)
    narrow = "8 ranks have no room in 60 columns: --json, --csv and --plot have every pair"
    assert report(found, 60)[0] == narrow


@pytest.mark.parametrize(
    "command, run, size",
    [(pairs, measure_pairs, "short"), (bandwidth, measure_bandwidth, "min_bytes")],
)
def test_one_rank_and_messages_without_bytes_are_refused(command, run, size):
    options = command.make_context(command.name, []).params
    with pytest.raises(ConfigError, match="measures messages between two"):
        run_ranks(1, run, options)
    with pytest.raises(ConfigError, match="at least 1 byte"):
        run_ranks(2, run, options | {size: 0})


@pytest.mark.slow
def test_the_heat_map_tells_hosts_figures_and_frames_the_odd_link(tmp_path):
    pytest.importorskip("matplotlib")
    from mpitrain.tools.bench.pictures import plot_pairs

    facts = {"hosts": 4, "processor": "Abacus 3000", "cores": 2, "mpi": "Open MPI", "mpitrain": "0"}
    found = links(lambda *words: usual(*words, slow=[(0, 2)], times=10.0), "abcd")
    plot_pairs(found, [BETWEEN], facts, tmp_path / "pairs.svg")
    drawn = (tmp_path / "pairs.svg").read_text()
    assert all(
        f"<!-- {text} -->" in drawn
        for text in ("0.0953", "0.672", "2.01", "2 c", "all pairs of 4 ranks on 4 host(s)")
    )
    assert drawn.count("stroke: #d55e00") == 2, "both halves of the matrix"
    assert "Framed: a link" in drawn and "~" not in drawn
    quiet = links(usual, "abcd")
    noisy = [quiet[0]._replace(latency_us=9.0), *quiet[1:]]
    plot_pairs(noisy, [BETWEEN], facts, tmp_path / "noisy.svg")
    drawn = (tmp_path / "noisy.svg").read_text()
    assert drawn.count("<!-- 9.00~ -->") == 2 and "~: other work ran" in drawn
    assert "Framed" not in drawn, "nothing has one"


def test_a_lossy_cable_is_told_apart_from_a_slow_one_and_from_both():
    fine, slow = (
        links(usual, "abcd"),
        links(partial(usual, slow={(0, 2), (1, 2), (2, 3)}, times=9.0), "abcd"),
    )
    everywhere = dict.fromkeys([(0, 2), (1, 2), (2, 3)], (300, 200))
    said = {
        name: "\n".join(report(pairs, 0))
        for name, pairs in (
            ("sound", counted(fine, {(0, 1): (3, 0)})),
            ("slow", counted(slow, {})),
            ("lossy", counted(fine, everywhere)),
            ("both", counted(slow, everywhere)),
            ("one way", counted(fine, {(0, 2): (300, 2)})),
            ("unasked", fine),
        )
    }
    host = "every link of rank 2 on c "
    assert (
        "no link is far" in said["sound"] and "no link loses frames: 3 of 60,000" in said["sound"]
    )
    assert host + "is slow:" in said["slow"] and "no link loses frames: 0 of" in said["slow"]
    assert host + "loses frames:" in said["lossy"] and "no link is far" not in said["lossy"]
    assert (
        "rank 1 on b and rank 2 on c: 500 of 10,000 segments were sent again, 5%" in said["lossy"]
    )
    assert host + "is slow and loses frames:" in said["both"]
    assert "lost frames: only from rank 0 on a to rank 2 on c: 302" in said["one way"]
    assert "lost frames: not asked" in said["unasked"]


def test_segments_are_those_of_tcp_and_of_infiniband_ports(tmp_path):
    (tmp_path / "snmp").write_text("Ip: a\nIp: 1\nTcp: InSegs OutSegs RetransSegs\nTcp: 5 700 30\n")
    port = tmp_path / "ports" / "mlx5_0" / "ports" / "1"
    for name, value in (("counters/port_xmit_packets", 1000), ("hw_counters/packet_seq_err", 7)):
        (port / name).parent.mkdir(parents=True)
        (port / name).write_text(f"{value}\n")
    assert segments(tmp_path / "snmp", tmp_path / "ports") == Segments(1700, 37)
    assert segments(tmp_path / "none", tmp_path / "none") == Segments(0, 0)
    assert segments().sent >= 0
