"""The class Config: all sections, the rules between them, and the list of all keys."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import Field

from mpitrain.config.sections import (
    ASYNCHRONOUS,
    KEPT_ON_HOST,
    Batch,
    Checkpoint,
    Data,
    Device,
    Layout,
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
    batch: Batch = Field(default_factory=Batch)
    layout: Layout = Field(default_factory=Layout)
    pipeline: Pipeline = Field(default_factory=Pipeline)
    replication: Replication = Field(default_factory=Replication)
    precision: Precision = Field(default_factory=Precision)
    optimizer: Optimizer = Field(default_factory=Optimizer)
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
        if self.replication.wire != "none" and self.replication.zero > 1:
            raise ConfigError(
                "Wire formats carry sums that every replica has whole, but with replication.zero "
                f"{self.replication.zero} none has, and replication.wire is {self.replication.wire}.",
                "Set replication.wire to none, or replication.zero to 0 or 1.",
            )
        if self.replication.shard != "all" and not self.replication.zero:
            raise ConfigError(
                f"replication.shard {self.replication.shard} says among whom ZeRO divides, but replication.zero is 0.",
                "Set replication.zero to 1, 2 or 3, or replication.shard to all.",
            )
        if self.replication.gather != "none" and (
            self.replication.zero != 3 or self.precision.compute != "float32"
        ):
            raise ConfigError(
                f"replication.gather {self.replication.gather} is of float32 parameters that no rank has whole, but "
                f"replication.zero is {self.replication.zero} and precision.compute {self.precision.compute}.",
                "Set replication.gather to none, or replication.zero to 3 and precision.compute to float32.",
            )
        if self.device.kind == "cuda" and self.replication.wire.startswith(KEPT_ON_HOST):
            raise ConfigError(
                f"Wire format {self.replication.wire} keeps its residuals in host memory, but device.kind is cuda.",
                "Set replication.wire to fp16, bf16, int8 or none, or device.kind to cpu.",
            )
        self._check_stream()
        self._check_mode()
        self._check_shared()
        width, heads = self.model.width, self.model.heads
        if self.model.kind == "gpt" and width % heads:
            near = sorted((width // heads * heads or heads, -(-width // heads) * heads))
            raise ConfigError(
                f"model.heads must divide model.width, but {heads} does not divide {width}.",
                f"Set model.width to {' or '.join(map(str, dict.fromkeys(near)))}, or model.heads to a divisor of {width}.",
            )

    def _check_stream(self) -> None:
        """Raise ConfigError for keys that exclude an asynchronous pipeline, if there is one."""
        schedule, replication, compute = (
            self.pipeline.schedule,
            self.replication,
            self.precision.compute,
        )
        if schedule not in ASYNCHRONOUS:
            return
        if self.model.tied:
            raise ConfigError(
                f"With schedule {schedule} each stage updates by itself, but model.tied has two share a tensor.",
                "Set model.tied to false, or pipeline.schedule to 1f1b.",
            )
        if compute == "float16":
            raise ConfigError(
                f"With schedule {schedule} no stage waits until all know of an overflow, but the loss scale of float16 adapts to "
                "them.",
                "Set precision.compute to bfloat16 or float32, or pipeline.schedule to 1f1b.",
            )
        for key, value, only in (
            ("replication.mode", replication.mode, "all-reduce"),
            ("replication.zero", replication.zero, 0),
            ("replication.wire", replication.wire, "none"),
        ):
            if value != only:
                raise ConfigError(
                    f"Schedule {schedule} needs {key} {only}, but it is {value}.",
                    f"Set {key} to {only}, or pipeline.schedule to 1f1b.",
                )

    def _check_mode(self) -> None:
        """Raise ConfigError for keys that need replication.mode all-reduce, in any other mode."""
        replication, layout = self.replication, self.layout
        if replication.mode == "all-reduce":
            return
        if self.precision.compute == "float16" and not replication.has_common_step:
            update = (
                f" with replication.update {replication.update}"
                if replication.mode == "server"
                else ""
            )
            raise ConfigError(
                "In float16 all ranks change the loss scale together after each step, but in mode "
                f"{replication.mode}{update} they have no step in common.",
                "Set precision.compute to bfloat16, or replication.mode to all-reduce, master, or server with update sync.",
            )
        for key, value, only in (
            ("replication.wire", replication.wire, "none"),
            ("replication.zero", replication.zero, 0),
            ("layout.tp", layout.tp, 1),
            ("layout.pp", layout.pp, 1),
        ):
            if value != only:
                raise ConfigError(
                    f"Mode {replication.mode} needs {key} {only}, but it is {value}.",
                    f"Set {key} to {only}, or replication.mode to all-reduce.",
                )

    def _check_shared(self) -> None:
        """Raise ConfigError for a model that layout.tp ranks cannot divide."""
        tp, model = self.layout.tp, self.model
        if self.layout.sequence_parallel and model.kind != "gpt":
            raise ConfigError(
                f"layout.sequence_parallel divides rows of tokens, but model.kind is {model.kind}.",
                "Set layout.sequence_parallel to false.",
            )
        if (
            self.device.kind in ("cuda", "cuda-sim")
            and self.precision.is_half
            and tp > 1
            and self.layout.algorithm == "native"
            and not self.layout.sequence_parallel
        ):
            raise ConfigError(
                f"layout.algorithm native sums activations by MPI, but they are {self.precision.compute} on {self.device.kind}, "
                "which MPI has no type for.",
                "Set layout.algorithm to auto, or precision.compute to float32.",
            )
        key, count = (
            ("model.heads", model.heads) if model.kind == "gpt" else ("model.width", model.width)
        )
        if count % tp == 0:
            return
        near = sorted({max(tp, count // tp * tp), count // tp * tp + tp})
        if model.kind == "gpt":  # The number of heads must divide the width as well.
            near = [heads for heads in range(tp, model.width + 1, tp) if model.width % heads == 0]
            near = sorted(sorted(near, key=lambda heads: abs(heads - count))[:2])
        divisors = [ranks for ranks in range(1, count + 1) if count % ranks == 0]
        ways = [f"{key} to {' or '.join(map(str, near))}"] if near else []
        ways.append(
            f"layout.tp to {' or '.join(map(str, sorted(sorted(divisors, key=lambda ranks: abs(ranks - tp))[:2])))}"
        )
        raise ConfigError(
            f"layout.tp must divide {key}, but {tp} does not divide {count}.",
            f"Set {', or '.join(ways)}.",
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


class Key(NamedTuple):
    """One entry of `--help-config`."""

    name: str
    type: str
    default: Any
    range: str
    help: str
    is_basic: bool


def keys() -> Iterator[Key]:
    """Iterate over all configuration keys, in the order of their definition."""
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        for name, key in field.annotation.model_fields.items():
            choices = getattr(key.annotation, "__args__", None)
            bounds = [
                f"{sign} {getattr(bound, attribute):g}"
                for bound in key.metadata
                for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
                if hasattr(bound, attribute)
            ]
            kind = type(choices[0]).__name__ if choices else key.annotation.__name__
            allowed = " | ".join(map(str, choices)) if choices else ", ".join(bounds)
            is_basic = name in field.annotation.basic
            yield Key(f"{section}.{name}", kind, key.default, allowed, key.description, is_basic)
