"""Restarts of a fault-tolerant run that did not go on in place: from its newest checkpoint, on the hosts that answer.

A lost host ends mpirun, or leaves it without the words of rank 0; a recovery may fail, too.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click

from mpitrain.cli import STOPPED, USAGE
from mpitrain.cli.launch.supervise import LauncherOutput
from mpitrain.config import Config
from mpitrain.config.faults import of_ranks
from mpitrain.errors import ConfigError, MpitrainError

ANSWER = 30.0
"""Seconds in which a host must start a process."""
PATIENCE = 60.0
"""Seconds in which the processes of the start before must leave the lock of the run."""
LOOK = 0.1
"""Seconds between two looks at that lock."""


class Restart(NamedTuple):
    """A start after one that failed.

    hosts  {host that answers: number of ranks that may compute on it}; empty: this host
    ranks  in replicas that are whole
    words  options of `train` that resume the run
    """

    hosts: dict[str, int]
    ranks: int
    words: list[str]


ATTEMPTS = 3
"""Number of starts in a row that may end without a newer checkpoint, if ranks were lost in each."""


class Restarts:
    """The restarts of one run. Each but a few needs a newer checkpoint than the one before, or has lost a host.

    is_first  whether there was none yet
    step      of the checkpoint from which the next start goes on; -1: there is none
    """

    def __init__(
        self,
        hosts: Mapping[str, int],
        ranks: int,
        answers: Callable[[str], bool],
        configured: Callable[[], Config],
    ):
        """Take the hosts and ranks of the first start.

        answers     host -> whether it starts processes
        configured  returns the configuration of the command line
        """
        self._hosts, self._ranks, self._answers = dict(hosts), ranks, answers
        self._configured, self.is_first = configured, True
        self.step, self._vain = -1, 0

    def after(self, words: LauncherOutput, code: int) -> Restart | None:
        """Return the next start after one that returned `code`, or None if that is the end."""
        is_over = words.end or words.failure.is_agreed or code in (0, STOPPED, USAGE)
        if is_over or not (words.began or words.failure.is_loss or words.killed.first()):
            return None
        from mpitrain.parallel.modes import servers_of
        from mpitrain.run.checkpoint.manifest import CHECKPOINTS, step_of, steps
        from mpitrain.run.run_dir import check_idle, configuration

        try:
            config = configuration(Path(words.run)) if words.began else self._configured()
            # A run that resumes may have been lost before it began.
            run = Path(words.run or config.run.out)
            saved = steps(run / CHECKPOINTS) if words.began or config.run.out else []
        except (MpitrainError, click.ClickException, OSError):
            return None
        step = step_of(saved[-1].name) if saved else -1
        with ThreadPoolExecutor(max(1, len(self._hosts))) as pool:
            living = [*pool.map(self._answers, self._hosts)]
        hosts = {
            host: n for (host, n), is_up in zip(self._hosts.items(), living, strict=True) if is_up
        }
        is_further = step > self.step or len(hosts) < len(self._hosts)
        self._vain = 0 if is_further else self._vain + 1
        if config.run.on_failure != "continue" or self._vain >= ATTEMPTS:
            return None
        layout, servers = config.layout, servers_of(config.replication, config.pipeline.schedule)
        size = layout.tp * layout.pp * layout.cp * layout.ep
        most = min(self._ranks, sum(hosts.values())) if self._hosts else self._ranks
        ranks = (most - servers) // size * size + servers
        if ranks <= servers:
            return None
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with suppress(ConfigError):
                check_idle(run)
                break
            time.sleep(LOOK)
        self._hosts, self.step, self.is_first = hosts, step, False
        again = ["--out", str(run), "--resume=auto"] if words.began or config.run.out else []
        again += ["--set", "run.inject="]
        if (delay := of_ranks(config.run.delay, ranks - servers)) != config.run.delay:
            again += ["--set", f"run.delay={delay}"]
        return Restart(hosts, ranks, again)


def answers(launcher: str, extra: list[str], host: str) -> bool:
    """Return whether a launcher of Open MPI can start a process on a host."""
    options = ["--allow-run-as-root"] * (os.geteuid() == 0)
    line = [launcher, "-n", "1", "--host", host, *options, *extra, sys.executable, "-c", ""]
    try:
        done = subprocess.run(line, timeout=ANSWER, stdin=subprocess.DEVNULL, capture_output=True)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
