"""The table of probes: a question about the machine each, its measurement, and its remedy.

All ranks run the rows in their order. A row measures on every rank, perhaps with messages, and then
judges the values of all ranks. Trials that can crash run in children (`child.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.tools.doctor import files, hosts, start
from mpitrain.tools.doctor.problem import Problem, Values
from mpitrain.transport.base import Transport


class Probe(NamedTuple):
    """A row of the table.

    question   what the row finds out, for the documentation and for --json
    look       (transport, folder) -> value of this rank, serialisable as JSON. Collective
    line       values of all ranks -> one line of the report
    problems   values of all ranks -> problems, without the remedy
    remedy     the way out of all problems of the row
    is_fatal   a node with this problem fails `certify`
    """

    question: str
    look: Callable[[Transport, Path], Any]
    line: Callable[[Values], str]
    problems: Callable[[Values], list[Problem]]
    remedy: str
    is_fatal: bool = True


class ProbeResult(NamedTuple):
    """The result of a probe.

    values    of all ranks, by rank
    problems  with the remedy
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
        start.look_library,
        start.line_library,
        start.mixed_libraries,
        "Load one MPI module on all hosts, and install mpi4py once.",
    ),
    "start": Probe(
        "Does the launcher give each rank the interface that the MPI library expects?",
        start.look_interface,
        start.line_interface,
        start.missing_interface,
        "Start Open MPI with `srun --mpi=pmix`, and MPICH with `srun --mpi=pmi2`.",
    ),
    "threads": Probe(
        "May a second thread of a rank send messages?",
        start.look_threads,
        start.line_threads,
        start.few_threads,
        "Messages then progress only between layers. Use an MPI with MPI_THREAD_SERIALIZED or more.",
        is_fatal=False,
    ),
    "GPU binding": Probe(
        "Does each rank see the other GPUs of its host?",
        start.look_gpus,
        start.line_gpus,
        start.hidden_gpus,
        "Use --gpus-per-node without --gpus-per-task or --gpu-bind: mpitrain chooses by local rank.",
        is_fatal=False,
    ),
    "imports": Probe(
        "How long does Python load the modules of a run, and from how many files?",
        start.look_imports,
        start.line_imports,
        start.slow_imports,
        "Put the environment on a local disk or into one image file (Apptainer, squashfs).",
        is_fatal=False,
    ),
    "windows": Probe(
        "Can the ranks of a host share memory?",
        hosts.look_windows,
        hosts.line_windows,
        hosts.broken_windows,
        "Enlarge /dev/shm: in a container, --shm-size=1g.",
    ),
    "first message": Probe(
        "How long does the first message to another host take?",
        hosts.look_first,
        hosts.line_first,
        hosts.late_first,
        "Name the fast interface to MPI, such as --mca btl_tcp_if_include or FI_TCP_IFACE.",
        is_fatal=False,
    ),
    "network": Probe(
        "Which interfaces carry the messages between hosts?",
        hosts.look_network,
        hosts.line_network,
        hosts.mixed_networks,
        "Compare the cables and drivers of these hosts, and name one interface to MPI.",
        is_fatal=False,
    ),
    "clocks": Probe(
        "Do the hosts have the same time?",
        hosts.look_clocks,
        hosts.line_clocks,
        hosts.wrong_clocks,
        "Start chrony or ntpd on the host.",
    ),
    "locks": Probe(
        "Does the file system of the run keep locks between processes and hosts?",
        files.look_locks,
        files.line_locks,
        files.missing_locks,
        "Choose another --dir and --out, or mount the file system with locks (Lustre: flock).",
    ),
    "mapped files": Probe(
        "Are bytes equal in a file and in a map of it?",
        files.look_maps,
        files.line_maps,
        files.broken_maps,
        "Choose another --dir, or keep files of tokens on another file system.",
    ),
}
"""{name: probe}, in the order of the report."""


def examine(transport: Transport, folder: Path) -> list[ProbeResult]:
    """Run all probes; collective. Every rank gets the same observations.

    folder  a directory on the file system of the runs
    """
    results = []
    for name, probe in PROBES.items():
        gathered = transport.gather_text(probe.look(transport, folder))
        values = Values(transport.hosts, gathered)
        problems = [
            problem._replace(text=f"{problem.text}. {probe.remedy}")
            for problem in probe.problems(values)
        ]
        results.append(
            ProbeResult(
                name, probe.question, probe.line(values), gathered, problems, probe.is_fatal
            )
        )
    return results
