"""The directories of checkpoints: which are finished, and how a new one becomes so."""

import re
import stat
from pathlib import Path

from mpitrain.errors import CheckpointError
from mpitrain.files import Directory, opened

NAME = re.compile(r"step-\d{8,18}", re.ASCII)
UNFINISHED = re.compile(r"\.step-.*\.(partial|dropped)", re.ASCII | re.DOTALL)
REPLACED = re.compile(r"\.(step-\d{8,18})\.replaced", re.ASCII)


def prepare(partial: Path) -> None:
    """Make the directory of a checkpoint to be, and sweep what others left that never got their names."""
    with opened(partial.parent.parent) as run, run.make(partial.parent.name) as folder:
        sweep(folder)
        folder.make(partial.name).close()


def sweep(folder: Directory) -> None:
    """Remove what a process that was killed left of checkpoints: one half written, one half dropped, one that was replaced."""
    names = folder.names()
    for name in names:
        replaced = REPLACED.fullmatch(name)
        if UNFINISHED.fullmatch(name) or (replaced and replaced[1] in names):
            folder.remove_tree(name)


def put_in_place(partial: Path, target: Path, keep: int) -> None:
    """Give a checkpoint its name, and drop all but the newest `keep`."""
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
            folder.rename(old, dropped)  # at once: a reader finds all of it or none
            folder.remove_tree(dropped)


def steps(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, oldest first; OSError if the folder is a link.

    One that was being replaced when its process died counts until the new one has its name.
    """
    try:
        with opened(folder, inner=1) as found:
            return [folder / name for name in _finished(found)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _finished(folder: Directory) -> list[str]:
    names = [
        name
        for name in folder.names()
        if (facts := folder.facts(name)) and stat.S_ISDIR(facts.st_mode)
    ]
    found = {replaced[1]: name for name in names if (replaced := REPLACED.fullmatch(name))}
    found |= {name: name for name in names if NAME.fullmatch(name)}
    return [found[name] for name in sorted(found, key=lambda name: int(name.removeprefix("step-")))]


def newest(folder: Path) -> Path:
    """The newest checkpoint of a folder; CheckpointError if there is none."""
    found = steps(folder)
    if not found:
        raise CheckpointError(
            f"There is no checkpoint in {folder}.",
            "Name a run directory that has one, or train first.",
        )
    return found[-1]


def way_out(path: Path) -> str:
    """What to do about a checkpoint that cannot be read."""
    finished = steps(path.parent)
    older = [other.name for other in finished[: finished.index(path)]] if path in finished else []
    return f"Remove {path}" + (
        f" to go on from {older[-1]}." if older else " and start the run again."
    )
