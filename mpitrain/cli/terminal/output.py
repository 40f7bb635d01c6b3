"""Standard output and standard error: the terminal behind them, progress bars on it, and failed writes.

Behind a stream may be a full disk, a pipe without a reader, or nothing; its encoding may be an old
one.
"""

import io
import os
import re
import sys
import threading
from typing import Any, TextIO

from mpitrain.errors import MpitrainError

# The ranks of `launch` write to pipes. These environment variables describe the terminal of `launch`.
TERMINAL = "MPITRAIN_TERMINAL"
"""Columns of the terminal behind standard error."""
ONE_TERMINAL = "MPITRAIN_ONE_TERMINAL"
"""`launch` sets this variable if the ranks' standard output and standard error end on one terminal.
"""
OUTPUT_TERMINAL = "MPITRAIN_OUTPUT_TERMINAL"
"""The variable in which `launch` passes the columns of its terminal, or 0 without a terminal."""

USUAL = 80
"""Columns of a terminal that does not report its size."""
DRAWN = re.compile(rb"(\r[^\r\n\x1b]*\x1b\[K)")
"""A drawn bar: a carriage return, the bar, and the sequence that erases the rest of the line."""
LONGEST = 4096
"""Upper bound of the bytes of the current line that a screen remembers."""


def columns(descriptor: int = 2) -> int:
    """Return the columns of the terminal behind a file descriptor.

    Without a terminal, return those of the variable COLUMNS, or USUAL.
    """
    try:
        known = os.get_terminal_size(descriptor).columns
    except OSError:
        known = 0
    variable = os.environ.get("COLUMNS", "")
    return known or (int(variable) if variable.isdecimal() else 0) or USUAL


def width() -> int | None:
    """Return the columns of the terminal behind standard error, or None without one.

    It may be behind the pipes of `launch`.
    """
    if os.isatty(2):
        return columns()
    value = os.environ.get(TERMINAL, "")
    return int(value) if value.isdecimal() else None


def output_columns() -> int:
    """Return the columns of the terminal behind standard output, or 0 without one.

    It may be behind the pipe of `launch`.
    """
    # `launch` is right even where mpirun gives its ranks a pseudo-terminal.
    value = os.environ.get(OUTPUT_TERMINAL, "")
    if value.isdecimal():
        return int(value)
    # The terminal that mpirun makes for its ranks has no columns.
    return os.get_terminal_size(1).columns if os.isatty(1) else 0


def is_one_terminal() -> bool:
    return os.isatty(1) and os.isatty(2) and os.path.samestat(os.fstat(1), os.fstat(2))


def shows_output() -> bool:
    """Return whether both streams end on one terminal, perhaps through the pipes of `launch`."""
    return ONE_TERMINAL in os.environ or is_one_terminal()


class Screen:
    """The last line of a terminal, on which progress bars and other text alternate.

    lock  lets one thread at a time write to the terminal
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._line = b""
        """The bytes since the last line break or carriage return."""

    def lead(self, data: bytes) -> bytes:
        """Return a line break if `data` must not continue the last line, else b"".

        Text does not continue a bar, nor a bar an unfinished line of text.
        """
        is_bar = self._line != b"\r\x1b[K" and bool(DRAWN.fullmatch(self._line))
        is_text = self._line[:1] not in (b"", b"\r")
        follows_bar = is_bar and data[:1] not in (b"\r", b"\n", b"")
        runs_into = follows_bar or (is_text and DRAWN.match(data))
        line = ((b"" if runs_into else self._line) + data).rpartition(b"\n")[2]
        self._line = line[max(0, line.rfind(b"\r")) :][-LONGEST:]
        return b"\n" if runs_into else b""

    def place(self, data: bytes) -> bytes:
        """Put line breaks between the bars and texts in `data`, and cut bars to the terminal's width.

        `data` may have the output of several ranks, as a launcher forwards it.
        """
        # If a line fills the last column, the terminal erases its last character.
        most = len("\r") + columns() - 1
        placed = b""
        for piece in filter(None, DRAWN.split(data)):
            placed += self.lead(piece)
            if DRAWN.fullmatch(piece):
                piece = piece[:-3].decode(errors="replace")[:most].encode() + piece[-3:]
            placed += piece
        return placed


class OutputError(MpitrainError):
    """Standard output accepts no more bytes."""


class Output(io.FileIO):
    """A raw stream of bytes that drops all bytes after the first failed write.

    is_courtesy  whether a failed write raises nothing: the work goes on, and its results are in
                 files
    is_lost      whether a write has failed
    screen       the terminal that shows the bytes, where a progress bar may be drawn
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

    Bytes that standard error does not accept are dropped. A launcher forwards two pipes in any
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


def silence() -> None:
    """Drop what this process prints on standard output from now on: only rank 0 prints."""
    # Python complains of a file object that is not closed, but not of one without a file to close.
    null = os.open(os.devnull, os.O_WRONLY)
    sys.stdout = open(null, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def be_courtesy() -> None:
    """Ignore failed writes to standard output from now on: a long run shall not end for them."""
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
