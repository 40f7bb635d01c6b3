"""Plugins: Python files of the user that add rows to tables, imported once in a process."""

import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from mpitrain.errors import ConfigError, line_in
from mpitrain.files import contents, reading_of
from mpitrain.tables import rows_of

MARK = " sha256:"
"""An entry of run.plugins is FILE, or FILE, this mark and the file's digest."""
_ERRORS: dict[str, ConfigError | None] = {}
"""{digest: the error of its import}, of each file that this process has tried to import."""
_LOCK = RLock()


def load(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Import the plugins that the tables name, in order, and return the tables with their digests.

    The same content is imported once in a process.

    raises  ConfigError if a file is missing, is not the one of its digest, or raises an exception
    """
    if not (plugins := entries(tables)):
        return tables
    return {**tables, "run": {**tables["run"], "plugins": [*map(_pinned, plugins)]}}


def entries(tables: Mapping[str, Any]) -> list[str]:
    """Return run.plugins of the tables; [] if it is invalid, which the validation refuses."""
    run = tables.get("run")
    plugins = run.get("plugins") if isinstance(run, Mapping) else None
    if isinstance(plugins, list) and all(isinstance(entry, str) for entry in plugins):
        return plugins
    return []


def digests(plugins: Sequence[str]) -> list[str]:
    """Return the digests in entries of run.plugins; "" for an entry without one."""
    return [entry.partition(MARK)[2] for entry in plugins]


def imported() -> list[str]:
    """Return the digests of the plugins that this process has imported."""
    return [digest for digest, error in _ERRORS.items() if error is None]


def check_named(plugins: Sequence[str], named: Collection[str], folder: Path) -> None:
    """Raise ConfigError unless the user has named the plugins of a run, with the same content.

    The name in a run directory is not enough to run code: its author may be another person.

    plugins  run.plugins of the run's configuration
    named    digests of the files that the user has named
    folder   the run directory
    """
    for name, _, digest in (entry.partition(MARK) for entry in plugins):
        if digest not in named:
            raise ConfigError(
                f"The run in {folder} was trained with the plugin {name} (sha256 {digest[:12]}), but no "
                "file with this content was named now.",
                "Read the file, then name it: in run.plugins of `mpitrain train`, by --plugin of other "
                "commands.",
            )


def _pinned(entry: str) -> str:
    """Import the file of an entry, unless it is imported already; return the entry with a digest."""
    name, _, wanted = entry.partition(MARK)
    with _LOCK:
        if wanted in imported():
            return entry
        with reading_of(f"The plugin {name}", "Name a Python file in run.plugins."):
            code = contents(Path(name))
        digest = hashlib.sha256(code).hexdigest()
        if wanted not in ("", digest):
            raise ConfigError(
                f"The plugin {name} must have sha256 {wanted[:12]}, but it has {digest[:12]}.",
                "Name the file as it was, or leave the digest out.",
            )
        if digest not in _ERRORS:
            _ERRORS[digest] = _import(code, name, digest)
        if failure := _ERRORS[digest]:
            raise ConfigError(failure.law, failure.way_out)
    return f"{name}{MARK}{digest}"


def module_of(name: str) -> ModuleType:
    """Import a Python file of the user, once in a process; ConfigError if that fails."""
    digest = _pinned(name).partition(MARK)[2]
    return sys.modules[_module_name(digest)]


def _module_name(digest: str) -> str:
    return f"mpitrain_plugin_{digest[:16]}"


def _import(code: bytes, name: str, digest: str) -> ConfigError | None:
    """Run the code as a module of its own in sys.modules; return the error, or None."""
    module = ModuleType(_module_name(digest))
    module.__file__ = name
    sys.modules[module.__name__] = module  # Dataclasses look their module up there.
    try:
        with rows_of(name):
            exec(compile(code, name, "exec"), module.__dict__)
        return None
    except (Exception, SystemExit) as error:
        where = f", line {line}" if (line := line_in(error, name)) else ""
        reason = error.law if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return ConfigError(
            f"The plugin {name} cannot be imported{where}: {reason}",
            "Correct the file, or leave it out of run.plugins.",
        )
