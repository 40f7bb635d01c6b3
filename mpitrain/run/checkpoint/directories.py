"""The directories of checkpoints: atomic renaming of a new one, and clean-up of old ones."""

import fcntl
import re
import stat
from contextlib import suppress
from pathlib import Path

from mpitrain.errors import CheckpointError
from mpitrain.files import Directory, opened

CHECKPOINTS, LOCK = "checkpoints", "lock"
"""The names of the folder of checkpoints and of the lock file in a run directory."""
NAME = re.compile(r"step-\d{8,18}", re.ASCII)
UNFINISHED = re.compile(r"\.step-.*\.(partial|dropped)", re.ASCII | re.DOTALL)
REPLACED = re.compile(r"\.(step-\d{8,18})\.replaced", re.ASCII)


def prepare(partial: Path) -> None:
    """Make the temporary directory of a new checkpoint; remove leftovers of killed processes."""
    with opened(partial.parent.parent) as run, run.make(partial.parent.name) as folder:
        sweep(folder)
        folder.make(partial.name).close()


def abandon(partial: Path) -> None:
    """Remove the temporary directory of a checkpoint that cannot be written, if that is possible."""
    with suppress(OSError), opened(partial.parent, inner=1) as folder:
        folder.remove_tree(partial.name)


def sweep(folder: Directory) -> None:
    """Remove the leftovers of killed processes.

    They are checkpoints that were half written, half removed, or replaced by a finished one.
    """
    names = folder.names()
    for name in names:
        replaced = REPLACED.fullmatch(name)
        if UNFINISHED.fullmatch(name) or (replaced and replaced[1] in names):
            folder.remove_tree(name)


def tidy(run: Path) -> None:
    """Remove the leftovers of a run that has died, unless a process holds the lock of the run."""
    with suppress(OSError), opened(run) as folder, folder.open(LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with folder.subdirectory(CHECKPOINTS) as checkpoints:
            sweep(checkpoints)


def put_in_place(partial: Path, target: Path, keep: int) -> None:
    """Rename a finished checkpoint to its final name, and remove all but the newest `keep`."""
    with opened(target.parent, inner=1) as folder:
        with folder.subdirectory(partial.name) as written:
            written.sync()
        replaced = f".{target.name}.replaced"
        if folder.facts(target.name):
            folder.remove_tree(replaced)
            folder.rename(target.name, replaced)
        folder.rename(partial.name, target.name)
        folder.remove_tree(replaced)
        folder.sync()
        for old in _finished(folder)[:-keep]:
            dropped = f".{old.strip('.')}.dropped"
            folder.rename(old, dropped)  # The rename is atomic: a reader finds all files or none.
            folder.remove_tree(dropped)


def steps(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first; OSError if the folder is a link.

    If a process died while it replaced a checkpoint, the old one counts until it is replaced.
    """
    try:
        with opened(folder, inner=1) as directory:
            return [folder / name for name in _finished(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _finished(folder: Directory) -> list[str]:
    names = [
        name
        for name in folder.names()
        if (facts := folder.facts(name)) and stat.S_ISDIR(facts.st_mode)
    ]
    checkpoints = {replaced[1]: name for name in names if (replaced := REPLACED.fullmatch(name))}
    checkpoints |= {name: name for name in names if NAME.fullmatch(name)}
    return [
        checkpoints[name]
        for name in sorted(checkpoints, key=lambda name: int(name.removeprefix("step-")))
    ]


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a folder; CheckpointError if there is none."""
    checkpoints = steps(folder)
    if not checkpoints:
        raise CheckpointError(
            f"There is no checkpoint in {folder}.",
            "Name a run directory that has one, or train first.",
        )
    return checkpoints[-1]


def way_out(path: Path) -> str:
    """Return the remedy for a checkpoint that cannot be read."""
    finished = steps(path.parent)
    older = [other.name for other in finished[: finished.index(path)]] if path in finished else []
    return f"Remove {path}" + (
        f" to go on from {older[-1]}." if older else " and start the run again."
    )
