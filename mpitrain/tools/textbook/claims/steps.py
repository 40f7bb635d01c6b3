"""Claims about a training step: its sharding, memory, computation and batches, and its rounding.

Memory and FLOPs are counted by layers that run without arrays. The rest is measured in short
training on threads.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.data.prefetch import Prefetched
from mpitrain.data.samples import SampleSource
from mpitrain.data.source import Source
from mpitrain.layers.plain import Plain
from mpitrain.models.classifiers import mlp
from mpitrain.models.table import units_of
from mpitrain.ops import OPERATIONS
from mpitrain.ops.device import ops_for
from mpitrain.run.build import build
from mpitrain.run.count.operations import cost_of
from mpitrain.run.job import StepCounts
from mpitrain.run.trainer import Trainer
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import (
    PLAIN_MOMENTUM,
    busiest,
    configured,
    counted,
    memory,
    on_ranks,
    trained,
)
from mpitrain.transport.base import Transport

ZERO = "Rajbhandari et al., ZeRO, SC 2020"
MEGATRON = "Shoeybi et al., Megatron-LM, arXiv:1909.08053, 2019"
COMPARE = "mpitrain launch -n 2 -- compare ring --set layout.tp=2 --set layout.algorithm=ring"


def zero_bytes(stage: int, micro_batches: int) -> Figures:
    job = ("model.layers=8", "batch.size=16", f"batch.micro_batches={micro_batches}")
    divided, plain = (busiest(4, *job, f"replication.zero={zero}") for zero in (stage, 0))
    return Figures(divided / plain, {"bytes with ZeRO": divided, "bytes without": plain})


def zero_three_bytes(stage: int, micro_batches: int) -> Figures:
    figures = zero_bytes(stage, micro_batches)
    return Figures(abs(figures.value / 1.5 - 1), figures.numbers)


def zero_memory(layers: int) -> Figures:
    job = ("layout.dp=4", "model.width=32", f"model.layers={layers}")
    divided, whole = (counted(*job, f"replication.zero={zero}").state for zero in (3, 0))
    return Figures(4 * divided / whole, {"kB with ZeRO": divided / 1e3, "kB without": whole / 1e3})


def adam_state(optimizer: str) -> Figures:
    with_state, without = (
        counted("model.width=64", f"optimizer.name={name}") for name in (optimizer, "sgd")
    )
    state, parameters = with_state.state - without.state, 4 * without.parameters
    return Figures(
        abs(state / parameters - 2), {"kB of state": state / 1e3, "kB, model": parameters / 1e3}
    )


def block_all_reduces(is_sequence_parallel: str, keep: str) -> Figures:
    job = ("layout.tp=2", "layout.algorithm=ring", "model.context=64", "model.width=32")
    divided = (f"layout.sequence_parallel={is_sequence_parallel}", f"layout.keep_gathered={keep}")
    one, two = (busiest(2, *job, *divided, f"model.layers={layers}") for layers in (1, 2))
    whole = 8 * 64 * 32 * 4  # B T C in float32; a ring of 2 ranks sends as many bytes
    return Figures(
        (two - one) / whole, {"bytes of a block": two - one, "bytes of one all-reduce": whole}
    )


def tensor_or_data(batch: int, context: int, width: int) -> Figures:
    job = (f"batch.size={batch}", f"model.context={context}", f"model.width={width}")
    tensor = busiest(2, *job, "layout.tp=2", "layout.algorithm=ring")
    data = busiest(2, *job)
    return Figures(tensor / data, {"bytes, tensor parallel": tensor, "bytes, data parallel": data})


DEEP = ("model.layers=12", "model.width=64")


def step(*settings: str) -> StepCounts:
    return counted(*settings).stages[0].step


def recomputed(recompute: str) -> Figures:
    plain, again = step(*DEEP), step(*DEEP, f"memory.recompute={recompute}")
    more = again.flops / plain.flops - 1
    return Figures(
        abs(more - 1 / 3), {"MFLOP": plain.flops / 1e6, "MFLOP, recomputed": again.recomputed / 1e6}
    )


def saved_by_recomputation(layers: int) -> Figures:
    job = ("model.width=64", f"model.layers={layers}")
    plain, again = step(*job).peak, step(*job, "memory.recompute=unit").peak
    return Figures(again / plain, {"kB with recomputation": again / 1e3, "kB without": plain / 1e3})


def attention_memory(attention: str) -> Figures:
    job = ("batch.size=1", f"memory.attention={attention}")
    short, long = (step(*job, f"model.context={tokens}").peak for tokens in (512, 1024))
    return Figures(long / short, {"kB, 512 tokens": short / 1e3, "kB, 1024 tokens": long / 1e3})


def half_memory(width: int, batch: int) -> Figures:
    job = ("device.kind=cuda-sim", f"model.width={width}", f"batch.size={batch}")
    half, full = (memory(counted(*job, f"precision.compute={x}")) for x in ("bfloat16", "float32"))
    return Figures(half / full, {"kB, bfloat16": half / 1e3, "kB, float32": full / 1e3})


def six_per_parameter(width: int, context: int) -> Figures:
    job = counted(f"model.width={width}", f"model.context={context}", "model.layers=4")
    flops, rule = job.stages[0].step.flops, 6 * job.parameters * 8 * context
    return Figures(abs(flops / rule - 1), {"MFLOP": flops / 1e6, "MFLOP by the rule": rule / 1e6})


def accumulated_memory(schedule: str, stages: int) -> Figures:
    job = (f"layout.pp={stages}", f"pipeline.schedule={schedule}", "batch.size=64")
    peak_2, peak_16 = (step(*job, f"batch.micro_batches={m}").peak for m in (2, 16))
    return Figures(
        8 * peak_16 / peak_2, {"kB, 16 micro-batches": peak_16 / 1e3, "kB, 2": peak_2 / 1e3}
    )


def same_losses(ranks: int, micro_batches: int, compute: str) -> Figures:
    job = (f"precision.compute={compute}", "run.steps=6")
    divided, whole = (
        [loss or np.nan for loss in trained(n, *job, f"batch.micro_batches={m}").losses]
        for n, m in ((ranks, micro_batches), (1, 1))
    )
    worst = max(abs(a / b - 1) for a, b in zip(divided, whole, strict=True))
    return Figures(float(worst), {"last loss": divided[-1], "last loss, whole": whole[-1]})


def larger_batch(factor: int) -> Figures:
    """Compare validation losses after 512 rows: with batches of 8 rows, and with larger batches.

    factor  of the larger batch and its learning rate
    """

    def loss(times: int) -> float:
        return trained(
            1,
            *PLAIN_MOMENTUM,
            f"optimizer.lr={0.01 * times}",
            f"batch.size={8 * times}",
            f"run.steps={64 // times}",
        ).val_loss

    small, large = loss(1), loss(factor)
    return Figures(large / small, {"loss, batches of 8": small, "loss, larger batches": large})


class WatchedOps:
    """Operations of the CPU that add up their work: of those without products, and of products.

    FLOP are those of products, and one for each element that another operation reads or writes.
    """

    def __init__(self) -> None:
        self._ops = ops_for("cpu")
        self.work = {unit: np.zeros(2) for unit in ("FLOP", "bytes", "seconds")}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        row, run = OPERATIONS[name], getattr(self._ops, name)

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = run(*arguments, **named)
            seconds = time.perf_counter() - began
            (nbytes, flops), at = cost_of(row, arguments), int(bool(row.products))
            self.work["FLOP"][at] += flops or nbytes / 4
            self.work["bytes"][at] += nbytes
            self.work["seconds"][at] += seconds
            return result

        return call


def products(unit: str, width: int) -> Figures:
    ops = WatchedOps()

    def steps(transport: Transport) -> None:
        job = build(transport, configured(f"model.width={width}"))
        config = job.trainer.config
        trainer = Trainer(transport, units_of(config.model, job.data, Plain(ops)), config)
        for number in range(2):
            trainer.step(number, *job.data.batch(0, number, 8, range(8)))
            if not number:  # The first step also loads code.
                ops.work = {unit: np.zeros(2) for unit in ops.work}
        job.close()

    on_ranks(1, steps)
    shares = {unit: float(of[1] / of.sum()) for unit, of in ops.work.items()}
    return Figures(
        shares[unit],
        {
            "% of FLOP": 100 * shares["FLOP"],
            "% of bytes": 100 * shares["bytes"],
            "% of the time": 100 * shares["seconds"],
        },
    )


def steadier(rows: int, small: int, large: int) -> Figures:
    """Compare the variances of the gradients of batches, each 48 batches of shuffled epochs.

    rows  number of rows in the data
    """
    features = np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)
    samples = features, (features.sum(1) > 0).astype(np.int64)
    source = SampleSource(samples, samples)

    def variance(size: int) -> float:
        def gradients(transport: Transport) -> np.ndarray:
            config = configured(f"batch.size={size}", "optimizer.lr=1e-12", "optimizer.clip=0")
            trainer = Trainer(
                transport, lambda layers: mlp(layers, features=8, hidden=[16], classes=2), config
            )
            drawn = []
            for step in range(48):
                trainer.step(step, *source.batch(0, step, size, range(size)))
                drawn.append(np.array(trainer.gradients))
            return np.array(drawn)

        return float(on_ranks(1, gradients)[0].var(0).sum())

    of_small, of_large = variance(small), variance(large)
    ratio = of_large * large / (of_small * small)
    return Figures(
        abs(ratio - 1), {"variance, small batch": of_small, "variance, large batch": of_large}
    )


def underflow(dtype: str) -> Figures:

    def gradients(transport: Transport) -> np.ndarray:
        job = build(transport, configured("model.width=32", "batch.size=32"))
        inputs, targets = job.data.batch(0, 0, 32, range(32))
        job.trainer.step(0, inputs, targets)
        values = np.array(job.trainer.gradients)
        job.close()
        return values

    whole = on_ranks(1, gradients)[0]
    whole = whole[whole != 0]
    least = {"float16": 2.0**-14, "bfloat16": 2.0**-126}[dtype]  # smaller numbers lose their bits
    lost = float(np.mean(np.abs(whole) < least))
    return Figures(lost, {"% lost": 100 * lost, "elements": whole.size})


class SlowSamples(SampleSource):
    def __init__(self, seconds: float):
        rows = np.zeros((64, 1), np.float32), np.arange(64) % 2
        super().__init__(rows, rows)
        self._seconds = seconds

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self._seconds)
        return super().batch(seed, step, size, rows, before)


def prefetched(read: float, compute: float) -> Figures:
    """Compare the times of 8 steps with a thread that reads batches ahead, and without it.

    read     milliseconds that reading a batch takes (it sleeps)
    compute  milliseconds that computing a step takes (it sleeps)
    """
    source = SlowSamples(read / 1e3)
    ahead = Prefetched(source, 2, 8)

    def seconds(data: Source) -> float:
        began = time.perf_counter()
        for step in range(8):
            data.batch(0, step, 4, range(4))
            time.sleep(compute / 1e3)
        return time.perf_counter() - began

    alone, together = seconds(source), seconds(ahead)
    ahead.close()
    return Figures(together / alone, {"ms ahead": 1e3 * together, "ms in turn": 1e3 * alone})


CLAIMS = {
    "zero-bytes": Claim(
        "ZeRO stages 1 and 2 send no more bytes than plain data parallelism.",
        f"{ZERO}, section 7",
        "bytes with ZeRO / without",
        ("<=", 1.01),
        zero_bytes,
        tuple(
            usual("stage {stage}, {micro_batches} micro-batches", stage=stage, micro_batches=m)
            for stage, m in ((1, 1), (1, 4), (2, 1), (2, 4))
        ),
        "mpitrain launch -n 4 -- compare ring zero1 zero2",
    ),
    "zero-3-bytes": Claim(
        "ZeRO stage 3 sends 1.5 times the bytes of plain data parallelism.",
        f"{ZERO}, section 7",
        "difference from 1.5 times, relative",
        ("<=", 0.1),
        zero_three_bytes,
        (
            usual("stage {stage}, {micro_batches} micro-batches", stage=3, micro_batches=1),
            other("stage {stage}, {micro_batches} micro-batches", stage=3, micro_batches=4),
        ),
        "mpitrain launch -n 4 -- compare ring zero3",
    ),
    "zero-3-memory": Claim(
        "ZeRO stage 3 divides the memory of the training state by the number of ranks.",
        f"{ZERO}, section 5",
        "memory with ZeRO on 4 ranks / without, times 4",
        ("<=", 1.1),
        zero_memory,
        (usual("{layers} layers", layers=32), other("{layers} layers", layers=1)),
        "mpitrain plan memory --dp 4 --set replication.zero=3",
    ),
    "adam-state": Claim(
        "Adam's state needs twice the memory of the parameters.",
        "Kingma and Ba, Adam, ICLR 2015",
        "difference from 2 times the parameters",
        ("<=", 0.05),
        adam_state,
        (
            usual("optimizer {optimizer}", optimizer="adamw"),
            other("optimizer {optimizer}", optimizer="adamw8bit"),
        ),
        "mpitrain plan memory --set optimizer.name=adamw8bit",
    ),
    "tensor-all-reduces": Claim(
        "Tensor parallelism needs the bytes of 4 all-reduces for each transformer block.",
        MEGATRON,
        "all-reduces that a block adds to a step",
        ("<=", 4.01),
        block_all_reduces,
        (
            usual("tensor parallelism alone", is_sequence_parallel="false", keep="false"),
            other(
                "sequence parallelism that gathers again", is_sequence_parallel="true", keep="false"
            ),
        ),
        COMPARE,
    ),
    "sequence-bytes": Claim(
        "Sequence parallelism sends no more bytes than tensor parallelism.",
        "Korthikanti et al., Reducing Activation Recomputation, MLSys 2023",
        "all-reduces that a block adds to a step",
        ("<=", 4.01),
        block_all_reduces,
        (
            usual("gathered inputs are saved", is_sequence_parallel="true", keep="true"),
            usual("gathered inputs are gathered again", is_sequence_parallel="true", keep="false"),
        ),
        f"{COMPARE} --set layout.sequence_parallel=true",
    ),
    "tensor-or-data": Claim(
        "Tensor parallelism sends more bytes than data parallelism.",
        MEGATRON,
        "bytes of tensor parallelism / of data parallelism",
        (">", 1),
        tensor_or_data,
        (
            usual("batch {batch}, context {context}, width {width}", batch=8, context=64, width=32),
            other("batch {batch}, context {context}, width {width}", batch=2, context=16, width=64),
        ),
        COMPARE,
    ),
    "recomputation-third": Claim(
        "Recomputation costs a third more computation.",
        "Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, 2016",
        "difference from a third",
        ("<=", 0.05),
        recomputed,
        (
            usual("recompute = {recompute}", recompute="unit"),
            usual("recompute = {recompute}", recompute="12"),
        ),
        "mpitrain plan memory --set memory.recompute=unit",
    ),
    "recomputation-memory": Claim(
        "Recomputation halves the memory of activations, or better.",
        "Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, 2016",
        "activations with recomputation / without",
        ("<=", 0.5),
        saved_by_recomputation,
        (usual("{layers} layers", layers=12), other("{layers} layers", layers=1)),
        "mpitrain plan memory --set memory.recompute=unit",
    ),
    "tiled-attention": Claim(
        "With tiled attention, memory grows only linearly with the sequence.",
        "Dao et al., FlashAttention, NeurIPS 2022",
        "activations of 1024 tokens / of 512",
        ("<=", 2.1),
        attention_memory,
        (
            usual("attention = {attention}", attention="tiled"),
            other("attention = {attention}", attention="whole"),
        ),
        "mpitrain plan memory --set memory.attention=tiled --set model.context=1024",
    ),
    "mixed-precision-memory": Claim(
        "Mixed precision may cost memory.",
        "Micikevicius et al., Mixed Precision Training, ICLR 2018",
        "memory with bfloat16 / with float32",
        (">", 1),
        half_memory,
        (
            usual("width {width}, batch {batch}", width=128, batch=1),
            usual("width {width}, batch {batch}", width=16, batch=64),
        ),
        "mpitrain plan memory --device cuda-sim --set precision.compute=bfloat16",
        compiled=True,
    ),
    "six-flop": Claim(
        "A training step takes 6 FLOP for each parameter and token.",
        "Kaplan et al., Scaling Laws for Neural Language Models, arXiv:2001.08361, 2020",
        "difference from the rule, relative",
        ("<=", 0.05),
        six_per_parameter,
        (
            usual("width {width}, context {context}", width=256, context=16),
            other("width {width}, context {context}", width=16, context=512),
        ),
        "mpitrain plan memory --set model.context=512",
    ),
    "accumulation-memory": Claim(
        "Accumulation over m micro-batches divides the memory of activations by m.",
        "Huang et al., GPipe, NeurIPS 2019",
        "activations of 16 micro-batches / of 2, times 8",
        ("<=", 1.1),
        accumulated_memory,
        (
            usual("{schedule}, {stages} stages", schedule="1f1b", stages=1),
            other("{schedule}, {stages} stages", schedule="gpipe", stages=2),
        ),
        "mpitrain plan memory --set batch.micro_batches=8",
    ),
    "same-training": Claim(
        "Ranks and micro-batches change nothing: training equals one large batch.",
        "Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, 2017",
        "largest difference of a loss, relative",
        ("<=", 1e-12),
        same_losses,
        tuple(
            usual(
                "{ranks} ranks, {micro_batches} micro-batches, {compute}",
                ranks=ranks,
                micro_batches=m,
                compute=compute,
            )
            for ranks, m, compute in ((1, 4, "float64"), (4, 1, "float64"), (4, 2, "float32"))
        ),
        "mpitrain launch -n 4 -- compare ring --set batch.micro_batches=2 --set precision.compute=float64",
    ),
    "large-batch": Claim(
        "With k times the batch and k times the learning rate, as many rows train as well.",
        "Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, 2017",
        "validation loss with larger batches / with batches of 8",
        ("<=", 1.05),
        larger_batch,
        (usual("k = {factor}", factor=2), usual("k = {factor}", factor=16)),
        "mpitrain train --set batch.size=64 --set optimizer.lr=4e-3",
    ),
    "steadier": Claim(
        "Larger batches are steadier: the variance of the gradient falls as 1/B.",
        "Bottou, Curtis and Nocedal, Optimization Methods for Large-Scale Machine Learning, SIAM Review 2018",
        "difference of B times the variance, relative",
        ("<=", 0.25),
        steadier,
        (
            usual("B = {small} and {large}, of {rows} rows", rows=4096, small=4, large=16),
            usual("B = {small} and {large}, of {rows} rows", rows=4096, small=4, large=64),
            other("B = {small} and {large}, of {rows} rows", rows=96, small=4, large=48),
        ),
        "mpitrain plan batch",
    ),
    "products": Claim(
        "Matrix products are more than 90% of the work.",
        "Ivanov et al., Data Movement Is All You Need, MLSys 2021, table 1",
        "work of products / of all operations of the layers",
        (">", 0.9),
        products,
        (
            usual("{unit}, width {width}", unit="FLOP", width=64),
            usual("{unit}, width {width}", unit="FLOP", width=256),
            other("{unit}, width {width}", unit="bytes", width=16),
        ),
        "mpitrain runs report runs/1",
    ),
    "loss-scaling": Claim(
        "Half-precision gradients underflow without a loss scale.",
        "Micikevicius et al., Mixed Precision Training, ICLR 2018",
        "fraction of gradient elements that lose their bits",
        (">", 0.01),
        underflow,
        (usual("{dtype}", dtype="float16"), usual("{dtype}", dtype="bfloat16")),
        "mpitrain train --set precision.compute=float16",
    ),
    "prefetch": Claim(
        "Reading ahead hides the time of reading.",
        "Mohan et al., Analyzing and Mitigating Data Stalls, VLDB 2021",
        "time with reading ahead / in turn",
        ("<", 0.75),
        prefetched,
        (
            usual("reading {read} ms, computing {compute} ms", read=40, compute=40),
            other("reading {read} ms, computing {compute} ms", read=80, compute=5),
        ),
        "mpitrain train --set data.prefetch=2",
    ),
}
