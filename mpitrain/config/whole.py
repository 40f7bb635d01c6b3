"""The class Config: all sections, the rules between them, and the list of all keys."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import Field

from mpitrain.config.sections import (
    KEPT_ON_HOST,
    Batch,
    Checkpoint,
    Data,
    Device,
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
from mpitrain.errors import ConfigError


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

    def model_post_init(self, context: Any) -> None:
        """Raise ConfigError for keys that exclude each other on any ranks and any data."""
        if self.replication.wire != "none" and self.precision.stored != "float32":
            raise ConfigError(
                f"Wire formats carry float32, but precision.compute is {self.precision.compute} with replication.wire "
                f"{self.replication.wire}.",
                "Set replication.wire to none, or precision.compute to float32.",
            )
        if self.precision.compute == "float16" and self.replication.wire.startswith(
            ("topk", "powersgd")
        ):
            raise ConfigError(
                f"Wire format {self.replication.wire} keeps what it leaves out for later steps, which an overflow of float16 "
                "would spoil, but precision.compute is float16.",
                "Set replication.wire to fp16, bf16, int8 or none, or precision.compute to bfloat16.",
            )
        if self.device.kind == "cuda" and self.replication.wire.startswith(KEPT_ON_HOST):
            raise ConfigError(
                f"Wire format {self.replication.wire} keeps its residuals in host memory, but device.kind is cuda.",
                "Set replication.wire to fp16, bf16, int8 or none, or device.kind to cpu.",
            )
        if self.device.passes == "compiled" and self.device.kind in ("cuda", "cuda-sim"):
            raise ConfigError(
                f"Compiled passes run on the host, but device.kind is {self.device.kind}.",
                "Set device.passes to numpy, or device.kind to cpu.",
            )
        if self.device.passes == "compiled" and self.precision.compute == "float64":
            raise ConfigError(
                "Compiled passes compute float32, but precision.compute is float64.",
                "Set device.passes to numpy, or precision.compute to float32.",
            )
        if self.device.kind in ("cuda", "cuda-sim") and self.memory.attention == "whole":
            raise ConfigError(
                f"Kernels compute attention in tiles, but memory.attention is whole on {self.device.kind}.",
                "Set memory.attention to auto, or device.kind to cpu.",
            )
        if self.data.attend == "document" and self.data.separator < 0 and not self.data.packing:
            raise ConfigError(
                "data.attend=document needs documents, but data.separator is -1 and data.packing is false.",
                "Set data.separator to the token that ends a document, data.packing=true for conversations, "
                "or data.attend to window.",
            )
        fields = Lora.model_fields
        idle = [
            key
            for key in ("alpha", "targets", "dropout")
            if getattr(self.lora, key) != fields[key].default
        ]
        if idle and not self.lora.rank:
            raise ConfigError(
                f"Without adapters the keys of [lora] have their defaults, but lora.{idle[0]} is "
                f"{getattr(self.lora, idle[0])!r} and lora.rank is 0.",
                f"Set lora.rank, or leave lora.{idle[0]} out.",
            )
        if self.lora.base and not (self.lora.rank and self.run.init_from):
            raise ConfigError(
                "lora.base stores the model of run.init_from under adapters, but lora.rank is "
                f"{self.lora.rank} and run.init_from is {self.run.init_from!r}.",
                "Set both, or leave lora.base out.",
            )
        if self.lora.base and self.replication.gather != "none":
            raise ConfigError(
                f"replication.gather {self.replication.gather} rounds gathered numbers, but lora.base is {self.lora.base}, "
                "which has codes.",
                "Set replication.gather to none, or leave lora.base out.",
            )
        if self.memory.logit_chunks > 1 and self.replication.mode == "master":
            raise ConfigError(
                f"In mode master rank 0 computes the loss of all logits, but memory.logit_chunks is {self.memory.logit_chunks}.",
                "Set memory.logit_chunks to 1, or replication.mode to all-reduce.",
            )
        if (
            self.device.kind in ("cuda", "cuda-sim")
            and self.precision.is_half
            and self.layout.tp > 1
            and self.layout.algorithm == "native"
            and not self.layout.sequence_parallel
        ):
            raise ConfigError(
                f"layout.algorithm native sums activations by MPI, but they are {self.precision.compute} on {self.device.kind}, "
                "which MPI has no type for.",
                "Set layout.algorithm to auto, or precision.compute to float32.",
            )

    def next_pause(self, step: int) -> int:
        """Return the next step with a checkpoint or an evaluation, or the last step."""
        everies = [every for every in (self.checkpoint.every, self.run.eval_every) if every > 0]
        return min([self.run.steps, *(step // every * every + every for every in everies)])

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


class ConfigKey(NamedTuple):
    """One entry of `--help-config`."""

    name: str
    type: str
    default: Any
    range: str
    help: str
    is_basic: bool


def keys() -> Iterator[ConfigKey]:
    """Iterate over all configuration keys, in the order of their definition."""
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        for name, key in field.annotation.model_fields.items():
            choices = get_args(key.annotation) if get_origin(key.annotation) is Literal else ()
            bounds = [
                f"{sign} {getattr(bound, attribute):g}"
                for bound in key.metadata
                for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
                if hasattr(bound, attribute)
            ]
            kind = type(choices[0]).__name__ if choices else key.annotation.__name__
            allowed = " | ".join(map(str, choices)) if choices else ", ".join(bounds)
            is_basic = name in field.annotation.basic
            yield ConfigKey(
                f"{section}.{name}", kind, key.default, allowed, key.description, is_basic
            )
