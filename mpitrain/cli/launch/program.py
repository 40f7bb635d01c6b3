"""The program that `mpitrain launch` starts on every rank: an mpitrain command, or a user's own program."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import click

from mpitrain.cli import COMMANDS, WORDS
from mpitrain.errors import ConfigError
from mpitrain.hints import foreign, hint

RANK = "mpitrain.transport.program"
"""The module that runs a user's program on a rank."""
PYTHON = ("python", "python3", f"python3.{sys.version_info.minor}")


class Program(NamedTuple):
    """The program of every rank.

    words    command line of a rank
    command  name of the mpitrain command; "" for a user's program
    """

    words: list[str]
    command: str

    @property
    def tells_its_end(self) -> bool:
        """Whether it is a user's program, whose ranks say that it has ended by itself."""
        return RANK in self.words


def program(arguments: list[str]) -> Program:
    """Return the program that the words after `launch ... --` name.

    COMMAND ...                        an mpitrain command, also after `mpitrain` or `python -m
                                       mpitrain`
    FILE.py ...                        a Python file
    python FILE|-m MODULE|-c CODE ...  a Python program, by this environment's interpreter
    raises                             ConfigError for a missing file, UsageError for anything else
    """
    first, *rest = arguments
    if first == "mpitrain" and rest:
        return program(rest)
    if first in WORDS or first.startswith("-"):
        return Program([sys.executable, "-m", "mpitrain", *arguments], first)
    if _is_this_python(first):
        return _python(rest)
    if first.endswith(".py"):
        return _python(arguments)
    return _unknown(first, rest)


def _is_this_python(word: str) -> bool:
    path = Path(word)
    is_here = path.name == word or path.parent.resolve() == Path(sys.executable).parent.resolve()
    return is_here and path.name in PYTHON


def _python(words: list[str]) -> Program:
    """Return the program of the words that follow `python`."""
    options, rest = _split(words)
    if rest[:2] == ["-m", "mpitrain"] and len(rest) > 2:
        return program(rest[1:])
    if not words:
        raise ConfigError(
            "python needs a program on every rank, but none is named.",
            "For example: -- python own.py",
        )
    if not rest:
        return Program([sys.executable, *options], "")  # as `python -V`
    if not rest[0].startswith("-"):
        _check_readable(rest[0])
    return Program([sys.executable, *options, "-m", RANK, *rest], "")


def _check_readable(file: str) -> None:
    if not os.path.exists(file):
        raise ConfigError(
            f"Every rank runs the file {file}, but there is none here.",
            f"Name one that exists; the current directory is {os.getcwd()}.",
        )
    if not os.access(file, os.R_OK):
        raise ConfigError(
            f"Every rank runs the file {file}, but you may not read it.",
            f"Ask its owner, or type: chmod u+r {shlex.quote(file)}",
        )
    if os.path.isdir(file) and not os.path.exists(os.path.join(file, "__main__.py")):
        raise ConfigError(
            f"Every rank runs the file {file}, but it is a folder without __main__.py.",
            "Name the file in it.",
        )


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split words into options of Python and the program, which begins at a file, -m, -c or -."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        flags, letter, value = re.fullmatch(r"-([^cmWX]*)([cmWX]?)(.*)", word, re.DOTALL).groups()  # type: ignore[union-attr]
        if letter in ("c", "m") and not word.startswith("--"):
            return [*options, *([f"-{flags}"] if flags else [])], [
                f"-{letter}",
                *([value] if value else []),
                *rest,
            ]
        options.append(word)
        if letter in ("W", "X") and not value and rest and not word.startswith("--"):
            options.append(rest.pop(0))
    return options, rest


def _unknown(name: str, rest: list[str]) -> Program:
    """Raise the error for a program that is no Python; `rest` are the words behind its name."""
    if os.sep in name:
        raise ConfigError(
            f"Ranks run Python programs by the Python of this environment, but {name} "
            + (
                "is a folder."
                if os.path.isdir(name)
                else "is another program."
                if os.path.exists(name)
                else "is missing."
            ),
            "Name a Python file, as own.py or python own.py.",
        )
    way_out = (
        f"Commands are {', '.join(COMMANDS)}; a Python file is named as own.py or python own.py."
    )
    files = [at for at, word in enumerate(rest) if word.endswith(".py")]
    if files and foreign(name, is_command=True):  # another launcher, as in `torchrun own.py`
        way_out = f"Type the file alone: -- {shlex.join(['python', *rest[files[0] :]])}"
    raise click.UsageError(
        f"{name!r} is neither an mpitrain command nor a Python file{hint(name, COMMANDS, is_command=True)} {way_out}"
    )
