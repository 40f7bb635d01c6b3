"""Files: read where they are regular, written so that a reader, or a crash, finds what was there before or all of the new."""

import errno
import os
import stat
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text`, in UTF-8, beside the file, and give it the file's name once it is on disk."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, durable, where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some have it for files only
            raise
    finally:
        os.close(descriptor)


def contents(path: Path) -> bytes:
    """The bytes of a regular file; OSError for anything else."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """OSError unless it is a regular file: a pipe would be waited for, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
