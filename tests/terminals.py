"""A terminal for programs that tests start: what it was sent, and the lines that it would then show."""

import os
import pty
import re
import select
import subprocess
import termios
import time

from tests.processes import SECONDS

PIECES = re.compile(r"\r|\n|\x1b\[\d*[A-Za-z]|[^\r\n\x1b]")


def rendered(data, columns):
    """The lines of a terminal of so many columns; the last column is left only when more comes, as on xterm."""
    rows, row, column = [[]], 0, 0
    for piece in PIECES.findall(data.decode(errors="replace")):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, column if column < columns else columns - 1
        elif piece == "\x1b[K":
            rows[row][min(column, columns - 1) :] = []
        elif piece == "\x1b[A":
            row = max(0, row - 1)
        elif not piece.startswith("\x1b"):
            if column == columns:
                row, column = row + 1, 0
            rows += [[] for _ in range(row + 1 - len(rows))]
            rows[row] += [" "] * (column - len(rows[row]))
            rows[row][column : column + 1], column = [piece], column + 1
        rows += [[] for _ in range(row + 1 - len(rows))]
    return ["".join(row).rstrip() for row in rows]


def on_a_terminal(words, columns=80, seen=lambda data, job: None, *, rows=24, **more):
    """(exit code, bytes) of a program whose streams are a terminal of so many columns, but for those named in `more`.

    seen    called with all bytes and the process whenever more have come; what is written to `job.keyboard` is typed
    """
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (rows, columns))
    job = subprocess.Popen(
        [*map(str, words)], **{"stdin": slave, "stdout": slave, "stderr": slave} | more
    )
    job.keyboard = master
    os.close(slave)
    data, until = b"", time.monotonic() + SECONDS
    while True:
        has_ended = job.poll() is not None
        if select.select([master], [], [], 0.05)[0]:
            try:
                data += os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
            seen(data, job)
        elif has_ended:
            break
        assert time.monotonic() < until, data
    os.close(master)
    return job.wait(SECONDS), data
