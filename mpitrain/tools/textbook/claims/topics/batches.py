"""Claims about batches, their data and the numbers of gradients, by short training on threads."""

import time

import numpy as np

from mpitrain.data.prefetch import Prefetched
from mpitrain.data.samples import SampleSource
from mpitrain.data.source import Source
from mpitrain.run.build import build
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import configured, on_ranks, trained
from mpitrain.transport.base import Transport


def same_losses(ranks: int, micro_batches: int, compute: str) -> Figures:
    """Compare the losses of 6 steps on some ranks with the losses on one rank."""
    job = (f"precision.compute={compute}", "run.steps=6")
    divided, whole = (
        [loss or np.nan for _, loss in trained(n, *job, f"batch.micro_batches={m}").curve]
        for n, m in ((ranks, micro_batches), (1, 1))
    )
    worst = max(abs(a / b - 1) for a, b in zip(divided, whole, strict=True))
    return Figures(float(worst), {"last loss": divided[-1], "last loss, whole": whole[-1]})


def larger_batch(factor: int) -> Figures:
    """Compare validation losses after 512 rows: with batches of 8, and with larger ones and rates.

    factor  of batch and learning rate
    """

    def loss(times: int) -> float:
        return trained(
            1,
            "optimizer.name=momentum",
            f"optimizer.lr={0.01 * times}",
            "optimizer.schedule=constant",
            "optimizer.warmup=0",
            f"batch.size={8 * times}",
            f"run.steps={64 // times}",
            "run.eval_rows=64",
        ).val_loss

    small, large = loss(1), loss(factor)
    return Figures(large / small, {"loss, batches of 8": small, "loss, larger batches": large})


def underflow(dtype: str) -> Figures:
    """Return the fraction of gradient elements that are lost in a half type without a loss scale."""

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
    """Samples whose batches take `seconds` to read."""

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
    """Compare the times of 8 steps with and without a thread that reads ahead.

    read, compute  milliseconds that reading a batch and computing a step sleep
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
    "same-training": Claim(
        "Ranks and micro-batches change nothing: training equals one large batch.",
        "Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, 2017",
        "largest difference of a loss, relative",
        "<=",
        1e-12,
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
        "mpitrain launch -n 4 -- compare --modes ring --set batch.micro_batches=2 --set precision.compute=float64",
    ),
    "large-batch": Claim(
        "With k times the batch and k times the learning rate, as many rows train as well.",
        "Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, 2017",
        "validation loss with larger batches / with batches of 8",
        "<=",
        1.05,
        larger_batch,
        (usual("k = {factor}", factor=2), usual("k = {factor}", factor=16)),
        "mpitrain train --set batch.size=64 --set optimizer.lr=4e-3",
    ),
    "loss-scaling": Claim(
        "Half-precision gradients underflow without a loss scale.",
        "Micikevicius et al., Mixed Precision Training, ICLR 2018",
        "fraction of gradient elements that lose their bits",
        ">",
        0.01,
        underflow,
        (usual("{dtype}", dtype="float16"), usual("{dtype}", dtype="bfloat16")),
        "mpitrain train --set precision.compute=float16",
    ),
    "prefetch": Claim(
        "Reading ahead hides the time of reading.",
        "Mohan et al., Analyzing and Mitigating Data Stalls, VLDB 2021",
        "time with reading ahead / in turn",
        "<",
        0.75,
        prefetched,
        (
            usual("reading {read} ms, computing {compute} ms", read=40, compute=40),
            other("reading {read} ms, computing {compute} ms", read=80, compute=5),
        ),
        "mpitrain train --set data.prefetch=2",
    ),
}
