"""Where compiled kernels are kept: a folder of this user alone for each kind of engine."""

import atexit
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

from mpitrain.files import opened


def cache_of(what: str) -> Path:
    """This user's folder for kernels compiled for `what`: a place where nobody else can put one, for they are loaded from it."""
    temporary = Path(tempfile.gettempdir()) / f"mpitrain-{what}-{os.getuid()}"
    at_home = Path(
        os.path.expanduser(f"~/.cache/mpitrain/{what}")
    )  # as it is, for a user without any home
    if at_home.is_absolute() and _is_own(at_home):
        return at_home
    return (
        temporary if _keeps_names(temporary.parent) and _is_own(temporary) else _fresh_folder(what)
    )


def _is_own(folder: Path) -> bool:
    """Whether the folder, made if there is none, is this user's, no symbolic link, and writable by this user alone."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with opened(folder.parent) as parent, parent.make(folder.name, 0o700) as found:
            facts = os.fstat(found.descriptor)
    except OSError:
        return False
    is_private = facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_private and os.access(folder, os.W_OK)


def _keeps_names(folder: Path) -> bool:
    """Whether no other user but root can exchange what this user has in the folder: as in /tmp, which has the sticky bit."""
    try:
        facts = os.stat(folder)
    except OSError:
        return False
    is_closed = not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or facts.st_mode & stat.S_ISVTX
    return facts.st_uid in (0, os.getuid()) and bool(is_closed)


@cache
def _fresh_folder(what: str) -> Path:
    """A folder of this process alone, gone when it ends: every kernel is compiled anew."""
    folder = tempfile.mkdtemp(prefix=f"mpitrain-{what}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
