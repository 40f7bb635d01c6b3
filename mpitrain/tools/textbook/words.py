"""English and Korean: the translation of texts, and their widths on a terminal.

A text is written once, in English, where it is used: a string, or a `Sentence` with the values of
its fields. `ko.json` has the Korean of each.
"""

import json
import re
import textwrap
import unicodedata
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mpitrain.errors import ConfigError, Sentence, joined

LANGUAGES = ("en", "ko")

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
    return PARTICLE.sub(_fitted, filled) if language == "ko" else filled


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


def width(line: str) -> int:
    """Return how many columns of a terminal a line takes: Hangul two, a combining mark none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in line
    )


def wrapped(line: str, columns: int) -> list[str]:
    """Return the lines of a paragraph, each of at most `columns` columns of a terminal."""
    # A mark after each wide character makes its length its width.
    marked = "".join(char + "\0" * (width(char) - 1) for char in line)
    return [part.replace("\0", "") for part in textwrap.wrap(marked, columns)]


def padded(line: str, columns: int) -> str:
    """Return a line with spaces behind it up to a number of columns; longer lines are unchanged."""
    return line + " " * (columns - width(line))
