"""The traces of ranks that have no run directory yet: files on the host of each, for starts that fail."""

import atexit
import contextlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from mpitrain.trace.recorder import Recorder

NAME = "rank-{:05d}"
DAY = 86_400
"""Seconds that what a failed start left behind is kept at least."""


def begun(rank: int, ranks: int) -> Recorder:
    """A recorder in a file of its own from its first record on; `keep` moves it, a process that ends by itself removes it.

    rank, ranks  as the launcher says; started by one process, the ranks of a host write side by side; one that has no launcher
                 by itself, for a shell may start several
    """
    recorder = Recorder()
    recorder.facts(rank=rank, ranks=ranks, host=socket.gethostname(), process=os.getpid(), time=time.time())
    with contextlib.suppress(OSError):    # a run goes on without
        home = _home()
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid == os.getuid():
            for old in left():
                if time.time() - old.stat().st_mtime > DAY:
                    shutil.rmtree(old, ignore_errors=True)
            folder = home / (str(os.getppid()) if ranks > 1 else f"{os.getppid()}-{os.getpid()}")
            folder.mkdir(exist_ok=True)
            recorder.keep(folder / NAME.format(rank))
            atexit.register(recorder.give_up, folder)
    return recorder


def _home() -> Path:
    return Path(tempfile.gettempdir()) / f"mpitrain-{os.getuid()}"


def left() -> list[Path]:
    """The directories of starts that have not come as far as a run directory, the newest last."""
    with contextlib.suppress(OSError):
        return sorted(_home().iterdir(), key=lambda folder: folder.stat().st_mtime)
    return []
