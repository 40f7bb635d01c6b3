"""Files that a user names."""

import errno
import stat
from pathlib import Path


def contents(path: Path) -> bytes:
    """The bytes of a regular file; OSError for anything else."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """OSError unless it is a regular file: a pipe would be waited for, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
