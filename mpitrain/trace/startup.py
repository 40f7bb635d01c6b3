"""Traces of ranks without a run directory: files on each host, for starts that fail.

A trace is at TMPDIR/mpitrain-<uid>/<parent process>/rank-00000. Every user of the host can
foresee this path. So the folder is used only if it is no link, belongs to this user, and has mode
0700. No link in it is followed.
"""

import atexit
import contextlib
import os
import re
import socket
import stat
import tempfile
import time
from pathlib import Path

from mpitrain.files import Directory, opened
from mpitrain.trace.recorder import Recorder

NAME = "rank-{:05d}"
START, TRACE = re.compile(r"\d+(-\d+)?", re.ASCII), re.compile(r"rank-\d{5,}", re.ASCII)
"""Patterns of the names of start folders, one for each launch, and of the trace files in them."""
DAY = 86_400
"""Age in seconds from which a later start deletes the trace files of a failed start."""


def begun(rank: int, ranks: int, local_ranks: int = 1) -> Recorder:
    """Return a recorder that writes to a file from its first record on.

    The arguments are the numbers that the launcher gave this process.
    `Recorder.keep` moves the file to the run directory. A process that exits by itself removes it.
    The ranks of a host share the folder of their parent process. A process without a launcher has
    its own, because a shell may start several.
    """
    recorder, host = Recorder(), socket.gethostname()
    recorder.facts(rank=rank, ranks=ranks, local_ranks=local_ranks, host=host)
    recorder.facts(process=os.getpid(), time=time.time())
    with contextlib.suppress(OSError):  # The run continues without a trace file.
        with opened(_home().parent) as temporary, contextlib.suppress(FileExistsError):
            os.mkdir(_home().name, 0o700, dir_fd=temporary.descriptor)
        with _own() as home:
            _sweep(home)
            name = str(os.getppid()) if ranks > 1 else f"{os.getppid()}-{os.getpid()}"
            folder = home.make(name, 0o700)
            recorder.keep_in(folder, NAME.format(rank))
            atexit.register(_give_up, recorder, folder.path)
    return recorder


def left() -> list[Path]:
    """Return the folders of starts that ended before they had a run directory, the newest last."""
    with contextlib.suppress(OSError), _own() as home:
        entries = [(home.facts(name), name) for name in home.names() if START.fullmatch(name)]
        starts = sorted(
            (facts.st_mtime, name)
            for facts, name in entries
            if facts and stat.S_ISDIR(facts.st_mode)
        )
        return [
            home.path / name for _, name in starts if any(map(TRACE.fullmatch, _names(home, name)))
        ]
    return []


def folder_of(parent: int) -> Path:
    """Return the folder of the ranks that a process has started on this host."""
    return _home() / str(parent)


def _home() -> Path:
    return Path(tempfile.gettempdir()) / f"mpitrain-{os.getuid()}"


def _own() -> Directory:
    """Open this user's folder, which contains a folder for each launch.

    raises   OSError unless it is a real folder of this user, closed to all others
    """
    home = opened(_home(), inner=1)
    facts = os.fstat(home.descriptor)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o777 != 0o700:
        home.close()
        raise PermissionError(f"{home.path} is open to others")
    return home


def _give_up(recorder: Recorder, folder: Path) -> None:
    """Record that the program ends by itself; remove this rank's file, and an empty folder."""
    recorder.facts(left=True)
    recorder.give_up(folder)
    with contextlib.suppress(OSError), _own() as home:
        home.remove_empty(folder.name)


def _sweep(home: Directory) -> None:
    """Remove the traces of starts from more than a day ago; a folder with other contents stays."""
    for name in filter(START.fullmatch, home.names()):
        with contextlib.suppress(OSError), home.subdirectory(name) as folder:
            facts, names = os.fstat(folder.descriptor), folder.names()
            is_old = time.time() - facts.st_mtime > DAY and facts.st_uid == os.getuid()
            if is_old and all(_is_trace(folder, each) for each in names):
                for each in names:
                    folder.remove(each)
                home.remove_empty(name)


def _names(home: Directory, name: str) -> list[str]:
    with home.subdirectory(name) as folder:
        return folder.names()


def _is_trace(folder: Directory, name: str) -> bool:
    facts = folder.facts(name)
    return bool(
        TRACE.fullmatch(name)
        and facts
        and stat.S_ISREG(facts.st_mode)
        and facts.st_uid == os.getuid()
    )
