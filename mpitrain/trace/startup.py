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

from mpitrain.files import own_folder, remove
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
        own_folder(_home(), 0o700)
        home = _own()
        _sweep(home)
        name = str(os.getppid()) if ranks > 1 else f"{os.getppid()}-{os.getpid()}"
        folder = own_folder(home / name, 0o700)
        recorder.keep(folder / NAME.format(rank))
        atexit.register(_give_up, recorder, folder)
    return recorder


def left() -> list[Path]:
    """Return the folders of starts that ended before they had a run directory, the newest last."""
    with contextlib.suppress(OSError):
        starts = sorted(_starts(_own()), key=lambda folder: (folder.stat().st_mtime, folder.name))
        return [folder for folder in starts if any(map(TRACE.fullmatch, os.listdir(folder)))]
    return []


def folder_of(parent: int) -> Path:
    """Return the folder of the ranks that a process has started on this host."""
    return _home() / str(parent)


def _home() -> Path:
    return Path(tempfile.gettempdir()) / f"mpitrain-{os.getuid()}"


def _own() -> Path:
    """Return this user's folder, which contains a folder for each launch.

    raises   OSError unless it is a real folder of this user, closed to all others: then nobody else can
             put a link into it
    """
    home = _home()
    facts = home.lstat()
    is_closed = stat.S_ISDIR(facts.st_mode) and facts.st_mode & 0o777 == 0o700
    if not is_closed or facts.st_uid != os.getuid():
        raise PermissionError(f"{home} is a link, or open to others")
    return home


def _starts(home: Path) -> list[Path]:
    """Return the folders of starts; a link is none."""
    return [
        folder
        for folder in sorted(home.iterdir())
        if START.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
    ]


def _give_up(recorder: Recorder, folder: Path) -> None:
    """Record that the program ends by itself; remove this rank's file, and an empty folder."""
    recorder.facts(left=True)
    recorder.give_up(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _sweep(home: Path) -> None:
    """Remove the traces of starts from more than a day ago; a folder with other contents stays."""
    for folder in _starts(home):
        with contextlib.suppress(OSError):
            facts, files = folder.stat(), [*folder.iterdir()]
            is_old = time.time() - facts.st_mtime > DAY and facts.st_uid == os.getuid()
            if is_old and all(map(_is_trace, files)):
                for file in files:
                    remove(file)
                folder.rmdir()


def _is_trace(file: Path) -> bool:
    facts = file.lstat()
    return bool(
        TRACE.fullmatch(file.name) and stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()
    )
