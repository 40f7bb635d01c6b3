"""The class Config, the list of all keys, and parsing."""

from __future__ import annotations  # help() prints signatures as they are written here.

import ast
import inspect
import math
import re
import threading
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import Field, ValidationError

from mpitrain.config import sections
from mpitrain.config.sections import (
    Batch,
    Checkpoint,
    Data,
    Device,
    Epochs,
    Layout,
    Lora,
    Memory,
    Model,
    Optimizer,
    Pipeline,
    Precision,
    Replication,
    Run,
    Section,
    listed,
)
from mpitrain.errors import ConfigError
from mpitrain.files import paths_of, reading_of, text_of
from mpitrain.hints import foreign, hint, similar
from mpitrain.strict_json import parsed


class Config(Section):
    """The configuration of a run: a frozen model of sections, each a frozen model of keys.

    `Config()` is the default run. `parse` makes any other, and reports all errors at once.
    The attribute `config.optimizer.lr` is the key optimizer.lr. `mpitrain train --help-config`
    lists all keys with types, ranges and defaults.
    """

    run: Run = Field(default_factory=Run)
    data: Data = Field(default_factory=Data)
    model: Model = Field(default_factory=Model)
    lora: Lora = Field(default_factory=Lora)
    batch: Batch = Field(default_factory=Batch)
    layout: Layout = Field(default_factory=Layout)
    pipeline: Pipeline = Field(default_factory=Pipeline)
    replication: Replication = Field(default_factory=Replication)
    precision: Precision = Field(default_factory=Precision)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    memory: Memory = Field(default_factory=Memory)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    device: Device = Field(default_factory=Device)

    def with_epochs(self, epochs: Epochs) -> Self:
        """Return a copy whose run.eval_every=epoch knows when epochs end, which no key says."""
        config = self.changed({"run.eval_every": self.run.eval_every})
        config.run._epochs = epochs
        return config

    def next_pause(self, step: int) -> int:
        """Return the next step with a checkpoint or an evaluation, or the last step."""
        every = self.checkpoint.every
        pauses = [step // every * every + every] if every else []
        return min(self.run.steps, self.run.next_evaluation(step), *pauses)

    @property
    def dense_steps(self) -> int:
        """The number of first steps that reduce uncompressed gradients, in any wire format."""
        if self.replication.dense_steps >= 0:
            return self.replication.dense_steps
        return self.run.steps // 4 if self.replication.wire.startswith("powersgd") else 0

    def flat(self) -> dict[str, Any]:
        """Return all values as {section.key: value}."""
        return {
            f"{section}.{key}": value
            for section, table in self.model_dump().items()
            for key, value in table.items()
        }

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these {section.key: value}, which are not checked."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, key = name.split(".")
            sections.setdefault(section, {})[key] = value
        return self.model_copy(
            update={
                section: getattr(self, section).model_copy(update=update)
                for section, update in sections.items()
            }
        )


class ConfigKey(NamedTuple):
    """One entry of `--help-config`."""

    name: str
    type: str
    default: Any
    range: str
    help: str
    is_basic: bool


PARSING = threading.Lock()
"""Ranks may be threads, and in Python 3.11 `ast.parse` of two threads at once raises SystemError."""


@cache
def _help() -> dict[tuple[str, str], str]:
    """Return {(section, key): the string below the key in sections.py, as one line}."""
    texts = {}
    with PARSING:
        tree = ast.parse(inspect.getsource(sections))
    for section in tree.body:
        body = section.body if isinstance(section, ast.ClassDef) else []
        for key, text in pairwise(body):
            match key, text:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    texts[section.name, name] = " ".join(words.split())  # type: ignore[attr-defined]
    return texts


def keys() -> Iterator[ConfigKey]:
    """Iterate over all configuration keys, in the order of their definition."""
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        for name, key in field.annotation.model_fields.items():
            parts = [key.annotation, *get_args(key.annotation)]
            choices = [one for p in parts if get_origin(p) is Literal for one in get_args(p)]
            bounds = [
                f"{sign} {getattr(bound, attribute):g}"
                for bound in key.metadata
                for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
                if hasattr(bound, attribute)
            ]
            plain = (p for p in parts if isinstance(p, type))
            kind = (next(plain, type(choices[0])) if choices else key.annotation).__name__
            texts = [str(c).lower() if isinstance(c, bool) else str(c) for c in choices]
            allowed = " | ".join(texts) if choices else ", ".join(bounds)
            is_basic = name in field.annotation.basic
            yield ConfigKey(
                f"{section}.{name}",
                kind,
                key.default,
                allowed,
                key.description or _help()[field.annotation.__name__, name],
                is_basic,
            )


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
        from mpitrain.config.other_files import as_toml

        lines = as_toml(path, data.decode(errors="replace"), [key.name for key in keys()])
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
