"""Topics of replication: a training step on symbols in each mode, from what its ranks stored after each event."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.plans import ring
from mpitrain.errors import Sentence
from mpitrain.parallel.averaging import Averaging, Gossip, LocalSGD, distances
from mpitrain.parallel.buckets import Buckets
from mpitrain.parallel.master import Master
from mpitrain.parallel.replica import Replica
from mpitrain.parallel.servers import Server, Worker
from mpitrain.parallel.zero import Zero1, Zero2, Zero3
from mpitrain.pipeline.pipeline import Stage
from mpitrain.regions import Piece
from mpitrain.run.trainer import Trainer
from mpitrain.tools.plan.mode_traffic import RankFacts, Sample, formula_of
from mpitrain.tools.textbook.explain import toy
from mpitrain.tools.textbook.explain.collectives import SLOWED_BYTES
from mpitrain.tools.textbook.explain.explanation import (
    UNDER_WAY,
    Columns,
    CountedFormula,
    CutMatrix,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)
from mpitrain.tools.textbook.explain.links import Network, SlowTransport
from mpitrain.transport.threads import ThreadTransport, run_ranks

NAMES = "ABCDEFGH"
"""Names of the units."""

Key = tuple[int, ...]
"""The order of an event: step, phase, micro-batch, direction, unit."""

ARRIVED, COMPUTED, SUMMED, UPDATED, ENDED = range(5)
"""Phases of a step."""


class WatchedState(NamedTuple):
    """What a rank stores after an event.

    title    of the event
    cells    {group of columns: contents}
    nbytes   bytes that the rank has sent since the start
    seconds  since the start of the step
    """

    title: str
    cells: Mapping[str, tuple[str, ...]]
    nbytes: int
    seconds: float


class ShownMode(NamedTuple):
    """A mode of replication to show.

    settings   `section.key=value` of its configuration
    sentences  the idea, a sentence each
    sources    functions and classes that run, shown as source
    units      number of units of the model; 0: as many as ranks
    is_split   whether a rank stores only a region of each unit
    servers    number of ranks without rows
    steps      number of training steps
    micros     micro-batches of a step
    kinds      kinds of passes (forward, halves of backward) that have frames of their own
    groups     groups of columns, in order
    sent       bytes that the busiest rank sends in a step, as a function of n ranks and the bytes S
               of all gradients; control messages and headers are left out
    memory     bytes of parameters, gradients and optimizer state on a rank: formula in words, and
               as a function of P elements, n ranks and the elements of a unit; None: not shown
    messages   whether rows and logits travel. Then they have columns, an earlier update has left
               its parameters on rank 0 alone, and the bytes of each kind of message are counted
    has_buckets  whether a picture has computing and the reduction of each bucket over time
    """

    settings: Sequence[str]
    sentences: Sequence[str]
    sources: Sequence[Any]
    sent: Callable[[int, float], float]
    units: int = 3
    is_split: bool = False
    servers: int = 0
    steps: int = 1
    micros: int = 1
    kinds: Collection[str] = ("weight",)
    groups: Sequence[str] = ("parameters", "gradients")
    memory: tuple[str, Callable[[int, int, int], float]] | None = None
    messages: bool = False
    has_buckets: bool = False

    def columns(self, workers: int) -> list[Columns]:
        units = NAMES[: self.units or workers]
        names = {
            "parameters": tuple(
                f"{unit}{region}" if self.is_split else unit
                for unit in units
                for region in range(workers if self.is_split else 1)
            ),
            **{
                group: tuple(f"{letter}{row}" for row in range(workers))
                for group, (_, letter) in OF_ROWS.items()
            },
            "loss": ("mean",),
        }
        return [Columns(group, names.get(group, names["parameters"])) for group in self.groups]


class _RankRun(NamedTuple):
    entries: Mapping[Key, WatchedState]
    nbytes: float
    words: str
    formula: float
    stored: float
    elements: int


WITH_STATE = ("parameters", "gradients", "optimizer state")
MOMENTUM = "optimizer.name=momentum"
OF_ROWS = {"batch": ("x", "x"), "logits": ("x", "y"), "gradients of logits": ("g", "d")}
"""{group of columns with one for each row: the letter of its symbols, and the letter to print}."""
OF_MESSAGES = ("batch", "parameters", "logits", "loss", "gradients of logits", "gradients")
DIVIDED = "The loss divides by the rows of the batch, before any message. So the sum is the mean."
ONE_UNIT = "replication.bucket_mb=0.000001"


LEGEND = (
    "A, B, ... are units of the model. w: initial parameters; g1: gradient of row 1 in step 1, "
    "h1 in step 2; →: on its way; - or empty: not stored."
)
LEGEND_OF_MESSAGES = (
    "x1: row 1 of the batch; y1: its logits; l1: its loss; d1: gradient of these logits; g1: gradient "
    "of the parameters from row 1; w: parameters before the last update, v: after it."
)


def record(shown: ShownMode, setting: TopicSetting) -> Explanation:
    n, network = setting.ranks, Network(setting.link) if setting.link else None
    runs: list[_RankRun] = run_ranks(n, _run, shown, network)
    workers = n - shown.servers
    units = shown.units or workers
    columns = shown.columns(workers)
    frames = _frames([run.entries for run in runs], shown, columns, bool(setting.link))
    size = 8 * runs[0].elements
    sent = shown.sent(n, size)
    rest = runs[0].formula - sent
    formulas = [
        CountedFormula(
            Sentence(
                "bytes that the busiest rank sends in a step, without {rest:,.0f} of control messages and headers; "
                "S is {size:,}",
                rest=rest,
                size=size,
            ),
            max(run.nbytes for run in runs) - rest,
            runs[0].words,
            sent,
        )
    ]
    if shown.messages:
        formulas += _by_message(frames, n, size)
    slots = _slots(frames, columns) if shown.has_buckets else []
    if slots and n > 1:
        name = "units that compute while a bucket is on its way"
        formulas.append(CountedFormula(name, sum(map(all, slots)), "L-1", units - 1))
    if shown.memory:
        formulas.append(
            CountedFormula(
                "bytes of parameters, gradients and optimizer state on a rank",
                sum(run.stored for run in runs) / n,
                shown.memory[0],
                shown.memory[1](runs[0].elements, n, runs[0].elements // units),
            )
        )
    learning = "averaging" if shown.steps > 1 else "training"
    laws = [f"tests/ranks/parallel/test_{learning}.py", "tests/ranks/bench/test_compare.py"]
    laws += ["tests/unit/machine/test_memory.py"] if shown.memory else []
    micros = [f"batch.micro_batches={shown.micros}"] if shown.micros > 1 else []
    settings = [word for word in (*shown.settings, *micros, "run.steps=20") if "bucket" not in word]
    return Explanation(
        [Sentence(sentence, n=n, w=workers) for sentence in shown.sentences],
        LEGEND_OF_MESSAGES if shown.messages else LEGEND,
        [
            Sentence("rank {r}", r=rank) if rank < workers else Sentence("server {r}", r=rank)
            for rank in range(n)
        ],
        columns,
        frames,
        formulas,
        [SourceLines.of(source) for source in shown.sources],
        " ".join((f"mpitrain launch -n {n} -- train", *(f"--set {word}" for word in settings))),
        laws,
        products=_of_time(slots),
    )


def _run(inner: ThreadTransport, shown: ShownMode, network: Network | None) -> _RankRun:
    transport = SlowTransport(inner, network) if network else inner
    workers = transport.size - shown.servers
    units, rows = shown.units or workers, workers * shown.micros
    elements = workers * toy.VECTOR
    if network:
        elements *= -(-SLOWED_BYTES // (8 * units * elements))
    symbols = toy.basis(shown.steps, rows, has_inputs=shown.messages)
    watch = Watch(
        symbols,
        NAMES[:units],
        workers if shown.is_split else 1,
        shown.kinds,
        shown.micros,
        rows if shown.messages else 0,
    )
    config = toy.configured(
        f"batch.size={rows}",
        f"batch.micro_batches={shown.micros}",
        f"run.steps={shown.steps}",
        *shown.settings,
    )
    trainer = Trainer(
        transport,
        toy.units(units, elements, symbols, watch.seen),
        config,
        toy.SymbolLoss(watch.seen),
    )
    watch.begin(trainer)
    sent, source = transport.traffic.nbytes, toy.SymbolSource(symbols, watch.seen)
    for step in range(shown.steps):
        transport.barrier()
        began = time.perf_counter()
        watch.clock = lambda began=began: time.perf_counter() - began  # type: ignore[misc]
        watch.step(step + 1)
        batch = trainer.replica.batch(source, step)
        watch.rows_arrived(batch[0])
        trainer.step(step, *batch)
        if step == shown.steps - 1 and not shown.messages:
            trainer.sync_parameters()
        watch.end()
        transport.barrier()
    nbytes = (transport.traffic.nbytes - sent) / shown.steps
    stored = sum(trainer.replica.held_by_kind().values()) - trainer.grid.scratch_bytes
    return _RankRun(watch.entries, nbytes, *_traffic(trainer), stored, trainer.storage.length)


WIDE = 3
"""Width of a time slot in a picture, relative to the height of a row."""


def _slots(frames: Sequence[Frame], columns: Sequence[Columns]) -> list[tuple[str, Sequence[str]]]:
    """Return, for each time slot, the unit that rank 0 computes, and those whose sums are under way.

    The last slot is that in which all gradients become complete.
    """
    names, slots = columns[-1].names, list[tuple[str, Sequence[str]]]()
    for before, frame in pairwise(frames):
        unit = str(getattr(frame.title, "values", {}).get("unit", ""))
        gradients = before.cells[0][-len(names) :]
        travel = [name for name, cell in zip(names, gradients, strict=True) if UNDER_WAY in cell]
        slots.append((unit, travel))
    return [slot for slot in slots if any(slot)]


def _of_time(slots: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, list[CutMatrix]]]:
    """Return a matrix with time to the right: computing in its first row, below it a row for each bucket."""
    parts = [
        (0, WIDE * slot, 1, WIDE, Sentence("backward of {unit}", unit=unit), 0)
        for slot, (unit, _) in enumerate(slots)
        if unit
    ]
    buckets = dict.fromkeys(unit for _, travel in slots for unit in reversed(travel))
    for row, bucket in enumerate(buckets, 1):
        during = [slot for slot, (_, travel) in enumerate(slots) if bucket in travel]
        law = Sentence("all-reduce of {unit}", unit=bucket)
        parts.append((row, WIDE * during[0], 1, WIDE * len(during), law, 1))
    title = "time to the right: other units compute while a bucket is reduced"
    shape = 1 + len(buckets), WIDE * len(slots)
    return [(title, [CutMatrix("", "", shape, parts)])] if buckets else []


def _by_message(frames: Sequence[Frame], n: int, size: int) -> list[CountedFormula]:
    """Return the bytes that all ranks sent before each of four frames, as in `Master`.

    size  bytes of all parameters
    """
    row, target = 8 * toy.VECTOR, 8  # logits have as many bytes as a row
    words = {
        "rows": ("(n-1) (X + Y), X of a row, Y of its target", row + target),
        "parameters": ("(n-1) S", size),
        "logits": ("(n-1) (L + Y), L of the logits of a row", row + target),
        "gradients of logits": ("(n-1) L", row),
    }
    totals = [sum(frame.sent) for frame in frames]
    arrivals = {
        frame.title.values["what"]: after - before
        for frame, before, after in zip(frames[1:], totals, totals[1:], strict=False)
        if isinstance(frame.title, Sentence) and "what" in frame.title.values
    }
    return [
        CountedFormula(
            Sentence("bytes of all messages with {what}", what=Sentence(name)),
            arrivals.get(Sentence(name), 0),
            formula,
            (n - 1) * each,
        )
        for name, (formula, each) in words.items()
    ]


def _traffic(trainer: Trainer) -> tuple[str, float]:
    formula = formula_of(trainer.config)
    assert formula is not None
    sample = Sample(8 * toy.VECTOR, 8, toy.VECTOR)
    return formula.words, float(formula.of(RankFacts.of(trainer), sample) or 0)


def _frames(
    ranks: Sequence[Mapping[Key, WatchedState]],
    shown: ShownMode,
    columns: Sequence[Columns],
    is_timed: bool,
) -> list[Frame]:
    """Return a frame for each event of any rank. A rank that had no such event shows its state
    before it.
    """
    frames: list[Frame] = []
    last = [entries[0,] for entries in ranks]
    for key in sorted({key for entries in ranks for key in entries}):
        last = [entries.get(key, before) for entries, before in zip(ranks, last, strict=True)]
        entry = next(entries[key] for entries in ranks if key in entries)
        title = entry.title
        if shown.steps > 1 and len(key) > 1:
            title = Sentence("step {k}: {event}", k=key[0], event=title)
        ends = len(key) == 1 or key[1] == ENDED
        frame = Frame(
            title,
            tuple(
                tuple(
                    cell
                    for group in columns
                    for cell in state.cells.get(group.heading, ("",) * len(group.names))
                )
                for state in last
            ),
            sent=tuple(state.nbytes for state in last) if ends or shown.messages else (),
            seconds=max(state.seconds for state in last) if ends and is_timed and key[0] else None,
        )
        if frames and not frame.changed(frames[-1]):
            # The last event of a step has its bytes and seconds.
            frame = frame._replace(title=frames.pop().title)
        frames.append(frame)
    return frames


class Watch:
    """The events of one rank, and what it stored after each. Layers and trainer of a toy job call it.

    names  of the units
    cells  number of cells of each unit
    kinds  kinds of passes that are events of their own
    rows   number of rows of the batch, if rows and logits are shown; else 0
    """

    def __init__(
        self,
        symbols: toy.Symbols,
        names: Sequence[str],
        cells: int,
        kinds: Collection[str],
        micro_batches: int,
        rows: int = 0,
    ):
        self._rows, self._held = rows, dict[str, tuple[str, ...]]()
        self._symbols, self._names, self._cells, self._kinds = symbols, names, cells, kinds
        self._micro_batches, self.entries = micro_batches, dict[Key, WatchedState]()
        self._step, self._passes = 0, dict[str, int]()
        self._opened: Mapping[int, tuple[str, ...]] = {}
        self._written: dict[int, tuple[str, ...]] = {}
        self._ready: list[int] = []
        self._first_bytes = 0
        self.clock: Callable[[], float] = lambda: 0.0

    def begin(self, trainer: Trainer) -> None:
        """Watch a trainer: its start is an event, and so are each update's begin and end."""
        self.trainer = trainer
        # A later call of `kept` would end messages in flight; the arrays stay the same.
        self._buffers = {buffer.name: buffer for buffer in trainer.replica.state()}
        self._first_bytes = trainer.transport.traffic.nbytes
        replica = trainer.replica
        optimizer: Any = replica.optimizer
        update = optimizer.update
        if self._rows:
            optimizer.update = self._earlier
            replica.apply(1.0, 0.0, 1)
        self._stored = self._read_parameters()
        self._note((0,), "start")
        apply = replica.apply

        def watched(scale: float, lr: float, step: int) -> None:
            self._opened = {}
            self._read_gradients()
            self._note((self._step, SUMMED), Sentence("gradients complete"))
            apply(scale, lr, step)
            self._note((self._step, UPDATED), Sentence("update"))

        def by_piece(
            *numbers: Any, updated: Callable[[Piece], object] = lambda piece: None
        ) -> None:
            def read(piece: Piece) -> None:
                self._read_piece(piece, replica.owned[piece])
                updated(piece)

            update(*numbers, updated=read)

        replica.apply = watched  # type: ignore[method-assign]
        optimizer.update = by_piece

    def _earlier(
        self, *numbers: Any, updated: Callable[[Piece], object] = lambda piece: None
    ) -> None:
        """Update the parameters as a step before the first one would have done; as `Optimizer.update`."""
        for piece, parameters in self.trainer.replica.owned.items():
            parameters[...] = self._symbols.cell("v", parameters.size)
            updated(piece)

    def _read_piece(self, piece: Piece, parameters: Any) -> None:
        """Read a piece of the parameters that has just been updated.

        Messages with other pieces may be on their way already, so only this one is read.
        """
        own = self._placed(parameters, [piece._replace(offset=0)])
        pairs = zip(own, self._stored["parameters"], strict=True)
        stored = self._read_buffers()
        self._stored = {**stored, "parameters": tuple(new or old for new, old in pairs)}

    def step(self, number: int) -> None:
        self._step, self._ready, self._written = number, [], {}
        self._passes = {"forward": 0, "weight": 0}

    def end(self) -> None:
        """End a step, when the parameters are current."""
        self._opened = {}
        self._stored = self._read_parameters()
        self._note((self._step, ENDED), Sentence("end of the step"))

    def seen(self, layer_pass: toy.Pass) -> None:
        """Record a pass of a layer."""
        if not self._passes:  # No step has begun.
            return
        count = len(self._names)
        if self._rows:
            self._seen_rows(layer_pass)
        if layer_pass.kind in ("batch", "loss"):
            return
        if layer_pass.kind == "input":
            self._opened = {layer_pass.unit: self._read(layer_pass.array)}
            return
        micro, at = divmod(self._passes[layer_pass.kind], count)
        self._passes[layer_pass.kind] += 1
        if layer_pass.kind == "forward":
            self._opened = {layer_pass.unit: self._read(layer_pass.array)}
            title = Sentence("forward of {unit}", unit=self._names[layer_pass.unit])
        else:
            self._written[layer_pass.unit] = self._read(layer_pass.array)
            title = Sentence("backward of {unit}", unit=self._names[layer_pass.unit])
        if self._micro_batches > 1:
            title = Sentence("micro-batch {k}: {event}", k=micro, event=title)
        if layer_pass.kind == "weight" and micro == self._micro_batches - 1:
            self._ready.append(layer_pass.unit)
        if layer_pass.kind in self._kinds:
            self._note((self._step, COMPUTED, micro, int(layer_pass.kind == "weight"), at), title)

    def rows_arrived(self, rows: Any) -> None:
        """Record that this rank has its rows of the batch."""
        if self._rows:
            self._hold("batch", rows)
            self._arrived(1, "rows")

    def _seen_rows(self, layer_pass: toy.Pass) -> None:
        """Record a pass in which rows, logits or their gradients are on another rank than before."""
        last = len(self._names) - 1
        match layer_pass.kind, layer_pass.unit:
            case "batch", _:
                self._hold("batch", layer_pass.rows)
                self._note((0,), "start")
            case "forward", 0:
                self._stored = self._read_parameters()
                self._arrived(2, "parameters")
            case "loss", _:
                self._hold("logits", layer_pass.rows)
                self._arrived(4, "logits")
                self._hold("gradients of logits", layer_pass.array)
                share = float(layer_pass.array.max())
                self._held["loss"] = (toy.written({f"l{row}": share for row in range(self._rows)}),)
                self._note((self._step, ARRIVED, 5), Sentence("loss of all rows"))
            case "input", unit if unit == last:
                if "loss" not in self._held:  # This rank's logits have left.
                    self._arrived(4, "logits")
                self._hold("gradients of logits", layer_pass.rows)
                self._arrived(6, "gradients of logits")
        if layer_pass.kind == "forward" and layer_pass.unit == last:
            self._hold("logits", layer_pass.rows)
            self._note((self._step, ARRIVED, 3), Sentence("forward of the model"))

    def _arrived(self, order: int, what: str) -> None:
        self._note((self._step, ARRIVED, order), Sentence("{what} arrive", what=Sentence(what)))

    def _hold(self, group: str, rows: Any) -> None:
        """Take over the contents of the columns of rows; each row stands below its own number."""
        letter, shown_as = OF_ROWS[group]
        contents = [self._symbols.read(row) for row in rows]
        self._held[group] = tuple(
            next((c.replace(letter, shown_as) for c in contents if f"{letter}{row}" in c), "")
            for row in range(self._rows)
        )

    def _note(self, key: Key, title: str) -> None:
        cells = dict(self._stored)
        parameters = [*cells["parameters"]]
        for unit, contents in self._opened.items():
            parameters[unit * self._cells : (unit + 1) * self._cells] = contents
        cells |= {**self._held, "parameters": tuple(parameters)}
        is_computing = len(key) > 1 and key[1] == COMPUTED
        cells["gradients"] = tuple(
            cell + UNDER_WAY * (is_computing and self._is_under_way(unit))
            for unit in range(len(self._names))
            for cell in self._written.get(unit, ("",) * self._cells)
        )
        traffic = self.trainer.transport.traffic
        self.entries[key] = WatchedState(
            title, cells, traffic.nbytes - self._first_bytes, self.clock()
        )

    def _is_under_way(self, unit: int) -> bool:
        """Return whether the sum of the unit's gradient starts now, or has started."""
        if self.trainer.transport.size == 1:
            return False
        replica = self.trainer.replica
        buckets = replica.buckets.buckets
        if not buckets:
            return unit in self._ready and not isinstance(replica, Averaging)
        return any(unit in bucket.units and {*bucket.units} <= {*self._ready} for bucket in buckets)

    def _read(self, array: np.ndarray) -> tuple[str, ...]:
        return self._symbols.read_all(array, self._cells)

    def _read_parameters(self) -> dict[str, tuple[str, ...]]:
        buffers = self._buffers
        stored = buffers.get("own_parameters", buffers["parameters"])
        return {**self._read_buffers(), "parameters": self._placed(stored.array, stored.pieces)}

    def _read_buffers(self) -> dict[str, tuple[str, ...]]:
        """Return the contents of the first buffer of optimizer state; {} if there is none."""
        states = [b for name, b in self._buffers.items() if not name.endswith("parameters")]
        if not states:
            return {}
        return {"optimizer state": self._placed(states[0].array, states[0].pieces)}

    def _read_gradients(self) -> None:
        """Read the gradients that this rank stores after their reduction."""
        replica = self.trainer.replica
        buffer = np.asarray(replica.gradient_buffer)
        pieces = replica.shards.owned if isinstance(replica, Zero2) else self._whole(buffer)
        contents = self._placed(buffer, pieces)
        self._written = {
            unit: contents[unit * self._cells : (unit + 1) * self._cells]
            for unit in range(len(self._names))
        }

    def _whole(self, buffer: np.ndarray) -> Sequence[Piece]:
        """Return the pieces of a buffer: those of the parameters if they have all its elements,
        else one.
        """
        pieces = self._buffers["parameters"].pieces
        if sum(piece.stop - piece.start for piece in pieces) == buffer.size:
            return pieces
        return [Piece(0, buffer.size, 0)]

    def _placed(self, array: Any, pieces: Sequence[Piece]) -> tuple[str, ...]:
        """Return the contents of all cells; a cell of which the pieces have no element is empty."""
        length = self.trainer.storage.length // (len(self._names) * self._cells)
        contents = []
        for cell in range(len(self._names) * self._cells):
            start, stop = cell * length, (cell + 1) * length
            parts = [
                np.asarray(array)[p.offset + max(p.start, start) - p.start :][
                    : min(p.stop, stop) - max(p.start, start)
                ]
                for p in pieces
                if max(p.start, start) < min(p.stop, stop)
            ]
            contents.append(self._symbols.read(np.concatenate(parts)) if parts else "")
        return tuple(contents)


def _of_ring(n: int, size: float) -> float:
    return 2 * (n - 1) / n * size


def _topic(title: str, shown: ShownMode, least: int = 1) -> Topic:
    return Topic(
        title,
        partial(record, shown),
        ranks=3 if shown.servers else 2 if shown.is_split else 4,
        least=2 if shown.servers else least,
        timed=True,
    )


TOPICS = {
    "ddp": _topic(
        "Data parallelism: buckets of gradients, and overlap with the backward",
        ShownMode(
            (ONE_UNIT,),
            (
                "Each of {n} ranks has all parameters and one row of the batch.",
                "The backward goes from the last unit to the first.",
                "A bucket is a run of units. Its all-reduce starts when its gradients are complete.",
                "The other units compute their backward meanwhile: this is the overlap.",
                DIVIDED,
                "All ranks then make the same update, and no parameter is sent.",
            ),
            (Replica.begin, Buckets, ring.all_reduce),
            _of_ring,
            has_buckets=True,
        ),
    ),
    "master": _topic(
        "Master: rank 0 alone updates",
        ShownMode(
            ("replication.mode=master",),
            (
                "Rank 0 reads the batch, and sends each rank its own rows (scatter).",
                "Parameters go down a tree to all ranks: each is a replica of the model.",
                "The replicas send their logits to rank 0 (gather), which computes the loss of all rows.",
                "It sends each replica the gradients of its logits.",
                "Gradients of parameters go up the same tree to rank 0, which updates.",
                "Only rank 0 has optimizer state, and its links carry the most.",
            ),
            (Master,),
            # An input has VECTOR elements, a target one, and the gradients of logits VECTOR.
            lambda n, size: (
                math.ceil(math.log2(n)) * size + (n - 1) * 8 * (toy.VECTOR + 1 + toy.VECTOR)
            ),
            units=1,
            groups=OF_MESSAGES,
            messages=True,
        ),
    ),
    "server": _topic(
        "Parameter server, synchronous: workers push gradients and pull parameters",
        ShownMode(
            ("replication.mode=server",),
            (
                "The last rank is a server: it has the parameters and computes no rows.",
                "Each of {w} workers pushes the gradient of a unit as soon as it is complete.",
                "The server waits for all workers, adds in the order of ranks, and updates.",
                DIVIDED,
                "It sends the new parameters to all workers: W S bytes through one link.",
            ),
            (Replica.begin, Worker, Server),
            lambda n, size: (n - 1) * size,
            servers=1,
        ),
    ),
    "zero1": _topic(
        "ZeRO stage 1: optimizer state is sharded",
        ShownMode(
            ("replication.zero=1", MOMENTUM),
            (
                "Every rank has all parameters and all gradients.",
                "After a reduce-scatter each rank has the sum of one shard; the rest is a partial sum.",
                "A rank has only the optimizer state of its shard, and updates only this shard.",
                "An all-gather sends the updated shards to all ranks.",
            ),
            (Zero1,),
            _of_ring,
            units=0,
            groups=WITH_STATE,
            memory=("(8+8) P + 8 P/n", lambda p, n, unit: 16 * p + 8 * p / n),
        ),
    ),
    "zero2": _topic(
        "ZeRO stage 2: gradients are sharded, too",
        ShownMode(
            ("replication.zero=2", MOMENTUM, ONE_UNIT),
            (
                "Every rank has all parameters, but only a shard of gradients and optimizer state.",
                "The gradient of a bucket is in a full-size buffer only until it is reduce-scattered.",
                "Then the rank adds its chunk to its shard, and the next bucket uses the buffer.",
                "An all-gather sends the updated shards to all ranks, as in stage 1.",
            ),
            (Zero2, Zero1),
            _of_ring,
            units=2,
            is_split=True,
            groups=WITH_STATE,
            memory=(
                "8 P + (8+8) P/n + 2 x 8 U, U in a unit",
                lambda p, n, unit: 8 * p + 16 * p / n + 16 * unit,
            ),
        ),
    ),
    "zero3": _topic(
        "ZeRO stage 3 (FSDP): parameters are sharded, too",
        ShownMode(
            ("replication.zero=3", MOMENTUM),
            (
                "A rank stores a shard of every unit: parameters, gradients and optimizer state.",
                "Just before a unit computes, an all-gather collects its parameters.",
                "A later unit uses the buffer again, so at most two units are unsharded at once.",
                "After its backward, a reduce-scatter leaves each rank the sum of its shard.",
            ),
            (Zero3, Zero2),
            lambda n, size: (n - 1) / n * (3 * size - 2 * size / 3),
            units=3,
            is_split=True,
            kinds=("forward", "weight"),
            groups=WITH_STATE,
            memory=(
                "(8+8+8) P/n + 2 x (8+8) U, U in a unit",
                lambda p, n, unit: 24 * p / n + 32 * unit,
            ),
        ),
    ),
    "accumulation": _topic(
        "Gradient accumulation: micro-batches add, and one reduction follows",
        ShownMode(
            ("replication.bucket_mb=0.000001",),
            (
                "Each rank divides its rows into two micro-batches.",
                "The first backward overwrites the gradient buffer, the second one adds to it.",
                "Only the last micro-batch starts reductions: the bytes sent do not grow.",
            ),
            (Stage, Buckets),
            _of_ring,
            units=2,
            micros=2,
        ),
    ),
    "local": _topic(
        "Local SGD: workers update alone, and average every second step",
        ShownMode(
            ("replication.mode=local", "replication.period=2"),
            (
                "Each worker updates its own parameters with its own gradient.",
                "After two steps an all-reduce averages the parameters of all workers.",
                "Between averages no message is sent, but the workers drift apart.",
            ),
            (LocalSGD,),
            lambda n, size: _of_ring(n, size) / 2,
            units=1,
            steps=2,
            kinds=(),
        ),
    ),
    "gossip": _topic(
        "Gossip: each worker averages with one neighbour after each step",
        ShownMode(
            ("replication.mode=gossip",),
            (
                "Each worker updates alone, then takes the mean with one other worker.",
                "The neighbour is at distance 1, 2, 4, ... in turn, so news reaches all in lg n steps.",
                "At the end of the run an all-reduce takes the average of all workers.",
            ),
            (Gossip, distances),
            lambda n, size: size + _of_ring(n, size) / 2,
            units=1,
            steps=2,
            kinds=(),
        ),
        least=2,
    ),
}
