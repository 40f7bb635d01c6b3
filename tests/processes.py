"""Programs that tests start, and how long one may take: long enough for a machine that does something else, too."""

import json
import os
import re
import subprocess
import sys
import time
from ast import literal_eval
from importlib.util import find_spec
from itertools import starmap
from typing import NamedTuple

import pytest

SECONDS = float(os.environ.get("MPITRAIN_TEST_SECONDS", "300"))
"""For one program; a whole test has three times that (see conftest.py). Nothing else in the tests counts seconds for one."""

NEVER_BEGAN = "listener thread failed to start"
"""What an mpirun says that a crowded machine gave no thread, before it starts a rank: no test of ours has begun."""

PROGRAM = [sys.executable, "-m", "mpitrain"]


def skip_without(package):
    """Skip a test, or a file, where a package is not installed. It is not imported: scikit-learn takes a worker a second."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)


def run(words, **more):
    """Run a program to its end, its output caught as text."""
    return begun(
        lambda: subprocess.run(
            [*map(str, words)],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=SECONDS,
            **more,
        )
    )


def begun(start, pauses=(1, 5, 20)):
    """What `start()` says, a finished process; called again where mpirun found no thread to spare and had started nothing."""
    for pause in pauses:
        done = start()
        if not done.returncode or NEVER_BEGAN not in f"{done.stdout}{done.stderr}":
            return done
        time.sleep(pause)
    return start()


def sets(**values):
    """The options --set of a command, {section__key: value}."""
    settings = (f"{key.replace('__', '.')}={value}" for key, value in values.items())
    return [word for setting in settings for word in ("--set", setting)]


TINY_STEPS = sets(model__layers=1, model__width=16, model__context=16, batch__size=6)
"""A job whose steps take no time."""


def mpitrain(*words, **more):
    return run([*PROGRAM, *words], **more)


def launch(ranks, *words, **more):
    return mpitrain("launch", "-n", ranks, "--", *words, **more)


def python_ranks(ranks, code, folder):
    """Run Python code on several ranks."""
    return run(["mpirun", "-n", ranks, sys.executable, "-c", code], cwd=folder)


WRITES = """
import json, os
own_lines = open("rank-" + (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) + ".jsonl", "w", buffering=1)
def says(*row): own_lines.write(json.dumps(row) + "\\n")
"""
"""Of a program on several ranks: `says(...)` writes a row to a file of the rank, since long lines of ranks mix on a pipe."""


def rows_of_ranks(folder):
    """All rows that programs with `WRITES` have written in a folder, rank by rank."""
    files = sorted(folder.glob("rank-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


class Said(NamedTuple):
    """What came of a call on several ranks: the exit code of each, and what they printed to either stream."""

    codes: list[int | None]
    output: str
    errors: str


def said_of_one_start(ranks, calls, folder, before=""):
    """What ranks of one start say of each call, one call after another. `before` is a line of Python that comes first."""
    program = (
        "import sys; from mpi4py import MPI; from mpitrain.cli import main\n"
        f"{before}\n"
        f"for words in {calls!r}:\n"
        "    ended = None\n"
        "    try: main(words)\n"
        "    except SystemExit as end: ended = end.code\n"
        "    everyone = MPI.COMM_WORLD.gather(ended)\n"
        "    for stream in (sys.stdout, sys.stderr):\n"
        "        if MPI.COMM_WORLD.rank == 0: print(f'=== {everyone}', file=stream, flush=True)\n"
    )
    done = python_ranks(ranks, program, folder)
    errors, output = (re.split(r"=== (.*)\n", stream) for stream in (done.stderr, done.stdout))
    assert errors[1::2] == output[1::2] and len(output) == 2 * len(calls) + 1, (
        done.stderr[-2000:] + done.stdout[-2000:]
    )
    codes = map(literal_eval, output[1::2])
    return [*starmap(Said, zip(codes, output[:-1:2], errors[:-1:2], strict=True))]


def calls_of_one_start(ranks, calls, folder, code, before=""):
    """What ranks of one start say of each call, one call after another, and print; `code` is the exit code of all ranks, of
    every call or a list of one for each. `before` is a line of Python that comes first.
    """
    found = said_of_one_start(ranks, calls, folder, before)
    codes = code if isinstance(code, list) else [code] * len(calls)
    assert [one.codes for one in found] == [[each] * ranks for each in codes], found[-1]
    return [one.errors for one in found], [one.output for one in found]


def shell(line, **more):
    """Run a line of bash; it fails if any part of a pipeline does."""
    return run(["bash", "-o", "pipefail", "-c", line], **more)
