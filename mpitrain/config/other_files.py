"""A configuration file in JSON or YAML, as of another tool, in the lines of a TOML file."""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from mpitrain.hints import CODE, foreign
from mpitrain.strict_json import parsed

YAML_LINE = re.compile(r"^( *)([\w.-]+):(?:\s+(.*?))?\s*(?:#.*)?$")
MOST = 100
"""Upper bound of the lines that a message shows."""


def as_toml(path: Path, text: str, keys: Collection[str]) -> str:
    """Return the lines of a TOML file for the keys of a JSON or YAML file; "" for any other file.

    A key of another tool becomes ours where COMING_FROM.md names one. Every other key is a comment.

    keys  our keys, as section.key
    """
    tables: dict[str, dict[str, Any]] = {}
    comments = []
    for name, value in _values(path, text):
        row = foreign(name)
        code = CODE.match(row.ours) if row else None
        key, _, its_value = code[1].partition("=") if code else ("", "", "")
        same = [each for each in keys if name in (each, each.partition(".")[2])]
        if len(same) == 1:
            key, its_value = same[0], ""
        if key not in keys:
            comments.append(f"# {row}" if row else f"# {name}: no such key")
        elif value is not False or not its_value:
            section, _, inner = key.partition(".")
            tables.setdefault(section, {})[inner] = (
                its_value if its_value and value is True else value
            )
    return "\n".join([*comments, *tomli_w.dumps(tables).strip().splitlines()][:MOST])


def _values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Iterate over the dotted names and the values of a file, without lists and null."""
    if text.lstrip().startswith("{"):
        try:
            yield from _flat(parsed(text.encode()))
        except ValueError:
            return
    elif path.suffix in (".yaml", ".yml"):
        outer: list[tuple[int, str]] = []
        for line in text.splitlines():
            if match := YAML_LINE.match(line):
                depth, name, value = len(match[1]), match[2], match[3]
                outer = [each for each in outer if each[0] < depth]
                if value:
                    yield ".".join([*(each[1] for each in outer), name]), _scalar(value)
                outer.append((depth, name))


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, str | int | float):
            yield before + name, value


def _scalar(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        number = re.fullmatch(r"[+-]?\d+\.?\d*[eE][+-]?\d+", text)
        return float(text) if number else text.strip("'\"")
