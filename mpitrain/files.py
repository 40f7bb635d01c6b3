"""Files that are complete or absent, and durable; only regular files are read.

A run directory may come from another person, and a folder for temporary files is open to all. A link
in it, such as `config.toml.partial`, could lead to any file of this user. So a link may be read, but
nothing is written or removed through one: a new file takes the place of a link, and so does a rename.
"""

import codecs
import errno
import math
import os
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from mpitrain.errors import ConfigError, MpitrainError

IS_LINK = "it is a symbolic link, and links are not followed here"
OTHER = "Name a file in a folder that exists and that you may write to."
NOT_REGULAR = "it is not a regular file"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IN_THE_WAY = (
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.ELOOP,
    errno.EINVAL,
    errno.ENXIO,
)
BYTE_ORDER_MARK = codecs.BOM_UTF8
FOUND_WRONG = (*IN_THE_WAY, errno.ENOENT, None)
"""The numbers of errors that a file itself causes: it is missing, no regular file, a link, or too short."""
ON_READ: ContextVar[Callable[[], None]] = ContextVar("after a block is read", default=lambda: None)
"""Called after each block of a large file that is read: the watchdog of a run counts it as progress."""

PARSING = threading.Lock()
"""Held for `ast.parse`, which also reads a header of NumPy's files. Ranks may be threads, and in Python 3.11 two of them
at once cause a SystemError.
"""


def reading(path: Path) -> BinaryIO:
    """Open a regular file for reading; OSError for anything else, without waiting for a pipe's writer."""
    return os.fdopen(_regular(path, os.O_RDONLY), "rb")


def contents(path: Path) -> bytes:
    """Return the bytes of a regular file; OSError for anything else."""
    with reading(path) as file:
        return file.read()


def text_of(path: Path) -> bytes:
    """Return the bytes of a text that people write, without a byte-order mark; else as `contents`."""
    return without_byte_order_mark(contents(path))


def without_byte_order_mark(data: bytes) -> bytes:
    """Return the bytes of a text without the mark of UTF-8 that some editors write before it."""
    return data.removeprefix(BYTE_ORDER_MARK)


def created(path: Path) -> int:
    """Return the descriptor of a new file for reading and writing.

    An old file or link of this name is unlinked: to truncate it would kill a process that maps it.
    """
    with _in_the_way(path):
        path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def appending(path: Path) -> int:
    """Return the descriptor of a regular file, perhaps new, for reading and appending; OSError for a link."""
    with _in_the_way(path):
        return _regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for an atomic write.

    The data is written and synced under a temporary name, and then renamed. If the block or the
    write fails, the temporary file is removed. A link at the file's own name is replaced.
    """
    partial = path.with_name(path.name + ".partial")
    descriptor = created(partial)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        with _in_the_way(path):
            os.rename(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a text atomically, in UTF-8; see `whole`."""
    with whole(path) as file:
        file.write(text.encode())


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder that is synced, durably; a file or link with the new name is replaced."""
    os.rename(old, new)
    sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder itself, so that its names are durable, where the file system can."""
    with open_folder(folder) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Some file systems sync files only.
                raise


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Yield the descriptor of a folder, to sync or lock it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def own_folder(folder: Path, mode: int = 0o777) -> Path:
    """Make a folder unless there is one, and return it; OSError if a link is in its place."""
    folder.mkdir(mode, exist_ok=True)
    refuse_link(folder)
    return folder


def refuse_link(path: Path) -> None:
    """Raise OSError if this name is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, IS_LINK, str(path))


def remove(path: Path) -> None:
    """Remove a file, a folder with all it holds, or a link but not what it leads to, if there is one.

    raises  OSError, too, if the folder that holds it is a link
    """
    refuse_link(path.parent)
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # It follows no link either.
        else:
            path.unlink()


def append(descriptor: int, data: bytes) -> None:
    """Append all of the data to a file; after a failure cut it off again, and raise OSError."""
    nbytes, rest = os.fstat(descriptor).st_size, data
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, nbytes)
        raise


def check_room(path: Path) -> None:
    """Raise OSError if no file can be made there or the disk is full; writes a test page."""
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(created(partial), "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    finally:
        with suppress(OSError):
            partial.unlink()


def check_writable(path: Path) -> None:
    """Raise ConfigError unless a file can be written there; call it before a long measurement."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder.", "Name a file.")
        if (
            path.exists() and not path.is_file()
        ):  # As root, a rename would replace /dev/null by a file.
            raise ConfigError(
                f"{path} cannot be written: it is a device or a pipe, which a file would replace.",
                "Name a file.",
            )
        check_room(path)
    except OSError as error:
        raise cannot_write(path, error) from None


@contextmanager
def reading_of(what: str, way_out: str, kind: type[MpitrainError] = ConfigError) -> Iterator[None]:
    """A context that reads a file, named by `what`: an OSError becomes an error of this kind."""
    try:
        yield
    except OSError as error:
        raise kind(
            f"{what} cannot be read: {error.strerror or error}.", remedy(error, way_out)
        ) from None


def check_regular(path: Path) -> None:
    """Raise OSError unless it is a regular file: reading a pipe or a device might never end."""
    reading(path).close()


def paths_of(place: str, folder: Path = Path()) -> list[str]:
    """Return the paths of a place `X` or `X,Y`; a path may have commas of its own.

    The comma between the paths is the one with a file on both sides; else on one side, if possible.

    folder  to which the paths are relative
    """
    parts = place.split(",")
    pairs = [[",".join(p) for p in (parts[:n], parts[n:])] for n in range(1, len(parts))]
    names = [([place], 2), *((pair, 1) for pair in pairs)]
    known = [(sum((folder / p).is_file() for p in some) * weight, some) for some, weight in names]
    count, paths = max(known, key=lambda one: one[0])
    return paths if count else parts


def largest_file() -> float:
    """Return the bytes that a file of this process may have: `ulimit -f`."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return math.inf if most == resource.RLIM_INFINITY else most


def remedy(error: OSError, way_out: str) -> str:
    """Return what to do about a file that could not be read: `way_out` only if it was found wrong."""
    is_wrong = error.errno in FOUND_WRONG
    return (
        way_out
        if is_wrong
        else "Let this user read it, or look at the file system: it may be whole."
    )


def mend(error: OSError) -> str:
    """Return a clause that tells how to make the file writable."""
    if error.errno == errno.EFBIG:
        return f"Make room (`ulimit -f` allows files of {largest_file():,.0f} bytes)"
    if error.errno in NO_ROOM:
        return "Make room"
    path = path_of(error)
    return f"Remove {path}" if error.errno in IN_THE_WAY and path else "Look at what is there"


def path_of(error: OSError) -> str | None:
    """Return the path that the system refused; of a rename, the new one."""
    return error.filename2 or error.filename


def cannot_write(what: Path | str, error: OSError, other: str = OTHER) -> ConfigError:
    """Return the ConfigError for a path that the system refused to write.

    what   the path, or words that end with it
    other  the remedy if neither space is missing nor another file is in the way
    """
    path = path_of(error)
    is_named = error.errno in NO_ROOM + IN_THE_WAY and not str(what).endswith(str(path))
    at = f" {path}:" if path and is_named else ""
    way_out = (
        "Choose a shorter name."
        if error.errno == errno.ENAMETOOLONG
        else f"{mend(error)}, or choose another place."
        if error.errno in NO_ROOM + IN_THE_WAY
        else other
    )
    return ConfigError(f"{what} cannot be written:{at} {error.strerror or error}.", way_out)


@contextmanager
def _in_the_way(path: Path) -> Iterator[None]:
    """Say of a file that cannot be made here that a directory has its name."""
    try:
        yield
    except IsADirectoryError as error:
        law = f"a directory named {path.name} is in the way"
        raise OSError(error.errno, law, str(path)) from None


def _regular(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file; OSError, which names the path, for anything else."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return descriptor
