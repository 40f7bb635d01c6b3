"""The typed configuration of a run: every key, its range, its default and one line of help; and nothing that acts on it."""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from mpitrain.errors import ConfigError
from mpitrain.files import contents

WIRE = r"^(none|fp16|bf16|int8|topk(:.+)?|powersgd(:.+)?)$"
BESIDE = (("replication", "tuning"), ("device", "tiles"))  # files that may lie with a configuration, and move with it
KEPT_ON_HOST = ("topk", "powersgd")  # wire formats whose residuals lie in host memory
LISTED = "`mpitrain train --help-config` lists every key with its type and range."
WHOLE = 2**63 - 1  # the largest whole number: of 64 bits
SMALL, LARGE = 1e-30, 1e30  # sizes of the other numbers but 0: float32 has all of these

NOT_YET = {  # values that are meant to work one day
    "layout.tp": r"[2-9]|\d{2,6}", "layout.pp": r"[2-9]|\d{2,6}", "precision.compute": "b?float16", "model.kind": "cnn",
    "replication.mode": "master|server|local|gossip",
}
SYNONYMS = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    "single": "float32", "fp64": "float64", "f64": "float64", "double": "float64", "gpu": "cuda", "allreduce": "all-reduce",
}


class Section(BaseModel):
    """A table of the configuration file: no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _within_reach(cls, value: Any) -> Any:
        """What every key's value must be, besides the key's own law."""
        if isinstance(value, int) and abs(value) > WHOLE:
            raise PydanticCustomError("range", "must be a whole number of at most 64 bits")
        if isinstance(value, float) and value and not SMALL <= abs(value) <= LARGE:
            raise PydanticCustomError("range", f"must be 0 or of a size between {SMALL:g} and {LARGE:g}")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise PydanticCustomError("text", "must be UTF-8")  # bytes that are not are lone surrogates in Python's text
        if isinstance(value, str) and not _is_speakable(value):
            raise PydanticCustomError("text", "must be text without NUL that file names can have in this locale")
        return value


class Run(Section):
    seed: int = Field(0, ge=0, description="seed of the initial parameters and of the data order")
    steps: int = Field(400, ge=0, description="optimizer steps in all, those before a resume included")
    out: str = Field("", description="run directory; empty: runs/<date>-<n>")
    log_every: int = Field(10, ge=1, description="steps between lines in metrics.jsonl and on the screen")
    eval_every: int = Field(0, ge=-1, description="steps between evaluations; 0: only at the end, -1: never")
    eval_rows: int = Field(10_000, ge=0, description="most held-out rows that an evaluation takes, spread evenly; 0: all")
    sample: int = Field(400, ge=0, description="tokens that a gpt writes when training is done, for at most 10 s; 0: none")
    stall_seconds: float = Field(600.0, ge=1, description="a rank that makes no progress for so long ends the job")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what a loss or gradient that is not finite does: end the run, or skip that update; 10 skipped "
                            "steps in a row, or at the end more than half, end the run too"
    )


class Data(Section):
    source: str = Field("pydocs", description="pydocs, digits, text:FILE, tokens:FILE (flat uint16) or idx:DIR (MNIST files)")
    vocabulary: int = Field(0, ge=0, description="tokens there can be in tokens:FILE; 0: as many as the file uses; of text 256")


class Model(Section):
    kind: Literal["gpt", "mlp"] = Field("gpt", description="gpt for tokens, mlp for samples with a class each")
    layers: int = Field(4, ge=1, description="transformer blocks, or hidden layers of the mlp")
    width: int = Field(128, ge=1, description="channels of the residual stream, or units of a hidden layer")
    heads: int = Field(4, ge=1, description="attention heads; must divide the width")
    context: int = Field(128, ge=1, description="tokens in one sequence")
    tied: bool = Field(False, description="the output projection shares the token embedding")


class Batch(Section):
    size: int = Field(32, ge=1, le=10**9, description="sequences (or samples) per optimizer step, over all ranks")
    micro_batches: int = Field(1, ge=1, description="parts in which each rank computes its share")


class Layout(Section):
    dp: int = Field(0, ge=0, description="data-parallel replicas; 0: as many as the ranks allow")
    tp: Literal[1] = Field(1, description="ranks that share each layer (this version shards no layers)")
    pp: Literal[1] = Field(1, description="pipeline stages (this version has one)")


class Replication(Section):
    mode: Literal["all-reduce"] = Field("all-reduce", description="how replicas are kept equal")
    algorithm: str = Field("auto", description="the all-reduce of the gradients; auto: what the tuning predicts to be fastest")
    tuning: str = Field(
        "", description="for auto: file of `mpitrain bench fit`, in a configuration file from its folder; empty: assumptions"
    )
    wire: str = Field(
        "none", pattern=WIRE, description="how gradients travel: none, fp16, bf16, int8, topk[:PART] or powersgd[:RANK]"
    )
    dense_steps: int = Field(
        -1, ge=-1, description="first steps whose gradients travel whole; -1: a quarter of run.steps for powersgd, else none"
    )
    bucket_mb: float = Field(
        0.0, ge=0, description="megabytes of whole units that are reduced together; 0: 4 within a host, between hosts what "
                               "suits the latency and bandwidth in the tuning"
    )
    overlap: bool = Field(True, description="reduce a bucket as soon as its gradients are ready")
    progress_thread: Literal["auto", "no"] = Field(
        "auto", description="what moves begun reductions between hosts; auto: a thread, if they are messages of host memory and "
                            "MPI grants more than one; no: the main thread, between layers"
    )


class Precision(Section):
    compute: Literal["float32", "float64"] = Field("float32", description="dtype of parameters, activations, gradients")


class Optimizer(Section):
    name: Literal["sgd", "momentum", "adamw"] = Field("adamw", description="the update rule")
    lr: float = Field(2e-3, gt=0, description="learning rate at its peak")
    weight_decay: float = Field(0.1, ge=0, description="decay of matrices, decoupled in adamw; biases and gains have none")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")
    warmup: int = Field(20, ge=0, description="steps over which the learning rate rises from 0")
    schedule: Literal["constant", "cosine", "linear"] = Field("cosine", description="decay to a tenth after the warm-up")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the momentum rule")
    beta1: float = Field(0.8, ge=0, lt=1, description="adamw: decay of the first moment; but see beta1_delayed")
    beta1_delayed: float = Field(
        0.5, ge=0, lt=1, description="adamw: the same in steps of topk and powersgd, whose residuals are a momentum of their own"
    )
    beta2: float = Field(0.95, ge=0, lt=1, description="adamw: decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="adamw: keeps the division finite")


class Checkpoint(Section):
    every: int = Field(100, ge=0, description="steps between checkpoints; 0: only when the run ends or is stopped")
    keep: int = Field(2, ge=1, description="newest checkpoints to keep")


class Device(Section):
    kind: Literal["auto", "cpu", "cuda", "cuda-sim"] = Field(
        "auto", description="where to compute; auto: cuda if every rank finds a GPU, else cpu; cuda-sim: GPU kernels on the CPU"
    )
    cuda_aware: Literal["auto", "yes", "no"] = Field(
        "auto", description="whether GPU pointers go to MPI or are staged through the host; auto: ask MPI and try it out"
    )
    gemm: Literal["tiled", "library"] = Field(
        "tiled", description="of cuda and cuda-sim: matrix products by kernels of our own, or by cuBLAS (in cuda-sim NumPy)"
    )
    tiles: str = Field("", description="for gemm tiled: file of `mpitrain bench gemm --tune`, in a configuration file from its "
                       "folder; empty: tiles that fill a large GPU")


class Config(Section):
    """A whole run. `Config()` is the default run."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    batch: Batch = Batch()
    layout: Layout = Layout()
    replication: Replication = Replication()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    device: Device = Device()

    def model_post_init(self, context: Any) -> None:
        """Refuse what cannot work whatever the ranks and the data are."""
        if self.replication.wire != "none" and self.precision.compute != "float32":
            raise ConfigError(
                f"Wire formats carry float32, but precision.compute is {self.precision.compute} with replication.wire "
                f"{self.replication.wire}.",
                "Set replication.wire to none, or precision.compute to float32.",
            )
        if self.device.kind == "cuda" and self.replication.wire.startswith(KEPT_ON_HOST):
            raise ConfigError(
                f"Wire format {self.replication.wire} keeps its residuals in host memory, but device.kind is cuda.",
                "Set replication.wire to fp16, bf16, int8 or none, or device.kind to cpu.",
            )
        width, heads = self.model.width, self.model.heads
        if self.model.kind == "gpt" and width % heads:
            near = sorted((width // heads * heads or heads, -(-width // heads) * heads))
            raise ConfigError(
                f"model.heads must divide model.width, but {heads} does not divide {width}.",
                f"Set model.width to {' or '.join(map(str, dict.fromkeys(near)))}, or model.heads to a divisor of {width}.",
            )

    @property
    def dense_steps(self) -> int:
        """The first steps whose gradients travel whole, whatever the wire format."""
        if self.replication.dense_steps >= 0:
            return self.replication.dense_steps
        return self.run.steps // 4 if self.replication.wire.startswith("powersgd") else 0

    def flat(self) -> dict[str, Any]:
        """{section.key: value}."""
        return {f"{section}.{key}": value for section, table in self.model_dump().items() for key, value in table.items()}


class Key(NamedTuple):
    """One line of `--help-config`."""

    name: str
    type: str
    default: Any
    range: str
    help: str


def keys() -> Iterator[Key]:
    """Every configuration key, in the order of the file."""
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
            yield Key(f"{section}.{name}", kind, key.default, allowed, key.description)


def nearest(word: str) -> list[str]:
    """Keys that somebody may mean by a word such as lr, optimizer.lr, batch-size or leraning_rate."""
    names = [key.name for key in keys()]
    word = word.replace("-", "_")
    for spelled in (lambda name: name.partition(".")[2], lambda name: name, lambda name: name.replace(".", "_")):
        if found := [name for name in names if spelled(name) == word]:
            return found
    spellings = {spelling: name for name in names for spelling in (name, name.replace(".", "_"), name.partition(".")[2])}
    return list(dict.fromkeys(spellings[close] for close in difflib.get_close_matches(word, spellings, 2, 0.75)))


def _is_speakable(text: str) -> bool:
    """Whether the system would take the text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a configuration file; a tuning or tiles file that it names is looked for from its own folder."""
    try:
        tables = tomllib.loads(contents(path).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error}.", "Name a readable TOML file.") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 1000 brackets
        raise ConfigError(f"{path} is not TOML: {error}.", "`mpitrain train --help-config` lists the keys.") from None
    for section, key in BESIDE:
        table = tables.get(section)
        if isinstance(table, dict) and isinstance(name := table.get(key), str) and name:
            table[key] = str(path.parent / name)
    return tables


def with_settings(tables: Mapping[str, Any], settings: list[str]) -> dict[str, Any]:
    """The tables with each `section.key=value` put in; a value is TOML, or else a bare string."""
    merged = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for setting in settings:
        name, equals, text = setting.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"--set takes section.key=value, but got {setting!r}.", "For example: --set optimizer.lr=1e-3")
        table = merged.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a table, but the configuration says {section} = {table!r}.",
                              f"Write a [{section}] table.")
        table[key] = _toml_value(text.strip())
    return merged


def _toml_value(text: str) -> Any:
    if text.lstrip("+-").lower() in ("nan", "inf"):
        return float(text)
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text  # a line break in the text would begin another key


def parse(tables: Mapping[str, Any]) -> Config:
    """Validate; one ConfigError lists everything that is wrong."""
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaint(item) for item in error.errors()), LISTED) from None


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """ConfigError, in the words of `parse`, unless the key's value is among choices that only a room above knows."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ConfigError(_no_choice(name, f"must be {', '.join(others)} or {last}", value, choices), LISTED)


def _complaint(item: Mapping[str, Any]) -> str:
    """One pydantic finding in our words: the key, the law, the value."""
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = [key.name for key in keys()]
        close = difflib.get_close_matches(name, known, 1, 0.6)
        return f"There is no key {name}" + (f"; did you mean {close[0]}?" if close else ".")
    law = item["msg"].replace("Input should be", "must be").replace("Input", "it")
    if item["type"] == "literal_error":
        choices = [choice for key in keys() if key.name == name for choice in key.range.split(" | ")]
        return _no_choice(name, law, item["input"], choices)
    if item["type"] == "string_pattern_mismatch":
        law = "must be none, fp16, bf16, int8, topk[:PART] or powersgd[:RANK]"
    if item["type"] == "finite_number" or (isinstance(item["input"], float) and math.isnan(item["input"])):
        law = "must be a finite number"
    return f"{name} {law}, but is {_shown(item['input'])}."


def _no_choice(name: str, law: str, value: Any, choices: Collection[str]) -> str:
    """What is wrong with a value that is none of the choices, and which one may be meant."""
    typed = value if isinstance(value, str) else _shown(value)
    word = SYNONYMS.get(typed.lower(), typed)
    if re.fullmatch(NOT_YET.get(name, ""), word):
        return f"{name} {law}, but is {_shown(value)}: {word} is not there yet."
    if close := difflib.get_close_matches(word, choices, 1, 0.6):
        return f"{name} {law}, but is {_shown(value)}; did you mean {close[0]}?"
    return f"{name} {law}, but is {_shown(value)}."


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no more than 4300 digits
        return "a larger one"
