"""Claims about computation and memory of a step, counted by layers that run without arrays."""

from mpitrain.run.counting import StepCounts
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import counted, memory

DEEP = ("model.layers=12", "model.width=64")


def step(*settings: str) -> StepCounts:
    return counted(*settings).stages[0].step


def recomputed(recompute: str) -> Figures:
    """Compare the repeated computation with a third of a step."""
    plain, again = step(*DEEP), step(*DEEP, f"memory.recompute={recompute}")
    more = again.flops / plain.flops - 1
    return Figures(
        abs(more - 1 / 3),
        {"MFLOP": plain.flops / 1e6, "MFLOP, recomputed": again.recomputed / 1e6},
    )


def saved_by_recomputation(layers: int) -> Figures:
    """Compare the activation memory with and without recomputation of each unit."""
    job = ("model.width=64", f"model.layers={layers}")
    plain, again = step(*job).peak, step(*job, "memory.recompute=unit").peak
    return Figures(again / plain, {"kB with recomputation": again / 1e3, "kB without": plain / 1e3})


def attention_memory(attention: str) -> Figures:
    """Compare the activation memory of sequences of 1024 and 512 tokens."""
    job = ("batch.size=1", f"memory.attention={attention}")
    short, long = (step(*job, f"model.context={tokens}").peak for tokens in (512, 1024))
    return Figures(long / short, {"kB, 512 tokens": short / 1e3, "kB, 1024 tokens": long / 1e3})


def half_memory(width: int, batch: int) -> Figures:
    """Compare the memory of bfloat16 and float32 on a device with kernels."""
    job = ("device.kind=cuda-sim", f"model.width={width}", f"batch.size={batch}")
    half, full = (memory(counted(*job, f"precision.compute={x}")) for x in ("bfloat16", "float32"))
    return Figures(half / full, {"kB, bfloat16": half / 1e3, "kB, float32": full / 1e3})


def six_per_parameter(width: int, context: int) -> Figures:
    """Compare the computation of a step with 6 FLOP for each parameter and token."""
    job = counted(f"model.width={width}", f"model.context={context}", "model.layers=4")
    flops, rule = job.stages[0].step.flops, 6 * job.parameters * 8 * context
    return Figures(abs(flops / rule - 1), {"MFLOP": flops / 1e6, "MFLOP by the rule": rule / 1e6})


def accumulated_memory(schedule: str, stages: int) -> Figures:
    """Compare the activation memory of 16 micro-batches, times 8, and of 2, on the first stage."""
    job = (f"layout.pp={stages}", f"pipeline.schedule={schedule}", "batch.size=64")
    peak_2, peak_16 = (step(*job, f"batch.micro_batches={m}").peak for m in (2, 16))
    return Figures(
        8 * peak_16 / peak_2, {"kB, 16 micro-batches": peak_16 / 1e3, "kB, 2": peak_2 / 1e3}
    )


CLAIMS = {
    "recomputation-third": Claim(
        "Recomputation costs a third more computation.",
        "Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, 2016",
        "difference from a third",
        "<=",
        0.05,
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
        "<=",
        0.5,
        saved_by_recomputation,
        (usual("{layers} layers", layers=12), other("{layers} layers", layers=1)),
        "mpitrain plan memory --set memory.recompute=unit",
    ),
    "tiled-attention": Claim(
        "With tiled attention, memory grows only linearly with the sequence.",
        "Dao et al., FlashAttention, NeurIPS 2022",
        "activations of 1024 tokens / of 512",
        "<=",
        2.1,
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
        ">",
        1,
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
        "<=",
        0.05,
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
        "<=",
        1.1,
        accumulated_memory,
        (
            usual("{schedule}, {stages} stages", schedule="1f1b", stages=1),
            other("{schedule}, {stages} stages", schedule="gpipe", stages=2),
        ),
        "mpitrain plan memory --set batch.micro_batches=8",
    ),
}
