"""Standard output and standard error, whatever is behind them: a full disk, a pipe that nobody reads, nothing, an old locale."""

import io
import os
import sys
from typing import Any, TextIO

from mpitrain.cli.terminal.screen import ONE_TERMINAL, Screen, shows_output, width
from mpitrain.errors import MpitrainError


class OutputError(MpitrainError):
    """Standard output takes no more."""


class Output(io.FileIO):
    """The bytes of a descriptor. After the first write that fails, what is written is dropped.

    is_courtesy  nothing is raised then: the work goes on and its results are elsewhere
    screen       the terminal that the bytes end on, where a bar may be drawn
    """

    is_courtesy = False
    is_lost = False
    screen: Screen | None = None

    def write(self, data: Any, /) -> int:
        try:
            if self.is_lost:
                return len(data)
            if self.screen and (lead := self.screen.lead(bytes(data))):
                super().write(lead)
            return super().write(data)
        except OSError as error:
            self.is_lost = True
            if self.is_courtesy:
                if self.fileno() == 1:
                    print(
                        f"warning: standard output takes no more ({error.strerror}): the run goes on, and its metrics.jsonl "
                        "says how.",
                        file=sys.stderr,
                    )
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(
                f"Standard output takes no more: {error.strerror}.",
                "Make room, or name another file.",
            ) from None


def open_output() -> None:
    """Make both streams anew: by lines, with escapes for what their encoding lacks. What stderr does not take is dropped.

    Launchers forward two pipes in any order: where `launch` shows both on one terminal, all goes through that of stderr.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened would get its number, and all that libraries print
            os.open(os.devnull, os.O_RDWR)
    screen = Screen() if width() is not None else None
    sys.stdout = _stream(
        2 if ONE_TERMINAL in os.environ else 1,
        sys.stdout,
        False,
        screen if shows_output() else None,
    )
    sys.stderr = _stream(2, sys.stderr, True, screen)


def be_courtesy() -> None:
    """From now on standard output is a courtesy: a run of hours does not end because nobody takes what it prints."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Output):  # that of the other ranks and of tests is something else
        raw.is_courtesy = True


def _stream(
    descriptor: int, now: TextIO | None, is_courtesy: bool, screen: Screen | None
) -> TextIO:
    if now is not None:
        now.flush()
    raw = Output(descriptor, "w", closefd=False)
    raw.is_courtesy, raw.screen = is_courtesy, screen
    encoding = now.encoding if now is not None else "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True
    )
