"""Robust standard output and standard error.

They may end in a full disk, a pipe without a reader, or nothing, and may have an old locale.
"""

import io
import os
import sys
from typing import Any, TextIO

from mpitrain.cli.terminal.screen import ONE_TERMINAL, Screen, shows_output, width
from mpitrain.errors import MpitrainError


class OutputError(MpitrainError):
    """The error of a standard output that accepts no more bytes."""


class Output(io.FileIO):
    """A raw stream of bytes that drops all bytes after the first failed write.

    is_courtesy  a failed write raises nothing: the work goes on, and its results are elsewhere
    is_lost      a write has failed
    screen       the terminal that shows the bytes, where a bar may be drawn
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
    """Reopen both streams, line-buffered, with escapes for characters that their encoding lacks.

    Bytes that standard error does not accept are dropped. Launchers forward two pipes in any
    order: where `launch` shows both on one terminal, all output goes through standard error.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The descriptor is closed. The next file to be opened would get its number, and all
            # output of libraries.
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
    """Ignore failed writes to standard output from now on: a long run need not end for them."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Output):  # other ranks and tests have another kind of stream
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
