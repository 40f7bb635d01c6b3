"""English and Korean: the translation of texts and of printed lines, and their widths on a terminal.

A text is written once, in English, where it is used. It is a string, a `Sentence` with the values
of its fields, or a printed line, whose fields `said` finds again. `ko.json` has the Korean of each.
"""

import json
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from mpitrain.errors import ConfigError, Sentence, in_singular, joined

LANGUAGES = ("en", "ko")

SHORT = 12
"""Characters of the words of a template; a shorter one describes only a few printed words."""
FORMS = {
    **dict.fromkeys(("rank", "host", "other", "where", "seconds", "time", "process"), r"\S+"),
    **dict.fromkeys(("lead", "condition"), ".+?"),  # formulas
    "what": "[^;]+?",
}
"""{field of sentences about ranks that wait: what it may contain}; such sentences follow each other."""
WIDE = 24
"""Longest cell that is aligned to the right in a row of a table."""

PLURAL = re.compile(r"^(\\ (?:chunk|host|message|micro\\-batch|rank|stage|step|update))e?s\b")
"""A noun behind a field, in an escaped template: a printed text may have it in the singular."""

PARTICLE = re.compile(r"(?<=([0-9가-힣]))([은이을과])\(([는가를와])\)")
"""A particle in both of its forms, behind a number or a Korean word: after a consonant, after a vowel."""


@cache
def korean() -> Mapping[str, str]:
    """Return {English text: Korean text}, with fields in braces."""
    words: dict[str, str] = json.loads(Path(__file__).with_name("ko.json").read_text("utf-8"))
    return words


def language_of(locale: str) -> str:
    """Return the language of a locale such as ko_KR.UTF-8: Korean, or English for any other."""
    return "ko" if locale.lower().startswith("ko") else "en"


def text(english: str, language: str, **values: object) -> str:
    """Return a text in a language, with `values` in place of its fields.

    A `Sentence` has values of its own. Each Sentence among the values is translated as well.

    raises  ConfigError if the language is unknown; a text without Korean is an error of the package
    """
    if language not in LANGUAGES:
        raise ConfigError(
            f"A language is {' or '.join(LANGUAGES)}, but this is {language!r}.",
            "Set --language to one of them.",
        )
    if isinstance(english, Sentence):
        return text(english.law, language, **english.values)
    template = korean()[english] if language == "ko" else english
    inner = {name: joined(_into(value, language)) for name, value in values.items()}
    filled = template.format(**inner) if values else template
    return PARTICLE.sub(_fitted, filled) if language == "ko" else in_singular(filled)


def _fitted(particle: re.Match[str]) -> str:
    """Return the form of a particle that fits the last sound before it."""
    before, after_consonant, after_vowel = particle.groups()
    ends_in_consonant = (
        before in "013678" if before.isdigit() else (ord(before) - ord("가")) % 28 > 0
    )
    return after_consonant if ends_in_consonant else after_vowel


def _into(value: object, language: str) -> object:
    if isinstance(value, Sentence):
        return text(value, language)
    return tuple(_into(item, language) for item in value) if isinstance(value, tuple) else value


@cache
def _patterns() -> Sequence[tuple[re.Pattern[str], str]]:
    """Return (pattern of a printed English text, Korean template), the longest first.

    A field of a short template has at most two words, so that the template describes no sentence.
    """
    rows = []
    for english, template in korean().items():
        pieces = re.split(r"\{(\w+)[^}]*\}", english)
        length, names = len("".join("".join(pieces[::2]).split())), pieces[1::2]
        if names and length > 1 and len({*names}) == len(names):
            is_short = length < SHORT and names != ["words"]
            forms = dict.fromkeys(names, r"\S+(?: \S+)?" if is_short else ".+?")
            forms |= FORMS
            fields = (
                f"(?P<{piece}>{forms[piece]})"
                if at % 2
                else PLURAL.sub(r"\1(?:e?s)?", re.escape(piece))
                for at, piece in enumerate(pieces)
            )
            template = re.sub(
                r"(\{\w+)[^}]*\}", r"\1}", template
            )  # The fields are formatted already.
            rows.append((length, re.compile("".join(fields)), template))
    return [row[1:] for row in sorted(rows, key=lambda row: -row[0])]


@cache
def _phrase(english: str) -> str:
    """Return the Korean of a printed text; the text itself if no template describes it."""
    if english in korean():
        return text(english, "ko")
    if re.search("[A-Za-z]", english):
        for pattern, template in _patterns():
            if found := pattern.fullmatch(english):
                named = {name: _listed(value) for name, value in found.groupdict().items()}
                return PARTICLE.sub(_fitted, template.format(**named))
    return english


def _listed(english: str) -> str:
    """Return the Korean of a printed text, or of each part of a list."""
    whole, mark = _phrase(english), next((m for m in ("; ", ", ", ": ") if m in english), "")
    return mark.join(map(_listed, english.split(mark))) if whole == english and mark else whole


def said(line: str, language: str) -> str:
    """Return a printed line in a language. Cells of a table end where those of the English row end."""
    if language == "en":
        return line
    row = ""
    for cell in re.finditer(r"\S+(?: \S+)*", line):
        for at, part in _parts(cell[0], cell.start()):
            shown = _listed(part)
            is_left = not row or len(part) > WIDE or ": " in shown
            start = at if is_left else at + len(part) - width(shown)
            row = padded(row + " " * bool(row), start) + shown
    return row


def _parts(cell: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield (column, text) of the titles of a heading, if one space is between them; else the whole."""
    words = cell.split(" ")
    is_heading = cell not in korean() and {*words} <= {*korean()}
    if _listed(cell) != cell and not is_heading:
        yield start, cell
        return
    while words:
        counts = range(len(words), 0, -1)
        most = next((n for n in counts if " ".join(words[:n]) in korean()), len(words))
        yield start, " ".join(words[:most])
        start, words = start + len(" ".join(words[:most])) + 1, words[most:]


def width(line: str) -> int:
    """Return how many columns of a terminal a line takes: Hangul two, a combining mark none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in line
    )


def wrapped(line: str, columns: int, indent: int = 0) -> list[str]:
    """Return the lines of a paragraph, each of at most `columns` columns of a terminal.

    indent  spaces before each line but the first
    """
    # A mark after each wide character makes its length its width.
    marked = "".join(char + "\0" * (width(char) - 1) for char in line)
    return [
        part.replace("\0", "")
        for part in textwrap.wrap(marked, columns, subsequent_indent=" " * indent)
    ]


def to_fit(line: str, columns: int) -> list[str]:
    """Return a line as it is, or wrapped if it is wider; the rest begins below its second cell.

    columns  of the terminal; 0: nothing is wrapped
    """
    if not 0 < columns < width(line):
        return [line]
    cell = re.match(r" *(?:\S+ )*\S+  +", line)
    return wrapped(line, columns, width(cell[0]) if cell else len(line) - len(line.lstrip()) + 2)


def padded(line: str, columns: int) -> str:
    """Return a line with spaces behind it up to a number of columns; longer lines are unchanged."""
    return line + " " * (columns - width(line))
