"""A student's Python file, run in a child process with limits of time and memory.

The child loads the file, and calls a function of this package with the file's module. Each answer
that this function yields is a line of JSON. If the file breaks a rule, the last line is
`{"problem": ...}`, a sentence. Nothing here imports NumPy or MPI.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, NamedTuple

from mpitrain.collectives.plans.checked import Wrong, reason_of
from mpitrain.errors import Sentence
from mpitrain.machine.process import environment_of_one

SECONDS = 10.0
"""Time limit for a student's file, in seconds from the start of its process."""
LIMITS = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_FSIZE: 1 << 26, resource.RLIMIT_CPU: 60}
"""Limits of the child: address space and largest file in bytes, and processor time in seconds.

The last ends a child whose parent is gone.
"""
CHILD = f"""import sys
sys.path.append({str(Path(__file__).parents[4])!r})
from {__name__} import serve
serve()"""


class Answers(NamedTuple):
    """Output of the child that ran a student's file.

    results  the lines of JSON that it wrote, parsed
    ended    its exit status
    is_slow  whether it exceeded its time limit
    """

    results: list[dict[str, Any]]
    ended: int
    is_slow: bool

    def answer(self, number: int) -> dict[str, Any]:
        """Return an answer by its number; Wrong if there is none, or the file breaks a rule there."""
        if number < len(self.results):
            answer = self.results[number]
            if "problem" in answer:
                problem = _from_json(answer["problem"])
                raise Wrong(problem.law, **problem.values)
            return answer
        if self.is_slow:
            raise Wrong("it gives no answer within {seconds:g} s", seconds=SECONDS)
        raise Wrong("its process ended with {ended} and no answer", ended=self.ended)


def answers(path: str, code: bytes, law: str, *arguments: Any) -> Answers:
    """Run a student's file in a child, and return its output.

    law        `module:function`: (module of the file, *arguments) -> iterator of answers
    arguments  JSON must be able to represent them
    """
    # An isolated interpreter imports nothing from the working directory.
    words = [sys.executable, "-I", "-c", CHILD, path, law, json.dumps(arguments)]
    with TemporaryFile() as source, TemporaryFile() as output:
        source.write(code)
        source.seek(0)
        child = subprocess.Popen(
            words,
            stdin=source,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={**environment_of_one(), "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            child.wait(SECONDS)
            is_slow = False
        except subprocess.TimeoutExpired:
            is_slow = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        *lines, _ = output.read().split(b"\n")
    return Answers([json.loads(line) for line in lines], child.returncode, is_slow)


def serve() -> None:
    """Run the file that the command line names, and write the answers; the main function of the child."""
    path, law, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    written = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # The file may print.
    code = sys.stdin.buffer.read()
    module, _, function = law.partition(":")
    judge = getattr(import_module(module), function)
    for limit, most in LIMITS.items():
        resource.setrlimit(limit, (most, most))
    own = ModuleType("own")
    own.__file__ = path
    sys.modules[own.__name__] = own  # A dataclass looks for its module there.
    try:
        exec(compile(code, path, "exec"), own.__dict__)
        for answer in judge(own, *arguments):
            print(json.dumps(answer), file=written, flush=True)
    except (Exception, SystemExit) as error:
        problem = _as_json(_reason(error, path).sentence)
        print(json.dumps({"problem": problem}), file=written, flush=True)
    os._exit(0)  # The file may have started threads.


def _reason(error: BaseException, path: str) -> Wrong:
    if isinstance(error, MemoryError):
        return Wrong("it takes more than {most} MiB", most=LIMITS[resource.RLIMIT_AS] >> 20)
    return reason_of(error, path)


def _as_json(value: Any) -> Any:
    """Return a `Sentence`, or the value of one of its fields, as JSON."""
    if isinstance(value, Sentence):
        return {"law": value.law, "values": {k: _as_json(v) for k, v in value.values.items()}}
    return [_as_json(one) for one in value] if isinstance(value, tuple) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return Sentence(value["law"], **{k: _from_json(v) for k, v in value["values"].items()})
    return tuple(map(_from_json, value)) if isinstance(value, list) else value
