"""Trials that can crash or hang, each in a child process: python -m mpitrain.tools.doctor.trials NAME ARGUMENT.

A crash or a hang is the result of the trial. Otherwise the trial prints its result as JSON: a dict
of names and short texts.
"""

import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from mpitrain.machine import process

SECONDS = 20.0
"""Time limit of a trial. It runs in a child process: if a file lock hangs, the rank continues."""
FAILED = "failed"
"""The key of the result of a trial that did not end by itself."""
WORKS, UNLOCKED = "works", "two processes hold one lock"
"""Results of a trial."""
SIZE = 1 << 20
SHARED = 16 << 20
"""Bytes of the trial of shared memory: Open MPI makes a file of this size for each rank."""


def in_child(name: str, argument: str, seconds: float = SECONDS) -> dict[str, str]:
    """Run a trial in a child; return its result, or {FAILED: reason}.

    name  of a function of this module
    """
    return outcome(
        (sys.executable, "-m", "mpitrain.tools.doctor.trials", name, argument), seconds=seconds
    )


def outcome(command: Sequence[str], seconds: float) -> dict[str, str]:
    """Run a command that prints a JSON object; return the object, or {FAILED: reason}."""
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


def locks(folder: str) -> dict[str, str]:
    """Lock a new file in `folder`, and try to lock it from a second process."""
    results = {}
    for name, lock in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
        with tempfile.NamedTemporaryFile(prefix=".mpitrain-doctor-", dir=folder) as file:
            try:
                lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                results[name] = error.strerror or str(error)
                continue
            second = os.fork()
            if not second:
                os._exit(1 if _gets_lock(file.name, lock) else 0)
            _, status = os.waitpid(second, 0)
            results[name] = UNLOCKED if status else WORKS
    return results


def _gets_lock(path: str, lock: Callable[[int, int], None]) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def locked(path: str) -> dict[str, str]:
    """Try to lock a file that another host has locked; return whether that was refused."""
    if not os.path.exists(path):
        return {"across": "the file of another host is not there"}
    is_free = _gets_lock(path, fcntl.flock)
    return {"across": "two hosts hold one lock" if is_free else WORKS}


def mapped(folder: str) -> dict[str, str]:
    """Write a file through a memory map and read it; then write the file and read the map."""
    with tempfile.TemporaryFile(prefix=".mpitrain-doctor-", dir=folder) as file:
        file.truncate(SIZE)
        with mmap.mmap(file.fileno(), SIZE) as memory:
            memory[:] = bytes(range(256)) * (SIZE // 256)
            memory.flush()
            if os.pread(file.fileno(), SIZE, 0) != memory[:]:
                return {"maps": "a read misses bytes written through a map"}
            os.pwrite(file.fileno(), b"\xff" * SIZE, 0)
            if memory[:] != b"\xff" * SIZE:
                return {"maps": "a map misses bytes written to the file"}
    return {"maps": WORKS}


def shared(folder: str) -> dict[str, str]:
    """Fill 16 MiB of shared memory. Without room there, the kernel ends this process."""
    with tempfile.TemporaryFile(prefix="mpitrain-doctor-", dir=folder) as file:
        file.truncate(SHARED)
        with mmap.mmap(file.fileno(), SHARED) as memory:
            for page in range(0, SHARED, mmap.PAGESIZE):
                memory[page] = 1
    return {"memory": WORKS}


def imports(_: str) -> dict[str, str]:
    """Import the modules of a training run; return the seconds and the number of files opened."""
    opened = 0

    def count(event: str, arguments: tuple) -> None:
        nonlocal opened
        opened += event == "open"

    sys.addaudithook(count)
    start = time.perf_counter()
    import mpitrain.run.loop
    import mpitrain.transport.mpi  # noqa: F401

    return {"seconds": f"{time.perf_counter() - start:.3f}", "files": str(opened)}


TRIALS = {"locks": locks, "locked": locked, "mapped": mapped, "shared": shared, "imports": imports}
"""{name: trial}."""


def main() -> None:
    name, argument = sys.argv[1:]
    try:
        result = TRIALS[name](argument)
    except OSError as error:
        result = {FAILED: f"files cannot be written in {argument}: {error.strerror or error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
