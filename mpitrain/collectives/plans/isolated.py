"""Runs a user's Python file in a process of its own, which limits its time and memory.

    python -I isolated.py FILE LAW ARGUMENTS < FILE

LAW is `module:function` of this package, ARGUMENTS a list as JSON. The function gets the names that
the file defines and the arguments. Each answer that it yields is printed as a line of JSON. After
an error the last line is `{"problem": "..."}`. The parent is `selection/isolated_answers.py`.
"""

import importlib
import json
import os
import resource
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SECONDS = 7
"""Processor time of the process, in seconds."""
MEMORY = 1 << 30
"""Address space of the process, in bytes."""
WRITTEN = 1 << 26
"""Largest file that the process may write, its answers included, in bytes."""


class Wrong(Exception):
    """A rule that the user's file breaks."""


def main() -> None:
    """Answer for the arguments of the command line."""
    file, law, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    module, _, function = law.partition(":")
    answers = getattr(importlib.import_module(module), function)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN, WRITTEN))
    out = os.dup(1)
    os.dup2(2, 1)  # A print of the file must not enter the answer.
    with os.fdopen(out, "w") as channel:

        def say(answer: dict[str, Any]) -> None:
            channel.write(json.dumps(answer) + "\n")
            channel.flush()

        try:
            own = ModuleType("own")
            own.__file__ = file
            code = sys.stdin.buffer.read()
            exec(compile(code, file, "exec"), own.__dict__)
            for answer in answers(own.__dict__, *arguments):
                say(answer)
        except Wrong as error:
            say({"problem": str(error)})
        except MemoryError:
            say({"problem": f"it takes more than {MEMORY >> 20} MiB"})
        except (Exception, SystemExit) as error:
            say({"problem": raised(error, file)})


def raised(error: BaseException, file: str) -> str:
    """Return an error as text, with its line in the user's file."""
    lines = []
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        lines.append(error.lineno)
    where = f" in line {lines[-1]}" if lines else ""
    return f"it raises {type(error).__name__}{where}: {error}"


if __name__ == "__main__":
    # A law raises Wrong of the imported module, so `main` must come from there.
    sys.path.append(str(Path(__file__).parents[3]))
    importlib.import_module("mpitrain.collectives.plans.isolated").main()
