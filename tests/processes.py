"""Programs that tests start, and how long one may take: long enough for a machine that does something else, too."""

import os
import subprocess
import sys

SECONDS = float(os.environ.get("MPITRAIN_TEST_SECONDS", "300"))
"""For one program; a whole test has three times that (see conftest.py). Nothing else in the tests counts seconds for one."""

PROGRAM = [sys.executable, "-m", "mpitrain"]


def run(words, **more):
    """Run a program to its end, its output caught as text."""
    return subprocess.run([*map(str, words)], capture_output=True, text=True, errors="surrogateescape", timeout=SECONDS, **more)


def mpitrain(*words, **more):
    return run([*PROGRAM, *words], **more)


def launch(ranks, *words, **more):
    return mpitrain("launch", "-n", ranks, "--", *words, **more)


def python_ranks(ranks, code, folder):
    """Run Python code on several ranks."""
    return run(["mpirun", "-n", ranks, sys.executable, "-c", code], cwd=folder)


def shell(line, **more):
    """Run a line of bash; it fails if any part of a pipeline does."""
    return run(["bash", "-o", "pipefail", "-c", line], **more)
