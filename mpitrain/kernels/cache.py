"""The folder of compiled kernels: private to this user, one for each kind of engine."""

import atexit
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

from mpitrain.files import opened


def cache_of(what: str) -> Path:
    """Return this user's folder for the compiled kernels of one kind of engine, `what`.

    No other user may write to it, because code is loaded from it. It is ~/.cache/mpitrain/<what>,
    else a folder in the temporary directory, else a new folder of this process.
    """
    temporary = Path(tempfile.gettempdir()) / f"mpitrain-{what}-{os.getuid()}"
    # Without a home directory, expanduser returns the path unchanged, which is then not absolute.
    at_home = Path(os.path.expanduser(f"~/.cache/mpitrain/{what}"))
    if at_home.is_absolute() and _is_own(at_home):
        return at_home
    return (
        temporary if _keeps_names(temporary.parent) and _is_own(temporary) else _fresh_folder(what)
    )


def _is_own(folder: Path) -> bool:
    """Return whether this user owns the folder, and only this user may write to it.

    A symbolic link does not qualify. Creates the folder if it does not exist.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with opened(folder.parent) as parent, parent.make(folder.name, 0o700) as directory:
            facts = os.fstat(directory.descriptor)
    except OSError:
        return False
    is_private = facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_private and os.access(folder, os.W_OK)


def _keeps_names(folder: Path) -> bool:
    """Return whether only root and this user can replace this user's entries in the folder.

    /tmp qualifies, because it has the sticky bit.
    """
    try:
        facts = os.stat(folder)
    except OSError:
        return False
    is_closed = not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or facts.st_mode & stat.S_ISVTX
    return facts.st_uid in (0, os.getuid()) and bool(is_closed)


@cache
def _fresh_folder(what: str) -> Path:
    """Return a new folder of this process, removed at exit: every kernel is then compiled anew."""
    folder = tempfile.mkdtemp(prefix=f"mpitrain-{what}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
