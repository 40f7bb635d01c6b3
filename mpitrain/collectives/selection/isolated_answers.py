"""Runs a user's Python file in processes (`plans/isolated.py`), and kills them after a time limit."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from mpitrain.collectives.plans import isolated
from mpitrain.collectives.selection.strays import adopt_orphans, children, end_strays
from mpitrain.machine.process import environment_of_one

SECONDS = 5.0
"""Time limit for a user's file, in seconds from the start of its process."""


class Answers(NamedTuple):
    """Output of the process that ran a user's file.

    found    the lines of JSON that it printed, parsed; an invalid line is None
    ended    its exit status
    is_slow  whether it exceeded its time limit
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
    """Run a user's file in a separate process, and return its output.

    Only one call may run at a time: it would kill the processes of a second call as strays.

    law        `module:function` that evaluates the file, as in `plans/isolated.py`
    arguments  arguments of this function; JSON must be able to represent them
    longest    number of bytes of output that are read
    """
    # An isolated interpreter imports nothing from the working directory.
    words = [sys.executable, "-I", isolated.__file__, path, law, json.dumps(arguments)]
    # The process limits the size of its files. A pipe has no such limit, and could stay open.
    with TemporaryFile() as given, TemporaryFile() as written:
        given.write(code)
        given.seek(0)
        adopt_orphans()
        before, end = children(), time.monotonic() + seconds
        child = subprocess.Popen(
            words,
            stdin=given,
            stdout=written,
            stderr=subprocess.DEVNULL,
            env={**environment_of_one(), "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            child.wait(max(0.0, end - time.monotonic()))
            is_slow = child.returncode == -signal.SIGXCPU  # It has used up its processor time.
        except subprocess.TimeoutExpired:
            is_slow = True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            end_strays(before)
        written.seek(0)
        found = [_parsed(line) for line in written.read(longest).splitlines()]
    return Answers(found, child.returncode, is_slow)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
