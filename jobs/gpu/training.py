"""Four parts of the GPU job: GPT-2 124M against PyTorch, float32 and bfloat16.

python3 jobs/gpu/training.py DEVICE losses      the losses of ten steps
python3 jobs/gpu/training.py DEVICE             the time of a step, against PyTorch eager
python3 jobs/gpu/training.py DEVICE graph       a step as a CUDA graph, against launches one by one
python3 jobs/gpu/training.py DEVICE compiled    against torch.compile, bfloat16 first; on a GPU only

PyTorch trains the same weights on the same batches: autocast for bfloat16, fused AdamW, scaled_dot_product_attention. There is
no MPI in this.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from predicted import GPUS, total
from table import emit
from workload import BLOCKS, STEPS, WAYS, config, source

from mpitrain.errors import MpitrainError
from mpitrain.optim import learning_rate
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks

WARM_UP = 3
LOSSES = 10
"""Steps whose losses are compared. Later the learning rate is so high that rounding grows without end.

On a CPU, in 10 steps and in 40, losses of PyTorch itself get 2e-6 and 5e-3 apart if the weights begin 1e-7 of themselves apart,
and 9e-4 and 1e-1 if one side takes bfloat16.
"""
OF_GRAPHS = 3
"""Blocks of a step as a graph, at most: the two sides differ by the host's part alone."""
REQUIRED = {"float32": "goal", "3xtf32": "goal", "bfloat16": "required"}
"""What being as fast as PyTorch eager is: our float32 has no wgmma."""
APART = {"float32": 1e-2, "3xtf32": 1e-2, "bfloat16": 5e-2}
"""Most that the first losses of the two may differ."""


class Times(NamedTuple):
    """Median seconds of a step: between events on the device, and of the host until it has started everything."""

    event: float
    host: float


class Events:
    """Marks the device's time by PyTorch's or CuPy's events; where there is no GPU, by the host's clock."""

    def __init__(
        self,
        make: Callable[[], Any] | None,
        elapsed_ms: Callable[[Any, Any], float],
        wait: Callable[[], None],
    ):
        self._make, self._elapsed_ms, self._wait = make, elapsed_ms, wait

    def times(self, step: Callable[[int], Any], indices: range) -> tuple[list[float], list[float]]:
        """(device seconds, host seconds) of each step."""
        device, host = [], []
        for index in indices:
            self._wait()
            ends = [self._make(), self._make()] if self._make else []
            start = time.perf_counter()
            if ends:
                ends[0].record()
            step(index)
            host.append(time.perf_counter() - start)
            if ends:
                ends[1].record()
            self._wait()
            device.append(self._elapsed_ms(*ends) / 1e3 if ends else time.perf_counter() - start)
        return device, host


def our_events(kind: str, wait: Callable[[], None]) -> Events:
    if kind != "cuda":
        return Events(None, lambda *_: 0.0, wait)
    import cupy

    return Events(cupy.cuda.Event, cupy.cuda.get_elapsed_time, wait)


class Rival:
    """A GPT of PyTorch's own layers with our weights."""

    def __init__(self, kind: str, settings: Any, vocabulary: int, tensors: dict[str, np.ndarray]):
        import torch

        from mpitrain.tools.bench.training.torch_gpt import GPT, copy_weights
        from mpitrain.tools.bench.training.torch_peer import placed

        m, o = settings.model, settings.optimizer
        self._torch, self._place, self._settings = torch, placed(kind), settings
        self.model = GPT(
            vocab=vocabulary,
            context=m.context,
            width=m.width,
            heads=m.heads,
            depth=m.layers,
            tied=m.tied,
        )
        copy_weights(tensors, self.model)
        self.model.to(self._place)
        groups = [
            {
                "params": [p for p in self.model.parameters() if (p.dim() > 1) == decays],
                "weight_decay": o.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.epsilon, fused=True
        )
        is_half = settings.precision.compute == "bfloat16"
        self._cast = (
            (lambda: torch.autocast(self._place.type, torch.bfloat16)) if is_half else nullcontext
        )
        self.losses: list[float] = []
        self._last: Any = None

    def compile(self) -> None:
        self.model = self._torch.compile(self.model)

    def events(self) -> Events:
        if self._place.type != "cuda":
            return Events(None, lambda *_: 0.0, lambda: None)
        cuda = self._torch.cuda
        return Events(
            lambda: cuda.Event(enable_timing=True), lambda a, b: a.elapsed_time(b), cuda.synchronize
        )

    def step(self, index: int, inputs: np.ndarray, targets: np.ndarray) -> None:
        """As ours: the loss is read at its end."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._settings.optimizer, index, self._settings.run.steps)
        self._optimizer.zero_grad(set_to_none=True)
        tokens = [self._torch.from_numpy(array).to(self._place) for array in (inputs, targets)]
        with self._cast():
            loss = self.model(*tokens)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())


def compare(transport: Any, kind: str, compute: str, way: str) -> None:
    """Ours and PyTorch's in turns: the losses of their steps, or the time."""
    what = f"training step of a GPT, {compute}"
    try:
        settings = config(kind, compute)
        job = build(transport, settings, source=source(kind, settings))
    except MpitrainError as error:
        emit(f"{what}: refused: {error.law[:110]}", ok=compute != "float32")
        return
    losses: list[float] = []
    size = settings.batch.size
    count = LOSSES if way == "losses" else WARM_UP + BLOCKS[kind] * STEPS[kind]
    rows = [job.data.batch(0, index, size, range(size)) for index in range(count)]
    rival = (
        Rival(kind, settings, job.data.inputs, job.trainer.tensors())
        if find_spec("torch")
        else None
    )

    def ours(index: int) -> None:
        losses.append(job.trainer.step(index, *rows[index]).loss)

    if way == "losses":
        for index in range(count):
            ours(index)
            if rival:
                rival.step(index, *rows[index])
        report(what, compute, losses, rival)
        return
    sides = [(our_events(kind, job.trainer.backend.synchronize), ours)]
    if rival and way == "compiled":
        rival.compile()
    if rival:
        sides.append((rival.events(), lambda index: rival.step(index, *rows[index])))
    found = measured(kind, sides)
    words = f"{size * settings.model.context / found[0].event:,.0f} tokens/s"
    predicted = milli(total(GPUS[0], compute))
    if not rival:
        emit(
            f"{what}, {words}: PyTorch is not installed",
            milli(found[0].event),
            predicted=predicted,
            **facts(found),
        )
        return
    apart = furthest(losses, rival.losses)
    limits: Any = {} if way == "compiled" else {REQUIRED[compute]: 1.0}
    emit(
        f"{what}, {words}, against {'torch.compile' if way == 'compiled' else 'PyTorch eager'}, "
        f"first {LOSSES} losses {apart:.0e} apart",
        *(milli(times.event) for times in found),
        ratio=found[1].event / found[0].event,
        predicted=predicted,
        **limits,
        ok=bool(apart <= APART[compute]),
        **facts(found),
    )
    emit(
        f"{what}, the host's part",
        *(milli(times.host) for times in found),
        ratio=found[1].host / found[0].host,
    )


def graphs(transport: Any, kind: str, compute: str) -> None:
    """A step as a CUDA graph and as launches one by one, in turns; the losses have to be the same."""
    settings = config(kind, compute)
    jobs = [
        build(transport, settings.changed({"device.graph": graph}), source=source(kind, settings))
        for graph in ("auto", "no")
    ]
    size, losses = settings.batch.size, [list[float](), list[float]()]
    blocks = min(OF_GRAPHS, BLOCKS[kind])
    rows = [
        jobs[0].data.batch(0, index, size, range(size))
        for index in range(WARM_UP + blocks * STEPS[kind])
    ]

    def side(job: Any, own: list[float]) -> tuple[Events, Callable[[int], None]]:
        return our_events(kind, job.trainer.backend.synchronize), lambda index: own.append(
            job.trainer.step(index, *rows[index]).loss
        )

    sides = [side(job, own) for job, own in zip(jobs, losses, strict=True)]
    found = measured(kind, sides, blocks)
    emit(
        f"training step of a GPT, {compute}, as a graph against launches one by one",
        *(milli(times.event) for times in found),
        ratio=found[1].event / found[0].event,
        goal=1.05,
        ok=losses[0] == losses[1],
        **facts(found),
    )


def report(what: str, compute: str, losses: list[float], rival: Rival | None) -> None:
    theirs = rival.losses if rival else losses
    apart = furthest(losses, theirs)
    emit(
        f"{what}, the last of {len(losses)} losses, "
        + (f"{apart:.0e} apart at most" if rival else "PyTorch is not installed"),
        f"{losses[-1]:.4f}",
        f"{theirs[-1]:.4f}" if rival else "-",
        ok=bool(apart <= APART[compute]),
        losses=[losses, theirs],
    )


def furthest(ours: list[float], theirs: list[float]) -> float:
    """How far apart the first losses are at most; NaN if any loss, of whatever step, is not finite."""
    apart = np.abs(np.subtract(ours, theirs))
    return float(apart[:LOSSES].max() + 0 * apart.sum())


def measured(
    kind: str, sides: list[tuple[Events, Callable[[int], None]]], blocks: int = 0
) -> list[Times]:
    """Blocks of steps of each side in turn, after some that do not count.    blocks: 0: those of BLOCKS"""
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in sides]
    for events, step in sides:
        events.times(step, range(WARM_UP))
    for block in range(blocks or BLOCKS[kind]):
        first = WARM_UP + block * STEPS[kind]
        for (events, step), (device, host) in zip(sides, taken, strict=True):
            seconds = events.times(step, range(first, first + STEPS[kind]))
            device.append(median(seconds[0]))
            host.append(median(seconds[1]))
    return [Times(median(device), median(host)) for device, host in taken]


def facts(found: list[Times]) -> dict[str, Any]:
    return {"times_ms": [{"event": 1e3 * times.event, "host": 1e3 * times.host} for times in found]}


def milli(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def main(transport: Any, kind: str, way: str) -> None:
    if way == "compiled" and kind != "cuda":
        emit("torch.compile: skipped, there is no GPU here")
        return
    for compute in ("bfloat16", "float32") if way in ("compiled", "graph") else WAYS:
        (graphs if way == "graph" else partial(compare, way=way))(transport, kind, compute)


if __name__ == "__main__":
    run_ranks(1, main, sys.argv[1], "".join(sys.argv[2:]))
