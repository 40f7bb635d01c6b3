"""Files that are whole and durable: a reader, or a crash of the machine, finds what was there before or all of the new."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text`, in UTF-8, beside the file, and give it the file's name once it is on disk."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
