"""C++ compiled on this machine: the compiler, the folder of what it compiled, and the observer of
compilations.

The simulator's kernels and the passes of the host are libraries that several ranks share. GPU
kernels have such a folder too.
"""

import atexit
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mpitrain.errors import ConfigError, KernelError
from mpitrain.files import cannot_write, contents, own_folder, path_of, sync_folder
from mpitrain.machine import process

NO_COMPILER = "there is no compiler."
"""The reason for which a rank without any compiler has no compiled passes."""


def compiler(
    use: str = "device.kind cuda-sim compiles kernels", instead: str = "use --device cpu"
) -> str:
    """Return the path of g++, else of zig, which compile kernels for the simulator and passes for
    the host.

    use, instead  its use and the way to avoid it, for the error
    raises        ConfigError if both are missing or the machine is not x86-64
    """
    path, machine, ziglang = shutil.which("g++"), platform.machine(), find_spec("ziglang")
    if path is None and ziglang and ziglang.origin:
        path = shutil.which(Path(ziglang.origin).with_name("zig"))
    if machine != "x86_64" or path is None:
        missing = f"this machine is {machine}" if machine != "x86_64" else "there is no g++ here"
        raise ConfigError(
            f"{use} with g++ 11 or later on x86-64, but {missing}.",
            f"Install g++ on an x86-64 machine (apt install g++, or pip install ziglang), or {instead}.",
        )
    return path


def has_compiler() -> bool:
    try:
        return bool(compiler())
    except ConfigError:
        return False


Observer = Callable[[str], AbstractContextManager[object]]
"""(name of the source) -> a context around its compilation."""


def _none(source: str) -> AbstractContextManager[object]:
    return nullcontext()


OBSERVER: ContextVar[Observer] = ContextVar("observer of compilations", default=_none)
"""The observer of this thread; ranks may be threads of one process."""


def compiling(source: str) -> AbstractContextManager[object]:
    """Return the context in which this thread compiles a source, or waits for another process that
    compiles it.
    """
    return OBSERVER.get()(source)


def cache_of(what: str) -> Path:
    """Return this user's folder for the compiled kernels of one kind of engine, `what`.

    It is that of `shared_cache_of`, else a new folder of this process.
    """
    return shared_cache_of(what) or _fresh_folder(what)


def shared_cache_of(what: str) -> Path | None:
    """Return this user's folder that all processes and starts share, or None.

    No other user may write to it, because code is loaded from it. It is ~/.cache/mpitrain/<what>,
    in XDG_CACHE_HOME if that is set, else a folder in the temporary directory.
    """
    temporary = Path(tempfile.gettempdir()) / f"mpitrain-{what}-{os.getuid()}"
    at_home = process.caches() / "mpitrain" / what
    if at_home.is_absolute() and _is_own(at_home):
        return at_home
    return temporary if _keeps_names(temporary.parent) and _is_own(temporary) else None


def _is_own(folder: Path) -> bool:
    """Return whether this user owns the folder, and only this user may write to it.

    A symbolic link does not qualify. Creates the folder if it does not exist.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        facts = own_folder(folder, 0o700).stat()
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


def is_zig() -> bool:
    """Return whether the compiler is zig's clang instead of g++."""
    return Path(compiler()).name == "zig"


def _run(command: list[str], what: str, way_out: str, seconds: float | None) -> None:
    """Run the compiler, as `compile_cpp`."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        reason = f" it did not end within {seconds:g} s."
    except OSError as error:
        reason = f" {error.strerror or error}."
    else:
        if not done.returncode:
            return
        code = done.returncode
        words = done.stderr.strip()[:4000]
        end = f" it ended with exit code {code}." if code > 0 else f" signal {-code} ended it."
        reason = f"\n{words}" if words else end
    raise KernelError(f"{compiler()} cannot compile {what}:{reason}", way_out)


@cache
def processor_and_compiler() -> str:
    """Return the processor's features and the compiler's file: -march=native and the language level
    depend on them.

    raises  ConfigError without a compiler
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line for line in lines if line.startswith("flags")), "")
    file = Path(compiler()).resolve()
    facts = file.stat()
    return f"{processor} {file} {facts.st_size} {facts.st_mtime_ns}"


def compile_cpp(
    arguments: list[str], target: Path, what: str, way_out: str, seconds: float | None = None
) -> None:
    """Run the compiler, which writes `target`.

    what, way_out  the subject and the way out of the error
    seconds        in which it must end; None: zig's C++ library takes minutes on a busy machine
    raises         ConfigError without a compiler, KernelError if it fails
    """
    arguments = [*arguments, "-o", str(target)]
    if is_zig():
        _compile_by_zig(arguments, what, way_out, seconds)
    else:
        _run([compiler(), *arguments], what, way_out, seconds)
    if not target.exists():
        raise KernelError(f"{compiler()} ended well, but wrote nothing for {what}.", way_out)


def _compile_by_zig(arguments: list[str], what: str, way_out: str, seconds: float | None) -> None:
    def run(folder: Path | str) -> None:
        command = ["/usr/bin/env", f"ZIG_GLOBAL_CACHE_DIR={folder}", compiler(), "c++", *arguments]
        _run(command, what, way_out, seconds)

    # Zig compiles its C++ library once, into a cache. Of files that were cut there it makes errors,
    # or empty libraries. So what needs no such library is compiled without, and errors are tried again.
    if "-nostdlib" not in arguments:
        with suppress(KernelError):
            run(cache_of("zig"))
            return
    with tempfile.TemporaryDirectory() as folder:
        run(folder)


def compiled_once(
    target: Path, source: str, compile: Callable[[Path], object], waits: bool = True
) -> Path:
    """Return `target`, a file of code in a cache; compile it if it is missing or damaged.

    Mapped code that was cut ends the process with SIGBUS. So the file is loaded only if it fits the
    digest beside it. It gets its name when it is complete and durable: no other rank loads half of
    it, and neither does a start after a crash.

    source   name for the observer of compilations
    compile  writes the file under the path that it gets, in a temporary folder
    waits    for another rank that compiles it; if not, the file may not exist yet
    raises   ConfigError if the folder cannot be written, and what `compile` raises
    """
    if not _is_whole(target):
        _compile(target, source, compile, waits)
    return target


def _compile(target: Path, source: str, compile: Callable[[Path], object], waits: bool) -> None:
    """Compile `target`, as `compiled_once`, unless another rank does so meanwhile."""
    try:
        with locked(target, source, waits) as (is_free, is_locked):
            if is_free and not _is_whole(target):
                # The host's name stands in it, because locks of some file systems end at the host.
                prefix = f".{target.name}.{platform.node()}."
                if is_locked:
                    _remove_leftovers(target.parent, prefix)
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
                    compile(part := Path(folder) / target.name)
                    _publish(part, target)
    except OSError as error:
        remedy = "Set XDG_CACHE_HOME to a folder that you may write to."
        raise cannot_write(path_of(error) or target, error, remedy) from None


def _remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove what compilations that were killed left behind: whoever makes such names holds the lock."""
    for path in folder.iterdir():
        if path.name.startswith(prefix):
            shutil.rmtree(path, ignore_errors=True)


def _digest_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _is_whole(target: Path) -> bool:
    with suppress(OSError):
        digest = hashlib.sha256(contents(target)).hexdigest()
        return contents(_digest_of(target)) == digest.encode()
    return False


def _publish(part: Path, target: Path) -> None:
    """Sync a new file and its digest, give them their names, and sync the folder."""
    with _digest_of(part).open("xb") as digest, part.open("rb") as file:
        digest.write(hashlib.file_digest(file, "sha256").hexdigest().encode())
        digest.flush()
        os.fsync(digest.fileno())
        os.fsync(file.fileno())
    part.replace(target)
    _digest_of(part).replace(_digest_of(target))
    sync_folder(target.parent)


def loaded(path: Path, way_out: str) -> ctypes.CDLL:
    """Load a library of `compiled_once`; KernelError with the reason if the system refuses it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # Its folder may be mounted with noexec.
        raise KernelError(f"What was compiled cannot be loaded: {error}.", way_out) from None


@contextmanager
def locked(target: Path, source: str, waits: bool = True) -> Iterator[tuple[bool, bool]]:
    """Lock the library's file, so that only one rank of a host compiles it, where files can be
    locked; yield whether this rank may compile it, which is always so if it `waits`, and whether
    this rank holds the lock.

    source  name for the observer of compilations
    """
    with compiling(source), target.with_suffix(".lock").open("w") as file:
        is_free = is_locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as error:
            is_free, is_locked = not isinstance(error, BlockingIOError), False
        yield is_free, is_locked
