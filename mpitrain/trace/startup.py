"""The traces of ranks that have no run directory yet: files on the host of each, for starts that fail.

A trace lies in TMPDIR/mpitrain-<uid>/<parent process>/rank-00000. Every user of the host can foresee
this path. The folder is used only if it is a real one, of this user and closed to all others (mode
0700); no link in it is followed.
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
"""Names of the folder of a start, and of the files in it."""
DAY = 86_400
"""Seconds that what a failed start left behind is kept at least."""


def begun(rank: int, ranks: int) -> Recorder:
    """A recorder in a file of its own from its first record on; `keep` moves it, a process that ends by itself removes it.

    rank, ranks  as the launcher says; started by one process, the ranks of a host write side by side; one that has no launcher
                 by itself, for a shell may start several
    """
    recorder = Recorder()
    recorder.facts(
        rank=rank, ranks=ranks, host=socket.gethostname(), process=os.getpid(), time=time.time()
    )
    with contextlib.suppress(OSError):  # a run goes on without
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
    """The directories of starts that have not come as far as a run directory, the newest last."""
    with contextlib.suppress(OSError), _own() as home:
        found = [(home.facts(name), name) for name in home.names() if START.fullmatch(name)]
        starts = sorted(
            (facts.st_mtime, name) for facts, name in found if facts and stat.S_ISDIR(facts.st_mode)
        )
        return [
            home.path / name for _, name in starts if any(map(TRACE.fullmatch, _names(home, name)))
        ]
    return []


def _home() -> Path:
    return Path(tempfile.gettempdir()) / f"mpitrain-{os.getuid()}"


def _own() -> Directory:
    """The folder of all starts; OSError unless it is a real one, of this user, and closed to all others."""
    home = opened(_home(), inner=1)
    facts = os.fstat(home.descriptor)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o777 != 0o700:
        home.close()
        raise PermissionError(f"{home.path} is open to others")
    return home


def _give_up(recorder: Recorder, folder: Path) -> None:
    """Remove the file of this rank, and the folder after the last of them."""
    recorder.give_up(folder)
    with contextlib.suppress(OSError), _own() as home:
        home.remove_empty(folder.name)


def _sweep(home: Directory) -> None:
    """Remove what starts of more than a day ago have left; a folder that holds anything else stays as it is."""
    for name in filter(START.fullmatch, home.names()):
        with contextlib.suppress(OSError), home.subdirectory(name) as folder:
            facts, names = os.fstat(folder.descriptor), folder.names()
            is_old = time.time() - facts.st_mtime > DAY
            if (
                is_old
                and facts.st_uid == os.getuid()
                and all(_is_trace(folder, each) for each in names)
            ):
                for each in names:
                    folder.remove(each)
                home.remove_empty(name)


def _names(home: Directory, name: str) -> list[str]:
    with home.subdirectory(name) as folder:
        return folder.names()


def _is_trace(folder: Directory, name: str) -> bool:
    """Whether this is a file that a rank of this user has written."""
    facts = folder.facts(name)
    return bool(
        TRACE.fullmatch(name)
        and facts
        and stat.S_ISREG(facts.st_mode)
        and facts.st_uid == os.getuid()
    )
