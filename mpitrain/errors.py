"""The exceptions of mpitrain. Each names a rule, the values that break it, and a remedy."""

import re
import sys
import traceback
import unicodedata
from typing import Self


def brief(message: str) -> str:
    """Return the message with the middle of each overlong word cut out.

    A word is overlong from 300 characters on: a mistyped argument may be a whole file.
    """
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:120]}[...]{word[0][-60:]}", message)


def visible(text: str) -> str:
    """Return the text with control characters escaped, as \\x1b.

    A file from another person may hold escape sequences that control the terminal.
    """
    return "".join(
        c
        if c in "\n\t" or unicodedata.category(c)[0] != "C"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def say(text: object) -> None:
    """Print a text to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def multiples_near(number: int, unit: int) -> str:
    """Return the multiples of `unit` below and above `number` as text, for a remedy."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def line_in(error: BaseException, file: str) -> int:
    """Return the last line of a file that an exception passed through or found unreadable; 0: none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return lines[-1] or 0 if lines else 0


def gigabytes(*nbytes: float) -> list[str]:
    """Return amounts in GB as text, with the digits (2 or more) that tell any two and 0 apart."""
    for digits in range(2, 10):
        *texts, nothing = [f"{each / 1e9:,.{digits}f} GB" for each in (*nbytes, 0)]
        if len({*texts, nothing}) == len({*nbytes, 0}):
            break
    return texts


class Sentence(str):
    """A sentence that a page can translate: a text with the values of its fields in braces.

    law     the text with its fields
    values  {field: value}; a value may be a Sentence, or a tuple of them
    """

    law: str
    values: dict[str, object]

    def __new__(cls, law: str, **values: object) -> "Sentence":
        filled = law.format(**{k: joined(v) for k, v in values.items()})
        sentence = super().__new__(cls, in_singular(filled))
        sentence.law, sentence.values = law, values
        return sentence


ONE = re.compile(
    r"(?<!rank )(?<!stage )(?<!step )(?<!worker )(?<![\w.,=-])"
    r"(1 (?:other )?(?:chunk|element|layer|micro-batch|rank|row|stage|step|time|unit|update|worker))e?s\b"
)
"""A number of one with a noun in the plural."""


def in_singular(english: str) -> str:
    """Return a filled text with its nouns in the singular behind a number of one."""
    return ONE.sub(r"\1", english)


def joined(value: object) -> object:
    """Return a tuple of texts as one text; any other value stays as it is."""
    is_list = isinstance(value, tuple) and value and all(isinstance(text, str) for text in value)
    return "; ".join(value) if is_list else value  # type: ignore[arg-type]


class MpitrainError(Exception):
    """Base of every error that mpitrain raises on purpose.

    Parameters
    ----------
    law : str
        The rule that is broken, and the values that break it; one or two sentences.
    way_out : str
        The remedy, an option to type or a value to change; printed on its own line.

    Attributes
    ----------
    exit_code : int
        The exit code of a command that raises this error.
    agreed : bool
        Whether every rank raises this error; rank 0 then prints it for all.
    """

    exit_code = 1
    agreed = False

    def __init__(self, law: str, way_out: str = ""):
        super().__init__(law, way_out)
        self.law = law
        self.way_out = way_out

    def on_every_rank(self) -> Self:
        """Set `agreed`, so that rank 0 prints this error for all ranks, which must all raise it; return self."""
        self.agreed = True
        return self

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def named(self) -> str:
        """Return the text behind the name of the class, as commands print it."""
        name = f"{type(self).__name__}: "
        return name + ("\n" + " " * len(name)).join(self._lines())

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return self.named().splitlines()

    def _lines(self) -> list[str]:
        lines = [*self.law.splitlines(), *self.way_out.splitlines()]
        return visible("\n".join(map(brief, lines))).split("\n")


class ConfigError(MpitrainError):
    """An invalid configuration, command line or layout of ranks."""

    exit_code = 2


class DataError(MpitrainError):
    """A data source that is missing, unreadable, or too small for the model."""

    exit_code = 2


class CheckpointError(MpitrainError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = 2


class CommError(MpitrainError, RuntimeError):
    """A communication error: ranks disagree about a message or a collective, or a peer is gone.

    It is a RuntimeError, as the errors of torch.distributed are.
    """


class PeerLost(CommError):
    """A peer that has died or left the job while this rank needed it.

    Attributes
    ----------
    ranks : tuple of int
        The lost ranks of the whole job, as far as this rank knows them.
    """

    def __init__(self, law: str, way_out: str = "", ranks: tuple[int, ...] = ()):
        super().__init__(law, way_out)
        self.ranks = ranks


class TrainingError(MpitrainError):
    """A failure of training itself: a loss that is not finite, or replicas that differ."""


class KernelError(MpitrainError):
    """A kernel that cannot be compiled or launched, or that broke a rule of the GPU simulator."""
