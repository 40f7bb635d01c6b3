"""Segments that this host has sent, and those that it had to send again: the kernel's counters of lost frames."""

from pathlib import Path
from typing import NamedTuple

SNMP, PORTS = Path("/proc/net/snmp"), Path("/sys/class/infiniband")
PER_TIMEOUT = "local_ack_timeout_err", "packet_seq_err", "out_of_sequence"
"""Counters of an InfiniBand or RoCE port that grow when a packet is lost."""


class Segments(NamedTuple):
    """Numbers of segments, of TCP and of InfiniBand ports together, since the host booted.

    sent    by this host
    resent  of them, those sent again, because no acknowledgement came
    """

    sent: int
    resent: int

    def since(self, before: "Segments") -> "Segments":
        return Segments(self.sent - before.sent, self.resent - before.resent)


def segments(snmp: Path = SNMP, ports: Path = PORTS) -> Segments:
    """Read the counters of this host; one that cannot be read counts as 0."""
    sent = resent = 0
    lines = [line.split() for line in _text(snmp).splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2:
        tcp = dict(zip(*lines, strict=False))
        sent, resent = int(tcp.get("OutSegs", 0)), int(tcp.get("RetransSegs", 0))
    for port in ports.glob("*/ports/*"):
        sent += _number(port / "counters" / "port_xmit_packets")
        resent += sum(_number(port / "hw_counters" / name) for name in PER_TIMEOUT)
    return Segments(sent, resent)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else 0
