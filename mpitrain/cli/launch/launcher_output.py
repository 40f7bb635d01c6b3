"""The output of a launched job, from which `launch` reads the state of the run and its killed rank.

Bytes are forwarded at once and unchanged, with two exceptions. Open MPI's boxes about an ended rank
are dropped if our own message reports the same. PMIX errors are dropped after such a message or
after the end of the run.
"""

import os
import re
import select
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from mpitrain.cli import BEGAN, ENDED, NOT_BEGUN, STOPPED_AT
from mpitrain.cli.terminal.screen import Screen

RULE = b"-" * 74
"""The line above and below each of Open MPI's boxes."""
BOX = re.compile(RULE + rb"\r?\n.*?\n" + RULE + rb"\r?\n", re.DOTALL)
LONGEST = 4096
"""Most bytes of a box, and of earlier output that is searched again together with new output."""
PAUSE = 0.3
"""Seconds without a byte after which an unfinished box is shown."""

TAG = rb"^(?:\[[^\]\n]*\](?:<\w+>)?: ?|\d+: ?)?"
"""The start of a line, with the tag of its rank that some launchers add."""

KILLED = (
    re.compile(
        rb"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+)\s+exited\s+on\s+"
        rb"(?P<how>signal\s+\d+ \([^)]*\))"
    ),
    re.compile(
        rb"^srun: error: (?P<host>\S+): tasks? (?P<rank>[\d,-]+): (?!Exited with)(?P<how>.+)$",
        re.MULTILINE,
    ),
    re.compile(
        rb"PID (?P<process>\d+) RUNNING AT (?P<host>\S+)\n.*TERMINATED WITH THE EXIT STRING: .*\((?P<how>signal \d+)\)",
        re.DOTALL,
    ),
)
# srun and its daemons print ABORTED when they kill the remaining ranks.
# LOST finds the rank that PMIx lost first.
ABORTED = re.compile(rb"^srun: Job step aborted|^slurmstepd-\S+: error: \*\*\* STEP ", re.MULTILINE)
LOST = re.compile(
    rb"^slurmstepd-\S+: error:.* _errhandler: .* source = \[\S+:(\d+)\]", re.MULTILINE
)
# After this message srun itself kills the other ranks.
LEFT = re.compile(rb"^srun: error: \S+: tasks? [\d,-]+: Exited with", re.MULTILINE)
PMIX = re.compile(rb"\[\S+:\d+\] PMIX ERROR")
ENDINGS = re.compile(
    rb"processes exited with non-zero status|MPI_ABORT was invoked|exited due to process rank"
)


class Killed(NamedTuple):
    """A process ended by a signal, as Open MPI, Slurm or MPICH reports it. MPICH reports no rank.

    rank  its number. Slurm may list several ranks, as "2-3" or "0,2"; it may have killed some.
    """

    how: str
    host: str
    rank: str = ""
    process: str = ""

    @property
    def is_one(self) -> bool:
        """Whether a single rank or process is named."""
        return self.rank.isdigit() or not self.rank

    def has(self, rank: int) -> bool:
        """Return whether this rank is listed."""
        ends = [
            [int(end) for end in listed.split("-")] for listed in self.rank.split(",") if listed
        ]
        return any(first <= rank <= last for first, *_, last in ([*pair, *pair] for pair in ends))

    def __str__(self) -> str:
        if not self.is_one:
            return f"at least one of the ranks {self.rank} on {self.host} was killed: {self.how} (Slurm then ends the others)"
        if self.rank:
            return f"rank {self.rank} on {self.host} was killed: {self.how}"
        return (
            f"process {self.process} on {self.host} was killed: {self.how}. MPICH does not tell its rank, and ends the "
            "others itself when one has left"
        )


class LauncherOutput:
    """The state of a run, read from its output.

    began    whether rank 0 has printed the run directory
    closing  phrase with which rank 0 closed the run: ENDED, STOPPED_AT or NOT_BEGUN; None before
    run      the run directory that rank 0 printed; "" before
    spoken   whether any byte was shown on standard error
    """

    def __init__(self) -> None:
        self.began = self.spoken = False
        self.closing: str | None = None
        self.run = ""
        self._killed: list[Killed] = []
        self._lost: int | None = None
        self._has_left = self._is_aborted = False

    @property
    def killed(self) -> Killed | None:
        """The process that a signal ended first, if known. srun also kills and lists others."""
        if self._lost is not None:
            for killed in self._killed:
                if killed.has(self._lost):
                    return killed._replace(rank=str(self._lost))
        if self._is_aborted and len(self._killed) > 1:
            # srun killed all ranks before it listed any, so the first one is unknown.
            return self._killed[0]._replace(
                rank=",".join(killed.rank for killed in self._killed),
                host=", ".join(killed.host for killed in self._killed),
            )
        return self._killed[0] if self._killed else None

    def hear(self, text: bytes) -> None:
        """Update the state from whole lines of either stream."""
        if not self.began and (found := re.search(re.escape(BEGAN.encode()) + rb"(.*)", text)):
            self.began, self.run = True, found[1].decode(errors="replace").strip()
        for sentence in (ENDED, STOPPED_AT, NOT_BEGUN):
            if self.closing is None and re.search(
                TAG + re.escape(sentence.encode()), text, re.MULTILINE
            ):
                self.closing = sentence
        lost = LOST.search(text)
        if lost and self._lost is None:
            self._lost = int(lost[1])
        left = LEFT.search(text)
        for pattern in KILLED if not self._has_left else ():
            for found in pattern.finditer(text, 0, left.start() if left else len(text)):
                killed = Killed(
                    **{
                        name: " ".join(value.decode(errors="replace").split())
                        for name, value in found.groupdict().items()
                    }
                )
                if not self._killed:
                    self._is_aborted = bool(ABORTED.search(text, 0, found.start()))
                if killed not in self._killed:
                    self._killed.append(killed)
        self._has_left = self._has_left or bool(left)


class Output:
    """A filter for standard output that shows all bytes at once."""

    held = b""

    def __init__(self, words: LauncherOutput):
        self._words, self._recent = words, b""

    def pass_on(self, chunk: bytes) -> bytes:
        """Return the bytes to show now."""
        self._recent += chunk
        self._words.hear(self._recent[: self._recent.rfind(b"\n") + 1])
        self._recent = self._recent[-LONGEST:]
        return chunk

    def release(self) -> bytes:
        """Return the withheld bytes, to be shown after all."""
        return b""


class Errors:
    """A filter for standard error that drops boxes and lines that repeat a message.

    server  prefix of the launcher's own lines
    held    withheld bytes that may become such a box or line
    """

    def __init__(self, words: LauncherOutput, server: bytes):
        self._words, self._server = words, server
        self._said = Output(words)
        self._at_line_start, self._follows_box = True, False
        self.held = b""

    def pass_on(self, chunk: bytes) -> bytes:
        data, self.held = self.held + chunk, b""
        shown = b""
        while data:
            # Open MPI ends a box with a null byte.
            if self._follows_box and data.startswith(b"\0"):
                data = data[1:]
            self._follows_box = False
            if self._at_line_start and (box := BOX.match(data)):
                shown, data = shown + self._show(box[0], self._repeats(box[0])), data[box.end() :]
                self._follows_box = True
            elif self._at_line_start and self._is_unfinished(data):
                self.held, data = data, b""
            else:
                line, newline, data = data.partition(b"\n")
                shown += self._show(line + newline, self._at_line_start and self._is_late(line))
                self._at_line_start = bool(newline)
        return shown

    def release(self) -> bytes:
        held, self.held = self.held, b""
        self._at_line_start = held.endswith(b"\n")
        return self._show(held, False)

    def _is_unfinished(self, data: bytes) -> bool:
        if data.startswith(RULE):
            return len(data) < LONGEST
        return (
            RULE.startswith(data)
            or self._server.startswith(data)
            or (data.startswith(self._server) and b"\n" not in data)
        )

    def _repeats(self, box: bytes) -> bool:
        """Return whether our own message reports the same as this box."""
        return bool(KILLED[0].search(box)) or (bool(ENDINGS.search(box)) and self._is_told())

    def _is_late(self, line: bytes) -> bool:
        """Return whether this line is a PMIX error that adds nothing.

        That is, from the launcher after the end was reported, or from any rank after the run.
        """
        is_servers = line.startswith(self._server) and b"PMIX ERROR" in line
        return (is_servers and self._is_told()) or bool(self._words.closing and PMIX.match(line))

    def _is_told(self) -> bool:
        """Return whether the output already shows how the run ended or why it failed."""
        return self._words.spoken or bool(self._words.closing)

    def _show(self, text: bytes, is_dropped: bool) -> bytes:
        if is_dropped:
            self._words.hear(text)
            return b""
        self._words.spoken = self._words.spoken or bool(text)
        return self._said.pass_on(text)


class Passage(threading.Thread):
    """A thread that copies one file descriptor to another until the source ends.

    is_courtesy  after a failed write, read on and drop the bytes; otherwise close the source
    screen       the terminal of the target, if bars are drawn there
    lost         error of the failed write; None before
    """

    def __init__(
        self,
        source: int,
        target: int,
        stream: Output | Errors,
        is_courtesy: bool = False,
        screen: Screen | None = None,
    ):
        super().__init__(daemon=True)
        self._is_courtesy, self._screen = is_courtesy, screen
        self.lost: OSError | None = None
        self._source, self._target, self._stream = source, target, stream
        self._is_waiting = False
        self.start()

    def run(self) -> None:
        with suppress(OSError):  # the target has no reader any more
            while chunk := self._read():
                self._write(self._stream.pass_on(chunk))
            self._write(self._stream.release())
        os.close(self._source)

    def finish(self, seconds: float) -> None:
        """Wait for the end of the source, but at most `seconds` after its last byte.

        A process on another host may never close the source.
        """
        until = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < until:
            self.join(0.02)
            if not self._is_waiting:
                until = time.monotonic() + seconds

    def _read(self) -> bytes:
        self._is_waiting = True
        if self._stream.held and not select.select([self._source], [], [], PAUSE)[0]:
            self._write(self._stream.release())
        chunk = os.read(self._source, 1 << 16)
        self._is_waiting = False
        return chunk

    def _write(self, data: bytes) -> None:
        if self._screen is None:
            self._write_all(data)
            return
        with self._screen.lock:
            self._write_all(self._screen.place(data))

    def _write_all(self, data: bytes) -> None:
        while data and self.lost is None:
            try:
                data = data[os.write(self._target, data) :]
            except OSError as error:
                self.lost = error
                if not self._is_courtesy:
                    raise
