"""Probes between ranks and hosts: shared windows, messages, network interfaces and clocks."""

import time
from pathlib import Path
from statistics import median_low

import numpy as np

from mpitrain.machine.process import SHARED_MEMORY
from mpitrain.tools.doctor.child import FAILED, in_child
from mpitrain.tools.doctor.problem import Problem, Values
from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks

WINDOW = 1 << 12
"""Elements that each rank writes into a shared window."""
LATE = 2.0
"""Seconds of the first message from which MPI probably tries addresses that do not answer."""
SENT = 8 << 20
"""Bytes that each host sends to the next one while the interfaces count."""
MOST_SKEW = 1.0
"""Greatest accepted difference between the clocks of two hosts, in seconds."""
NETWORKS = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"


def look_windows(transport: Transport, folder: Path) -> str:
    """Fill shared memory in a child, then read the neighbours' blocks of a real window.

    Returns "" if that works, or if this rank is alone on its host.
    """
    hosts, rank = transport.hosts, transport.rank
    host_ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    has_trial = len(host_ranks) > 1 and host_ranks[0] == rank
    crashed = transport.gather_text(
        in_child("shared", SHARED_MEMORY).get(FAILED, "") if has_trial else ""
    )
    if any(crashed):
        return crashed[host_ranks[0]]
    own = transport.split(0)
    assert own is not None
    wrong = _wrong_blocks(own, host_ranks)
    own.close()
    return wrong


def _wrong_blocks(transport: Transport, host_ranks: list[int]) -> str:
    """Return what is wrong with a new window of this host's ranks, or "". Collective."""
    own_block = transport.allocate(WINDOW, np.float32)
    own_block[:] = transport.rank + np.arange(WINDOW)
    transport.gather_text(None)
    location = transport.windows.locate(own_block, transport.members[transport.rank])
    members = [transport.members[other] for other in host_ranks]
    blocks = location and transport.windows.views(location, members, WINDOW, np.float32)
    wrong = [
        f"rank {transport.rank} reads wrong bytes of rank {other}"
        for other, block in zip(host_ranks, blocks or [], strict=False)
        if not np.array_equal(block, other + np.arange(WINDOW, dtype=np.float32))
    ]
    if len(host_ranks) > 1 and not blocks:
        wrong = ["no window was made"]
    transport.gather_text(None)
    return wrong[0] if wrong else ""


def line_windows(seen: Values) -> str:
    wrong = [value for value in seen.values if value]
    return wrong[0] if wrong else f"{len(seen.values)} rank(s) on {len(set(seen.hosts))} host(s)"


def broken_windows(seen: Values) -> list[Problem]:
    wrong = {host: value for host, value in zip(seen.hosts, seen.values, strict=True) if value}
    return [
        Problem(host, f"shared memory must work on {host}, but {text}")
        for host, text in wrong.items()
    ]


def _neighbours(transport: Transport) -> tuple[int, int] | None:
    """Return the first ranks of the next and the previous host; None if this is no first rank."""
    hosts = transport.hosts
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) < 2 or transport.rank not in firsts:
        return None
    own = firsts.index(transport.rank)
    return firsts[(own + 1) % len(firsts)], firsts[own - 1]


def look_first(transport: Transport, folder: Path) -> list[float]:
    """Return the seconds of the first and the second message around the ring of hosts."""
    tag, near = transport.claim_tag(), _neighbours(transport)
    outgoing, incoming, seconds = np.zeros(1), np.zeros(1), []
    for _ in range(2):
        transport.gather_text(None)
        start = time.perf_counter()
        if near:
            transport.exchange(outgoing, near[0], incoming, near[1], tag)
            seconds.append(time.perf_counter() - start)
    return seconds


def line_first(seen: Values) -> str:
    times = [value for value in seen.values if value]
    if not times:
        return "one host, so no message leaves it"
    first, second = (max(value[index] for value in times) for index in (0, 1))
    return f"{1e3 * first:.3g} ms between hosts, the second one {1e3 * second:.3g} ms"


def late_first(seen: Values) -> list[Problem]:
    return [
        Problem(host, f"the first message of {host} took {value[0]:.1f} s, more than {LATE:g} s")
        for host, value in seen.by_host().items()
        if value and value[0] > LATE
    ]


def sent_bytes() -> dict[str, int]:
    """Return {interface: bytes sent so far} of networks and of InfiniBand ports."""
    counts = {}
    for path in Path(NETWORKS).glob("*/statistics/tx_bytes"):
        counts[path.parts[-3]] = _number(path)
    for path in Path(INFINIBAND).glob("*/ports/*/counters/port_xmit_data"):
        counts[f"{path.parts[-5]}:{path.parts[-3]}"] = 4 * _number(path)  # it counts words
    return counts


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def look_network(transport: Transport, folder: Path) -> list[str] | None:
    """Send to the next host; return the interfaces that carried at least half of the bytes."""
    tag, near = transport.claim_tag(), _neighbours(transport)
    if not near:
        return None
    outgoing, incoming = np.zeros(SENT, np.uint8), np.zeros(SENT, np.uint8)
    before = sent_bytes()
    transport.exchange(outgoing, near[0], incoming, near[1], tag)
    after = sent_bytes()
    return sorted(name for name in after if after[name] - before.get(name, 0) > SENT // 4)


def line_network(seen: Values) -> str:
    interfaces = [value for value in seen.values if value is not None]
    if not interfaces:
        return "one host, so no message leaves it"
    kinds = dict.fromkeys(" and ".join(value) or "no counted interface" for value in interfaces)
    return "; ".join(kinds)


def mixed_networks(seen: Values) -> list[Problem]:
    """Return a problem for each host that sends over other interfaces than rank 0's host."""
    interfaces = {host: value for host, value in seen.by_host().items() if value is not None}
    first = next(iter(interfaces.values()), None)
    return [
        Problem(
            host,
            f"messages of {host} go over {' and '.join(value) or 'no counted interface'}, "
            f"those of rank 0 over {' and '.join(first or ()) or 'no counted interface'}",
        )
        for host, value in interfaces.items()
        if value != first
    ]


def look_clocks(transport: Transport, folder: Path) -> float:
    """Return the seconds that rank 0's clock is ahead of this host's."""
    return Clocks(transport, time.time).measure()[1]


def line_clocks(seen: Values) -> str:
    ahead = seen.by_host().values()
    return (
        f"at most {1e3 * (max(ahead) - min(ahead)):.3g} ms apart" if len(ahead) > 1 else "one host"
    )


def wrong_clocks(seen: Values) -> list[Problem]:
    """Return a problem for each host whose clock is far from the median of all hosts."""
    ahead = seen.by_host()
    usual = median_low(ahead.values())
    return [
        Problem(
            host,
            f"clocks differ by at most {MOST_SKEW:g} s, but that of {host} is {abs(usual - value):.1f} s "
            f"{'ahead' if value < usual else 'behind'}",
        )
        for host, value in ahead.items()
        if not (abs(usual - value) <= MOST_SKEW)
    ]
