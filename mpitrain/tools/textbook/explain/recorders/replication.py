"""Topics of replication: a training step of symbols, in each mode."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.traffic import Sample
from mpitrain.run.trainer import Trainer
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Text,
    sentence,
)
from mpitrain.tools.textbook.explain.links import Network, Watched
from mpitrain.tools.textbook.explain.recorders import toy
from mpitrain.tools.textbook.explain.recorders.collectives import SLOWED_BYTES
from mpitrain.tools.textbook.explain.recorders.watch import ENDED, Key, Watch, WatchedState
from mpitrain.tools.textbook.explain.topic import TopicSetting
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

NAMES = "ABCDEFGH"


class ShownMode(NamedTuple):
    """A mode of replication to show.

    settings   of its configuration
    sentences  the idea
    sources    functions and classes that run
    laws       tests that prove it
    units      of the model; 0: one for each rank
    is_split   whether a rank stores a region of each unit
    servers    ranks without rows
    steps      of training
    micros     micro-batches of a step
    kinds      passes of layers with a frame of their own
    groups     of columns, in order
    memory     formula of the bytes of parameters, gradients and state on a rank, in words, and as a
               function of elements P, ranks n and elements of a unit; None: not shown
    """

    settings: Sequence[str]
    sentences: Sequence[Text]
    sources: Sequence[Any]
    laws: Sequence[str]
    units: int = 3
    is_split: bool = False
    servers: int = 0
    steps: int = 1
    micros: int = 1
    kinds: Collection[str] = ("weight",)
    groups: Sequence[str] = ("parameters", "gradients")
    memory: tuple[str, Callable[[int, int, int], float]] | None = None


class _RankRun(NamedTuple):
    """The run on one rank.

    entries         its diary
    nbytes          that it sent in a step
    words, formula  of the bytes that the busiest rank sends
    stored          bytes of parameters, gradients and optimizer state
    elements        of all parameters
    """

    entries: Mapping[Key, WatchedState]
    nbytes: float
    words: str
    formula: float
    stored: float
    elements: int


def recorder(shown: ShownMode, title: Text) -> Callable[[str, TopicSetting], Explanation]:
    def record(name: str, setting: TopicSetting) -> Explanation:
        n, network = setting.ranks, Network(setting.link)
        runs: list[_RankRun] = run_ranks(n, _run, shown, network)
        workers = n - shown.servers
        units = shown.units or workers
        columns = [
            f"{NAMES[unit]}{region}" if shown.is_split else NAMES[unit]
            for unit in range(units)
            for region in range(workers if shown.is_split else 1)
        ]
        frames = _frames([run.entries for run in runs], shown, bool(setting.link))
        formulas = [
            CountedFormula(
                sentence("bytes that the busiest rank sends in a step, control message included"),
                max(run.nbytes for run in runs),
                runs[0].words,
                runs[0].formula,
            )
        ]
        if shown.memory:
            formulas.append(
                CountedFormula(
                    sentence("bytes of parameters, gradients and optimizer state on a rank"),
                    sum(run.stored for run in runs) / n,
                    shown.memory[0],
                    shown.memory[1](runs[0].elements, n, runs[0].elements // units),
                )
            )
        micros = [f"batch.micro_batches={shown.micros}"] if shown.micros > 1 else []
        settings = [
            word for word in (*shown.settings, *micros, "run.steps=20") if "bucket" not in word
        ]
        return Explanation(
            name,
            title,
            [sentence(text.english, n=n, w=workers) for text in shown.sentences],
            sentence(
                "A, B, ... are units of the model. w: initial parameters; g1: gradient of row 1 in step 1, "
                "h1 in step 2; →: on its way; - or empty: not stored."
            ),
            [
                sentence("rank {r}", r=rank) if rank < workers else sentence("server {r}", r=rank)
                for rank in range(n)
            ],
            [Columns(HEADINGS[group], tuple(columns)) for group in shown.groups],
            frames,
            formulas,
            [SourceLines.of(source) for source in shown.sources],
            " ".join((f"mpitrain launch -n {n} -- train", *(f"--set {word}" for word in settings))),
            shown.laws,
        )

    return record


HEADINGS = {
    "parameters": sentence("parameters"),
    "gradients": sentence("gradients"),
    "optimizer state": sentence("optimizer state"),
}


def _run(inner: Transport, shown: ShownMode, network: Network) -> _RankRun:
    transport = Watched(inner, network)
    workers = transport.size - shown.servers
    units, rows = shown.units or workers, workers * shown.micros
    elements = workers * toy.VECTOR
    if network.link:
        elements *= -(-SLOWED_BYTES // (8 * units * elements))
    symbols = toy.basis(shown.steps, rows)
    watch = Watch(
        symbols, NAMES[:units], workers if shown.is_split else 1, shown.kinds, shown.micros
    )
    config = toy.configured(
        f"batch.size={rows}",
        f"batch.micro_batches={shown.micros}",
        f"run.steps={shown.steps}",
        *shown.settings,
    )
    trainer = Trainer(
        transport, toy.units(units, elements, symbols, watch.seen), config, toy.SymbolLoss()
    )
    watch.begin(trainer)
    sent, source = transport.traffic.nbytes, toy.SymbolSource(symbols)
    for step in range(shown.steps):
        transport.barrier()
        began = time.perf_counter()
        watch.clock = lambda began=began: time.perf_counter() - began  # type: ignore[misc]
        watch.step(step + 1)
        trainer.step(step, *trainer.replication.rows.batch(source, step))
        if step == shown.steps - 1:
            trainer.sync_parameters()
        watch.end()
        transport.barrier()
    nbytes = (transport.traffic.nbytes - sent) / shown.steps
    stored = sum(trainer.replication.held_by_kind().values()) - trainer.grid.scratch_bytes
    return _RankRun(watch.entries, nbytes, *_traffic(trainer), stored, trainer.storage.length)


def _traffic(trainer: Trainer) -> tuple[str, float]:
    """Return the formula of the bytes of a step, in words and as a number."""
    formula = mode_of(trainer.config).traffic(trainer.config.replication)
    assert formula is not None
    sample = Sample(8 * toy.VECTOR, 8, toy.VECTOR)
    return formula.words, float(formula.of(trainer.replication.replica, sample) or 0)


def _frames(
    ranks: Sequence[Mapping[Key, WatchedState]], shown: ShownMode, is_timed: bool
) -> list[Frame]:
    """Return a frame for each event of any rank; a rank without it shows its last entry."""
    frames: list[Frame] = []
    last = [entries[0,] for entries in ranks]
    for key in sorted({key for entries in ranks for key in entries}):
        last = [entries.get(key, before) for entries, before in zip(ranks, last, strict=True)]
        entry = next(entries[key] for entries in ranks if key in entries)
        title = entry.title
        if shown.steps > 1 and len(key) > 1:
            title = sentence("step {k}: {event}", k=key[0], event=title)
        ends = len(key) == 1 or key[1] == ENDED
        frame = Frame(
            title,
            tuple(
                tuple(
                    cell
                    for group in shown.groups
                    for cell in state.cells.get(group, ("",) * len(state.cells["parameters"]))
                )
                for state in last
            ),
            sent=tuple(state.nbytes for state in last) if ends else (),
            seconds=max(state.seconds for state in last) if ends and is_timed and key[0] else None,
        )
        if frames and not frame.changed(frames[-1]):
            # The last event of a step has its bytes and seconds.
            frame = frame._replace(title=frames.pop().title)
        frames.append(frame)
    return frames
