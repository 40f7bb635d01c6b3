"""The parent of `plans/isolated.py`: starts the process of a user's file, and ends it in time."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from mpitrain.collectives.plans import isolated
from mpitrain.machine.process import environment_of_one

SECONDS = 8.0
"""Longest time in which a file must answer."""


class Answers(NamedTuple):
    """Result of the process of a user's file.

    found    the lines of JSON that it wrote; a line that is no JSON is None
    ended    its exit status
    is_slow  whether its time was over
    """

    found: list[Any]
    ended: int
    is_slow: bool


def answers(
    path: str,
    code: bytes,
    law: str,
    *arguments: Any,
    seconds: float = SECONDS,
    longest: int = isolated.WRITTEN,
) -> Answers:
    """Run a user's file in a process of its own, and return its answers.

    law        as in `plans/isolated.py`
    arguments  of the law, as JSON has them
    longest    bytes of its answers that are read
    """
    # An isolated interpreter imports nothing from the working directory.
    words = [sys.executable, "-I", isolated.__file__, path, law, json.dumps(arguments)]
    # The process limits the size of files. A pipe would have no limit, and could stay open.
    with TemporaryFile() as given, TemporaryFile() as written:
        given.write(code)
        given.seek(0)
        child = subprocess.Popen(
            words,
            stdin=given,
            stdout=written,
            stderr=subprocess.DEVNULL,
            env={**environment_of_one(), "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # A file may start processes: they end with this one.
        )
        try:
            child.wait(seconds)
            is_slow = child.returncode in (
                -signal.SIGXCPU,
                -signal.SIGKILL,
            )  # Its limit of time ended it.
        except subprocess.TimeoutExpired:
            is_slow = True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        written.seek(0)
        found = [_parsed(line) for line in written.read(longest).splitlines()]
    return Answers(found, child.returncode, is_slow)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
