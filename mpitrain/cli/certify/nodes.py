"""A probe of each node from outside MPI."""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from mpitrain.machine.process import package

CONNECT, SECONDS = 20, 60.0
"""Seconds in which ssh must connect to a node, and in which the node must have imported mpitrain."""
ASK = (
    "import mpitrain.cli.certify.command, mpitrain.tools.certify.collect; "
    "from mpitrain.machine import process; "
    "print('mpitrain', process.package())"
)
"""The program that a node runs."""


def agent_for(environ: Mapping[str, str]) -> list[str]:
    """Return the words that run a command on a node, to be followed by its name: srun, else ssh."""
    if "SLURM_JOB_ID" in environ:
        return ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist"]
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"]


def probe(
    nodes: Sequence[str], agent: Sequence[str], seconds: float = SECONDS
) -> Iterator[tuple[str, str]]:
    """Start this Python on every node at the same time; yield (node, reason) as each one fails.

    agent  words that run a command on a node, without its name
    """
    with ThreadPoolExecutor(min(64, len(nodes))) as pool:
        asked = {pool.submit(_answer, node, agent, seconds): node for node in nodes}
        for answer in as_completed(asked):
            if why := answer.result():
                yield asked[answer], why


def _answer(node: str, agent: Sequence[str], seconds: float) -> str:
    """Return why a node cannot be used; "" if it imports the same mpitrain, version and files."""
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
    if answer == [f"mpitrain {package()}"]:
        return ""
    if answer and answer[0].startswith("mpitrain "):
        return f"it has {answer[0]}, and this is {package()}"
    complaint = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"it cannot run mpitrain: {complaint[0]}"
