"""Safe file access: only regular files are read, writes are atomic, and links are not followed.

A run directory may come from another person. A link in it, such as `config.toml.partial`, could
lead to any file of the reader. Only the path that the user types may contain links. All names
beneath it are opened relative to an open directory (openat with O_NOFOLLOW). This excludes
races between the check of a file and its use.
"""

import codecs
import errno
import math
import os
import resource
import shutil
import stat
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
BENEATH = os.O_NOFOLLOW | os.O_CLOEXEC  # These flags open every name in an open directory.


class Directory:
    """An open directory whose methods follow no links; their OSErrors name the whole path.

    path  the directory's path, for messages
    name  in all methods, one component of a path
    """

    def __init__(self, path: Path, descriptor: int):
        """Take ownership of an open descriptor; use `opened` to make a Directory."""
        self.path, self.descriptor = path, descriptor

    def __enter__(self) -> "Directory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; names cannot be used afterwards."""
        os.close(self.descriptor)

    def names(self) -> list[str]:
        """Return the names in the directory, sorted."""
        return sorted(os.listdir(self.descriptor))

    def facts(self, name: str) -> os.stat_result | None:
        """Return the status of a name, as lstat; None if there is no such name."""
        try:
            with self._named(name):
                return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def subdirectory(self, name: str) -> "Directory":
        with self._named(name):
            flags = os.O_RDONLY | os.O_DIRECTORY | BENEATH
            return Directory(self.path / name, os.open(name, flags, dir_fd=self.descriptor))

    def make(self, name: str, mode: int = 0o777) -> "Directory":
        """Open a subdirectory, and make it first if it does not exist."""
        with self._named(name), suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=self.descriptor)
        return self.subdirectory(name)

    def open(self, name: str) -> BinaryIO:
        """Open a regular file for reading; refuse a pipe at once, without waiting for a writer."""
        with self._named(name):
            flags = os.O_RDONLY | os.O_NONBLOCK | BENEATH
            return _regular(os.open(name, flags, dir_fd=self.descriptor))

    def append(self, name: str) -> int:
        """Return the descriptor of a regular file, perhaps new, for reading and appending."""
        with self._named(name):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | BENEATH
            return _checked(os.open(name, flags, 0o644, dir_fd=self.descriptor))

    def create(self, name: str) -> int:
        """Return the descriptor of a new file for reading and writing; remove an old one first."""
        self.remove(name)
        with self._named(name):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | BENEATH
            return os.open(name, flags, 0o644, dir_fd=self.descriptor)

    @contextmanager
    def whole(self, name: str) -> Iterator[BinaryIO]:
        """Yield a file for an atomic write.

        The data is written and synced under a temporary name, and then renamed. If the block or
        the write fails, the temporary file is removed.
        """
        partial = name + ".partial"
        descriptor = self.create(partial)
        try:
            with self._named(name), os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            self.rename(partial, name)
        except BaseException:
            with suppress(OSError):
                self.remove(partial)
            raise
        self.sync()

    def write_whole(self, name: str, text: str) -> None:
        """Write a text atomically, in UTF-8; see `whole`."""
        with self.whole(name) as file:
            file.write(text.encode())

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory; replace a file that has the new name."""
        with self._named(new):
            os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, or a link but not its target, if there is one."""
        with self._named(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_empty(self, name: str) -> None:
        with self._named(name):
            os.rmdir(name, dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a directory with all its contents, or a file or link, if there is one."""
        facts = self.facts(name)
        if facts is None or not stat.S_ISDIR(facts.st_mode):
            self.remove(name)
            return
        with self._named(name):
            shutil.rmtree(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Sync the directory itself, so that its names are durable, where the file system can."""
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Some file systems sync files only.
                raise

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Give each OSError the whole path, and name a link or directory that caused it."""
        try:
            if "/" in name or name in ("", ".", ".."):
                raise OSError(errno.EINVAL, "it is not the name of one file")
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, self.descriptor):
                error.errno, reason = errno.ELOOP, IS_LINK
            elif error.errno == errno.EISDIR:
                reason = f"a directory named {name} is in the way"
            raise OSError(error.errno, reason, str(self.path / name)) from None


def opened(path: Path, inner: int = 0) -> Directory:
    """Open a directory. Links in its path are followed, except among its last `inner` names.

    inner  how many names at the end of the path are below the directory that the user typed
    """
    if not inner:
        return Directory(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with opened(path.parent, inner - 1) as parent:
        return parent.subdirectory(path.name)


def reading(path: Path, inner: int = 0) -> BinaryIO:
    """Open a regular file for reading; OSError for anything else.

    inner  see `opened`; here the file's own name counts as one of them
    """
    if inner:
        with opened(path.parent, inner - 1) as folder:
            return folder.open(path.name)
    try:
        return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def contents(path: Path, inner: int = 0) -> bytes:
    """Return the bytes of a regular file; OSError for anything else. inner: see `reading`."""
    with reading(path, inner) as file:
        return file.read()


def text_of(path: Path, inner: int = 0) -> bytes:
    """Return the bytes of a text that people write, without a byte-order mark; else as `contents`."""
    return without_byte_order_mark(contents(path, inner))


def without_byte_order_mark(data: bytes) -> bytes:
    """Return the bytes of a text without the mark of UTF-8 that some editors write before it."""
    return data.removeprefix(BYTE_ORDER_MARK)


def write_whole(path: Path, text: str, inner: int = 0) -> None:
    """Write a text atomically, in UTF-8; see `Directory.whole`. inner: see `reading`.

    A link at the file's own name is replaced, whatever `inner` is.
    """
    with opened(path.parent, max(0, inner - 1)) as folder:
        folder.write_whole(path.name, text)


@contextmanager
def whole(path: Path, inner: int = 0) -> Iterator[BinaryIO]:
    """Yield a file for an atomic write; see `Directory.whole`. inner: see `write_whole`."""
    with opened(path.parent, max(0, inner - 1)) as folder, folder.whole(path.name) as file:
        yield file


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
    with opened(path.parent) as folder:
        partial = path.name + ".partial"
        try:
            with os.fdopen(folder.create(partial), "wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        finally:
            with suppress(OSError):
                folder.remove(partial)


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


def _regular(descriptor: int) -> BinaryIO:
    return os.fdopen(_checked(descriptor), "rb")


def _checked(descriptor: int) -> int:
    """Return the descriptor of a regular file; close any other, and raise OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR)
    return descriptor


def _is_link(name: str, folder: int) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False
