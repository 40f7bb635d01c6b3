"""Files: read where they are regular, written whole or not at all, never through a link in a run directory.

Another person may have packed a run directory: a link in it named `config.toml.partial` may lead to
any file of the reader. Only the path that the user types may contain links. The names beneath it
are used relative to an open directory (openat with O_NOFOLLOW): no file can be exchanged between a
check and its use.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mpitrain.errors import ConfigError

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
BENEATH = os.O_NOFOLLOW | os.O_CLOEXEC  # of every name in an open directory


class Directory:
    """An open directory, in which no link is followed. Its OSErrors name the whole path.

    path  the directory's name in messages
    name  in all methods: one component of a path
    """

    def __init__(self, path: Path, descriptor: int):
        """Take over an open descriptor; see `opened`."""
        self.path, self.descriptor = path, descriptor

    def __enter__(self) -> "Directory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; names cannot be used afterwards."""
        os.close(self.descriptor)

    def names(self) -> list[str]:
        """The names in it, sorted."""
        return sorted(os.listdir(self.descriptor))

    def facts(self, name: str) -> os.stat_result | None:
        """The status of a name, of a link its own; None if there is no such name."""
        try:
            with self._named(name):
                return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def subdirectory(self, name: str) -> "Directory":
        """Open a directory in this one."""
        with self._named(name):
            flags = os.O_RDONLY | os.O_DIRECTORY | BENEATH
            return Directory(self.path / name, os.open(name, flags, dir_fd=self.descriptor))

    def make(self, name: str, mode: int = 0o777) -> "Directory":
        """Open a directory in this one, made if there is none."""
        with self._named(name), suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=self.descriptor)
        return self.subdirectory(name)

    def open(self, name: str) -> BinaryIO:
        """Open a regular file to read it; a pipe is refused without being waited for."""
        with self._named(name):
            flags = os.O_RDONLY | os.O_NONBLOCK | BENEATH
            return _regular(os.open(name, flags, dir_fd=self.descriptor))

    def append(self, name: str) -> int:
        """Open a regular file to read it and to append to it, made if there is none: its descriptor."""
        with self._named(name):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | BENEATH
            return _checked(os.open(name, flags, 0o644, dir_fd=self.descriptor))

    def create(self, name: str) -> int:
        """Make a new file in the place of a leftover, to read and write it: its descriptor."""
        self.remove(name)
        with self._named(name):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | BENEATH
            return os.open(name, flags, 0o644, dir_fd=self.descriptor)

    @contextmanager
    def whole(self, name: str) -> Iterator[BinaryIO]:
        """A file to write to. It gets its name once it is on disk, and is removed if that fails."""
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
        """Write a text, in UTF-8, as `whole` does."""
        with self.whole(name) as file:
            file.write(text.encode())

    def rename(self, old: str, new: str) -> None:
        """Give a name another one, whose file is replaced."""
        with self._named(new):
            os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, or a link itself, if there is one."""
        with self._named(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_empty(self, name: str) -> None:
        """Remove a directory that holds nothing."""
        with self._named(name):
            os.rmdir(name, dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a directory and what it holds, or whatever else has this name, if anything has."""
        found = self.facts(name)
        if found is None or not stat.S_ISDIR(found.st_mode):
            self.remove(name)
            return
        with self._named(name):
            shutil.rmtree(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in it durable, where the file system can do that."""
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some have it for files only
                raise

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Give an OSError the whole path, and name a link or a directory that is in the way."""
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

    inner  how many of the names lie beneath the directory that the user typed
    """
    if not inner:
        return Directory(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with opened(path.parent, inner - 1) as parent:
        return parent.subdirectory(path.name)


def reading(path: Path, inner: int = 0) -> BinaryIO:
    """Open a regular file to read it; OSError for anything else.

    inner  as in `opened`; the file's own name counts
    """
    if inner:
        with opened(path.parent, inner - 1) as folder:
            return folder.open(path.name)
    try:
        return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def contents(path: Path, inner: int = 0) -> bytes:
    """The bytes of a regular file; OSError for anything else. inner: as in `reading`."""
    with reading(path, inner) as file:
        return file.read()


def write_whole(path: Path, text: str, inner: int = 0) -> None:
    """Write a text, in UTF-8, as `Directory.whole` does. inner: as in `reading`.

    A link at the file's own name is replaced in any case.
    """
    with opened(path.parent, max(0, inner - 1)) as folder:
        folder.write_whole(path.name, text)


@contextmanager
def whole(path: Path, inner: int = 0) -> Iterator[BinaryIO]:
    """A file to write to, as `Directory.whole` has it. inner: as in `write_whole`."""
    with opened(path.parent, max(0, inner - 1)) as folder, folder.whole(path.name) as file:
        yield file


def check_room(path: Path) -> None:
    """OSError if no file can be made there, or the disk is full: writes a page, and removes it."""
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
    """ConfigError unless a file can be written there: better before a measurement than after it."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder.", "Name a file.")
        if path.exists() and not path.is_file():  # root would put a file in the place of /dev/null
            raise ConfigError(
                f"{path} cannot be written: it is a device or a pipe, which a file would replace.",
                "Name a file.",
            )
        check_room(path)
    except OSError as error:
        raise cannot_write(path, error) from None


def check_regular(path: Path) -> None:
    """OSError unless it is a regular file: a pipe would be waited for, and a device may never end."""
    reading(path).close()


def mend(error: OSError) -> str:
    """What to do before a file can be written, as a clause."""
    if error.errno in NO_ROOM:
        return "Make room"
    is_named = error.errno in IN_THE_WAY and error.filename
    return f"Remove {error.filename}" if is_named else "Look at what is there"


def cannot_write(what: Path | str, error: OSError, other: str = OTHER) -> ConfigError:
    """The refusal of a path that the system did not write.

    what   the path, or words that end with it
    other  the way out if neither room is missing nor something is in the way
    """
    is_named = error.errno in NO_ROOM + IN_THE_WAY and not str(what).endswith(str(error.filename))
    at = f" {error.filename}:" if error.filename and is_named else ""
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
    """The descriptor, if it is of a regular file; else it is closed, and OSError raised."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR)
    return descriptor


def _is_link(name: str, folder: int) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False
