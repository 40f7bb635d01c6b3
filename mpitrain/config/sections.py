"""The typed configuration of a run: every key, its range, its default and one line of help; and nothing that acts on it."""

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from mpitrain.config.delays import PATTERN as DELAY
from mpitrain.machine.kinds import Kind

WIRE = r"^(none|fp16|bf16|int8|topk(:.+)?|powersgd(:.+)?)$"
ASYNC_LR = r"^(1/workers|staleness|[0-9]{1,9}(\.[0-9]{0,20})?(e-?[0-9]{1,2})?)$"
VALIDATION = r"^(tenth|tokens:.+)?$"
PARTITION = r"^time$|^( *[0-9]{1,9} *(, *[0-9]{1,9} *)*)?$"
HALVES = ("bfloat16", "float16")
ASYNCHRONOUS = (
    "async",
    "async-2bw",
)  # schedules whose stages update by themselves, while others compute
KEPT_ON_HOST = ("topk", "powersgd")  # wire formats whose residuals lie in host memory
WHOLE = 2**63 - 1  # the largest whole number: of 64 bits
SMALL, LARGE = 1e-30, 1e30  # sizes of the other numbers but 0: float32 has all of these


class Section(BaseModel):
    """A table of the configuration file: no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes True and 1.0 for 1; a choice among whole numbers takes neither, like every other whole number."""
        choices = getattr(cls.model_fields[info.field_name or ""].annotation, "__args__", ())
        if isinstance(value, bool | float) and value in choices:
            raise PydanticKnownError("int_type")
        return value

    @field_validator("*")
    @classmethod
    def _within_reach(cls, value: Any) -> Any:
        """What every key's value must be, besides the key's own law."""
        if isinstance(value, int) and abs(value) > WHOLE:
            raise PydanticCustomError("range", "must be a whole number of at most 64 bits")
        if isinstance(value, float) and value and not SMALL <= abs(value) <= LARGE:
            raise PydanticCustomError(
                "range", f"must be 0 or of a size between {SMALL:g} and {LARGE:g}"
            )
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise PydanticCustomError(
                "text", "must be UTF-8"
            )  # bytes that are not are lone surrogates in Python's text
        if isinstance(value, str) and not _is_speakable(value):
            raise PydanticCustomError(
                "text", "must be text without NUL that file names can have in this locale"
            )
        return value


class Run(Section):
    seed: int = Field(0, ge=0, description="seed of the initial parameters and of the data order")
    steps: int = Field(
        400, ge=0, description="optimizer steps in all, those before a resume included"
    )
    out: str = Field("", description="run directory; empty: runs/<date>-<n>")
    log_every: int = Field(
        10, ge=1, description="steps between lines in metrics.jsonl and on the screen"
    )
    eval_every: int = Field(
        0, ge=-1, description="steps between evaluations; 0: only at the end, -1: never"
    )
    eval_rows: int = Field(
        10_000,
        ge=0,
        description="most held-out rows that an evaluation takes, spread evenly; 0: all",
    )
    sample: int = Field(
        400,
        ge=0,
        description="tokens that a gpt writes when training is done, for at most 10 s; 0: none",
    )
    delay: str = Field(
        "",
        pattern=DELAY,
        description="stragglers on purpose; RANK:MS: each step of this rank takes so many milliseconds "
        "longer; random:MS:P: each step of each rank does with probability P, drawn from the "
        "seed, the step and the rows it computes; several with commas between; empty: none",
    )
    stall_seconds: float = Field(
        600.0, ge=1, description="a rank that makes no progress for so long ends the job"
    )
    trace: bool = Field(
        True, description="note in trace/ what each rank did last, for `mpitrain report`"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="what a loss or gradient that is not finite does: end the run, or skip that update; 10 skipped "
        "steps in a row, or at the end more than half, end the run too",
    )


class Data(Section):
    source: str = Field(
        "pydocs",
        description="pydocs, digits, text:FILE, tokens:FILE (flat uint16) or idx:DIR (MNIST files)",
    )
    validation: str = Field(
        "",
        pattern=VALIDATION,
        description="what is held out where data.source is tokens:FILE: another tokens:FILE, or tenth, "
        "the last tenth of the source; empty: val.bin if it lies beside train.bin, else tenth",
    )
    vocabulary: int = Field(
        0,
        ge=0,
        description="tokens there can be in tokens:FILE; 0: as many as the file uses; of text 256",
    )


class Model(Section):
    kind: Literal["gpt", "mlp"] = Field(
        "gpt",
        description="gpt for tokens, mlp for samples with a class each; not set: as data.source needs",
    )
    layers: int = Field(4, ge=1, description="transformer blocks, or hidden layers of the mlp")
    width: int = Field(
        128, ge=1, description="channels of the residual stream, or units of a hidden layer"
    )
    heads: int = Field(4, ge=1, description="attention heads; must divide the width")
    context: int = Field(128, ge=1, description="tokens in one sequence")
    tied: bool = Field(False, description="the output projection shares the token embedding")


class Batch(Section):
    size: int = Field(
        32, ge=1, le=10**9, description="sequences (or samples) per optimizer step, over all ranks"
    )
    micro_batches: int = Field(
        0,
        ge=0,
        description="parts in which each rank computes its share; 0: 1, or in a pipeline of several stages 2 for each "
        "of them, if there are rows",
    )


class Layout(Section):
    dp: int = Field(0, ge=0, description="data-parallel replicas; 0: as many as the ranks allow")
    tp: int = Field(
        1,
        ge=1,
        description="ranks that share each layer: its heads, widths and vocabulary are divided among them",
    )
    pp: int = Field(1, ge=1, description="pipeline stages: ranks that each hold some of the layers")
    algorithm: str = Field(
        "auto", description="the all-reduce of activations, over the ranks that share layers"
    )
    sequence_parallel: bool = Field(
        False, description="ranks that share layers also divide the rows of norms and residuals"
    )
    keep_gathered: bool = Field(
        False,
        description="of sequence_parallel: keep the rows that a layer has gathered for its backward, instead of gathering "
        "them again",
    )


class Pipeline(Section):
    schedule: str = Field(
        "1f1b",
        description="in which order stages compute: naive, gpipe, 1f1b, interleaved, zero-bubble, zb-v, v-half, "
        "breadth-first, or a file of `mpitrain plan schedule --json`; async and async-2bw: a stream of "
        "micro-batches without end, in which each stage updates by itself: after every micro-batch, or once "
        "a step from gradients at the parameters of the step before",
    )
    chunks: int = Field(
        0,
        ge=0,
        description="parts of the model on each stage; 0: as many as the schedule has, 2 if any number",
    )
    partition: str = Field(
        "",
        pattern=PARTITION,
        description="how many units (of a gpt: embedding, 2 for each block, head) each part has, as in "
        "4,4,3,5; empty: about the same parameters; time: about the same time, measured at "
        "the start on all ranks",
    )


class Replication(Section):
    mode: Literal["all-reduce", "master", "server", "local", "gossip"] = Field(
        "all-reduce",
        description="who updates: all-reduce: everyone, from the sum of all gradients; master: rank 0 alone; "
        "server: ranks that hold the parameters and compute no rows; local: each worker by itself, "
        "and all average after a period; gossip: each worker by itself, and averages with one "
        "neighbour after a step",
    )
    servers: int = Field(
        1,
        ge=1,
        description="server: how many of the ranks, the last ones, are servers and compute no rows",
    )
    update: Literal["sync", "async", "bounded"] = Field(
        "sync",
        description="server: when parameters are updated; sync: once a step, from all workers' gradients; async: by each "
        "gradient as it comes; bounded: the same, but no worker gets more than `staleness` steps ahead",
    )
    staleness: int = Field(
        2,
        ge=0,
        description="bounded: a worker starts a step when all have finished the step before the "
        "last `staleness` ones; 0: as sync",
    )
    async_lr: str = Field(
        "1/workers",
        pattern=ASYNC_LR,
        description="async and bounded: what the learning rate is multiplied by: a number, "
        "1/workers, or staleness: 1/(1 + that of the gradient)",
    )
    period: int = Field(
        10,
        ge=1,
        description="of local: steps between averages; of local and gossip: steps until all know of a request to stop",
    )
    outer_lr: float = Field(
        1.0, gt=0, description="of local: how far all go towards the average; DiLoCo takes 0.7"
    )
    outer_momentum: float = Field(
        0.0, ge=0, lt=1, description="of local: momentum of what averages change; DiLoCo takes 0.9"
    )
    zero: Literal[0, 1, 2, 3] = Field(
        0,
        description="what of a replica is divided among the replicas: 0 nothing, 1 the state of the optimizer, 2 and the "
        "gradients, 3 and the parameters; 2 and 3 reduce gradients with every micro-batch anew, or in a pipeline, "
        "where they need gpipe or breadth-first, once",
    )
    shard: Literal["all", "host"] = Field(
        "all",
        description="zero: among whom; all: all replicas; host: those of each host, between which only gradients travel, "
        "once a step",
    )
    zero_keep: int = Field(
        0,
        ge=0,
        description="elements of a unit up to which zero = 3 gathers it once a step, to a place of its own, instead of "
        "for each use",
    )
    gather: Literal["none", "fp16", "bf16", "int8"] = Field(
        "none",
        description="zero = 3: how parameters travel to be computed with; those that are updated stay as they are",
    )
    algorithm: str = Field(
        "auto",
        description="the all-reduce of the gradients; auto: what the tuning predicts to be fastest",
    )
    tuning: str = Field(
        "", description="for auto: file of `mpitrain bench fit`; empty: assumptions"
    )
    wire: str = Field(
        "none",
        pattern=WIRE,
        description="how gradients travel: none, fp16, bf16, int8, topk[:PART] or powersgd[:RANK]",
    )
    dense_steps: int = Field(
        -1,
        ge=-1,
        description="first steps whose gradients travel whole; -1: a quarter of run.steps for powersgd, else none",
    )
    bucket_mb: float = Field(
        0.0,
        ge=0,
        description="megabytes of whole units that are reduced together; 0: 4 within a host, between hosts what "
        "suits the latency and bandwidth in the tuning",
    )
    overlap: bool = Field(
        True,
        description="reduce a bucket as soon as its gradients are ready, and compute while parameters are gathered",
    )
    progress_thread: Literal["auto", "no"] = Field(
        "auto",
        description="what moves begun reductions between hosts; auto: a thread, if they are messages of host memory and "
        "MPI grants more than one; no: the main thread, between layers",
    )

    @field_validator("async_lr", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """A number may be written as one."""
        return (
            str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        )

    @property
    def has_common_step(self) -> bool:
        """Whether all ranks know the outcome of each step before the next begins."""
        is_late = self.update == "async" or (self.update == "bounded" and self.staleness > 0)
        return self.mode not in ("local", "gossip") and not (self.mode == "server" and is_late)


class Precision(Section):
    compute: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        "float32",
        description="dtype of parameters, activations, gradients; bfloat16 and float16: of activations, their "
        "gradients, and the copy of the parameters that layers compute with, where float32 holds what is "
        "updated. On cpu both are rounded in float32's memory, and products are float32's: nothing is "
        "saved, and the copy costs 4 bytes a parameter, 25% with adamw. float16 finds a loss scale by "
        "trial: steps whose gradients overflow, but not their loss, are skipped, and 20 in a row end the "
        "run",
    )

    @property
    def is_half(self) -> bool:
        """Whether layers compute with a rounded copy of the parameters."""
        return self.compute in HALVES

    @property
    def stored(self) -> str:
        """The dtype of parameters as they are updated, of their gradients, and of the optimizer's state."""
        return "float32" if self.is_half else self.compute


class Optimizer(Section):
    name: Literal["sgd", "momentum", "adamw"] = Field("adamw", description="the update rule")
    lr: float = Field(2e-3, gt=0, description="learning rate at its peak")
    weight_decay: float = Field(
        0.1, ge=0, description="decay of matrices, decoupled in adamw; biases and gains have none"
    )
    clip: float = Field(
        1.0,
        ge=0,
        description="largest global gradient norm, in asynchronous pipelines of each stage; "
        "0: no clipping",
    )
    warmup: int = Field(20, ge=0, description="steps over which the learning rate rises from 0")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "cosine", description="decay to a tenth after the warm-up"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="of the momentum rule")
    beta1: float = Field(
        0.8, ge=0, lt=1, description="adamw: decay of the first moment; but see beta1_delayed"
    )
    beta1_delayed: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="adamw: the same in steps of topk and powersgd, whose residuals are a momentum of their own",
    )
    beta2: float = Field(0.95, ge=0, lt=1, description="adamw: decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="adamw: keeps the division finite")


class Checkpoint(Section):
    every: int = Field(
        100, ge=0, description="steps between checkpoints; 0: only when the run ends or is stopped"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints to keep")


class Device(Section):
    kind: Literal["auto", Kind] = Field(
        "auto",
        description="where to compute; auto: cuda if every rank finds a GPU, else cpu; cuda-sim: GPU kernels on the CPU",
    )
    cuda_aware: Literal["auto", "yes", "no"] = Field(
        "auto",
        description="whether GPU pointers go to MPI or are staged through the host; auto: ask MPI and try it out",
    )
    gemm: Literal["tiled", "library"] = Field(
        "tiled",
        description="of cuda and cuda-sim: matrix products by kernels of our own, or by cuBLAS (in cuda-sim NumPy)",
    )
    tiles: str = Field(
        "",
        description="for gemm tiled: file of `mpitrain bench gemm --tune`; empty: tiles by their cost on this "
        "GPU",
    )


def _is_speakable(text: str) -> bool:
    """Whether the system would take the text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
