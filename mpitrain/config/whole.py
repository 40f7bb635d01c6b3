"""The class Config, and the list of all keys."""

from __future__ import annotations  # help() prints signatures as they are written here.

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import Field, PrivateAttr

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
)
from mpitrain.files import PARSING


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
    # Whether names of rows and rules between keys hold: `run.choices.parse` has checked them.
    _is_checked: bool = PrivateAttr(False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and all(
            getattr(self, section) == getattr(other, section) for section in Config.model_fields
        )

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
        copy = self.model_copy(
            update={
                section: getattr(self, section).model_copy(update=update)
                for section, update in sections.items()
            }
        )
        copy._is_checked = False
        return copy

    def as_checked(self) -> Self:
        """Return this configuration, of which a job need not check names and rules between keys again."""
        self._is_checked = True
        return self

    @property
    def is_checked(self) -> bool:
        return self._is_checked


class ConfigKey(NamedTuple):
    """One entry of `--help-config`."""

    name: str
    type: str
    default: Any
    range: str
    help: str
    is_basic: bool


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
