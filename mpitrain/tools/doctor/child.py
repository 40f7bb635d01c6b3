"""A child process for each trial: a crash or a hang of a trial is its result."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence

from mpitrain.machine import process

SECONDS = 20.0
"""Time limit of a trial. It runs in a child process: if a file lock hangs, the rank continues."""
FAILED = "failed"
"""The key of the result of a trial that did not end by itself."""


def in_child(name: str, argument: str, seconds: float = SECONDS) -> dict[str, str]:
    """Run a trial of `mpitrain.tools.doctor.trials` in a child; return its result, or {FAILED: why}."""
    return outcome(
        (sys.executable, "-m", "mpitrain.tools.doctor.trials", name, argument), seconds=seconds
    )


def outcome(command: Sequence[str], seconds: float) -> dict[str, str]:
    """Run a command that prints a JSON object; return the object, or {FAILED: why}."""
    try:
        done = subprocess.run(
            command,
            env=process.environment_of_one(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {FAILED: f"no answer after {seconds:g} s"}
    if done.returncode < 0:
        return {FAILED: f"crashed ({signal.Signals(-done.returncode).name})"}
    try:
        result = json.loads(done.stdout.splitlines()[-1])
        return {str(key): str(value) for key, value in result.items()}
    except (ValueError, IndexError, AttributeError):
        lines = done.stderr.strip().splitlines()
        return {FAILED: lines[-1] if lines else f"exit code {done.returncode}"}
