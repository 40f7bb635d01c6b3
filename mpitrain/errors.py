"""Errors a user can meet: the law that was broken, the values that broke it, and the way out."""

import re
import unicodedata
from typing import TypeVar


def brief(message: str) -> str:
    """The message without the middle of overlong words: what was typed, or read, by mistake may be a whole file."""
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:120]}[...]{word[0][-60:]}", message)


def visible(text: str) -> str:
    """The text with control characters escaped, as \\x1b: a trace may hold what controls a terminal."""
    return "".join(
        c
        if c in "\n\t" or unicodedata.category(c)[0] != "C"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def multiples_near(number: int, unit: int) -> str:
    """The multiples of `unit` next to a number that is none, in words: what to set it to instead."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


class MpitrainError(Exception):
    """Base of every error that mpitrain raises on purpose.

    Parameters
    ----------
    law : str
        What must hold, with the values that break it; one or two sentences.
    way_out : str
        What to type or change; printed on a line of its own, aligned under the law.

    Attributes
    ----------
    exit_code : int
        What a command ends with.
    agreed : bool
        Whether every rank raises this very error, so that rank 0 may print it for all.
    """

    exit_code = 1
    agreed = False

    def __init__(self, law: str, way_out: str = ""):
        super().__init__(law, way_out)
        self.law = law
        self.way_out = way_out

    def __str__(self) -> str:
        name = f"{type(self).__name__}: "
        indent = "\n" + " " * len(name)
        lines = [*self.law.splitlines(), *self.way_out.splitlines()]
        return visible(name + indent.join(map(brief, lines)))


Error = TypeVar("Error", bound=MpitrainError)


def on_every_rank(error: Error) -> Error:
    """Mark an error that every rank raises, so that one may print it and all may leave together."""
    error.agreed = True
    return error


class ConfigError(MpitrainError):
    """The configuration, the command line or the layout cannot work."""

    exit_code = 2


class DataError(MpitrainError):
    """A data source is missing, unreadable, or too small for the model."""

    exit_code = 2


class CheckpointError(MpitrainError):
    """A checkpoint is missing, damaged, or belongs to another model."""

    exit_code = 2


class CommError(MpitrainError):
    """Ranks disagree about a message or a collective, or a peer is gone."""


class TrainingError(MpitrainError):
    """The run itself went wrong: a loss that is not finite, a replica that differs."""


class KernelError(MpitrainError):
    """A kernel cannot be compiled or launched like this, or broke a rule of the machine while the simulator watched."""
