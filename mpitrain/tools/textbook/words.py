"""English and Korean: the translation of headings, labels and sentences, and widths on a terminal.

A text is written once, in English, where it is used. `text` returns it in the reader's language.
The Korean of a sub-room's texts is in its own `korean.py`; WORDS joins them with the common ones.
"""

import textwrap
import unicodedata
from types import MappingProxyType

from mpitrain.errors import ConfigError, Sentence, joined
from mpitrain.tools.textbook.claims.korean import CLAIMS
from mpitrain.tools.textbook.exercises.korean import EXERCISES
from mpitrain.tools.textbook.exercises.korean_reasons import REASONS
from mpitrain.tools.textbook.explain.korean import EXPLAIN

LANGUAGES = ("en", "ko")

COMMON = {
    "rank": "랭크",
    "step": "단계",
    "start": "시작",
    "bytes": "바이트",
    "formula": "공식",
    "source": "소스",
    "command": "명령",
    "tests": "테스트",
    "topic": "주제",
}
"""Words that several sub-rooms use."""

WORDS = MappingProxyType({**COMMON, **EXPLAIN, **CLAIMS, **EXERCISES, **REASONS})
"""The Korean of every English text, fields in braces included."""


def language_of(locale: str) -> str:
    """Return the language of a locale such as ko_KR.UTF-8; English for any other than Korean."""
    return "ko" if locale.lower().startswith("ko") else "en"


def text(english: str, language: str, **values: object) -> str:
    """Return a text in a language, with `values` in place of its fields.

    A value that is a Sentence is translated as well, and so is each Sentence of a tuple.

    raises  ConfigError if the language is unknown; a missing Korean text is an error of the package
    """
    if language not in LANGUAGES:
        raise ConfigError(
            f"A language is {' or '.join(LANGUAGES)}, but this is {language!r}.",
            "Set --language to one of them.",
        )
    template = WORDS[english] if language == "ko" else english
    inner = {name: joined(_into(value, language)) for name, value in values.items()}
    return template.format(**inner) if values else template


def _into(value: object, language: str) -> object:
    if isinstance(value, Sentence):
        return text(value.law, language, **value.values)
    return tuple(_into(item, language) for item in value) if isinstance(value, tuple) else value


def width(line: str) -> int:
    """Return the columns of a line on a terminal: Hangul takes two, a combining mark none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in line
    )


def wrapped(line: str, columns: int) -> list[str]:
    """Return the lines of a paragraph, each of at most `columns` on a terminal."""
    # A mark after each wide character makes its length its width.
    marked = "".join(char + "\0" * (width(char) - 1) for char in line)
    return [part.replace("\0", "") for part in textwrap.wrap(marked, columns)]


def padded(line: str, columns: int) -> str:
    """Return a line with spaces up to a number of columns; a longer line stays as it is."""
    return line + " " * (columns - width(line))
