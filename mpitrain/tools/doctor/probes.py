"""The table of probes: questions about the start of the ranks, their hosts, and the file system of runs.

All ranks run the rows of PROBES one after the other. A row first measures a value on every rank,
perhaps with messages, and then judges the values of all ranks. Trials that can crash run in
children (`trials.py`).
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from mpitrain.machine import process
from mpitrain.machine.meters import gpu_states
from mpitrain.machine.process import SHARED_MEMORY
from mpitrain.tools.doctor.trials import FAILED, WORKS, in_child
from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks
from mpitrain.transport.library import library

SLOW_IMPORTS = 10.0
"""If imports take more seconds, a shared file system is probably the reason."""
WINDOW = 1 << 12
"""Elements that each rank writes into a shared window."""
LATE = 2.0
"""If the first message takes more seconds, MPI probably tries addresses that do not answer."""
SENT = 8 << 20
"""Bytes that each host sends to the next one, to see which interfaces count them."""
MOST_SKEW = 1.0
"""Greatest accepted difference between the clocks of two hosts, in seconds."""
REPEATED = 1000
"""More repeated transfers of a GPU's links than this are a fault; a few happen on good ones."""
NETWORKS = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"


class Problem(NamedTuple):
    """What a probe found wrong.

    host  the affected host; "" if no single host can be named
    text  the law with its values, and the remedy
    """

    host: str
    text: str


class Values(NamedTuple):
    """What a probe measured on all ranks.

    hosts   by rank: name of its host
    values  by rank: what it measured
    """

    hosts: Sequence[str]
    values: Sequence[Any]

    def by_host(self) -> dict[str, Any]:
        """Return {host: value of its first rank}."""
        return {host: own[0] for host, own in self.of_hosts().items()}

    def of_hosts(self) -> dict[str, list[Any]]:
        """Return {host: values of its ranks}."""
        own: dict[str, list[Any]] = {}
        for host, value in zip(self.hosts, self.values, strict=True):
            own.setdefault(host, []).append(value)
        return own


def look_library(transport: Transport, folder: Path) -> list[str]:
    mpi = library()
    return [mpi.version, mpi.path]


def line_library(seen: Values) -> str:
    libraries = dict.fromkeys(tuple(value) for value in seen.values)
    return "; ".join(f"{version}, {path or 'path unknown'}" for version, path in libraries)


def mixed_libraries(host: str, own: list[Any], seen: Values) -> str:
    first = seen.values[0][0]
    others = [version for version, _ in own if version != first]
    if not others:
        return ""
    return f"all ranks need one MPI library, but rank 0 loaded {first} and {host} {others[0]}"


def look_interface(transport: Transport, folder: Path) -> dict[str, Any]:
    names = process.environment()
    interfaces = [
        kind
        for kind, prefix in (("PMIx", "PMIX_"), ("PMI-2", "PMI2_"), ("PMI", "PMI_"))
        if any(name.startswith(prefix) for name in names)
    ]
    return {
        "launcher": process.launched().launcher,
        "interfaces": interfaces,
        "mpi": library().version.split()[0:2],
    }


def line_interface(seen: Values) -> str:
    first = seen.values[0]
    return f"{first['launcher']}, {' and '.join(first['interfaces']) or 'no PMI or PMIx'}"


def missing_interface(host: str, own: list[Any], seen: Values) -> str:
    value = own[0]
    needs = ["PMIx"] if value["mpi"][0] == "Open" else ["PMI-2", "PMI", "PMIx"]
    if value["launcher"] != "Slurm" or set(needs) & set(value["interfaces"]):
        return ""
    offered = " and ".join(value["interfaces"]) or "neither PMI nor PMIx"
    return f"{' '.join(value['mpi'])} needs {' or '.join(needs)}, but srun gives {host} {offered}"


def few_threads(host: str, own: list[Any], seen: Values) -> str:
    if own[0] not in ("single", "funneled"):
        return ""
    return f"a progress thread needs level serialized, but {host} has {own[0]}"


def line_gpus(seen: Values) -> str:
    counts = sorted(set(map(len, seen.values)))
    return f"{' or '.join(map(str, counts))} GPU(s) visible to a rank"


def hidden_gpus(host: str, own: list[Any], seen: Values) -> str:
    sets = {" ".join(sorted(gpus)) for gpus in own if gpus}
    if len(sets) < 2:
        return ""
    return f"ranks of {host} cannot read each other's GPUs: they see {' and '.join(sorted(sets))}"


def look_states(transport: Transport, folder: Path) -> list[Any]:
    """Return the `GpuState` of each GPU of this host, from its first rank."""
    return list(gpu_states()) if _is_first(transport) else []


def line_states(seen: Values) -> str:
    states = [(host, *state) for host, own in seen.by_host().items() for state in own]
    if not states:
        return "no GPU that NVML can be asked about"
    return "; ".join(
        f"{name} of {host}: cannot be asked"
        if problem
        else f"{name} of {host}: {clock} of {most} MHz, {memory} memory errors, {link} link errors".replace(
            "None", "unknown"
        )
        for host, name, clock, most, memory, link, problem in states
    )


def faulty_gpus(host: str, own: list[Any], seen: Values) -> str:
    faults = []
    for name, _, _, memory, link, problem in own[0]:
        if problem:
            faults.append(f"a GPU must answer, but {name} of {host} cannot be asked: {problem}")
        if memory:
            faults.append(
                f"the memory of a GPU must be right, but {name} of {host} has {memory} uncorrected errors"
            )
        if (link or 0) > REPEATED:
            faults.append(
                f"the links of a GPU must be right, but those of {name} of {host} repeated {link} transfers"
            )
    return "; ".join(faults)


def _is_first(transport: Transport) -> bool:
    """Return whether this rank is the first one of its host."""
    return transport.hosts.index(transport.hosts[transport.rank]) == transport.rank


def look_imports(transport: Transport, folder: Path) -> dict[str, str] | None:
    return in_child("imports", "", 120.0) if _is_first(transport) else None


def line_imports(seen: Values) -> str:
    trials = seen.by_host().values()
    if any(FAILED in value for value in trials):
        return "failed"
    slowest = max(trials, key=lambda value: float(value["seconds"]))
    return f"{float(slowest['seconds']):.2f} s, {slowest['files']} files opened by each rank"


def slow_imports(host: str, own: list[Any], seen: Values) -> str:
    if FAILED in own[0]:
        return f"the imports of a run fail on {host}: {own[0][FAILED]}"
    seconds = float(own[0]["seconds"])
    return f"imports take {seconds:.0f} s on {host}" if seconds > SLOW_IMPORTS else ""


def look_windows(transport: Transport, folder: Path) -> str:
    """Fill shared memory in a child, then read what other ranks of this host wrote into a real window.

    Returns what is wrong, or "". If this rank is alone on its host, nothing is tried.
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


def broken_windows(host: str, own: list[Any], seen: Values) -> str:
    wrong = next(filter(None, own), "")
    return wrong and f"shared memory must work on {host}, but {wrong}"


def _neighbours(transport: Transport) -> tuple[int, int] | None:
    """Return the first ranks of the next and of the previous host.

    None on a rank that is not the first of its host, and with a single host.
    """
    hosts = transport.hosts
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) < 2 or transport.rank not in firsts:
        return None
    own = firsts.index(transport.rank)
    return firsts[(own + 1) % len(firsts)], firsts[own - 1]


def look_first(transport: Transport, folder: Path) -> list[float]:
    """Return the seconds of the first and of the second message around the ring of hosts."""
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


def late_first(host: str, own: list[Any], seen: Values) -> str:
    if not own[0] or own[0][0] <= LATE:
        return ""
    return f"the first message of {host} took {own[0][0]:.1f} s, more than {LATE:g} s"


def sent_bytes() -> dict[str, int]:
    """Return {interface: bytes sent so far}, of networks and of InfiniBand ports."""
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


def mixed_networks(host: str, own: list[Any], seen: Values) -> str:
    first = next((value for value in seen.values if value is not None), None)
    if own[0] in (None, first):
        return ""
    over, others = (" and ".join(each or ()) or "no counted interface" for each in (own[0], first))
    return f"messages of {host} go over {over}, those of rank 0 over {others}"


def line_clocks(seen: Values) -> str:
    ahead = seen.by_host().values()
    return (
        f"at most {1e3 * (max(ahead) - min(ahead)):.3g} ms apart" if len(ahead) > 1 else "one host"
    )


def wrong_clocks(host: str, own: list[Any], seen: Values) -> str:
    late = median_low(seen.by_host().values()) - own[0]
    if abs(late) <= MOST_SKEW:
        return ""
    return (
        f"clocks differ by at most {MOST_SKEW:g} s, but that of {host} is {abs(late):.1f} s "
        f"{'ahead' if late > 0 else 'behind'}"
    )


def look_locks(transport: Transport, folder: Path) -> dict[str, str]:
    """Try file locks on the first rank of each host, then a lock on a file that rank 0 has locked."""
    hosts, rank, is_first = transport.hosts, transport.rank, _is_first(transport)
    results = in_child("locks", str(folder)) if is_first else {}
    path, descriptor = "", -1
    if rank == 0 and results.get("flock") == WORKS:
        try:
            descriptor, path = tempfile.mkstemp(prefix=".mpitrain-doctor-", dir=folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            results["flock"] = error.strerror or str(error)
    path = transport.gather_text(path)[0]
    if path and is_first and hosts[rank] != hosts[0]:
        results |= in_child("locked", path)
    transport.gather_text(None)
    if descriptor >= 0:
        os.close(descriptor)
        os.unlink(path)
    return results


def look_maps(transport: Transport, folder: Path) -> dict[str, str]:
    return in_child("mapped", str(folder)) if _is_first(transport) else {}


def line_files(seen: Values) -> str:
    results = [result for value in seen.by_host().values() for result in value.items()]
    wrong = [f"{name}: {text}" for name, text in results if text != WORKS]
    return "; ".join(dict.fromkeys(wrong)) or ", ".join(
        dict.fromkeys(f"{name} works" for name, _ in results)
    )


def broken_files(name: str, host: str, own: list[Any], seen: Values) -> str:
    wrong = [
        text if kind == FAILED else f"{kind}: {text}"
        for kind, text in own[0].items()
        if text != WORKS
    ]
    return f"{name} must work on {host}, but {'; '.join(wrong)}" if wrong else ""


class Probe(NamedTuple):
    """A row of the table.

    question   what the row finds out, for the documentation and for --json
    look       (transport, folder) -> value of this rank, serialisable as JSON. Collective
    line       values of all ranks -> one line of the report
    wrong      (host, values of its ranks, all values) -> the problem of this host without the
               remedy; empty if there is none
    remedy     the way out of all problems of the row
    is_fatal   whether a node with this problem fails `certify`
    """

    question: str
    look: Callable[[Transport, Path], Any]
    line: Callable[[Values], str]
    wrong: Callable[[str, list[Any], Values], str]
    remedy: str
    is_fatal: bool = True

    def problems(self, seen: Values) -> list[Problem]:
        return [
            Problem(host, f"{text}. {self.remedy}")
            for host, own in seen.of_hosts().items()
            if (text := self.wrong(host, own, seen))
        ]


class ProbeResult(NamedTuple):
    """What a probe measured and found.

    values    by rank
    problems  with their remedy
    """

    name: str
    question: str
    line: str
    values: Sequence[Any]
    problems: list[Problem]
    is_fatal: bool


PROBES: dict[str, Probe] = {
    "MPI loaded": Probe(
        "Which MPI library did each rank load, and is it the same one?",
        look_library,
        line_library,
        mixed_libraries,
        "Load one MPI module on all hosts, and install mpi4py once.",
    ),
    "start": Probe(
        "Does the launcher give each rank the interface that the MPI library expects?",
        look_interface,
        line_interface,
        missing_interface,
        "Start Open MPI with `srun --mpi=pmix`, and MPICH with `srun --mpi=pmi2`.",
    ),
    "threads": Probe(
        "May a second thread of a rank send messages?",
        lambda transport, folder: library().thread_level,
        lambda seen: ", ".join(dict.fromkeys(seen.values)),
        few_threads,
        "Messages then progress only between layers. Use an MPI with MPI_THREAD_SERIALIZED or more.",
        is_fatal=False,
    ),
    "GPU binding": Probe(
        "Does each rank see the other GPUs of its host?",
        lambda transport, folder: process.visible_gpus(),
        line_gpus,
        hidden_gpus,
        "Use --gpus-per-node without --gpus-per-task or --gpu-bind: mpitrain chooses by local rank.",
        is_fatal=False,
    ),
    "GPU state": Probe(
        "Which clocks do the GPUs have, and has their memory or a link had errors?",
        look_states,
        line_states,
        faulty_gpus,
        "Reset the GPU, or leave this host out and have it examined: `nvidia-smi -q -d ECC`.",
        is_fatal=False,
    ),
    "imports": Probe(
        "How long does Python load the modules of a run, and from how many files?",
        look_imports,
        line_imports,
        slow_imports,
        "Put the environment on a local disk or into one image file (Apptainer, squashfs).",
        is_fatal=False,
    ),
    "windows": Probe(
        "Can the ranks of a host share memory?",
        look_windows,
        line_windows,
        broken_windows,
        "Enlarge /dev/shm: in a container, --shm-size=1g.",
    ),
    "first message": Probe(
        "How long does the first message to another host take?",
        look_first,
        line_first,
        late_first,
        "Name the fast interface to MPI, such as --mca btl_tcp_if_include or FI_TCP_IFACE.",
        is_fatal=False,
    ),
    "network": Probe(
        "Which interfaces carry the messages between hosts?",
        look_network,
        line_network,
        mixed_networks,
        "Compare the cables and drivers of these hosts, and name one interface to MPI.",
        is_fatal=False,
    ),
    "clocks": Probe(
        "Do the hosts have the same time?",
        lambda transport, folder: Clocks(transport, time.time).measure()[1],
        line_clocks,
        wrong_clocks,
        "Start chrony or ntpd on the host.",
    ),
    "locks": Probe(
        "Does the file system of the run keep locks between processes and hosts?",
        look_locks,
        line_files,
        partial(broken_files, "locks"),
        "Choose another --dir and --out, or mount the file system with locks (Lustre: flock).",
    ),
    "mapped files": Probe(
        "Are bytes equal in a file and in a map of it?",
        look_maps,
        line_files,
        partial(broken_files, "mapped files"),
        "Choose another --dir, or keep files of tokens on another file system.",
    ),
}
"""{name: probe}, in the order of the report."""


def examine(transport: Transport, folder: Path) -> list[ProbeResult]:
    """Run all probes. Collective. Every rank gets the same results.

    folder  a directory on the file system of the runs
    """
    results = []
    for name, probe in PROBES.items():
        gathered = transport.gather_text(probe.look(transport, folder))
        values = Values(transport.hosts, gathered)
        line, problems = probe.line(values), probe.problems(values)
        results.append(ProbeResult(name, probe.question, line, gathered, problems, probe.is_fatal))
    return results
