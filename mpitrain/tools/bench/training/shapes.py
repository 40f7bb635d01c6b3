"""`compare --shapes`: steps in a table of shapes, each beside its peers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.data.tokens import TokenSource
from mpitrain.errors import ConfigError, gigabytes
from mpitrain.machine import process
from mpitrain.run.build import build
from mpitrain.run.job import Job
from mpitrain.tools.bench.training.floor import BareProducts, recorded
from mpitrain.tools.bench.training.peers import peer_of
from mpitrain.tools.bench.training.steps import Ours, alternate
from mpitrain.tools.bench.turns import Row
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport


class TrainingShape(NamedTuple):
    """A row of SHAPES: a size and layout of the job `gpt` of `compare`.

    rows        sequences of a rank in a step; all ranks of a tensor-parallel or pipeline job
                together have as many
    settings    `section.key=value` that change the job
    vocabulary  number of different random tokens; 0: the job keeps its text
    """

    rows: int
    settings: tuple[str, ...] = ()
    vocabulary: int = 0


WIDE = ("model.width=768", "model.heads=12")


def _pipeline(schedule: str, micro_batches: int) -> TrainingShape:
    settings = f"pipeline.schedule={schedule}", f"batch.micro_batches={micro_batches}"
    return TrainingShape(16, ("layout.pp=2", *settings))


SHAPES = {
    "context-128": TrainingShape(16),
    "context-512": TrainingShape(
        4, ("model.context=512", "model.width=512", "model.heads=8", "model.layers=6")
    ),
    "context-1024": TrainingShape(4, ("model.context=1024",)),
    "context-2048": TrainingShape(2, ("model.context=2048",)),
    "context-4096": TrainingShape(1, ("model.context=4096",)),
    "vocabulary-50257": TrainingShape(4, ("model.context=256",), vocabulary=50257),
    "width-768": TrainingShape(8, WIDE),
    "tp-2": TrainingShape(16, ("layout.tp=2",)),
    "tp-2-context-1024": TrainingShape(4, ("layout.tp=2", "model.context=1024")),
    "zero-3": TrainingShape(8, ("replication.zero=3", *WIDE)),
    "pp-2-1f1b-4": _pipeline("1f1b", 4),
    "pp-2-1f1b-8": _pipeline("1f1b", 8),
    "pp-2-gpipe-4": _pipeline("gpipe", 4),
}
"""{name: shape}; the names are arguments of `compare --shapes`."""


def chosen(names: str, ranks: int) -> list[str]:
    """Return the names of shapes in a text with commas, or of all shapes. No message is sent.

    raises  ConfigError for an unknown name, or a shape that these ranks cannot compute
    """
    wanted = [*SHAPES] if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in SHAPES:
            raise ConfigError(
                f"--shapes takes all, or some of {', '.join(SHAPES)}, but got {name!r}.",
                "For example: --shapes context-128,tp-2",
            )
    if ranks != 2:
        raise ConfigError(
            f"The table of shapes is for 2 ranks, but there are {ranks}.",
            "mpitrain launch -n 2 -- compare --shapes all",
        )
    return wanted


def measure_shape(
    transport: Transport,
    name: str,
    config: Config,
    peers: Sequence[tuple[str, str]],
    blocks: int,
    steps: int,
    seconds: float,
) -> tuple[list[Row], list[str]]:
    """Return the rows of one shape, and lines such as a peer that was left out. Collective.

    config   of the shape, with its `settings`
    peers    keys of PEERS and backends of PyTorch; a peer that does not support the shape is left out, with a note
    steps    largest number of steps in a turn
    seconds  upper limit of the time of all turns
    raises   ConfigError on every rank if the shape does not fit into memory or into `seconds`
    """
    notes, sides, vocabulary = list[str](), list[Any](), SHAPES[name].vocabulary
    source = random_tokens(vocabulary, config.model.context) if vocabulary else None
    job = build(transport, config, source=source)
    sides.append(Ours(job))
    try:
        on_all_ranks(transport, lambda: check_fits(transport, job, 3 + len(peers)))
        for key, backend in peers:
            try:
                sides.append(peer_of(transport, job, key, backend))
            except ConfigError as error:
                notes.append(f"{name}, without {key}: {error.law}")
        sides.append(BareProducts(recorded(transport, job)))
        rows = alternate(transport, job, sides, blocks, steps, seconds, name)
        for side in sides[1:-1]:
            notes += [f"{name}, {note}" for note in side.notes()]
    except ConfigError as error:
        # After an error of one rank, closing would wait for the others.
        if error.agreed:
            close_all(sides)
        raise
    close_all(sides)
    return rows, notes


def close_all(sides: Sequence[Any]) -> None:
    for side in sides:
        side.close()


def settings(shape: TrainingShape, ranks: int) -> list[str]:
    """Return the `section.key=value` of a shape; batch.size counts the rows of all ranks."""
    is_one_replica = any(key.startswith(("layout.tp", "layout.pp")) for key in shape.settings)
    return [*shape.settings, f"batch.size={shape.rows * (1 if is_one_replica else ranks)}"]


def random_tokens(vocabulary: int, context: int) -> TokenSource:
    tokens = np.random.default_rng(0).integers(vocabulary, size=64 * (context + 1))
    return TokenSource(tokens.astype(np.uint16), vocabulary, context, "random tokens")


def check_fits(transport: Transport, job: Job, sides: int) -> None:
    """Raise ConfigError if an upper estimate of the memory of all sides exceeds the free memory.

    No message is sent. A layer saves at most 24 activations of the width for each token, and half
    of its attention scores. A head needs four arrays of logits.
    """
    config, ranks = job.trainer.config, transport.hosts.count(transport.hosts[transport.rank])
    model, rows = config.model, -(-config.batch.size // job.trainer.grid.axes.dp)
    scores = model.heads * model.context / 2
    saved = model.layers * (24 * model.width + scores) + 4 * job.source.classes
    needed = 16 * job.trainer.parameter_count + 4 * rows * model.context * saved
    free = process.free_memory("cpu")
    if sides * ranks * needed > free:
        of_all, room = gigabytes(sides * ranks * needed, free)
        raise ConfigError(
            f"{sides} programs of {ranks} rank(s) may need {of_all}, but {room} are free.",
            "Leave this shape out of --shapes.",
        )
