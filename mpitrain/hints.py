"""What an unknown word means: a word of another tool, by the tables of COMING_FROM.md, or one of ours, misspelt."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("COMING_FROM.md")
ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
SIMILAR = 0.75
"""Least similarity of two spellings, by difflib, from which one may be meant by the other."""


class Foreign(NamedTuple):
    """A word of another tool. `ours` says what it is here, with our words in backticks."""

    word: str
    tool: str
    ours: str

    def __str__(self) -> str:
        ours = "mpitrain has no counterpart" if self.ours == "none" else self.ours
        return f"{self.word} of {self.tool}: {ours}."


def _key(word: str) -> str:
    """Return a word as it is looked up: --nproc-per-node is nproc_per_node."""
    return word.lstrip("-").replace("-", "_")


@cache
def _rows() -> dict[str, list[Foreign]]:
    """Return {name: its rows of the page}.

    Where a row has as many of our words as of theirs, with commas between, they belong together in
    this order.
    """
    rows: dict[str, list[Foreign]] = {}
    tool = ""
    for theirs, ours in ROW.findall(PAGE.read_text()):
        if ours == "mpitrain":
            tool = theirs
        ours, words = LINK.sub(r"\1", ours), CODE.findall(theirs)
        parts = re.split(r", (?=`)", ours)
        is_paired = len(parts) == len(words) == len(CODE.findall(ours))
        for word, part in zip(words, parts if is_paired else [ours] * len(words), strict=True):
            name = re.split(r"[=(\s]", word, maxsplit=1)[0]
            rows.setdefault(_key(name), []).append(Foreign(name, tool, part))
    return rows


def foreign(word: str, is_command: bool = False) -> Foreign | None:
    """Return the row of another tool's word, or of the last part of a dotted one; None without one.

    is_command  whether a row that answers with a command is preferred to the others
    """
    name = _key(word)
    rows = _rows().get(name) or _rows().get(name.rpartition(".")[2]) or []
    rows = sorted(rows, key=lambda row: row.ours.startswith("`mpitrain") is not is_command)
    return rows[0] if rows else None


def similar(word: str, known: Iterable[str]) -> list[str]:
    """Return at most two known words that are spelt almost as this one, the nearest first."""
    import difflib

    return difflib.get_close_matches(word, list(known), 2, SIMILAR)


def hint(word: str, known: Iterable[str], is_command: bool = False) -> str:
    """Return the end of a message about an unknown word; without a hint it is a full stop.

    known       our words, one of which may be meant
    is_command  as for `foreign`
    """
    known = list(known)
    _, _, name = _key(word).rpartition(".")
    meant = [each for each in known if each.rpartition(".")[2] == name]  # in another section
    if not meant and (row := foreign(word, is_command)):
        return f". {row}"
    meant = meant or similar(word, known)[:1]
    return f"; did you mean {' or '.join(meant)}?" if meant else "."
