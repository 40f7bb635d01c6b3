"""C++ compiled on this machine: the compiler, the folder of what it compiled, and the observer of
compilations.

The simulator's kernels and the passes of the host are libraries that several ranks share. GPU
kernels have such a folder too.
"""

import atexit
import fcntl
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mpitrain.errors import ConfigError, KernelError
from mpitrain.files import opened
from mpitrain.machine import process


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


def is_zig() -> bool:
    """Return whether the compiler is zig's clang instead of g++."""
    return Path(compiler()).name == "zig"


def _command() -> list[str]:
    """Zig compiles its C++ library once, into a cache."""
    if not is_zig():
        return [compiler()]
    return ["/usr/bin/env", f"ZIG_GLOBAL_CACHE_DIR={cache_of('zig')}", compiler(), "c++"]


@cache
def version() -> str:
    """Return the first line that the compiler says of itself.

    raises  ConfigError without a compiler
    """
    done = subprocess.run(
        [*_command(), "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    return f"{Path(compiler()).name}: {done.stdout.partition(chr(10))[0]}"


@cache
def processor_and_compiler() -> str:
    """Return the processor's features and the compiler's version: -march=native and the language
    level depend on them.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line for line in lines if line.startswith("flags")), "")
    return processor + version()


def compile_cpp(arguments: list[str], target: Path, what: str, way_out: str) -> None:
    """Run the compiler.

    The library gets its final name only when it is complete. So no other rank loads half of one.

    what, way_out  the subject and the way out of the error
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / target.name
        command = [*_command(), *arguments, "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(
                f"{Path(compiler()).name} cannot compile {what}:\n{done.stderr.strip()[:4000]}",
                way_out,
            )
        part.replace(target)


@contextmanager
def locked(target: Path, source: str, waits: bool = True) -> Iterator[bool]:
    """Lock the library's file, so that only one rank of a host compiles it, where files can be
    locked; yield whether this rank may compile it, which is always so if it `waits`.

    source  name for the observer of compilations
    """
    with compiling(source), target.with_suffix(".lock").open("w") as file:
        is_free = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as error:
            is_free = not isinstance(error, BlockingIOError)
        yield is_free
