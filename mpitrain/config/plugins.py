"""Plugins: Python files of the user that add rows to tables, imported once in a process."""

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.files import contents

_ENTRY = re.compile(r"(.+?)(?: sha256:([0-9a-f]{64}))?", re.DOTALL)
_IMPORTED: dict[Path, str | ConfigError] = {}
"""{absolute path: digest of a plugin that this process has imported, or the error of the import}."""
_LOCK = RLock()


def load(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Import the plugins that the tables name, in order, and return the tables with their digests.

    An entry of run.plugins is FILE, or FILE followed by ` sha256:` and the file's digest. A file
    is imported once in a process, even if it changes afterwards.

    raises  ConfigError if a file is missing, is not the one of its digest, or raises an exception
    """
    if not (found := entries(tables)):
        return tables
    return {**tables, "run": {**tables["run"], "plugins": [*map(_pinned, found)]}}


def entries(tables: Mapping[str, Any]) -> list[str]:
    """Return run.plugins of the tables; [] if it is invalid, which the validation refuses."""
    run = tables.get("run")
    found = run.get("plugins") if isinstance(run, Mapping) else None
    if isinstance(found, list) and all(isinstance(entry, str) for entry in found):
        return found
    return []


def absolute_entry(entry: str) -> str:
    """Return an entry with the absolute path of its file."""
    return os.path.abspath(entry)


def digests(entries: Sequence[str]) -> list[str]:
    """Return the digests of entries; "" for an entry without one."""
    return [_split(entry)[1] for entry in entries]


def imported() -> list[str]:
    """Return the digests of the plugins that this process has imported."""
    return [digest for digest in _IMPORTED.values() if isinstance(digest, str)]


def check_named(entries: Sequence[str], named: Collection[str], folder: Path) -> None:
    """Raise ConfigError unless the user has named the plugins of a run, with the same content.

    A run directory names no code to run: its author may be another person.

    entries  run.plugins of the run's configuration
    named    digests of the files that the user has named
    folder   the run directory
    """
    for name, digest in map(_split, entries):
        if digest not in named:
            raise ConfigError(
                f"The run in {folder} was trained with the plugin {name} (sha256 {digest[:12]}), but no "
                "file with this content was named now.",
                "Read the file, then name it: in run.plugins of `mpitrain train`, by --plugin of other "
                "commands.",
            )


def _split(entry: str) -> tuple[str, str]:
    """Return the path and the digest of an entry; "" for none."""
    found = _ENTRY.fullmatch(entry)
    return (found[1], found[2] or "") if found else (entry, "")


def _pinned(entry: str) -> str:
    """Import the file of an entry, unless it is imported already; return the entry with a digest."""
    name, wanted = _split(entry)
    path = Path(name).absolute()
    with _LOCK:
        if wanted in imported():
            return entry
        if path not in _IMPORTED:
            _IMPORTED[path] = _import(name, path, wanted)
        found = _IMPORTED[path]
    if isinstance(found, ConfigError):
        raise ConfigError(found.law, found.way_out)
    if wanted not in ("", found):
        raise _changed(name, wanted, found)
    return f"{name} sha256:{found}"


def _import(name: str, path: Path, wanted: str) -> str | ConfigError:
    """Import a file under a name of its own in sys.modules; return its digest, or the error."""
    try:
        code = contents(path)
    except OSError as error:
        return ConfigError(
            f"The plugin {name} cannot be read: {error.strerror}.",
            "Name a Python file in run.plugins.",
        )
    digest = hashlib.sha256(code).hexdigest()
    if wanted not in ("", digest):
        return _changed(name, wanted, digest)
    module = ModuleType(f"mpitrain_plugin_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # Dataclasses look their module up there.
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f", line {lines[-1]}" if lines else ""
        said = error.law if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return ConfigError(
            f"The plugin {name} cannot be imported{where}: {said}",
            "Correct the file, or leave it out of run.plugins.",
        )
    return digest


def _changed(name: str, wanted: str, found: str) -> ConfigError:
    return ConfigError(
        f"The plugin {name} must have sha256 {wanted[:12]}, but it has {found[:12]}.",
        "Name the file as it was, or start another run with its own --out.",
    )
