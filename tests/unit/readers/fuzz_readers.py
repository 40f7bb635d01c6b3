"""Damaged files of every kind that mpitrain reads, and what its reader makes of each."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import MpitrainError

INVALID = object()
"""What is expected of a file that is invalid by the rules of its format."""


class Damaged(NamedTuple):
    """A damaged file.

    kind      of the damage
    path      what the reader is given
    named     what a refusal names
    expected  what the reader returns, or INVALID
    """

    kind: str
    path: Path
    named: str
    expected: Any


def verdict(read, damaged: Damaged) -> str:
    """What is wrong with how a reader takes a damaged file; nothing if it is right."""
    try:
        found = read(damaged.path)
    except MpitrainError as error:
        if damaged.expected is not INVALID:
            return f"refused, and is valid: {error}"
        if error.exit_code != 2 or damaged.named not in str(error):
            return f"a refusal that does not name {damaged.named}: {error}"
        return (
            ""
            if len(str(error)) < 2000 and str(error).isprintable() is ("\n" not in str(error))
            else f"unreadable: {error!r}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if damaged.expected is INVALID:
        return f"read, and is invalid: {str(found)[:100]}"
    return (
        ""
        if found == damaged.expected
        else f"read as {str(found)[:100]} instead of {str(damaged.expected)[:100]}"
    )


def in_the_way(rng: random.Random, file: Path) -> bool:
    """Something else in the place of a file; returns whether it leads to what the file had."""
    kind = rng.choice(
        ["link", "link to a link", "nowhere", "loop", "pipe", "folder", "nothing", "no bytes"]
    )
    target = file.with_name("elsewhere")
    file.rename(target)
    if kind == "link":
        file.symlink_to(target.name)
    elif kind == "link to a link":
        file.with_name("between").symlink_to(target)
        file.symlink_to("between")
    elif kind == "nowhere":
        file.symlink_to("where nothing is")
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "no bytes":
        file.touch()
    return kind.startswith("link")


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True) + "\n"


def emptied(folder: Path) -> Path:
    """A folder without anything in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
