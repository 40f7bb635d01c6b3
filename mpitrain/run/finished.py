"""The directories of checkpoints: which are finished, and how a new one becomes so."""

import re
import shutil
from pathlib import Path

from mpitrain.errors import CheckpointError
from mpitrain.files import sync


def prepare(partial: Path) -> None:
    """Make the directory of a checkpoint to be, and sweep what others left that never got their names."""
    for left_over in (*partial.parent.glob(".step-*.partial"), *partial.parent.glob(".step-*.dropped")):
        shutil.rmtree(left_over)
    partial.mkdir(parents=True)


def put_in_place(partial: Path, target: Path, keep: int) -> None:
    """Give a checkpoint its name, and drop all but the newest `keep`."""
    folder = target.parent
    sync(partial)
    replaced = folder / f".{target.name}.replaced"
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    sync(folder)
    for old in steps(folder)[:-keep]:
        dropped = old.rename(folder / f".{old.name.strip('.')}.dropped")  # at once: a reader finds all of it or none
        shutil.rmtree(dropped)


def steps(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, oldest first.

    One that was being replaced when its process died counts until the new one has its name.
    """
    found: dict[str, Path] = {}
    for form in (r"(step-\d{8,18})", r"\.(step-\d{8,18})\.replaced"):
        for path in folder.glob("*"):
            if path.is_dir() and (name := re.fullmatch(form, path.name, re.ASCII)):
                found.setdefault(name[1], path)
    return [found[name] for name in sorted(found, key=lambda name: int(name.removeprefix("step-")))]


def newest(folder: Path) -> Path:
    """The newest checkpoint of a folder; CheckpointError if there is none."""
    found = steps(folder)
    if not found:
        raise CheckpointError(f"There is no checkpoint in {folder}.", "Name a run directory that has one, or train first.")
    return found[-1]


def way_out(path: Path) -> str:
    """What to do about a checkpoint that cannot be read."""
    finished = steps(path.parent)
    older = [other.name for other in finished[:finished.index(path)]] if path in finished else []
    return f"Remove {path}" + (f" to go on from {older[-1]}." if older else " and start the run again.")
