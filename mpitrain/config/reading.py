"""Parsing: configuration files and settings are read, merged and validated as a Config."""

from __future__ import annotations  # help() prints signatures as they are written here.

import difflib
import math
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mpitrain.config.sections import listed
from mpitrain.config.whole import Config, keys
from mpitrain.errors import ConfigError
from mpitrain.files import contents
from mpitrain.strict_json import parsed

# These keys hold paths, which in a configuration file are relative to its folder.
PATHS = (
    ("data", "source"),
    ("data", "validation"),
    ("data", "mixture"),
    ("replication", "tuning"),
    ("device", "tiles"),
    ("pipeline", "schedule"),
    ("replication", "algorithm"),
    ("layout", "algorithm"),
    ("run", "out"),
    ("run", "init_from"),
    ("lora", "init_from"),
    ("run", "plugins"),
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
SYNONYMS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "single": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "gpu": "cuda",
    "allreduce": "all-reduce",
}


def read_toml(path: Path, inner: int = 0) -> dict[str, Any]:
    """Return the tables of a configuration file, with relative paths made relative to its folder.

    inner   1 for a file in a run directory, which is refused if it is a link
    raises  ConfigError if the file cannot be read or is not TOML
    """
    try:
        tables = tomllib.loads(contents(path, inner).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error.strerror}.", "Name a TOML file."
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # It may have bytes that are not UTF-8, a number of 5000 digits, or 1000 brackets.
        raise ConfigError(
            f"{path} is not TOML: {error}.", "`mpitrain train --help-config` lists the keys."
        ) from None
    for section, key in PATHS:
        table = tables.get(section)
        if not isinstance(table, dict):
            continue
        if isinstance(name := table.get(key), list):
            table[key] = [
                str(path.parent / file) if isinstance(file, str) else file for file in name
            ]
        elif isinstance(name, dict):
            table[key] = {_beside(path, source): weight for source, weight in name.items()}
        elif isinstance(name, str):
            kind, colon, place = name.partition(":") if section == "data" else ("", "", name)
            is_path = {  # Otherwise it is the name of a row.
                "schedule": "/" in name or "." in name or (path.parent / name).is_file(),
                "algorithm": ".py" in name,
            }.get(key, True)
            if place and is_path:
                table[key] = f"{kind}{colon}{path.parent / place}"
    return tables


def _beside(path: Path, source: str) -> str:
    """Return the name of a data source with its path relative to the folder of a file."""
    kind, colon, place = source.partition(":")
    return f"{kind}{colon}{path.parent / place}" if place else source


def with_settings(tables: Mapping[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return a copy of the tables with each `section.key=value` put in.

    A value is parsed as TOML; if that fails, as a JSON object; if that fails, it is a string.
    """
    merged = {
        name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()
    }
    for setting in settings:
        name, equals, text = setting.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise ConfigError(
                f"A setting is section.key=value, but got {setting!r}.",
                "For example: --set optimizer.lr=1e-3",
            )
        table = merged.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{section} must be a table, but the configuration says {section} = {table!r}.",
                f"Write a [{section}] table.",
            )
        table[key] = _toml_value(text.strip())
    return merged


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
    """Make a `Config` of tables, checked by types, ranges and the rules between keys.

    It does not know the tables of other rooms; `run.choices.parse` checks their names as well.

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

    choices  of a key that names an entry of a table outside of this package
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


def nearest(word: str) -> list[str]:
    """Return the keys that best match a word such as lr, batch-size or leraning_rate."""
    names = [key.name for key in keys()]
    word = word.replace("-", "_")
    for spelled in (
        lambda name: name.partition(".")[2],
        lambda name: name,
        lambda name: name.replace(".", "_"),
    ):
        if matches := [name for name in names if spelled(name) == word]:
            return matches
    spellings = {
        spelling: name
        for name in names
        for spelling in (name, name.replace(".", "_"), name.partition(".")[2])
    }
    return list(
        dict.fromkeys(
            spellings[close] for close in difflib.get_close_matches(word, spellings, 2, 0.75)
        )
    )


def _complaint(item: Mapping[str, Any], names: Mapping[str, Collection[Any]]) -> str:
    """Return the message for one finding of pydantic: the key, the rule and the value."""
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = [key.name for key in keys()]
        close = difflib.get_close_matches(name, known, 1, 0.6)
        return f"There is no key {name}" + (f"; did you mean {close[0]}?" if close else ".")
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
    word = SYNONYMS.get(typed.lower(), typed)
    if close := difflib.get_close_matches(word, choices, 1, 0.6):
        return f"{name} {law}, but is {_shown(value)}; did you mean {close[0]}?"
    return f"{name} {law}, but is {_shown(value)}."


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits.
        return "a larger one"
