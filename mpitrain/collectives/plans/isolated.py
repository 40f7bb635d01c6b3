"""Judges a user's Python file: a process with limits of time and memory, whose forks run the file.

    python -I isolated.py FILE LAW ARGUMENTS < FILE

LAW is `module:function` of this package, ARGUMENTS a list as JSON. The function gets a `UserFile`
and the arguments. Each answer that it yields is printed as a line of JSON. If the file breaks a rule,
the last line is `{"problem": ...}`, a sentence. If the file's process ends without an answer, this
one ends as it did. The parent is `selection/isolated_answers.py`.
"""

import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

SECONDS = 4
"""Processor time of each process, in seconds."""
MEMORY = 1 << 30
"""Address space of each process, in bytes."""
WRITTEN = 1 << 26
"""Largest file that a process may write, in bytes."""


def main() -> None:
    """Answer for the arguments of the command line."""
    from mpitrain.collectives.plans.isolated_values import as_json
    from mpitrain.collectives.plans.isolated_worker import Ended, UserFile, Wrong, keep_secret

    file, law, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    module, _, function = law.partition(":")
    answers = getattr(importlib.import_module(module), function)
    keep_secret()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN, WRITTEN))
    own, status = UserFile(file, sys.stdin.buffer.read()), 0

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    try:
        for answer in answers(own, *arguments):
            say(answer)
    except Wrong as error:
        say({"problem": as_json(error.sentence)})
    except MemoryError:
        say(
            {"problem": as_json(Wrong("it takes more than {most} MiB", most=MEMORY >> 20).sentence)}
        )
    except Ended as ended:
        status = ended.status
    if status < 0:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))
    main()
