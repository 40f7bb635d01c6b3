"""Processes that run a user's file, and calls of its functions from outside.

A worker is a fork of `isolated.py` that has only two pipes. It loads the file, then answers each
request, a line of JSON. So the process with the laws never runs the user's code. A worker can only
return values, raise errors, or end.
"""

import ctypes
import json
import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from mpitrain.collectives.plans.isolated_values import decoded, encoded
from mpitrain.errors import Sentence

LINE = 1 << 26
"""Largest answer to a request, in bytes."""
TEXT = 200
"""Characters of the text of an error."""
DUMPABLE, NO_NEW_PRIVILEGES = 4, 38
"""PR_SET_DUMPABLE and PR_SET_NO_NEW_PRIVS of prctl(2)."""
CAPABILITIES = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3 of capset(2)."""


class Wrong(Exception):
    """A rule that the user's file breaks.

    law     sentence with fields in braces
    values  of the fields
    """

    def __init__(self, law: str, **values: Any):
        self.sentence = Sentence(law, **values)
        super().__init__(self.sentence)

    @property
    def law(self) -> str:
        """The sentence with its fields."""
        return self.sentence.law

    @property
    def values(self) -> dict[str, Any]:
        """The values of the fields."""
        return self.sentence.values


class Ended(Exception):
    """A worker has ended without an answer.    status: as Popen.returncode"""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


class Running:
    """The stand-in for a generator of the user's file, which runs in a worker."""

    def __init__(self, worker: "Worker", number: int):
        self._worker, self._number = worker, number

    def send(self, value: Any) -> Any:
        """Go on to the next `yield`; StopIteration with the result at the end."""
        return self._worker.ask(send=self._number, value=encoded(value, []))


class Worker:
    """A process with the user's file."""

    def __init__(self, path: str, code: bytes):
        requests, to = os.pipe()
        of, replies = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _begin(path, code, requests, replies)
        os.close(requests)
        os.close(replies)
        self._to, self._of = os.fdopen(to, "wb", 0), os.fdopen(of, "rb")

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request.

        raises  Wrong if the file raised an error; StopIteration at the end of a generator; Ended if
                the process ended or wrote anything else
        """
        try:
            self._to.write(json.dumps(request).encode() + b"\n")
            answer = decoded(self._of.readline(LINE), lambda number: Running(self, number))
            (way, found), *_ = answer.items()
            if way not in ("value", "returned"):
                error = _problem(way, *found)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise self._ended() from None
        if way == "value":
            return found
        raise StopIteration(found) if way == "returned" else error

    def _ended(self) -> Ended:
        """Wait for the end of the process; the time limit of `isolated_answers` ends this wait."""
        self._to.close()
        self._of.close()
        return Ended(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


class UserFile:
    """A user's file, and its functions."""

    def __init__(self, path: str, code: bytes):
        self._path, self._code = path, code
        self._workers: dict[int, Worker] = {}

    def function(self, name: str, process: int = 0) -> Callable[..., Any] | None:
        """Return a function of the file, to call in a worker; None if the file does not define it.

        process  number of the worker: they share no memory
        """
        if process not in self._workers:
            self._workers[process] = Worker(self._path, self._code)
        worker = self._workers[process]
        if worker.ask(defines=name) is not True:
            return None
        return lambda *given: worker.ask(call=name, given=[encoded(one, []) for one in given])


def keep_secret(is_secret: bool = True) -> None:
    """Hide the memory and the descriptors of this process from others of the same user, or show them."""
    ctypes.CDLL(None).prctl(DUMPABLE, int(not is_secret))


def _problem(way: str, *found: Any) -> Wrong:
    """Return the error that a worker reports; ValueError or TypeError for any other answer."""
    if way == "memory":
        return Wrong("it takes more than {most} MiB", most=int(found[0]))
    kind, line, text = found
    if way != "raised" or [type(one) for one in found] != [str, int, str]:
        raise ValueError(way)
    said = " ".join(text.split())[:TEXT]
    values = {"kind": kind[:TEXT], "text": f": {said}" if said else ""}
    if not line:
        return Wrong("it raises {kind}{text}", **values)
    return Wrong("it raises {kind} in line {line}{text}", line=line, **values)


def _begin(path: str, code: bytes, requests: int, replies: int) -> NoReturn:
    """Run a worker: close all other descriptors, drop root's capabilities, and answer."""
    status = 1
    try:
        empty = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(empty, standard)
        first, last = sorted((requests, replies))
        for start, stop in ((3, first), (first + 1, last), (last + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(start, stop)
        library = ctypes.CDLL(None)
        library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        library.capset((ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)())
        with os.fdopen(requests, "rb") as reader, os.fdopen(replies, "wb", 0) as writer:
            _serve(path, code, reader, writer)
        status = 0
    finally:
        os._exit(status)


def _serve(path: str, code: bytes, requests: BinaryIO, replies: BinaryIO) -> None:
    """Load the user's file, and answer requests until there are no more."""
    own = ModuleType("own")
    own.__file__ = path
    sys.modules[own.__name__] = own  # A dataclass looks for its module there.
    generators: list[Any] = []
    failed = b""
    try:
        exec(compile(code, path, "exec"), own.__dict__)
    except (Exception, SystemExit) as error:
        failed = _failed(error, path)
    for line in requests:
        replies.write(failed or _answer(decoded(line, int), own.__dict__, generators, path))


def _answer(request: dict[str, Any], own: dict[str, Any], generators: list, path: str) -> bytes:
    """Return the answer to a request as a line of JSON."""
    try:
        way = "value"
        if "defines" in request:
            value = callable(own.get(request["defines"]))
        elif "call" in request:
            value = own[request["call"]](*request["given"])
        else:
            try:
                value = generators[request["send"]].send(request["value"])
            except StopIteration as end:
                way, value = "returned", end.value
        return _line({way: encoded(value, generators)})
    except (Exception, SystemExit) as error:
        return _failed(error, path)


def _failed(error: BaseException, path: str) -> bytes:
    """Return an error as a line: its type, its line in the user's file or 0, and its text."""
    if isinstance(error, MemoryError):
        return _line({"memory": [resource.getrlimit(resource.RLIMIT_AS)[0] >> 20]})
    lines = [0]
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == path:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        lines.append(error.lineno)
    return _line({"raised": [type(error).__name__, lines[-1], f"{error!s:.{TEXT}}"]})


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"
