"""Short training runs that must have equal bits: on other nodes, and resumed from a checkpoint."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.config import Config
from mpitrain.errors import MpitrainError
from mpitrain.run.loop import train
from mpitrain.tools.certify.arithmetic import digest, small_config
from mpitrain.tools.certify.evidence import Jobs
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

STEPS, STOP = 6, 3
"""Steps of a run, and the step after which the third run stops and resumes."""


def repeat(transport: Transport, work: Path) -> Jobs:
    """Run a job twice, the second time on other nodes, and once more through a checkpoint.

    Collective. The files are in the new directory `work`, which is removed at the end.

    raises  ConfigError on every rank if `work` cannot be made
    """

    def make() -> None:
        if transport.rank == 0:
            work.mkdir(mode=0o700)

    on_all_ranks(transport, make)
    errors: list[str] = []

    def run(name: str, keys: Sequence[int], stops: int = 0, resume: str = "no") -> str:
        """Train with the ranks in the order of `keys`; return the digest, "" after any error."""
        if errors:
            return ""
        placed = transport.split(0, keys[transport.rank])
        assert placed is not None
        try:
            return _trained(placed, _config(work / name, transport.size), stops, resume)
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
    """Return the new rank of each rank: all ranks of a host move to the next host.

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
        run={"steps": STEPS, "out": str(folder), "log_every": 1, "eval_every": -1, "sample": 0},
        checkpoint={"every": 0},
        replication={"algorithm": "ring"},
    )


def _trained(
    transport: Transport,
    config: Config,
    stops: int,
    resume: str,
) -> str:
    """Train, and return the digest of the parameters; it stops after `stops` steps, 0: never."""
    steps = 0

    def asked() -> bool:
        nonlocal steps
        steps += 1
        return steps == stops

    finished = train(transport, lambda: config, resume, asked)
    finished.job.trainer.sync_parameters()
    bits = digest(finished.job.trainer.tensors())
    finished.job.close()
    return transport.gather_text(bits)[0]
