"""The terminal behind standard error: its width, and the bar on it that other text must not run into."""

import os
import re
import threading

# What `launch` tells its ranks of the terminal behind the pipes that they are given.
TERMINAL = "MPITRAIN_TERMINAL"  # the columns of the one behind standard error
ONE_TERMINAL = "MPITRAIN_ONE_TERMINAL"  # set where standard output ends there, too
OUTPUT_TERMINAL = (
    "MPITRAIN_OUTPUT_TERMINAL"  # the columns of the one behind standard output, 0 without one
)

USUAL = 80  # columns of a terminal that does not say how many it has
DRAWN = re.compile(rb"(\r[^\r\n\x1b]*\x1b\[K)")  # a bar: over the line's text, whose rest is erased
LONGEST = 4096  # bytes of a line that are remembered


def columns(descriptor: int = 2) -> int:
    """Columns of the terminal behind a descriptor, by default standard error; COLUMNS if it does not know."""
    try:
        known = os.get_terminal_size(descriptor).columns
    except OSError:
        known = 0
    said = os.environ.get("COLUMNS", "")
    return known or (int(said) if said.isdecimal() else 0) or USUAL


def width() -> int | None:
    """Columns of the terminal behind standard error, also through the pipes of `launch`; or None."""
    if os.isatty(2):
        return columns()
    told = os.environ.get(TERMINAL, "")
    return int(told) if told.isdecimal() else None


def output_columns() -> int:
    """Columns of the terminal behind standard output, also behind the pipe of `launch`; 0 without one."""
    told = os.environ.get(
        OUTPUT_TERMINAL, ""
    )  # mpirun gives its ranks a terminal of its own, whatever is behind that
    if told.isdecimal():
        return int(told)
    # The terminal that mpirun makes for its ranks has no columns.
    return os.get_terminal_size(1).columns if os.isatty(1) else 0


def is_one_terminal() -> bool:
    """Whether standard output and standard error are the same terminal."""
    return os.isatty(1) and os.isatty(2) and os.path.samestat(os.fstat(1), os.fstat(2))


def shows_output() -> bool:
    """Whether both streams end on one terminal, also through the pipes of `launch`."""
    return ONE_TERMINAL in os.environ or is_one_terminal()


class Screen:
    """The last line of a terminal, on which a bar and other text take turns.

    lock  held while bytes are placed and written, where several threads write to one terminal
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._line = b""  # what has come since the last line break or carriage return

    def lead(self, data: bytes) -> bytes:
        """A line break, if `data` comes next and would run into a bar, or draw one over unfinished text."""
        is_bar = self._line != b"\r\x1b[K" and bool(DRAWN.fullmatch(self._line))
        is_text = self._line[:1] not in (b"", b"\r")
        follows_bar = is_bar and data[:1] not in (b"\r", b"\n", b"")
        runs_into = follows_bar or (is_text and DRAWN.match(data))
        line = ((b"" if runs_into else self._line) + data).rpartition(b"\n")[2]
        self._line = line[max(0, line.rfind(b"\r")) :][-LONGEST:]
        return b"\n" if runs_into else b""

    def place(self, data: bytes) -> bytes:
        """`data` as `launch` writes it on its terminal: each piece behind its lead, no bar wider than that.

        A launcher may pass on in one piece what several ranks have written.
        """
        most = len("\r") + columns() - 1  # a line that ends in the last column has its end erased
        placed = b""
        for piece in filter(None, DRAWN.split(data)):
            placed += self.lead(piece)
            if DRAWN.fullmatch(piece):
                piece = piece[:-3].decode(errors="replace")[:most].encode() + piece[-3:]
            placed += piece
        return placed
