"""Replay of two runs of one layout side by side, to find the first tensor that differs.

The ranks are threads of this process. Each of them has both jobs, and takes the same step of both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from mpitrain.config import Config
from mpitrain.config.faults import injection
from mpitrain.errors import ConfigError
from mpitrain.machine import process
from mpitrain.run.build import build
from mpitrain.run.job import Job
from mpitrain.run.metrics import strict
from mpitrain.run.replicas import digest_record, state_digests
from mpitrain.tools.plan.memory import ranks_of
from mpitrain.tools.report.diff import THREADS, ComparedRun, Digests, order, some_of
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

MOST = 64
"""The largest number of ranks of a replay."""

IN_GRADIENTS = ("nan", "bitflip")
"""The failures of run.inject that a replay repeats."""


class Differing(NamedTuple):
    """A tensor whose bits differ between the two replays after a step.

    buffer  gradient, parameters, or a buffer of the optimizer
    ranks   those on which the tensor differs
    """

    buffer: str
    unit: str
    tensor: str
    ranks: list[int]


class Unlike(NamedTuple):
    """The first record of a run that its replay does not repeat.

    kind     logged or digests
    tensors  those whose digests differ, in the order of a step
    """

    step: int
    kind: str
    tensors: list[str]


class Replayed(NamedTuple):
    """The result of a replay.

    first, last  the replay begins with the state after step `first`, and ends after step `last`
    step         the first step after which the two replays differ; None: they are equal
    differing    the tensors that differ then, in the order of a step
    unlike       by run: its first record that the replay does not repeat, or None
    """

    first: int
    last: int
    step: int | None
    differing: list[Differing]
    unlike: tuple[Unlike | None, Unlike | None]


def replay(
    sides: tuple[ComparedRun, ComparedRun],
    start: int,
    last: int,
    stepped: Callable[[int], None] = lambda step: None,
) -> Replayed:
    """Replay two runs from the same step, until their states differ or step `last` is done.

    Both replays use as many BLAS threads as the first run did: a process has one number of them.

    start    step of a checkpoint of both runs; 0: begin with the initial parameters
    stepped  called on rank 0 after each step
    raises   ConfigError for too many ranks; MpitrainError if a run cannot be built here
    """
    first = sides[0]
    if first.ranks > MOST or first.ranks != ranks_of(first.config):
        raise ConfigError(
            f"A replay has a thread for each of at most {MOST} ranks, as many as dp x tp x pp and servers, "
            f"but {first.folder} had {first.ranks}.",
            "Leave out --replay, or compare shorter runs on fewer ranks.",
        )
    if not first.threads:
        process.lower_blas_threads(-(-first.ranks // first.hosts))
    hosts = [f"host {rank * first.hosts // first.ranks}" for rank in range(first.ranks)]
    with threadpool_limits(first.threads or None, user_api="blas"):
        return run_ranks(first.ranks, _on_a_rank, sides, start, last, stepped, hosts=hosts)[0]


def _on_a_rank(
    transport: Transport,
    sides: tuple[ComparedRun, ComparedRun],
    start: int,
    last: int,
    stepped: Callable[[int], None],
) -> Replayed:
    jobs = [build(transport, _config(side, start), side.saved.get(start)) for side in sides]
    unlike: list[Unlike | None] = [None, None]
    differing = _differing(transport, jobs)
    step = start
    if differing:
        return Replayed(start, last, step, differing, (None, None))
    while step < last and not differing:
        step += 1
        logged = [_step(job, start, step) for job in jobs]
        everyone = transport.gather_text([state_digests(job.trainer) for job in jobs])
        for number, side in enumerate(sides):
            digests = [of_rank[number] for of_rank in everyone]
            unlike[number] = unlike[number] or _unlike(side, step, logged[number], digests)
        differing = _differing(transport, jobs)
        if transport.rank == 0:
            stepped(step)
    return Replayed(start, last, step if differing else None, differing, (unlike[0], unlike[1]))


def _config(side: ComparedRun, start: int) -> Config:
    """Return the configuration of a run, without slowed ranks and without faults that end it."""
    run = side.config.run
    failure = injection(run.inject)
    does_repeat = failure and failure.kind in IN_GRADIENTS and failure.step > start
    # The steps of the learning rate are those of the run, whatever its batches were.
    changed = {"delay": "", "inject": run.inject if does_repeat else "", "epochs": 0.0}
    return side.config.model_copy(update={"run": run.model_copy(update=changed)})


# Each step counts values that are not finite, so NumPy need not warn of them.
@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def _step(job: Job, start: int, step: int) -> tuple[float | None, float | None]:
    """Take one step of a job; return loss and gradient norm as they are in a metrics file."""
    trainer, index = job.trainer, step - 1
    before = job.done.samples + (index - start) * trainer.config.batch.size
    inputs, targets = trainer.replica.batch(job.data, index, before)
    result = trainer.step(index, inputs, targets)
    record = strict({"loss": result.loss, "grad_norm": result.grad_norm})
    return record["loss"], record["grad_norm"]


def _unlike(
    side: ComparedRun,
    step: int,
    logged: tuple[float | None, float | None],
    everyone: Sequence[Mapping[str, str]],
) -> Unlike | None:
    if step in side.digests:
        repeated, recorded = Digests(**digest_record(everyone)), side.digests[step]
        tensors = [
            name
            for name, digest in recorded.tensors.items()
            if repeated.tensors.get(name) != digest
        ]
        if tensors:
            return Unlike(step, "digests", sorted(tensors, key=order))
    if step in side.logged and side.logged[step] != logged:
        return Unlike(step, "logged", [])
    return None


def _differing(transport: Transport, jobs: Sequence[Job]) -> list[Differing]:
    """Return the tensors that differ between two jobs, in the order of a step. Collective."""
    first, second = (state_digests(job.trainer) for job in jobs)
    trainer = jobs[0].trainer
    stage = trainer.grid.coords.pp
    # {tensor: (its stage, its unit)}; a backward goes through them from the last to the first.
    units = {entry.name: (stage, entry.unit) for entry in trainer.storage.tensors}
    keys: list[Any] = []
    for name in first.keys() | second.keys():
        if first.get(name) != second.get(name):
            buffer, _, tensor = name.partition("/")
            place = units.get(tensor)
            unit = trainer.units[place[1]].name if place else ""
            keys.append(
                [order(name)[0], *(-number for number in place or (0, 0)), buffer, unit, tensor]
            )
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for rank, keys_of_rank in enumerate(transport.gather_text(keys)):
        for key in keys_of_rank:
            ranks.setdefault(tuple(key), []).append(rank)
    return [Differing(*key[-3:], where) for key, where in sorted(ranks.items())]  # type: ignore[call-arg]


def replayed(result: Replayed, both: tuple[ComparedRun, ComparedRun]) -> Iterator[str]:
    yield f"Replayed from step {result.first} to at most step {result.last}:"
    if result.step is not None:
        head, *rest = result.differing
        when = f"in step {result.step}" if result.step > result.first else "before any step"
        yield f"  the replays first differ {when}: {_named(head)}"
        if others := [difference.tensor for difference in rest if difference.buffer == head.buffer]:
            yield f"  also {head.buffer} of {some_of(others)}"
    else:
        yield "  both replays are equal, so neither configuration nor code explains the difference"
    for side, unlike in zip(both, result.unlike, strict=True):
        name = str(side.folder)
        if unlike is None:
            yield f"  {name} is repeated, as far as it was recorded"
            continue
        where = f": {some_of(unlike.tensors)}" if unlike.tensors else ", of loss and gradient norm"
        yield f"  {name} is not repeated: first the record of step {unlike.step}{where}"
        if 0 < side.threads != both[0].threads > 0:
            yield f"    its {THREADS} were {side.threads}, but those of the replay {both[0].threads}"
    if all(result.unlike) and result.step is None:
        yield "  Neither is: this process has another processor, BLAS or algorithm than the runs."


def _named(difference: Differing) -> str:
    ranks = ", ".join(map(str, difference.ranks))
    return f"{difference.buffer} of unit {difference.unit}, tensor {difference.tensor}, on rank(s) {ranks}"
