"""The status lines of a training run: rank 0 writes them, `launch` reads and removes them.

A status line is an element of a JSON text sequence (RFC 7464): record separator, object, line
break. It travels on standard output, the only channel that every launcher forwards from every
host. `launch` requests it by an option of the interpreter, because command lines reach all hosts.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

FLAG = "mpitrain_launched"
"""The value of Python's option -X on every rank that `launch` starts."""
Event = Literal["began", "ended", "stopped", "not begun"]
LONGEST = 8192
"""Upper bound of the bytes of a status line."""

MARK = b'\x1e{"mpitrain": '
TAG = rb"(?:^(?:(?:\[[^\]\n]*\])+(?:<\w+>)?: ?|\d+: ?))?"
"""The start of a line, with the tag of its rank that some launchers add."""
STATUS = re.compile(TAG + re.escape(MARK[:1]) + rb"(\{\"mpitrain\": .*)\n", re.MULTILINE)
UNFINISHED = re.compile(TAG + re.escape(MARK[:1]) + rb"[^\x1e\n]*\Z", re.MULTILINE)


def is_launched() -> bool:
    """Return whether `launch` started this rank; it can stop a run without ending its launcher."""
    return FLAG in sys._xoptions


def status(event: Event, run_dir: str = "") -> str:
    """Return the status line of an event, or "" if no `launch` reads it.

    began      the run directory exists; `run_dir` is its path
    ended      all steps are done, and the replicas are bitwise equal
    stopped    the run stopped on request, after a checkpoint
    not begun  the run stopped on request, before it had a run directory
    """
    if not is_launched():
        return ""
    return f"\x1e{json.dumps({'mpitrain': event, 'run_dir': run_dir})}\n"


class StatusFilter:
    """Removes the status lines from a stream of bytes.

    note  is called with event and run directory of each line
    held  withheld bytes that may become a status line
    """

    def __init__(self, note: Callable[[str, str], None]):
        self._note = note
        self.held = b""

    def pass_on(self, chunk: bytes) -> bytes:
        """Return the bytes that belong to no status line."""
        data, self.held = STATUS.sub(self._read, self.held + chunk), b""
        rest = UNFINISHED.search(data)
        if rest and self._may_become_status(rest[0][rest[0].index(MARK[:1]) :]):
            data, self.held = data[: rest.start()], rest[0]
        return data

    def release(self) -> bytes:
        """Return the withheld bytes, unless they have become the start of a status line."""
        held, self.held = self.held, b""
        if MARK in held:
            held, self.held = b"", held
        return held

    def _read(self, match: re.Match[bytes]) -> bytes:
        with suppress(ValueError, KeyError, TypeError):
            facts = json.loads(match[1])
            self._note(facts["mpitrain"], facts["run_dir"])
        return b""

    def _may_become_status(self, text: bytes) -> bool:
        return MARK.startswith(text) or (text.startswith(MARK) and len(text) < LONGEST)
