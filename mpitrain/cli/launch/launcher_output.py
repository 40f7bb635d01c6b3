"""What a started job says on its output, and what of it `launch` understands: how the run stands, and which rank was killed.

Bytes pass as they are, at once. Two things are kept back: Open MPI's boxes about a rank that ended, where our own message
has said it already (or will say it better), and errors of PMIX that follow them or the end of the run.
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

RULE = b"-" * 74  # above and below each of Open MPI's boxes
BOX = re.compile(RULE + rb"\r?\n.*?\n" + RULE + rb"\r?\n", re.DOTALL)
LONGEST = (
    4096  # bytes of a box, and of what was said before and is looked at again when more has come
)
PAUSE = 0.3  # seconds without a byte after which an unfinished box is passed on

TAG = rb"^(?:\[[^\]\n]*\](?:<\w+>)?: ?|\d+: ?)?"  # the beginning of a line, which a launcher may mark with its rank

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
# What srun and its daemons say when they kill all that are left, and which rank PMIx lost first.
ABORTED = re.compile(rb"^srun: Job step aborted|^slurmstepd-\S+: error: \*\*\* STEP ", re.MULTILINE)
LOST = re.compile(
    rb"^slurmstepd-\S+: error:.* _errhandler: .* source = \[\S+:(\d+)\]", re.MULTILINE
)
LEFT = re.compile(
    rb"^srun: error: \S+: tasks? [\d,-]+: Exited with", re.MULTILINE
)  # after which srun itself kills the others
PMIX = re.compile(rb"\[\S+:\d+\] PMIX ERROR")
ENDINGS = re.compile(
    rb"processes exited with non-zero status|MPI_ABORT was invoked|exited due to process rank"
)


class Killed(NamedTuple):
    """What a signal ended, as Open MPI, Slurm or MPICH (which knows no ranks) tells.

    rank  its number; of Slurm "2-3" or "0,2" where it lists several, some of which it may have killed itself
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
        """Whether this rank is among those that are listed."""
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
    """What was understood so far.

    began    rank 0 has said that the run has its directory
    closing  the sentence with which rank 0 closed the run: ENDED, STOPPED_AT or NOT_BEGUN; None until then
    run      the directory of the run, as rank 0 named it; empty until then
    spoken   whether anything has come on standard error
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
        """What a signal ended first, as far as the launcher tells: srun kills, and then lists, others too."""
        if self._lost is not None:
            for killed in self._killed:
                if killed.has(self._lost):
                    return killed._replace(rank=str(self._lost))
        if (
            self._is_aborted and len(self._killed) > 1
        ):  # srun ended all before it said so of any: nothing tells them apart
            return self._killed[0]._replace(
                rank=",".join(killed.rank for killed in self._killed),
                host=", ".join(killed.host for killed in self._killed),
            )
        return self._killed[0] if self._killed else None

    def hear(self, text: bytes) -> None:
        """Understand whole lines of either stream."""
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
    """Standard output: nothing is kept back."""

    held = b""

    def __init__(self, words: LauncherOutput):
        self._words, self._recent = words, b""

    def pass_on(self, chunk: bytes) -> bytes:
        """The bytes to show now."""
        self._recent += chunk
        self._words.hear(self._recent[: self._recent.rfind(b"\n") + 1])
        self._recent = self._recent[-LONGEST:]
        return chunk

    def release(self) -> bytes:
        """What was kept back and shall be shown after all."""
        return b""


class Errors:
    """Standard error, without boxes that repeat what was said.

    server  how the launcher's own lines begin
    held    bytes that may become such a box or line
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
            if self._follows_box and data.startswith(b"\0"):  # Open MPI ends a box with it
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
        """Whether our own message says what this box says."""
        return bool(KILLED[0].search(box)) or (bool(ENDINGS.search(box)) and self._is_told())

    def _is_late(self, line: bytes) -> bool:
        """Whether this is an error of PMIX after what was said: of the launcher's server, or of any rank after the run's end."""
        is_servers = line.startswith(self._server) and b"PMIX ERROR" in line
        return (is_servers and self._is_told()) or bool(self._words.closing and PMIX.match(line))

    def _is_told(self) -> bool:
        """Whether somebody has said already how the run ended, or why it did not go on."""
        return self._words.spoken or bool(self._words.closing)

    def _show(self, text: bytes, is_dropped: bool) -> bytes:
        if is_dropped:
            self._words.hear(text)
            return b""
        self._words.spoken = self._words.spoken or bool(text)
        return self._said.pass_on(text)


class Passage(threading.Thread):
    """Copies one file descriptor to another as long as bytes come.

    is_courtesy  a target that takes no more gets no more, and the source is read on; or else it is closed
    screen       the terminal that the target is, if bars are drawn there
    lost         why the target took no more; None as long as it takes everything
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
        with suppress(OSError):  # nobody reads any more
            while chunk := self._read():
                self._write(self._stream.pass_on(chunk))
            self._write(self._stream.release())
        os.close(self._source)

    def finish(self, seconds: float) -> None:
        """Wait for the end, but for no more than so long without a byte: a process on another host may hold the source open."""
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
