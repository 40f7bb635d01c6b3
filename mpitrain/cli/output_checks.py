"""Output files: their options, and checks before a command measures and after it has printed all."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpitrain.errors import ConfigError
from mpitrain.files import cannot_write

if TYPE_CHECKING:
    # `plan schedule` uses this module without NumPy.
    from mpitrain.transport.base import Transport


def output_option(name: str, text: str) -> Callable[[Callable], Callable]:
    """Return the option `--json`, `--csv` or `--plot`, which names an output file."""
    return click.option(name, f"{name[2:]}_file", type=click.Path(path_type=Path), help=text)


def check_files(rank: int, written: Sequence[Path | None], drawn: Path | None = None) -> None:
    """Raise ConfigError unless rank 0 can write these files, all different, and draw this picture."""
    if rank != 0 or not any((*written, drawn)):
        # Without files the imports below are skipped: `plan schedule` then loads no NumPy.
        return
    from mpitrain.files import check_writable
    from mpitrain.plots import check_drawable

    files: set[str] = set()
    for path in filter(None, (*written, drawn)):
        files, others = files | {os.path.realpath(path)}, files
        if files == others:
            raise ConfigError(
                f"Each output has a file of its own, but {path} is given twice.",
                "Name another file for one of them.",
            )
    for path in filter(None, written):
        check_writable(path)
    if drawn:
        check_drawable(drawn)


class Outputs:
    """The output files of a command. A failed write does not end it: `settle` raises the error.

    So a full disk costs one file, never the measurement.
    """

    def __init__(self) -> None:
        self._refusals: dict[Path, ConfigError] = {}

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Catch the errors of writing `path` for `settle`; a later successful write clears them."""
        try:
            yield
        except BrokenPipeError:
            # Standard output was closed: this is no error of the output file.
            raise
        except OSError as error:
            self._refusals[path] = cannot_write(path, error)
        else:
            self._refusals.pop(path, None)

    def conclude(
        self,
        transport: "Transport",
        lines: Callable[[], list[str]],
        plot_file: Path | None,
        draw: Callable[[Path], None],
    ) -> None:
        """Print the last lines and draw the picture on rank 0, then `settle` on all ranks."""
        from mpitrain.transport.agreement import on_all_ranks

        if transport.rank == 0:
            click.echo("\n".join(lines()))
            if plot_file:
                with self.to(plot_file):
                    draw(plot_file)
        on_all_ranks(transport, self.settle)

    def settle(self) -> None:
        """Raise ConfigError if a file could not be written. Call it after all output is printed."""
        for refusal in self._refusals.values():
            raise refusal
