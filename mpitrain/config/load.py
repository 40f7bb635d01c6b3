"""From files, presets and settings to a Config: tables, their checks by types and ranges, and messages."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mpitrain.config.presets import merged, preset
from mpitrain.config.sections import Config, keys, listed
from mpitrain.errors import ConfigError
from mpitrain.files import paths_of, reading_of, text_of
from mpitrain.hints import CODE, foreign, hint, similar
from mpitrain.strict_json import parsed

# These keys hold paths, which in a configuration file are relative to its folder.
PATHS = (
    ("data", "source"),
    ("data", "validation"),
    ("data", "mixture"),
    ("data", "tokenizer"),
    ("replication", "tuning"),
    ("device", "tiles"),
    ("pipeline", "schedule"),
    ("replication", "algorithm"),
    ("layout", "algorithm"),
    ("run", "out"),
    ("run", "init_from"),
    ("lora", "init_from"),
    ("run", "plugins"),
    ("run", "watchers"),
)
CONFIG = "config.toml"
"""The name of the file in a run directory with all keys of the run."""
LISTED = "`mpitrain train --help-config` lists every key with its type and range."

PATTERNS = {  # The patterns of `sections` in words, for messages.
    "run.delay": "must be RANK:MS or random:MS:P with P from 0 to 1, or several of these with commas between",
    "run.inject": "must be KIND:RANK@STEP or KIND:RANK@STEP:POINT, with names from --help-config run",
    "replication.wire": "must be none, fp16, bf16, int8, topk[:PART] or powersgd[:RANK]",
    "pipeline.partition": "must be time, or numbers and commas, as in 4,4,3,5",
    "memory.recompute": "must be none, attention, unit or a number of units",
    "replication.async_lr": "must be 1/workers, staleness or a number",
}


YAML_LINE = re.compile(r"^( *)([\w.-]+):(?:\s+(.*?))?\s*(?:#.*)?$")
MOST = 100
"""Upper bound of the lines of a file in JSON or YAML that a message shows."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a configuration file, with relative paths made relative to its folder.

    raises  ConfigError if the file cannot be read or is not TOML
    """
    with reading_of(f"The configuration file {path}", "Name a TOML file."):
        data = text_of(path)
    try:
        tables = tomllib.loads(data.decode())
    except (
        ValueError,
        RecursionError,
    ) as error:  # It may have bytes that are not UTF-8, a number of 5000 digits, or 1000 brackets.
        lines = as_toml(path, data.decode(errors="replace"))
        raise ConfigError(
            f"{path} is not TOML: {error}.",
            f"mpitrain reads TOML. In TOML this file is:\n{lines}"
            if lines
            else "`mpitrain train --help-config` lists the keys.",
        ) from None
    for section, key in PATHS:
        table = tables.get(section)
        if not isinstance(table, dict):
            continue
        if isinstance(name := table.get(key), list):
            table[key] = [
                str(path.parent / file) if isinstance(file, str) and ".py" in file else file
                for file in name
            ]
        elif isinstance(name, dict):
            table[key] = {_beside(path, source): weight for source, weight in name.items()}
        elif isinstance(name, str):
            is_source = key in ("source", "validation")
            place = name.partition(":")[2] if is_source else name
            is_path = {  # Otherwise it is the name of a row.
                "schedule": "/" in name or "." in name or (path.parent / name).is_file(),
                "algorithm": ".py" in name,
            }.get(key, True)
            if place and is_path:
                table[key] = _beside(path, name) if is_source else str(path.parent / place)
    return tables


def _beside(path: Path, source: str) -> str:
    """Return the name of a data source with its path relative to the folder of a file."""
    kind, _, place = source.partition(":")
    places = paths_of(place, path.parent) if kind == "npy" else [place]
    return f"{kind}:{','.join(str(path.parent / each) for each in places)}" if place else source


def as_toml(path: Path, text: str) -> str:
    """Return the lines of a TOML file for the keys of a JSON or YAML file; "" for any other file.

    A key of another tool becomes ours where COMING_FROM.md names one. Every other key is a comment.
    """
    import tomli_w

    known = [key.name for key in keys()]
    tables: dict[str, dict[str, Any]] = {}
    comments = []
    for name, value in _values(path, text):
        row = foreign(name)
        code = CODE.match(row.ours) if row else None
        key, _, its_value = code[1].partition("=") if code else ("", "", "")
        same = [each for each in known if name in (each, each.partition(".")[2])]
        if len(same) == 1:
            key, its_value = same[0], ""
        if key not in known:
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


def tables_of(
    file: Path | None, settings: Sequence[str] = (), preset_name: str | None = None
) -> dict[str, Any]:
    """Return the tables of a file over those of a preset, with each `section.key=value` put in."""
    tables = merged(preset(preset_name), read_toml(file) if file else {})
    return with_settings(tables, [*settings])


def with_settings(tables: Mapping[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return a copy of the tables with each `section.key=value` put in.

    A value is parsed as TOML; if that fails, as a JSON object; if that fails, it is a string. The
    strings of a list need no quotes: run.watchers=[wandb, mlflow], run.watchers=wandb.
    """
    merged = {
        name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()
    }
    for setting in settings:
        name, equals, text = setting.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            ending = hint(name.strip(), [each.name for each in keys()])
            raise ConfigError(
                f"A setting is section.key=value, but got {setting!r}{ending}",
                "For example: --set optimizer.lr=1e-3",
            )
        table = merged.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{section} must be a table, but the configuration says {section} = {table!r}.",
                f"Write a [{section}] table.",
            )
        table[key] = _toml_value(text.strip())
        if isinstance(table[key], str) and f"{section}.{key}" in _lists_of_texts():
            text = table[key]
            is_prose = key == "sample_prompt" and not text.startswith("[")
            table[key] = [text] if is_prose else _entries(text)
    return merged


@cache
def _lists_of_texts() -> set[str]:
    return {
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        for name, key in field.annotation.model_fields.items()  # type: ignore[union-attr]
        if key.annotation == list[str]
    }


def _entries(text: str) -> Any:
    """Return the entries of a list without quotes, [a, b] or a, b; else the text."""
    if match := re.fullmatch(r"\[([^\[\]'\"]*)\]", text):
        return [entry.strip() for entry in match[1].split(",")]
    if re.match(r"[\[\d'\"]", text):
        return text
    return [entry.strip() for entry in text.split(",")]


def _toml_value(text: str) -> Any:
    if text.lstrip("+-").lower() in ("nan", "inf"):
        return float(text)
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return _json_object(text)
    if len(table) != 1:
        return text  # The text has a line break, and so defines a second key.
    return table["value"]


def _json_object(text: str) -> Any:
    """Return the table that a JSON object describes, such as {"text:a.txt": 0.7}; else the text."""
    try:
        value = parsed(text.encode()) if text.startswith("{") else text
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def parse(
    tables: Mapping[str, Any],
    path: Path | None = None,
    names: Mapping[str, Collection[Any]] | None = None,
) -> Config:
    """Make a `Config` of tables, checked by types and ranges.

    It does not know the tables of other rooms; `run.choices.parse` also checks their names, and the
    rules between keys.

    path    the file that the tables were read from, for messages
    names   {key: the names that it allows}, for keys that name a row of a table of a higher room;
            without it such a key may have any value, as in the file of a run whose plugins are
            not loaded
    raises  ConfigError that lists all invalid keys and values
    """
    try:
        return Config.model_validate(tables, context=names)
    except ValidationError as error:
        complaints = "\n".join(_complaint(item, names or {}) for item in error.errors())
        raise refusal(complaints, path) from None


def refusal(law: str, path: Path | None) -> ConfigError:
    """Return the error for invalid keys and values; path: the file that they were read from."""
    return ConfigError(law, f"The configuration file is {path}.\n{LISTED}" if path else LISTED)


def check_choice(name: str, value: Any, choices: Collection[Any], path: Path | None = None) -> None:
    """Raise ConfigError, with the message of `parse`, unless the value is one of the choices.

    choices  the values that the key allows
    path     the file that the value was read from
    """
    if value not in choices:
        law = f"must be {listed(choices)}"
        raise refusal(_no_choice(name, law, value, [*map(str, choices)]), path)


def check_text(name: str, value: str | list[str]) -> None:
    """Raise ConfigError, with the message of `parse`, unless text or texts are valid UTF-8."""
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} must be UTF-8, but is {value!r}.", LISTED) from None


def _complaint(item: Mapping[str, Any], names: Mapping[str, Collection[Any]]) -> str:
    """Return the message for one finding of pydantic: the key, the rule and the value."""
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        inner = item["input"] if isinstance(item["input"], dict) else {}
        known = [key.name for key in keys()]
        unknown = [f"{name}.{key}" for key in inner] or [name]
        return "\n".join(f"There is no key {each}{hint(each, known)}" for each in unknown)
    law = item["msg"].replace("Input should be", "must be").replace("Input", "it")
    if item["type"] == "literal_error":
        choices = names.get(name) or [
            choice for key in keys() if key.name == name for choice in key.range.split(" | ")
        ]
        return _no_choice(name, law, item["input"], [*map(str, choices)])
    if item["type"] == "string_pattern_mismatch":
        law = PATTERNS[name]
    if item["type"] == "finite_number" or (
        isinstance(item["input"], float) and math.isnan(item["input"])
    ):
        law = "must be a finite number"
    return f"{name} {law}, but is {_shown(item['input'])}."


def _no_choice(name: str, law: str, value: Any, choices: Collection[str]) -> str:
    typed = value if isinstance(value, str) else _shown(value)
    row = foreign(typed.lower())
    close = [choice for choice in choices if row and f"={choice}`" in row.ours]
    meant = [*close, *similar(typed, choices)][:1]
    ending = f"; did you mean {meant[0]}?" if meant else "."
    return f"{name} {law}, but is {_shown(value)}{ending}"


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits.
        return "a larger one"
