"""The files that a command writes: looked at before anything is measured, and refused after everything has been printed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.files import cannot_write


def check_files(rank: int, written: Sequence[Path | None], drawn: Path | None = None) -> None:
    """ConfigError unless rank 0 can write these files, and draw this one."""
    if rank != 0 or not any((*written, drawn)):
        return  # what charts a pipeline loads no NumPy
    from mpitrain.files import check_writable
    from mpitrain.plots import check_drawable

    for path in filter(None, written):
        check_writable(path)
    if drawn:
        check_drawable(drawn)


class Outputs:
    """The files that a command writes, none of which is worth losing what it measured: it goes on, and is refused at its end."""

    def __init__(self) -> None:
        self._refusals: dict[Path, ConfigError] = {}

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Write a file within this; if the system refuses, `settle` says so, unless the file can be written later."""
        try:
            yield
        except BrokenPipeError:  # of what is printed within
            raise
        except OSError as error:
            self._refusals[path] = cannot_write(path, error)
        else:
            self._refusals.pop(path, None)

    def settle(self) -> None:
        """ConfigError if a file could not be written; to be called when everything has been printed."""
        for refusal in self._refusals.values():
            raise refusal
