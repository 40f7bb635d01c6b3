"""The keys of the configuration: type, range, default and help of each, as pydantic models; the class Config.

The string below a key is its help, in which `{...}` stands for names of rows (run/choices.py).
"""

from __future__ import annotations  # help() prints signatures as they are written here.

import ast
import inspect
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from mpitrain.config.faults import DELAY, INJECTION
from mpitrain.files import PARSING
from mpitrain.machine.process import Kind

WIRE = r"^(none|fp16|bf16|int8|topk(:.+)?|powersgd(:.+)?)$"
ASYNC_LR = r"^(1/workers|staleness|[0-9]{1,9}(\.[0-9]{0,20})?(e-?[0-9]{1,2})?)$"
RECOMPUTE = r"^(none|attention|unit|[1-9][0-9]{0,8})$"
PARTITION = r"^time$|^( *[0-9]{1,9} *(, *[0-9]{1,9} *)*)?$"
HALVES = ("bfloat16", "float16")
KEPT_ON_HOST = ("topk", "powersgd")
"""The compression formats with error-feedback residuals, which are in host memory."""
ALL_LINEAR = "all-linear"
"""The value of lora.targets for every linear layer but the output layer, as in peft."""
EPOCH = "epoch"
"""The value of run.eval_every for an evaluation after each pass over the data."""
WHOLE = 2**63 - 1
"""The largest integer of 64 bits."""
SMALL, LARGE = 1e-30, 1e30
"""The range of the magnitude of a float other than 0; float32 represents all of it."""


def listed(names: Collection[Any]) -> str:
    """Return the names as a message lists choices."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


class Section(BaseModel):
    """A table of the configuration file: no unknown keys, no implicit conversions, no NaN.

    Some keys name a row of a table in a higher room. The context of a validation gives their
    allowed names: {section.key: names}.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    basic: ClassVar[Sequence[str]] = ()
    """The keys that a first run of one's own needs; the others are advanced."""

    @field_validator("*", mode="before")
    @classmethod
    def _in_its_table(cls, value: Any, info: ValidationInfo) -> Any:
        names = (info.context or {}).get(f"{cls.__name__.lower()}.{info.field_name}")
        if names and value not in names:
            raise PydanticKnownError("literal_error", {"expected": listed(names)})
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse True and 1.0 for keys with a choice of integers. Python would accept both as equal
        to 1.
        """
        choices = getattr(cls.model_fields[info.field_name or ""].annotation, "__args__", ())
        is_choice = any(value is choice for choice in choices)
        if isinstance(value, bool | float) and value in choices and not is_choice:
            raise PydanticKnownError("int_type")
        return value

    @field_validator("*")
    @classmethod
    def _within_reach(cls, value: Any) -> Any:
        """Check the rules for the values of all keys: ranges of numbers, and valid text."""
        if isinstance(value, list):
            return [*map(cls._within_reach, value)]
        if isinstance(value, dict):
            return {cls._within_reach(key): cls._within_reach(item) for key, item in value.items()}
        if isinstance(value, int) and abs(value) > WHOLE:
            raise PydanticCustomError("range", "must be a whole number of at most 64 bits")
        if isinstance(value, float) and value and not SMALL <= abs(value) <= LARGE:
            raise PydanticCustomError(
                "range", f"must be 0 or of a size between {SMALL:g} and {LARGE:g}"
            )
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise PydanticCustomError(
                "text", "must be UTF-8"
            )  # Python represents other bytes as lone surrogates.
        if isinstance(value, str) and not _is_speakable(value):
            raise PydanticCustomError(
                "text", "must be text without NUL that file names can have in this locale"
            )
        return value


class Epochs(NamedTuple):
    """How epochs follow each other in the steps of a start.

    rows     of an epoch
    size     rows of a step
    step     number of steps before this start
    samples  number of rows in these steps
    """

    rows: float
    size: int
    step: int
    samples: int

    def next_end(self, step: int) -> int:
        """Return the first step after `step` at whose end one more epoch is complete."""
        passed = int((self.samples + (step - self.step) * self.size) // self.rows)
        ends = (
            self.step + math.ceil((epoch * self.rows - self.samples) / self.size)
            for epoch in count(passed + 1)
        )
        return next(end for end in ends if end > step)


class Run(Section):
    basic = ("seed", "steps", "out", "eval_every")

    seed: int = Field(0, ge=0)
    """seed of the initial parameters and of the data order"""
    steps: int = Field(400, ge=0)
    """total number of optimizer steps, including the steps before a resume"""
    epochs: float = Field(0.0, ge=0)
    """passes over the data, which give run.steps; 0: run.steps is as set"""
    out: str = ""
    """run directory; empty: runs/<date>-<n>"""
    init_from: str = ""
    """folder with the initial parameters: a folder of HuggingFace with a GPT-2, Llama, Mistral,
    Qwen2 or BERT, or the run directory of another run. Keys of [model] that are not set come from
    it. A resumed run does not read it. Empty: random parameters"""
    plugins: list[str] = []
    """Python files that add rows to the tables of modes, schedules and the like; every rank imports
    them before it checks the configuration. FILE, or FILE sha256:DIGEST"""
    watchers: list[str] = []
    """watchers that rank 0 makes: wandb, mlflow, FILE.py:CLASS, a class derived from
    mpitrain.Watcher, or the name of a row that a plugin has added. A resumed run does not take them
    over"""
    log_every: int = Field(10, ge=1)
    """steps between two lines in metrics.jsonl and on the screen"""
    eval_every: int | Literal["epoch"] = 0
    """steps between evaluations; epoch: after each pass over the data, 0: only at the end, -1:
    never"""
    eval_rows: int = Field(10_000, ge=0)
    """largest number of held-out rows in an evaluation, spread evenly over all of them; 0: all rows
    """
    sample: int = Field(400, ge=0)
    """number of tokens that a {rows} generates after training, for at most 10 s; 0: none"""
    sample_prompt: list[str] = []
    """prompts that each evaluation continues, by at most run.sample tokens each and for at most 10
    s, in place of the text after training; of conversations, what the user says"""
    patience: int = Field(0, ge=0)
    """evaluations in a row without a better validation loss that end the run; 0: the run goes on"""
    max_hours: float = Field(0.0, ge=0)
    """hours of this start, before the end of which the run saves a checkpoint and stops with exit
    code 85, as before the time limit of a batch job; 0: there is no such end"""
    digest_every: int = Field(0, ge=0)
    """steps between digests of the parameters and the optimizer state in metrics.jsonl, which
    `mpitrain runs diff` compares. Each reads the whole state; 0: none"""
    delay: str = Field("", pattern=DELAY)
    """artificial stragglers, as a list with commas. RANK:MS makes each step of this rank MS
    milliseconds longer. random:MS:P does so to each step of each rank with probability P. The draw
    depends on the seed, the step and the rows of the rank. Empty: none"""
    inject: str = Field("", pattern=INJECTION)
    """an artificial failure, KIND:RANK@STEP[:POINT], for tests of jobs. KIND is kill, segfault,
    stop, exit, _exit, raise, oom, disk, deadlock, mismatch, lose, nan or bitflip. It happens once,
    from this step on; step 0 is the start. POINT is step, forward, backward, save, snapshot,
    thread, publish, evaluation or end. A resumed run does not take it over. Empty: none"""
    stall_seconds: float = Field(600.0, ge=1)
    """the watchdog ends the job if a rank makes no progress for this many seconds"""
    on_failure: Literal["end", "continue"] = "end"
    """reaction to the loss of a rank; end: the job ends, continue: the living ranks go on, from
    their own state, copies (copies_every) or the newest checkpoint. continue needs `mpitrain launch
    --fault-tolerant`"""
    copies_every: int = Field(0, ge=0)
    """on_failure continue: steps between copies of the state in host memory, of this rank and of
    what a neighbour alone has, on another host where there is one. 0: no copies"""
    recover_seconds: float = Field(120.0, ge=1)
    """seconds from a loss to the next step, after which the job ends"""
    on_stall: Literal["end", "warn"] = "end"
    """reaction of the watchdog; end: it names the rank to blame, and ends the job, warn: the job
    goes on"""
    grace: float = Field(60.0, ge=1)
    """seconds in which a rank must exit after the run has ended; then it ends itself, even if
    MPI_Finalize waits for a rank that hangs"""
    trace: bool = True
    """record the last actions of each rank in trace/ of the run directory, for `mpitrain runs
    report`"""
    tensorboard: bool = False
    """write the numbers of metrics.jsonl as TensorBoard event files, too, to tensorboard/ of the
    run directory"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """reaction to a loss or gradient that is not finite; stop: end the run, skip: skip the update
    of this step. Even with skip the run ends after 10 skipped steps in a row, or at its end if more
    than half were skipped"""
    on_spike: Literal["ignore", "skip", "back"] = "ignore"
    """reaction to a spike of the loss; skip: skip the update of this step, back: also undo the
    updates since the last snapshot. Skipped and undone updates end a run as those of
    run.on_nonfinite do"""
    spike: float = Field(6.0, gt=0)
    """standard deviations above the mean of recent losses from which a loss is a spike; at least 10
    losses come before it"""
    snapshot_every: int = Field(20, ge=1)
    """on_spike back: steps between snapshots of the state in host memory. The newest two are kept;
    each checkpoint is a snapshot, too"""
    _epochs: Epochs | None = PrivateAttr(None)

    @field_validator("eval_every", mode="before")
    @classmethod
    def _steps_or_epoch(cls, value: Any) -> Any:
        if value != EPOCH and (type(value) is not int or value < -1):
            raise PydanticCustomError("range", f"must be a whole number from -1 on, or {EPOCH}")
        return value

    def next_evaluation(self, step: int) -> int:
        """Return the first step after `step` that an evaluation follows; beyond all steps if none does."""
        if self.eval_every == EPOCH:
            return self._epochs.next_end(step) if self._epochs else WHOLE
        every = int(self.eval_every)
        return step // every * every + every if every > 0 else WHOLE


class Data(Section):
    basic = ("source", "validation")

    source: str = "pydocs"
    """data to train on: {rows}"""
    validation: str = ""
    """held-out rows for a data.source {rows}: another file of the same kind, or tenth for the last
    tenth of the source. Of arrays also a fraction of the rows, drawn at random, such as 0.2. Empty:
    the file val.bin in the folder of a train.bin, if there is one, else tenth"""
    normalise: bool = True
    """scale the numbers of {rows} to mean 0 and deviation 1: features, channels of images, and the
    targets of mse and mae. Evaluations and predictions have the unit of the data"""
    vocabulary: int = Field(0, ge=0)
    """vocabulary size for {rows}; 0: the largest token in the file + 1. Text has at least 256"""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """dtype of the tokens of {rows}; auto: as the header says (.npy, llm.c), else as the key dtype
    of meta.json beside the file, else uint16"""
    order: Literal["random", "epochs"] = "random"
    """order of the rows of {rows}; random: windows at random offsets, epochs: windows side by side,
    each once per epoch. A mixture is always random; other data always goes in epochs"""
    separator: int = Field(-1, ge=-1)
    """the token that ends a document of {rows}; a row ends with its document, and the rest of the
    row does not count, unless data.attend is document. -1: rows cross borders of documents"""
    mixture: dict[str, float] = {}
    """weights of the sources of data.source mixture, as a table: each row comes from one of them.
    They are {rows}"""
    prefetch: int = Field(2, ge=0, le=1000)
    """batches that a thread reads ahead, which changes no bit; 0: each step reads its own"""
    template: str = ""
    """a message of a conversation of {rows} as text, with {{role}} and {{content}}, or a chat
    template in Jinja; the content of the role assistant, and the text behind it, are trained on. If
    the key is not set, the template in the folder of run.init_from is taken, if there is one.
    Empty: {{role}}: and {{content}} on the next line, and two line breaks"""
    tokenizer: str = ""
    """tokenizer.json for the conversations of {rows}; if the key is not set, that in the folder of
    run.init_from. Empty: their tokens are bytes"""
    packing: bool = False
    """pack several conversations of {rows} into a row to train on, as many as fit model.context.
    Held-out rows have one each"""
    attend: Literal["window", "document"] = "window"
    """tokens that attention sees, in {rows}; window: all earlier ones of the row, document: those
    of its own document, which ends at data.separator or is a conversation of data.packing.
    Positions then begin anew at each document, and all documents of a row count"""

    classes: int = Field(0, ge=0)
    """classes of the labelled texts of {rows}; 0: those of run.init_from, else the largest label +
    1"""
    labels: list[str] = []
    """names of these classes, from class 0 on; empty: those of run.init_from, else the names in the
    texts, sorted"""
    mask: float = Field(0.15, gt=0, le=1)
    """{rows}: part of the tokens to predict. Of these, 80% become the mask token, 10% any token,
    and 10% stay. The mask token is [MASK] of the tokenizer; without one it is added behind all
    tokens, and data.vocabulary counts it"""

    @field_validator("validation", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) else value


class Model(Section):
    basic = ("kind", "layers", "width", "heads", "context")

    kind: str = "gpt"
    """{rows}; if the key is not set, the kind that fits data.source"""
    layers: int = Field(4, ge=1, le=10_000)
    """number of {rows}"""
    width: int = Field(128, ge=1)
    """{rows}"""
    heads: int = Field(4, ge=1)
    """number of attention heads; must divide model.width, unless model.head_dim is set"""
    kv_heads: int = Field(0, ge=0)
    """llama: number of heads of keys and values, which model.heads shares; 0: as many"""
    head_dim: int = Field(0, ge=0)
    """llama: channels of a head; 0: model.width / model.heads"""
    qk_norm: bool | Literal["joint"] = False
    """llama: queries and keys are normed before their rotation; true: each head, as in Qwen3, joint:
    all heads of a token together, as in OLMoE"""
    pre_norm: bool = True
    """llama: the inputs of attention and of each MLP are normed; false, with model.post_norm: as in
    OLMo 2 and 3"""
    post_norm: bool = False
    """llama: the outputs of attention and of each MLP are normed, too, as in Gemma 2 and 3"""
    activation: Literal["silu", "gelu"] = "silu"
    """llama: activation of the gates of each MLP; gelu, of the tanh form, as in Gemma"""
    scaled_embedding: bool = False
    """llama: the embedding is multiplied by the square root of model.width, as in Gemma"""
    qkv_bias: bool = False
    """llama: queries, keys and values have biases, as in Qwen2"""
    theta: float = Field(10_000.0, gt=1)
    """llama: base of the angles of rotary positions"""
    rope_scaling: list[float] = []
    """llama: scaled rotary positions. [factor]: linear; factor, low and high frequency factors and
    earlier context, such as [32, 1, 4, 8192]: as in Llama 3; factor, fast and slow periods, earlier
    context and size of the turns, such as [4, 32, 1, 4096, 1.14]: YaRN; []: not scaled"""
    context: int = Field(128, ge=1)
    """tokens in one sequence"""
    window: int = Field(0, ge=0)
    """gpt, llama: most tokens that attention sees, the last up to each token (sliding window); 0:
    all earlier ones"""
    window_from: int = Field(0, ge=0)
    """gpt, llama: the first layer with model.window, counted from 0, as max_window_layers of Qwen2
    """
    window_every: int = Field(0, ge=0)
    """gpt, llama: the last of each so many layers sees all tokens in place of model.window: 2 in Gemma
    2, 6 in Gemma 3; 0: there is no such layer"""
    window_theta: float = Field(0.0, ge=0)
    """llama: model.theta of the layers with model.window, whose positions are then not scaled, as in
    Gemma 3; 0: they turn as those of the others"""
    nope_every: int = Field(0, ge=0)
    """llama: the last of each so many layers has no positions: 4 in SmolLM3; 0: there is no such layer
    """
    clip_qkv: float = Field(0.0, ge=0)
    """llama: the largest size of an element of queries, keys and values, after their norms, as in
    OLMoE; 0: they have no limit"""
    score_scale: float = Field(0.0, ge=0)
    """llama: scale of the scores of attention; 0: 1 / the square root of a head's channels"""
    score_cap: float = Field(0.0, ge=0)
    """llama: the scores s of attention become cap tanh(s / cap), as in Gemma 2; 0: they stay"""
    embedding_scale: float = Field(1.0, gt=0)
    """llama: factor of the token embedding, as in Granite"""
    residual_scale: float = Field(1.0, gt=0)
    """llama: factor of what attention and MLP add to their input, as in Granite"""
    logit_scale: float = Field(1.0, gt=0)
    """llama: factor of the logits, as in Granite"""
    logit_cap: float = Field(0.0, ge=0)
    """llama: the logits z become cap tanh(z / cap), as in Gemma 2; 0: they stay"""
    tied: bool = False
    """tie the weights of the output projection to the token embedding"""
    loss: str = "cross-entropy"
    """loss, as the mean over all targets that count: {rows}. Targets -100 and NaN do not count"""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """part of each target of cross-entropy that all classes share equally, in training but not in
    evaluations"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """rate of dropout in training: {rows}; a multiple of 1/65536. The random bits depend on
    run.seed, step, row and layer, but not on the layout"""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """gpt: rate of dropout of the attention probabilities in training. cuda and cuda-sim compute
    such attention without tensor cores"""
    channels: list[Annotated[int, Field(ge=1)]] = [16, 32]
    """cnn: channels of each convolution's output; ReLU and a max-pooling follow"""
    kernel: int = Field(3, ge=1)
    """cnn: rows and columns of a convolution's kernel; an odd number"""
    pool: int = Field(2, ge=1, le=16)
    """cnn: rows and columns of a max-pooling's windows; 1: none"""
    hidden: int = Field(0, ge=0)
    """gpt, llama: hidden units of each MLP; 0: 4 x model.width, and of a llama 8/3 x model.width up
    to a multiple of 64"""
    epsilon: float = Field(1e-5, gt=0)
    """gpt, llama: term of the norms, added to the variance"""
    experts: int = Field(0, ge=0)
    """gpt, llama: number of MLPs in each block, of which a router chooses some for each token
    (mixture of experts); 0: one MLP, without a router"""
    dense_blocks: list[Annotated[int, Field(ge=0)]] = []
    """llama: blocks with one MLP in place of experts, counted from 0, as mlp_only_layers of Qwen2-MoE
    """
    dense_hidden: int = Field(0, ge=0)
    """llama: hidden units of the MLP of model.dense_blocks; 0: model.hidden"""
    top_k: int = Field(2, ge=1)
    """experts of each token"""
    router: Literal["after", "before"] = "after"
    """weights of the chosen experts. after: the softmax over the chosen ones, as Mixtral; before: of
    the softmax over all experts, as Qwen2-MoE and OLMoE"""
    capacity: float = Field(0.0, ge=0)
    """tokens of a sequence that an expert takes in training, as a multiple of an equal share; the
    others pass without it. 0: all"""
    balance: float = Field(0.01, ge=0)
    """weight in the loss of the experts' imbalance within each sequence, 1 if all get as many tokens
    (Switch Transformer)"""
    z: float = Field(0.0, ge=0)
    """weight in the loss of the mean square of the router's log sum of exponentials (ST-MoE)"""
    shared: int = Field(0, ge=0)
    """hidden units of an MLP beside the experts, which every token passes; 0: none"""
    shared_gate: bool = False
    """each token has a gate of its own for this MLP, as in Qwen2-MoE"""
    freeze: list[str] = []
    """parameters that are not trained, as patterns of full names such as blocks.0.*; a star matches
    any text, also dots. A frozen parameter has no gradient and no optimizer state, and no rank
    sends it but with replication.zero 3"""

    @field_validator("qk_norm", mode="before")
    @classmethod
    def _true_or_joint(cls, value: Any) -> Any:
        if value != "joint" and not isinstance(value, bool):
            raise PydanticCustomError("choice", "must be true, false or joint")
        return value

    @property
    def head_channels(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def windows(self) -> list[int]:
        """The window of each layer's attention; 0: it has none."""
        every = self.window_every or self.layers + 1
        return [
            self.window * (layer >= self.window_from and (layer + 1) % every > 0)
            for layer in range(self.layers)
        ]

    @property
    def dense_units(self) -> int:
        """Hidden units of the MLP of a block without experts."""
        return self.dense_hidden or self.hidden_units

    @property
    def hidden_units(self) -> int:
        """Hidden units of each MLP of a gpt or llama."""
        if self.hidden or self.kind != "llama":
            return self.hidden or 4 * self.width
        return -(-8 * self.width // 192) * 64


class Lora(Section):
    rank: int = Field(0, ge=0)
    """rank of low-rank adapters (LoRA), which are trained in place of the model; 0: none, the model
    is trained"""
    alpha: float = Field(16.0, gt=0)
    """the output of an adapter is multiplied by lora.alpha / lora.rank"""
    targets: list[str] = ["c_attn"]
    """linear layers that get an adapter, separated by commas: names of Hugging Face's models such
    as c_attn, q_proj, query, lm_head or h.0.attn.c_attn, or the names of this model, such as qkv or
    blocks.0.mlp.up. q, k and v are a part of qkv each. all-linear: every one but the output layer,
    as in peft"""

    dropout: float = Field(0.0, ge=0, lt=1)
    """rate of dropout of the input of the adapters; the model has model.dropout"""
    init_from: str = ""
    """adapters to start from: a folder of HuggingFace's peft, or the run directory of a run with
    adapters. Empty: A is random and B is 0. If run.init_from names such a folder, the adapters
    start from there, on the model that they were trained on"""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_runs(cls, keys: Any) -> Any:
        """Leave out lora.base, if it is empty: runs were saved with it."""
        if isinstance(keys, dict) and keys.get("base") == "":
            return {key: value for key, value in keys.items() if key != "base"}
        return keys

    @field_validator("targets", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return [ALL_LINEAR if n.lower() == ALL_LINEAR else n for n in names] if is_list else names


class Batch(Section):
    basic = ("size", "micro_batches")

    size: int = Field(32, ge=1, le=10**9)
    """global batch: sequences (or samples) per optimizer step, over all ranks"""
    micro_batches: int = Field(0, ge=0)
    """number of micro-batches into which each rank divides its rows of a step; 0: 1, or in a
    pipeline of several stages 2 per stage, if there are enough rows"""


class Layout(Section):
    basic = ("dp", "tp", "pp")

    dp: int = Field(0, ge=0)
    """number of data-parallel replicas; 0: as many as the ranks allow"""
    cp: int = Field(1, ge=1)
    """context-parallel size: the ranks of a group divide the tokens of each row"""
    cp_mode: Literal["ulysses", "ring"] = "ulysses"
    """how ranks of a context-parallel group compute attention. ulysses: all-to-alls give each rank
    some heads of all tokens; ring: keys and values go from rank to rank, for any number of heads"""
    ep: int = Field(1, ge=1)
    """expert-parallel size, which divides the data-parallel size: each of so many replicas holds a
    part of the experts of model.experts, and tokens go to them and back"""
    tp: int = Field(1, ge=1)
    """tensor-parallel size: the ranks of a group divide the heads, widths and vocabulary of each
    layer"""
    pp: int = Field(1, ge=1)
    """number of pipeline stages; each stage holds some of the layers"""
    algorithm: str = "auto"
    """all-reduce algorithm for activations, within a tensor-parallel group"""
    sequence_parallel: bool = False
    """sequence parallelism as in Megatron-LM: the ranks of a tensor-parallel group also divide the
    rows of norms and residuals"""
    keep_gathered: bool = False
    """with sequence_parallel: save the gathered input of each layer for its backward, instead of
    gathering it again; this needs more memory"""


class Pipeline(Section):
    basic = ("schedule",)

    schedule: str = "1f1b"
    """pipeline schedule: {rows}, or a file of `mpitrain plan schedule --json`. {streams}"""
    chunks: int = Field(0, ge=0)
    """model chunks on each stage; 0: as many as the schedule has, or 2 if it takes any number"""
    partition: str = Field("", pattern=PARTITION)
    """number of units in each model chunk, as in 4,4,3,5. {rows} Empty: balanced by parameters.
    time: balanced by times that all ranks measure at the start"""


class Replication(Section):
    basic = ("mode", "zero", "algorithm")

    mode: str = "all-reduce"
    """how replicas are synchronised. {rows}"""
    servers: int = Field(1, ge=1)
    """mode server: number of parameter servers; they are the last ranks, and compute no rows"""
    update: Literal["sync", "async", "bounded"] = "sync"
    """mode server: time of an update. sync: once a step, from the gradients of all workers. async:
    at once with each gradient that arrives. bounded: as async, but no worker runs more than
    replication.staleness steps ahead (stale-synchronous parallel)"""
    staleness: int = Field(2, ge=0)
    """update bounded: a worker starts step k only after all workers have finished step k - 1 -
    staleness; 0: as sync"""
    async_lr: str = Field("1/workers", pattern=ASYNC_LR)
    """update async and bounded: factor of the learning rate. It is a number, 1/workers, or
    staleness: 1 / (1 + staleness of the gradient)"""
    period: int = Field(10, ge=1)
    """mode local: steps between parameter averages; local and gossip: also steps between exchanges
    of losses and stop requests"""
    outer_lr: float = Field(1.0, gt=0)
    """mode local: outer learning rate, by which workers move towards the average; DiLoCo takes 0.7
    """
    outer_momentum: float = Field(0.0, ge=0, lt=1)
    """mode local: Nesterov momentum of the outer steps; DiLoCo takes 0.9"""
    zero: int = 0
    """ZeRO stage: 0 shards nothing, {rows}, over the replicas. Stages 2 and 3 reduce the gradients
    of every micro-batch; in a pipeline they reduce once a step, and need gpipe or breadth-first"""
    shard: Literal["all", "host"] = "all"
    """with zero: the ranks that shard. all: all replicas. host: the replicas of each host, as
    hybrid sharding of FSDP; then only gradients travel between hosts, once a step"""
    zero_keep: int = Field(0, ge=0)
    """zero 3: units of at most this many elements get buffers of their own, and are gathered once a
    step instead of before each use"""
    gather: Literal["none", "fp16", "bf16", "int8"] = "none"
    """zero 3: compression of the parameters in all-gathers; the shards themselves stay float32"""
    algorithm: str = "auto"
    """all-reduce algorithm for gradients; auto: the fastest by the cost model"""
    tuning: str = ""
    """for auto: file of measured link parameters from `mpitrain bench fit`; empty: built-in
    assumptions"""
    wire: str = Field("none", pattern=WIRE)
    """gradient compression: none, fp16, bf16, int8, topk[:PART] or powersgd[:RANK]; topk sends the
    fraction PART of the elements"""
    dense_steps: int = Field(-1, ge=-1)
    """number of first steps without gradient compression; -1: a quarter of run.steps for powersgd,
    else 0"""
    bucket_mb: float = Field(0.0, ge=0)
    """size of gradient buckets in megabytes, rounded to whole units; 0: 4 MB within a host, 25 MB
    between its GPUs, between hosts by the latency and bandwidth in the tuning"""
    overlap: bool = True
    """overlap communication with computation: reduce a bucket as soon as its gradients are ready,
    and gather parameters in advance"""
    progress_thread: Literal["auto", "no"] = "auto"
    """progress of non-blocking reductions between hosts. auto: a background thread, if their
    messages lie in host memory and MPI provides MPI_THREAD_MULTIPLE. no: by polling in the main
    thread, between layers"""

    def exact_steps(self, steps: int) -> int:
        """Return the first steps, of so many, that reduce uncompressed gradients in any wire format."""
        if self.dense_steps >= 0:
            return self.dense_steps
        return steps // 4 if self.wire.startswith("powersgd") else 0

    @field_validator("async_lr", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return (
            str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        )


class Precision(Section):
    basic = ("compute",)

    compute: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """dtype of parameters, activations and gradients. bfloat16 and float16 are mixed precision:
    activations, their gradients and a copy of the parameters are rounded, and the updated
    parameters stay float32. On cpu rounded values are stored as float32: nothing is saved, and the
    copy costs 4 bytes per parameter (25% with adamw). float16 has a dynamic loss scale: a step with
    overflowing gradients but a finite loss is skipped, and 20 such steps in a row end the run"""

    @property
    def is_half(self) -> bool:
        """Whether layers compute with a rounded copy of the parameters: mixed precision."""
        return self.compute in HALVES

    @property
    def stored(self) -> str:
        """The dtype of master parameters, gradients and optimizer state."""
        return "float32" if self.is_half else self.compute


class ParameterGroup(Section):
    """One entry of optimizer.groups (as a parameter group of torch.optim).

    match         pattern of full names of parameters, as of fnmatch
    lr            factor of the learning rate
    weight_decay  of these parameters; None: as without the group
    """

    match: str
    lr: float = Field(1.0, gt=0)
    weight_decay: float | None = Field(None, ge=0)

    @model_serializer
    def _as_table(self) -> dict[str, Any]:
        """Leave out None, which TOML does not have."""
        every = {"match": self.match, "lr": self.lr, "weight_decay": self.weight_decay}
        return {key: value for key, value in every.items() if value is not None}


class Optimizer(Section):
    basic = ("name", "lr")

    name: str = "adamw"
    """update rule; keys that the rule does not read must have their defaults. {rows}"""
    lr: float = Field(2e-3, gt=0)
    """peak learning rate. If the key is not set, it is a 40th under run.init_from, and a 10th for
    adapters"""
    weight_decay: float = Field(0.1, ge=0)
    """weight decay of matrices and embeddings; biases and gains have none"""
    clip: float = Field(1.0, ge=0)
    """largest global gradient norm; in asynchronous pipelines the norm of each stage; 0: no
    clipping"""
    warmup: int = Field(20, ge=0)
    """steps of linear warm-up of the learning rate from 0"""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """decay of the learning rate after the warm-up; constant: none; wsd: constant, then linear"""
    final: float = Field(0.1, ge=0, le=1)
    """learning rate at the end of the decay, relative to the peak"""
    decay_steps: int = Field(0, ge=0)
    """steps of the decay, the last ones of the run; 0: all after the warm-up, in wsd the last fifth
    of the run"""
    groups: list[ParameterGroup] = []
    """weight decay and factor of the learning rate by full names of parameters: [{{match =
    "embedding.*", weight_decay = 0.0, lr = 0.5}}]. The first match counts. A * matches dots, too"""
    momentum: float = Field(0.9, ge=0, lt=1)
    """{rows}: decay of the velocity"""
    beta1: float = Field(0.8, ge=0, lt=1)
    """{rows}: decay of the first moment, except in the steps of beta1_delayed; in lion the
    momentum's weight in the step"""
    beta1_delayed: float = Field(0.5, ge=0, lt=1)
    """{rows}: decay of the first moment in steps with topk or powersgd; their error feedback acts
    as a momentum, too"""
    beta2: float = Field(0.95, ge=0, lt=1)
    """{rows}: decay of the second moment; in lion of the momentum"""
    epsilon: float = Field(1e-8, gt=0)
    """{rows}: term in the denominator that avoids a division by 0"""
    ns_steps: int = Field(5, ge=1, lt=100)
    """{rows}: Newton-Schulz steps, which make a matrix orthogonal"""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """{rows}: factor of a matrix' learning rate: 0.2 x sqrt of its longer side, or original:
    sqrt(max(1, rows / columns))"""


class Memory(Section):
    recompute: str = Field("none", pattern=RECOMPUTE)
    """activations that the backward pass computes again instead of saving them. none, attention:
    the probabilities of attention, unit: all but the input of each unit, or N: all but the input of
    each N units; 2 are a transformer block"""
    logit_chunks: int = Field(1, ge=1)
    """number of slices of rows in which the output head and the loss are computed, so that the
    logits of all rows are never in memory together"""
    attention: Literal["auto", "tiled", "whole"] = "auto"
    """attention on cpu. tiled: in tiles that stay in cache; the backward computes the exponentials
    again, and no memory grows with the square of model.context. whole: the exponentials are saved
    for the backward. auto: whole for short sequences, tiled from 512 tokens on and with
    model.score_cap. cuda and cuda-sim always compute in tiles"""
    release_every: int = Field(0, ge=0)
    """steps between releases of unused activation memory to the system; 0: never"""
    limit_gb: float = Field(0.0, ge=0)
    """memory in GB that the ranks of a host, or of a GPU, may use together for parameters,
    gradients, optimizer state and activations, as counted before the start; 0: all that is free"""

    @field_validator("recompute", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @property
    def segment(self) -> int:
        """The number of units that are computed again together; 0: none are."""
        named = {"none": 0, "attention": 0, "unit": 1}
        return named[self.recompute] if self.recompute in named else int(self.recompute)


class Checkpoint(Section):
    basic = ("every",)

    every: int = Field(100, ge=0)
    """steps between checkpoints; 0: only when the run ends or is stopped"""
    keep: int = Field(2, ge=1)
    """number of newest checkpoints to keep; older ones are removed"""
    best: bool = False
    """keep the checkpoint with the best validation loss, too, for --best of eval, generate, chat
    and export"""
    keep_every: int = Field(0, ge=0)
    """steps between checkpoints that stay for ever, a multiple of checkpoint.every; 0: none does"""
    background: Literal["auto", True, False] = "auto"
    """copy the state between two steps, and write the copies in a thread while the steps go on;
    auto: from 1 MiB a rank on, if the memory has room for the copies. A save that is due while a
    thread still writes is skipped"""


class Device(Section):
    basic = ("kind",)

    kind: Literal["auto", Kind] = "auto"
    """device to compute on; auto: cuda if every rank finds a GPU, else cpu; cuda-sim: the CUDA
    kernels, simulated on the CPU"""
    cuda_aware: Literal["auto", "yes", "no"] = "auto"
    """yes: pass GPU pointers to MPI; no: stage messages through host memory; auto: query MPI and
    run a self-test"""
    gemm: Literal["tiled", "3xtf32", "library", "auto"] = "tiled"
    """cuda and cuda-sim: matrix products by the tiled kernels of mpitrain, or by cuBLAS (in
    cuda-sim NumPy). 3xtf32: tiled, and float32 on tensor cores as three products of TF32, as exact
    as float32, attention too. auto: for each product the one that measurements found faster. 3xtf32
    where device.tiles says that it is 1.3 times as fast as tiled, and cuBLAS for bare 16-bit ones
    where it says 1.05 times; of 16-bit ones that are not near a measured one, cuBLAS for bare ones
    on compute capability 9.0"""
    tensor_cores: Literal["mma", "wgmma"] = "mma"
    """cuda and cuda-sim, gemm tiled, 3xtf32 and auto: 16-bit products and attention by instructions of a warp (mma), or by
    those of Hopper's warpgroups (wgmma), which need a GPU of compute capability 9.0 or cuda-sim; with wgmma
    auto takes cuBLAS only where device.tiles says so. wgmma has not run on a GPU yet"""
    graph: Literal["no", "auto"] = "no"
    """cuda: the forward and backward passes of a step are one launch, of a CUDA graph. auto: where one
    rank trains, without run.trace, run.inject, memory.release_every, dropout, documents, padding and
    cuBLAS; else each kernel is launched by itself, and rank 0 says why"""
    passes: Literal["auto", "compiled", "numpy"] = "auto"
    """LayerNorm, GELU and the softmax of attention on cpu. compiled: fused passes in C++, which g++
    or zig compiles at the first start on a machine. numpy: passes of NumPy; equal to rounding.
    auto: compiled if every rank can, else numpy; a resumed run keeps what it had"""
    tiles: str = ""
    """gemm tiled and 3xtf32: file of tile sizes from `mpitrain bench gemm --tune`; empty: tiles by
    a cost model of this GPU"""


def _is_speakable(text: str) -> bool:
    """Return whether the text is valid as a path of this system."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


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
        sections: dict[str, Section] = {}
        for name, value in values.items():
            section, key = name.split(".")
            before = sections.get(section, getattr(self, section))
            sections[section] = before.model_copy(update={key: value})
        return self.model_copy(update=sections)

    def model_copy(self, **changes: Any) -> Self:
        """Return a copy, as pydantic's; a job checks its names and rules between keys again."""
        copy = super().model_copy(**changes)
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
    """Return {(section, key): the string below the key in this file, as one line}."""
    texts = {}
    with PARSING:
        tree = ast.parse(inspect.getsource(sys.modules[__name__]))
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
