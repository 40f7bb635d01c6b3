"""The speed of whole training steps: ours, and in turns with it the peer's, on the same data from the same weights."""

import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.files import write_whole
from mpitrain.run.build import Job
from mpitrain.transport.base import Transport

WARM_UP = 3  # steps of each side before any is timed
PEERS = {"torch": ("mpitrain.bench.torch_peer", "pip install torch==2.13.0")}
"""Where a peer lives, and how to install what it needs."""


class Ours:
    """Our trainer, with the interface of a peer."""

    name = "mpitrain"

    def __init__(self, job: Job):
        self._trainer = job.trainer

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        """One optimizer step on this rank's rows, waited for; the loss of the whole batch."""
        loss = self._trainer.step(index, inputs, targets).loss
        self._trainer.backend.synchronize()
        return loss

    def close(self) -> None:
        """Nothing is held."""


class Result(NamedTuple):
    """One side's times.

    name    of the side
    blocks  median seconds per step of each block, every step timed on its slowest rank
    losses  of the whole batch at each timed step
    """

    name: str
    blocks: list[float]
    losses: list[float]

    @property
    def step_s(self) -> float:
        """Median over blocks."""
        return median(self.blocks)


def peer_class(name: str, config: Config) -> Any:
    """The class of a peer; ConfigError if it is not installed or cannot do what is configured. Local.

    config  with device.kind settled
    """
    if config.model.kind != "gpt" or config.optimizer.name != "adamw" or config.batch.micro_batches > 1:
        raise ConfigError("The peer trains a GPT with AdamW in one micro-batch.",
                          "Leave out --peer, or set model.kind=gpt, optimizer.name=adamw and batch.micro_batches=1.")
    if config.precision.compute != "float32" or config.optimizer.clip:
        raise ConfigError("The peer computes in float32 and does not clip.",
                          "Leave out --peer, or set precision.compute=float32 and optimizer.clip=0.")
    peer = imported(name)
    peer.placed(config.device.kind)
    return peer.TorchPeer


def imported(name: str) -> ModuleType:
    """The module of a peer; ConfigError if what it needs is not installed."""
    module, way_in = PEERS[name]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"The peer {name} needs the module {error.name}, which is not installed.",
                          f"Install it with `{way_in}`, or leave out --peer.") from None


def alternate(transport: Transport, job: Job, sides: Sequence[Any], blocks: int, steps: int) -> list[Result]:
    """Blocks of steps of each side in turn; every side sees the same batches. Collective.

    blocks  times that every side has its turn
    steps   in each turn
    """
    results = [Result(side.name, [], []) for side in sides]
    for side in sides:
        _timed(transport, job, side, range(WARM_UP))
    for block in range(blocks):
        first = WARM_UP + block * steps
        for side, result in zip(sides, results, strict=True):
            times, losses = _timed(transport, job, side, range(first, first + steps))
            result.blocks.append(median(times))
            result.losses.extend(losses)
    return results


def _timed(transport: Transport, job: Job, side: Any, indices: range) -> tuple[list[float], list[float]]:
    """Seconds of each step on the slowest rank, and the mean of the ranks' losses."""
    config = job.trainer.config
    times, losses = [], []
    for index in indices:
        inputs, targets = job.data.batch(config.run.seed, index, config.batch.size, job.trainer.share())
        transport.barrier()
        start = time.perf_counter()
        losses.append(side.step(index, inputs, targets))
        times.append(time.perf_counter() - start)
    gathered = transport.gather_text([times, losses])
    slowest = [max(step) for step in zip(*(times for times, _ in gathered), strict=True)]
    means = [sum(step) / len(step) for step in zip(*(losses for _, losses in gathered), strict=True)]
    return slowest, means


def table(results: Sequence[Result], tokens: int) -> list[str]:
    """Lines to print; the first result is ours. tokens: per step, over all ranks."""
    lines = [f"{'side':<18} {'step s':>9} {'tokens/s':>10}   {'step s, blocks':<18} {'last loss':>10}"]
    for result in results:
        spread = f"{min(result.blocks):.4f} .. {max(result.blocks):.4f}"
        rate = f"{tokens / result.step_s:10.0f}" if tokens else f"{'-':>10}"
        lines.append(f"{result.name:<18} {result.step_s:9.4f} {rate}   {spread:<18} {result.losses[-1]:10.5f}")
    for peer in results[1:]:
        ratios = against(results[0], peer)
        apart = max(abs(a - b) for a, b in zip(results[0].losses, peer.losses, strict=True))
        lines.append(f"mpitrain is {median(ratios):.3f} times as fast as {peer.name} (neighbouring blocks "
                     f"{min(ratios):.3f} .. {max(ratios):.3f}); losses at most {apart:.1e} apart")
    return lines


def against(ours: Result, peer: Result) -> list[float]:
    """How many times as fast as the peer, in each pair of neighbouring blocks."""
    return [theirs / mine for mine, theirs in zip(ours.blocks, peer.blocks, strict=True)]


def write_json(path: Path, device: str, results: Sequence[Result]) -> None:
    """Write every side's blocks and losses; the first result is ours."""
    write_whole(path, json.dumps({"device": device, "sides": [result._asdict() for result in results]}, indent=1) + "\n")
