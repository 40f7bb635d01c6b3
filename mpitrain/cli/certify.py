"""`mpitrain certify`: measures every node of a machine, and prints PASS or FAIL for each."""

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.rows import exit_with
from mpitrain.cli.doctor import FOLDER, check_folder, write_document
from mpitrain.cli.job_options import Outputs, check_files, counted, output_option, path_option
from mpitrain.cli.session import mpi_session
from mpitrain.cli.terminal.stop_requests import Stop
from mpitrain.errors import ConfigError, visible
from mpitrain.machine import process

LEAST_ROUNDS = 5
CONNECT, SECONDS = 20, 60.0
"""Seconds in which ssh must connect to a node, and in which the node must have imported mpitrain."""
ASK = (
    "import mpitrain.cli.certify, mpitrain.tools.certify.collect; "
    "from mpitrain.machine import process; "
    "print('mpitrain', process.package())"
)
"""The program that a node runs."""


def _absent(context: Any, option: Any, entries: tuple[str, ...]) -> dict[str, str]:
    reasons = {}
    for entry in entries:
        node, _, reason = entry.partition("=")
        if not node or not reason:
            raise click.BadParameter(f"{entry!r} is not NODE=REASON.")
        reasons[node] = reason
    return reasons


def _words(context: Any, option: Any, line: str | None) -> list[str]:
    try:
        return shlex.split(line or "")
    except ValueError as error:
        raise click.BadParameter(f"{line}: {error}") from None


@click.command()
@click.option(
    "--hosts",
    metavar="A:4,B:4",
    help="Probe these nodes from outside MPI, then start so many ranks on each that answers.  [default: those of the batch job]",
)
@path_option("--hostfile", "File of such nodes, as for launch.")
@click.option("--ppn", type=click.IntRange(min=1), help="Ranks of each node of --hosts.")
@click.option(
    "--agent",
    metavar="'WORDS'",
    callback=_words,
    help="Words that run a command on a node, before its name.  [default: ssh; srun in a Slurm job]",
)
@click.option(
    "--with",
    "extra",
    multiple=True,
    metavar="'OPTIONS'",
    help="With --hosts: options for mpirun, mpiexec or srun, as for launch (repeatable).",
)
@path_option(
    "--expect",
    "A TOML file of limits: nodes, gemm_GFLOPs, memory_GBs, link_GBs, link_us, ratio, shm_MB.",
)
@counted(
    "--rounds",
    LEAST_ROUNDS,
    LEAST_ROUNDS,
    "Samples of the speed of each rank; the fastest counts.",
    most=1000,
)
@FOLDER
@click.option(
    "--absent",
    multiple=True,
    metavar="NODE=REASON",
    callback=_absent,
    help="A node that did not answer, and fails (repeatable). --hosts sets it.",
)
@output_option("--json", "Write verdicts and all measurements to this JSON file.")
@output_option("--junit", "Write a JUnit file: a test case for each node.")
def command(
    hosts: str | None,
    hostfile: Path | None,
    ppn: int | None,
    agent: list[str],
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure every node, and print PASS or FAIL for each with the reason.

    From outside MPI, by node names: mpitrain certify --hosts a:4,b:4. In a batch job, the nodes are
    those of the job, with one rank each or --ppn. On ranks that run already: mpitrain launch -n 8
    -- certify. With one rank per node, memory and products have no other work.

    It runs the probes of `doctor`, then all pairs of nodes and every collective. Each rank measures
    matrix products and memory, and computes one seeded step alone. Two short runs compare other
    nodes and a resumed run. A slow link fails a node only if all its links are slow. Without
    --expect, a node is compared with the median of all nodes. The exit code is 1 if anything fails.

    A failure is printed as soon as it is known. After Ctrl-C or TERM, as at the time limit of a
    batch job, the other nodes are reported as not judged.
    """
    if nodes := _nodes(hosts, hostfile, ppn or 0):
        _from_outside(nodes, agent, extra, options)
    if agent or extra or ppn:
        raise click.UsageError("--ppn, --agent and --with need --hosts, --hostfile or a batch job.")
    shown = ShownVerdicts(options)
    stop = Stop(shown.rest, 1)
    with mpi_session() as transport:
        passes = _certify(transport, options, shown, stop)
    exit_with(int(not passes))


def _nodes(hosts: str | None, hostfile: Path | None, ppn: int) -> dict[str, int]:
    """Return {node: number of its ranks} by the options or, without them, by the batch job.

    Empty if a launcher has started this process as a rank.
    """
    from mpitrain.cli.launch.hosts import placement, slots

    if hosts is None and not hostfile and process.launched().launcher == "none":
        hosts = ",".join(slots(os.environ)) or None
    return placement(hosts, hostfile, ppn, "").hosts


def _from_outside(
    nodes: dict[str, int], agent: list[str], extra: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Probe the nodes; then this process becomes `launch` of `certify` on the nodes that answered."""
    if process.launched().size > 1:
        raise ConfigError(
            f"--hosts starts ranks itself, but {process.launched().launcher} started this command.",
            "Leave out --hosts, or the launcher.",
        ).on_every_rank()
    if options["expect"]:
        from mpitrain.tools.certify.verdict import read_limits

        read_limits(options["expect"])
    words = agent or agent_for(os.environ)
    click.echo(f"certify: {len(nodes)} node(s) from outside MPI", err=True)
    failed = {}
    for node, why in probe(list(nodes), words):
        click.echo(f"certify: {node}: {visible(why)}", err=True)
        failed[node] = why
    absent = {**options["absent"], **{node: failed[node] for node in nodes if node in failed}}
    present = {node: ranks for node, ranks in nodes.items() if node not in absent}
    if not present:
        _nobody(absent, options)
    listed = ",".join(f"{node}:{ranks}" for node, ranks in present.items())
    line = [sys.executable, "-m", "mpitrain", "launch", "--hosts", listed]
    line += [word for words in extra for word in ("--with", words)] + ["--", "certify"]
    line += [word for node, why in absent.items() for word in ("--absent", f"{node}={why}")]
    line += ["--rounds", str(options["rounds"]), "--dir", str(options["folder"].absolute())]
    for name, key in (("expect", "expect"), ("json", "json_file"), ("junit", "junit_file")):
        if options[key]:
            line += [f"--{name}", str(options[key].absolute())]
    os.execv(sys.executable, line)


def agent_for(environ: Mapping[str, str]) -> list[str]:
    """Return the words that run a command on a node, to be followed by its name: srun's, else
    ssh's.
    """
    if "SLURM_JOB_ID" in environ:
        return ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist"]
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"]


def probe(
    nodes: Sequence[str], agent: Sequence[str], seconds: float = SECONDS
) -> Iterator[tuple[str, str]]:
    """Start this Python on every node at the same time; yield (node, reason) when a node fails.

    agent  words that run a command on a node, without its name
    """
    with ThreadPoolExecutor(min(64, len(nodes))) as pool:
        asked = {pool.submit(_answer, node, agent, seconds): node for node in nodes}
        for answer in as_completed(asked):
            if why := answer.result():
                yield asked[answer], why


def _answer(node: str, agent: Sequence[str], seconds: float) -> str:
    """Return why a node cannot be used; "" if it imports the same mpitrain: version and files."""
    words = [sys.executable, "-c", ASK]
    # ssh passes a line to a shell on the node; srun passes words.
    tail = words if agent[0].endswith("srun") else [shlex.join(words)]
    try:
        done = subprocess.run(
            [*agent, node, *tail],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"it does not answer within {seconds:g} s"
    except OSError as error:
        return f"{agent[0]} cannot be started: {error.strerror}"
    answer = done.stdout.strip().splitlines()[-1:]
    if answer == [f"mpitrain {process.package()}"]:
        return ""
    if answer and answer[0].startswith("mpitrain "):
        return f"it has {answer[0]}, and this is {process.package()}"
    complaint = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"it cannot run mpitrain: {complaint[0]}"


def _nobody(absent: dict[str, str], options: dict[str, Any]) -> None:
    from mpitrain.tools.certify.verdict import Evidence, Limits, judge

    evidence, shown = Evidence(absent=absent), ShownVerdicts(options)
    shown.show(evidence, judge(evidence, Limits()), {})
    shown.outputs.settle()
    sys.exit(1)


class ShownVerdicts:
    """What of the verdicts is printed so far, and the files of `--json` and `--junit`."""

    def __init__(self, options: dict[str, Any]):
        self._options, self.outputs = options, Outputs()
        self._printed: list[str] = []
        self._lines = ["certify: stopped before any measurement"]

    def show(self, evidence: Any, certificate: Any, facts: dict[str, Any]) -> None:
        """Print what is new in a certificate, and write the files. At the end, print all lines."""
        from mpitrain.files import write_whole
        from mpitrain.tools.certify.report import document, failures, junit, lines

        self._lines = lines(evidence, certificate)
        new = [
            line
            for line in (failures(certificate) if certificate.awaits else self._lines)
            if line not in self._printed
        ]
        self._printed += new
        if new:
            click.echo("\n".join(new))
        if certificate.awaits:
            click.echo(f"certify: {certificate.awaits}", err=True)
        if path := self._options["json_file"]:
            write_document(self.outputs, path, document(evidence, certificate, facts))
        if path := self._options["junit_file"]:
            with self.outputs.to(path):
                write_whole(path, junit(certificate))

    def rest(self) -> str:
        """Return the lines that are not printed yet, for a certificate that is stopped now."""
        return "\n".join(line for line in self._lines if line not in self._printed)


def _certify(transport: Any, options: dict[str, Any], shown: ShownVerdicts, stop: Stop) -> bool:
    from mpitrain.tools.bench.kernels.host_products import sampler
    from mpitrain.tools.bench.results import header
    from mpitrain.tools.certify.collect import collect
    from mpitrain.tools.certify.verdict import Limits, judge, read_limits
    from mpitrain.tools.doctor.probes import examine
    from mpitrain.transport.agreement import from_all_ranks, on_all_ranks

    stop.connected(transport.rank)
    folder, expect = options["folder"], options["expect"]
    files = options["json_file"], options["junit_file"]
    is_root = transport.rank == 0

    def read() -> dict[str, Any]:
        # Only rank 0 reads the file: other hosts may not have it.
        return (read_limits(expect) if expect and is_root else Limits()).model_dump()

    limits = Limits(**from_all_ranks(transport, read)[0])
    on_all_ranks(transport, lambda: check_folder(folder))
    on_all_ranks(transport, lambda: check_files(transport.rank, files))

    def findings() -> list[Any]:
        seen = [each for each in examine(transport, folder) if each.is_fatal]
        return [problem for each in seen for problem in each.problems]

    facts = header(transport, "certify", "cpu", sys.argv[1:])
    name = from_all_ranks(transport, lambda: f"mpitrain-certify-{secrets.token_hex(4)}")[0]
    stop.temporary = work = folder / name
    measured = collect(
        transport, limits, work, options["rounds"], sampler(), findings, options["absent"]
    )
    for evidence in measured:
        certificate = judge(evidence, limits)
        if not certificate.awaits:
            stop.note()
        if is_root:
            shown.show(evidence, certificate, facts)
    on_all_ranks(transport, shown.outputs.settle)
    return certificate.passes
