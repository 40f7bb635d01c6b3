"""Where compiled kernels are kept: a folder of this user alone for each kind of engine."""

import atexit
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path


def cache_of(what: str) -> Path:
    """This user's folder for kernels compiled for `what`: a place where nobody else can put one, for they are loaded from it."""
    temporary = Path(tempfile.gettempdir()) / f"mpitrain-{what}-{os.getuid()}"
    at_home = Path(os.path.expanduser(f"~/.cache/mpitrain/{what}"))  # as it is, for a user without any home
    for folder in (at_home, temporary):
        if folder.is_absolute() and _is_own(folder):
            return folder
    return _fresh_folder(what)


def _is_own(folder: Path) -> bool:
    """Whether the folder, made if there is none, is this user's, no symbolic link, and writable by this user alone."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return False
    is_private = facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(facts.st_mode) and is_private and os.access(folder, os.W_OK)


@cache
def _fresh_folder(what: str) -> Path:
    """A folder of this process alone, gone when it ends: every kernel is compiled anew."""
    folder = tempfile.mkdtemp(prefix=f"mpitrain-{what}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
