"""The files that a command will write: looked at before anything is measured."""

from collections.abc import Sequence
from pathlib import Path


def check_files(rank: int, written: Sequence[Path | None], drawn: Path | None = None) -> None:
    """ConfigError unless rank 0 can write these files, and draw this one."""
    if rank != 0 or not any((*written, drawn)):
        return    # what charts a pipeline loads no NumPy
    from mpitrain.bench.plot import check_drawable
    from mpitrain.bench.table import check_writable

    for path in filter(None, written):
        check_writable(path)
    if drawn:
        check_drawable(drawn)
