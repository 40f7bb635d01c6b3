"""The measurements of `certify`, one after the other, on all ranks.

Speeds, links and collectives are measured by the code of `bench`; the machine is examined by
`doctor`. Training steps and short runs with the same seed must give equal bits.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.config import Config, parse
from mpitrain.data import Unopened
from mpitrain.errors import MpitrainError
from mpitrain.run.build import build
from mpitrain.run.loop import train
from mpitrain.tools.bench.collectives.operations import OPERATIONS
from mpitrain.tools.bench.collectives.sweep import Sweep, SweepRequest
from mpitrain.tools.bench.kernels.host_products import Sampler
from mpitrain.tools.bench.pairs import BETWEEN, Pair, merged
from mpitrain.tools.bench.pairs import measure as measure_pairs
from mpitrain.tools.certify.verdict import (
    Evidence,
    Jobs,
    Limits,
    Speeds,
    WrongCollective,
    slow_ranks,
)
from mpitrain.tools.doctor.facts import Facts, facts_here, of_all
from mpitrain.tools.doctor.probes import Problem
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

AGAIN = 3
"""Number of times that slow ranks are measured again, alone, before they count as slow."""
SIZES = (4 << 10, 1 << 20)
"""Bytes of the arrays of the collectives."""
SHORT, LONG = 8, 4 << 20
"""Bytes of the messages between two nodes."""
STEPS, ROWS, TOKENS, CLASSES = 2, 4, 32, 96
RUN_STEPS, STOP = 6, 3
"""Steps of a run, and the step after which the third run stops and resumes."""


def collect(
    transport: Transport,
    limits: Limits,
    work: Path,
    rounds: int,
    sample: Sampler,
    examine: Callable[[], Sequence[Problem]],
    absent: dict[str, str],
    own: Callable[[str], Facts] = facts_here,
) -> Iterator[Evidence]:
    """Yield the evidence so far before each measurement, and at the end. Collective.

    The evidence is equal on all ranks.

    work     a new directory for short runs, on the file system of the user's runs
    rounds   number of samples of each rank's speed
    sample   measures one sample of this rank's speed
    examine  returns the problems that `doctor` finds; collective
    absent   {node: reason} of nodes that did not answer
    own      (name of this rank's host) -> the facts about this rank
    """
    everyone = of_all(transport, own)
    known = Evidence(everyone, absent=absent, awaits="probes of doctor")
    yield known
    known = known._replace(findings=examine(), awaits="the same step alone on every rank")
    yield known
    known = known._replace(
        steps=[(digests[0], digests[1]) for digests in step_digests(transport)],
        awaits=f"matrix products and memory, {rounds} rounds of {len(turns(everyone))} turn(s)",
    )
    yield known
    known = known._replace(
        speeds=_speeds(transport, everyone, limits, rounds, sample),
        awaits="links of all pairs of nodes",
    )
    yield known
    known = known._replace(pairs=links(transport), awaits="every collective")
    yield known
    checked, wrong = collectives(transport)
    known = known._replace(
        collectives=checked,
        wrong=wrong,
        awaits="a training run, on other nodes, and resumed from a checkpoint",
    )
    yield known
    yield known._replace(jobs=repeat(transport, work), awaits="")


def _speeds(
    transport: Transport, everyone: Sequence[Facts], limits: Limits, rounds: int, sample: Sampler
) -> list[Speeds]:
    speeds = measure(transport, turns(everyone), rounds, sample)
    for _ in range(AGAIN):
        slow = slow_ranks(everyone, speeds, limits)
        if not slow:
            break
        more = measure(transport, [[rank] for rank in slow], rounds, sample)
        speeds = with_more(speeds, more)
    return speeds


def links(transport: Transport) -> list[Pair]:
    """Measure the links between the first ranks of all nodes. Collective. Empty for a single node."""
    first = transport.hosts.index(transport.hosts[transport.rank])
    leaders = transport.split(0 if first == transport.rank else None)
    pairs: list[Pair] = []
    if leaders is not None:
        measured = measure_pairs(leaders, SHORT, LONG, places=(BETWEEN,))
        pairs = merged([pair for one_round in measured for pair in one_round])
        leaders.close()
    return [Pair(*pair) for pair in transport.gather_text(pairs)[0]]


def collectives(transport: Transport) -> tuple[int, list[WrongCollective]]:
    """Run every algorithm of every collective. Collective.

    Returns the number of those that ran, and those that had wrong elements.
    """
    checked, wrong = 0, []
    for operation in OPERATIONS:
        request = SweepRequest(
            operation, (), SIZES, np.dtype("float32"), 2, 1, ("window", "plain"), 1
        )
        for row in Sweep(transport, request, DEFAULT):
            checked += 1
            if row.wrong:
                wrong.append(WrongCollective(operation, row.algorithm, row.wrong))
    return checked, wrong


def turns(facts: Sequence[Facts]) -> list[list[int]]:
    """Divide the ranks into groups; ranks of one group measure at the same time and share no core."""
    groups: list[list[int]] = []
    used: list[set[tuple[str, int]]] = []
    for rank, fact in enumerate(facts):
        cores = {(fact.machine, core) for core in fact.cores}
        for turn, busy in zip(groups, used, strict=True):
            if not cores & busy:
                turn.append(rank)
                busy |= cores
                break
        else:
            groups.append([rank])
            used.append(cores)
    return groups


def measure(
    transport: Transport, order: Sequence[Sequence[int]], rounds: int, sample: Sampler
) -> list[Speeds]:
    """Take a sample of each listed rank in each round; return all samples, by rank. Collective.

    order  the groups of ranks of a round, one after the other; other ranks sleep meanwhile
    """
    samples = Speeds([], [])
    for _ in range(rounds):
        for turn in order:
            transport.gather_text(None)
            if transport.rank in turn:
                gemm, memory = sample()
                samples.gemm.append(gemm)
                samples.memory.append(memory)
    return [Speeds(*own) for own in transport.gather_text(samples)]


def with_more(speeds: Sequence[Speeds], more: Sequence[Speeds]) -> list[Speeds]:
    return [
        Speeds([*own.gemm, *new.gemm], [*own.memory, *new.memory])
        for own, new in zip(speeds, more, strict=True)
    ]


def small_config(**sections: dict[str, object]) -> Config:
    tables: dict[str, dict[str, object]] = {
        "model": {"layers": 2, "width": 64, "heads": 2, "context": TOKENS},
        "batch": {"size": ROWS},
        "optimizer": {"schedule": "constant", "warmup": 0},
        "device": {"kind": "cpu"},
        "run": {"seed": 11},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return parse(tables)


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the first 16 digits of the SHA-256 of all tensors, in the order of their names."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(name.encode())
        sha256.update(np.ascontiguousarray(tensors[name]).tobytes())
    return sha256.hexdigest()[:16]


def step_digests(transport: Transport, repeats: int = 2) -> list[tuple[str, ...]]:
    """Train on each rank without the others, several times; return the digests of all ranks. Collective.

    BLAS uses one thread, so that the bits do not depend on the number of a rank's cores.
    """
    own = transport.split(transport.rank)
    assert own is not None
    with threadpool_limits(1, user_api="blas"):
        digests = [_trained(own) for _ in range(repeats)]
    everyone = transport.gather_text(digests)
    own.close()
    return [tuple(digests) for digests in everyone]


def _trained(alone: Transport) -> str:
    config = small_config()
    source = Unopened("tokens", (TOKENS,), CLASSES, CLASSES)
    job = build(alone, config, source=source)
    draw = np.random.default_rng(11)
    for step in range(STEPS):
        tokens = draw.integers(0, CLASSES, (ROWS, TOKENS + 1))
        job.trainer.step(step, tokens[:, :-1], tokens[:, 1:])
    bits = digest(job.trainer.tensors())
    job.close()
    return bits


def repeat(transport: Transport, work: Path) -> Jobs:
    """Run a short job, the same job on other nodes, and the same job through a checkpoint. Collective.

    The files are in the new directory `work`, which is removed at the end.

    raises  ConfigError on every rank if `work` cannot be made
    """

    def make() -> None:
        if transport.rank == 0:
            work.mkdir(mode=0o700)

    on_all_ranks(transport, make)
    errors: list[str] = []

    def run(name: str, keys: Sequence[int], stops: int = 0, resume: str = "no") -> str:
        """Train with the ranks in the order of `keys`; return the digest, or "" after an error."""
        if errors:
            return ""
        placed = transport.split(0, keys[transport.rank])
        assert placed is not None
        try:
            return _run(placed, _config(work / name, transport.size), stops, resume)
        except MpitrainError as error:
            if not error.agreed:
                raise
            errors.append(error.law)
            return ""
        finally:
            placed.close()

    try:
        same, other = list(range(transport.size)), moved(transport.hosts)
        first = run("first", same)
        again = run("moved", other)
        run("resumed", same, STOP)
        resumed = run("resumed", same, 0, "yes")
    finally:
        if transport.rank == 0:
            with suppress(OSError):
                shutil.rmtree(work)
    return Jobs(first, again, resumed, errors)


def moved(hosts: Sequence[str]) -> list[int]:
    """Return the new number of each rank, by which all ranks of a host move to the next host.

    The ranks of one host stay neighbours. On a single host each rank moves by one.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return [(rank + 1) % len(hosts) for rank in range(len(hosts))]
    order = sorted(
        range(len(hosts)), key=lambda rank: ((names.index(hosts[rank]) + 1) % len(names), rank)
    )
    return [order.index(rank) for rank in range(len(hosts))]


def _config(folder: Path, ranks: int) -> Config:
    return small_config(
        batch={"size": 2 * ranks},
        run={"steps": RUN_STEPS, "out": str(folder), "log_every": 1, "eval_every": -1, "sample": 0},
        checkpoint={"every": 0},
        replication={"algorithm": "ring"},
    )


def _run(transport: Transport, config: Config, stops: int, resume: str) -> str:
    steps = 0

    def asked() -> bool:
        nonlocal steps
        steps += 1
        return steps == stops

    finished = train(transport, lambda: config, resume, asked, watchers=())
    finished.job.trainer.sync_parameters()
    bits = digest(finished.job.trainer.tensors())
    finished.job.close()
    return transport.gather_text(bits)[0]
