"""`plan layout`: step time and memory of every layout of a job, predicted in one process.

The units of the model are counted on arrays without memory, for each number of tensor- and
context-parallel ranks and each size of a micro-batch: FLOPs, activations, and collectives of activations.
The time of a step is that of the simulated pipeline, whose stages compute and sum activations, and
then of the messages between replicas that no computing hides.

Seconds of computing are FLOPs over one rate, or those of timed units (tools/plan/units.py). Seconds
of messages are those of the cost model (collectives/selection/cost_model.py). The update of the
optimizer is not counted.
"""

import math
from collections import Counter as Numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import (
    Tuning,
    candidates,
    level_of,
    plans_of,
    predict,
)
from mpitrain.collectives.selection.table import TABLES
from mpitrain.collectives.selection.tuning import foreign
from mpitrain.config import Config, with_settings
from mpitrain.errors import ConfigError, gigabytes, multiples_near
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine import process
from mpitrain.machine.backend import DeviceBackend
from mpitrain.parallel.buckets import bucket_bytes
from mpitrain.parallel.grid import EXPERTS, Axes, divisor
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.tensor.layer_factory import described
from mpitrain.pipeline.partition import cut
from mpitrain.pipeline.pipeline import own
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import (
    SERIAL,
    Plan,
    Program,
    Send,
    fused_at_the_input,
    plan_of,
    training_program,
)
from mpitrain.pipeline.simulate import Cost, held, simulate
from mpitrain.plots import COLOURS, add_legend, save, subplots
from mpitrain.regions import share
from mpitrain.run.build import alone
from mpitrain.run.choices import parse
from mpitrain.run.count.step import Counter
from mpitrain.run.job import Job, resolve_here
from mpitrain.run.rules import check_each, of_model
from mpitrain.tools.plan.memory import check_imbalance, most_imbalance, stage_sizes
from mpitrain.tools.plan.mode_traffic import RankFacts, of_partial_sums, of_replicas, sent_to_agree
from mpitrain.tools.plan.unit_counts import UnitCount, keeps, unit_counts
from mpitrain.tools.plan.units import UnitTimes, facts_of, kind_of, seconds_of, timed_quickly
from mpitrain.tools.text_table import TextColumn, TextTable

SHOWN = 10
"""Layouts in the table."""
LESS = 0.95
"""A slower layout is of interest if it needs at most this part of the memory of a faster one."""
KEYS = ("tp", "cp", "pp", "zero", "micro_batches", "recompute")
"""Keys of a layout that its neighbours change, each alone; dp follows."""
OF_STEP = {0: ("all-reduce",), 1: ("reduce-scatter", "all-gather"), 2: ("all-gather",)}
OF_MICRO_BATCH = {2: ("reduce-scatter",), 3: ("reduce-scatter", "all-gather", "all-gather")}
"""{stage of ZeRO: its collectives of gradients and parameters}, once a step or a micro-batch."""
MESSAGES = {"sendrecv": "ping-pong", "all-to-all": "pairwise", "shift": "ring"}
"""{operation of one algorithm: the algorithm}."""
LINEAR = 1 << 24
"""Elements from which the cost model is a line."""
SAVINGS = ("memory.logit_chunks=8", "memory.attention=tiled", "optimizer.name=adamw8bit")
"""Settings beside the layout that may lower the memory of a rank; half the context is one more."""
PARTS = {
    "computing": "computing",
    "tensors": "messages between tensor-, context- and expert-parallel ranks",
    "pipeline": "the bubble and messages between stages",
    "replicas": "messages between replicas",
}
"""{field of Prediction: its name in a sentence}."""


class ParallelLayout(NamedTuple):
    """One way to divide a job over ranks: the keys of the configuration that `plan layout` chooses."""

    dp: int
    tp: int
    pp: int
    zero: int
    micro_batches: int
    recompute: str
    cp: int = 1
    ep: int = 1

    @property
    def settings(self) -> dict[str, str | int]:
        """Return {key: value}."""
        keys = ("layout.dp", "layout.tp", "layout.pp", "replication.zero", "batch.micro_batches")
        more = "memory.recompute", "layout.cp", "layout.ep"
        return dict(zip((*keys, *more), self, strict=True))

    @property
    def axes(self) -> Axes:
        return Axes(self.tp, self.dp, self.pp, cp=self.cp, ep=self.ep)

    def of(self, config: Config) -> Config:
        """Return a configuration with this layout."""
        return config.changed(self.settings)


class Prediction(NamedTuple):
    """The predicted step of a layout: seconds of its slowest stage, and bytes of its fullest rank.

    computing  of matrix products
    tensors    collectives of activations over tp, cp and ep
    pipeline   the rest of the simulated pipeline: idle time, and messages between stages
    replicas   sums and gathers over dp x cp that no computing hides
    nbytes     parameters, gradients, optimizer state and activations
    imbalance  rows at the experts of the predicted rank, over the mean
    """

    layout: ParallelLayout
    computing: float
    tensors: float
    pipeline: float
    replicas: float
    nbytes: float
    imbalance: float = 1.0

    @property
    def step_s(self) -> float:
        return self.computing + self.tensors + self.pipeline + self.replicas

    def facts(self) -> dict[str, Any]:
        return {"step_s": self.step_s, **self._asdict(), "layout": self.layout.settings}


class CountedUnit(NamedTuple):
    """A unit of a rank, in one micro-batch.

    repeated  of its FLOPs, those of recomputed forwards
    output    elements of its output for one row
    keeps     whether what it saves has its input, and its output
    """

    counted: UnitCount
    repeated: int
    output: int
    keeps: tuple[bool, bool]


class ChunkBytes(NamedTuple):
    """Bytes of a chunk of the model in one micro-batch, named as in `pipeline.simulate.held`."""

    saved: int
    output: int
    input: int
    gradient: int
    sent: int
    pending: int
    forward: int
    backward: int
    input_half: int
    weight_half: int

    @classmethod
    def of(cls, units: Sequence[CountedUnit], start: int, stop: int, boundary: int) -> "ChunkBytes":
        """Return those of units [start, stop) of a model.

        boundary  bytes of an activation between chunks
        """
        own, is_last = units[start:stop], stop == len(units)
        given, left = boundary * (start > 0), boundary * (not is_last)
        # In the whole model the unit before keeps this chunk's input.
        absent = given * (start > 0 and units[start - 1].keeps[1] and not own[0].keeps[0])
        live = [*accumulate((each.counted.saved for each in own), initial=given)]
        pending = [each.counted.pending for each in own]
        working = [each.counted.working for each in own]
        kept = left * own[-1].keeps[1]
        return cls(
            live[-1] - absent - left + kept + own[-1].counted.loss * is_last,
            left - kept,
            given,
            left,
            given,
            sum(pending),
            max(
                at + w[0] - absent * (n > 0)
                for n, (at, w) in enumerate(zip(live, working, strict=False))
            ),
            max(at + w[1] for at, w in zip(live, working, strict=False)) - absent,
            max(
                at + w[2] + sum(pending[n + 1 :])
                for n, (at, w) in enumerate(zip(live, working, strict=False))
            )
            - absent,
            max(sum(pending[:n]) + w[3] for n, w in enumerate(working)),
        )


class Simulated(NamedTuple):
    """A simulated pipeline: seconds of `computing` and `tensors` are those of the slowest stage.

    backward     seconds of one micro-batch, on the slowest stage
    """

    makespan: float
    computing: float
    tensors: float
    backward: float


class MessageTimes:
    """The cost model of collectives between ranks on these hosts.

    hosts  name of the host of each rank
    """

    def __init__(self, tuning: Tuning, hosts: Sequence[str], is_on_device: bool):
        self._hosts, self.is_on_device, self._tuning = hosts, is_on_device, tuning
        # Consecutive ranks of a host share a socket, if the tuning is of a host with several.
        on_host, sockets = hosts.count(hosts[0]), tuning.machine.get("sockets", 1)
        self._sockets = [
            f"{rank % on_host * sockets // on_host}" if sockets > 1 else ""
            for rank in range(len(hosts))
        ]
        self._predicted = cache(partial(predict, tuning))

    def seconds(
        self, operation: str, members: range, nbytes: float, itemsize: int, algorithm: str = "auto"
    ) -> float:
        """Return the seconds of one collective, while all groups of its kind run theirs.

        operation  as in UnitCount.sums; or "sendrecv", from the first of two members to the other
        nbytes     of the array
        """
        hosts = [self._hosts[rank] for rank in members]
        elements = nbytes / itemsize
        if len(hosts) == 1 or elements < 1:
            return 0.0
        if len(set(hosts)) > 1:  # All groups send over the one link of their host.
            elements *= self._hosts.count(hosts[0]) / hosts.count(hosts[0])
        numbers = {name: str(number) for number, name in enumerate(dict.fromkeys(hosts))}
        where = tuple(numbers[name] for name in hosts)
        level = level_of(hosts, [self._sockets[rank] for rank in members])
        operation = operation.replace("all-reduce", "allreduce")
        names = [MESSAGES.get(operation, algorithm)]
        if operation in TABLES and algorithm not in TABLES[operation]:
            names = candidates(Topology(hosts, is_on_device=self.is_on_device), operation)
        # Between powers of four the model is nearly linear, and long plans take seconds to make.
        low = min(4 ** int(math.log(elements, 4)), LINEAR)
        times = [
            [
                self._predicted(operation, name, where, size, itemsize, level=level)
                for size in (low, 4 * low)
            ]
            for name in names
        ]
        return min(
            least + (elements / low - 1) / 3 * (most - least)
            for least, most in times
            if not math.isnan(least)
        )

    def part_bytes(self, members: range, storage: Storage) -> float:
        """Estimate the bytes of a bucket between hosts: as `cost_model.part_bytes`, on a line."""
        itemsize = storage.dtype.itemsize
        whole = storage.length * itemsize
        full, quarter = (
            self.seconds("all-reduce", members, nbytes, itemsize, "ring")
            for nbytes in (whole, whole / 4)
        )
        moved = min(full, (full - quarter) * 4 / 3)
        return whole / min(
            (2**power for power in range(9)),
            key=lambda parts: (parts + 1) * (full - moved + moved / parts),
        )

    def can_hide(self, members: range) -> bool:
        """Return whether messages take no time of computing: within a host the same cores copy."""
        return self.is_on_device or len({self._hosts[rank] for rank in members}) > 1


COUNT = 8
"""Bytes of a number of rows."""


class Planner:
    """Predicts the layouts of one job.

    hosts  name of the host of each rank
    work   FLOPs per second of a rank, or timed units; None: they are timed here, by the threads of
           this process, while other processes load the other cores of a host
    shown  shows the progress of the steps of timing, as of `timed_quickly`
    limit  bytes of memory of a rank; 0: what is free here, shared by the ranks of a host
    imbalance  rows at the experts of the busiest rank of layout.ep, over the mean; the step and the memory
               are that rank's. A layout with less ep has the most that is possible there
    raises     ConfigError if no layout can have this imbalance
    """

    def __init__(
        self,
        config: Config,
        hosts: Sequence[str],
        work: float | UnitTimes | None = None,
        limit: float = 0,
        shown: Callable[[Iterator[Any]], Iterable[Any]] = iter,
        imbalance: float = 1.0,
    ):
        if imbalance > 1 and not config.model.experts:
            raise ConfigError(
                f"--imbalance is of the tokens of experts, but model.experts is 0 and --imbalance {imbalance:g}.",
                "Set model.experts, or leave out --imbalance.",
            )
        self.imbalance, self.ranks = imbalance, len(hosts)
        if parts := {each.ep for each in self.layouts(config)}:
            check_imbalance(config.model, parts, imbalance)
        shard, alone_config = (
            config.replication.shard,
            ParallelLayout(1, 1, 1, 0, 1, "none").of(config),
        )
        if config.replication.zero:  # One rank divides nothing, but layouts do.
            alone_config = alone_config.changed({"replication.shard": "all"})
        self._job = alone(alone_config, hosts[:1])
        self._whole = self._job.units(described(self._job.device.ops, self._job.config.layout))
        self._config, self._hosts = self._job.config.changed({"replication.shard": shard}), hosts
        device = self._job.device
        is_on_device = isinstance(device.backend, DeviceBackend)
        on_host = 1 if is_on_device else hosts.count(hosts[0])
        if work is None:
            threads = max(1, process.cores() // on_host)
            others = 0 if is_on_device else min(on_host, process.cores() // threads) - 1
            steps = timed_quickly(self._job, others)
            rows = [row for _, of_size in shown(steps) for row in of_size]
            work = UnitTimes(facts_of(self._job, threads), rows)
        self.times: UnitTimes | None = None
        if isinstance(work, UnitTimes):
            self._check_kinds(work)
            self.times, self._points = work, work.points()
            self._turns = work.turns(on_host)
            self.rate = work.rate / self._turns
        else:
            self.rate = work
        self.limit = limit or (
            self._config.memory.limit_gb * 1e9 or process.free_memory(device.kind) / on_host
        )
        self._messages = MessageTimes(self._job.tuning, hosts, is_on_device)
        self._computed = device.itemsize(self._config.precision.stored)
        self._stored = np.dtype(self._config.precision.stored).itemsize
        self._counts, self._simulated = cache(self._count), cache(self._simulate)
        self._planned = cache(self._plan)
        self._two, self._kept = cache(self._count_two), cache(self._count_kept)
        self._stages, self._state = cache(self._count_stages), cache(self._count_state)
        self._held, self._cut = cache(self._count_held), cache(self._count_cut)
        self._activations = cache(self._count_activations)

    def _check_kinds(self, times: UnitTimes) -> None:
        timed = times.points()
        units, _ = self._count_two(ParallelLayout(1, 1, 1, 0, 1, "none"), 1)
        if missing := [kind for unit in units if (kind := kind_of(unit.name)) not in timed]:
            raise ConfigError(
                f"The timed units are {', '.join(timed)}, but the model has units {missing[0]}.",
                "Time those of this configuration: mpitrain bench units.",
            )

    @property
    def is_doubtful(self) -> bool:
        return self.times is not None and bool(self.times.doubtful())

    def _beyond(self) -> list[str]:
        """Return the kinds of units of which one row takes more FLOPs than any that was timed."""
        units, counts = self._two(ParallelLayout(1, 1, 1, 0, 1, "none"), 1)
        sizes = {kind_of(u.name): c.flops for u, c in zip(units, counts, strict=True)}
        return [kind for kind, flops in sizes.items() if flops > self._points[kind][-1][0]]

    def _of_computing(self, unit: CountedUnit, rows: int) -> tuple[float, float]:
        """Return the seconds of a unit in a micro-batch, and those of forwards that it repeats."""
        flops = unit.counted.flops - unit.repeated
        if self.times is None:
            return flops / self.rate, unit.repeated / self.rate
        once = self._turns * seconds_of(
            self._points[kind_of(unit.counted.name)], flops or rows * unit.output
        )
        return once, once * unit.repeated / max(1, flops)

    def notes(self) -> Iterator[str]:
        """Yield sentences about constants that were not measured on the machine of the job."""
        tuning = self._job.tuning
        if self.times is None:
            yield "computing: FLOPs over this rate; no unit was timed"
        elif self._config.replication.tuning and self.times.facts["device"] == "cpu":
            here, there = (facts.get("processor") for facts in (self.times.facts, tuning.machine))
            if here != there:
                yield f"replication.tuning is of other hardware, {there}: units were timed on {here}"
        if self.times is not None and (kinds := self._beyond()):
            yield f"units of a smaller model were timed: those of {', '.join(kinds)} are extrapolated"
        if self.is_doubtful and self.times:
            yield f"~: other work disturbed the timing of {', '.join(self.times.doubtful())}; time again"
        if advice := foreign(tuning, self._hosts):
            yield f"{advice} in replication.tuning"

    def layouts(self, given: Config) -> Iterator[ParallelLayout]:
        """Yield the layouts to predict; what `given` sets to other than the defaults stays."""
        ranks, layout, size = self.ranks, given.layout, given.batch.size
        for tp in [layout.tp] if layout.tp > 1 else _divisors(ranks):
            for pp, cp in product(
                [layout.pp] if layout.pp > 1 else _divisors(ranks // tp),
                [layout.cp] if layout.cp > 1 else _divisors(ranks // tp),
            ):
                dp, rest = divmod(ranks, tp * pp * cp)
                if rest or dp > size or layout.dp not in (0, dp):
                    continue
                parts = [
                    ep
                    for ep in ([layout.ep] if layout.ep > 1 else _divisors(dp))
                    if dp % ep == 0
                    and (ep == 1 or (given.model.experts and not given.model.experts % ep))
                ]
                rows = size // dp
                counts = {pp << doubled for doubled in range(rows.bit_length())}
                counts |= {given.batch.micro_batches} - {0}
                for micro_batches, zero, recompute in product(
                    sorted(counts),
                    [given.replication.zero]
                    if given.replication.zero or dp * cp == 1
                    else range(4),
                    [given.memory.recompute] if given.memory.segment else ("none", "unit"),
                ):
                    if pp <= micro_batches <= rows:
                        for ep in parts:
                            own = dp, tp, pp, zero, micro_batches, recompute, cp, ep
                            yield ParallelLayout(*own)

    def refusal(self, layout: ParallelLayout) -> ConfigError | None:
        """Return the error with which `train` would refuse a layout."""
        config = layout.of(self._config)
        try:
            resolve_here(config, self._hosts)
        except ConfigError as error:
            return error
        return None

    def predict(self, layout: ParallelLayout) -> Prediction:
        """Predict a step.    raises  ConfigError if units do not fit stages or ranks"""
        axes, m, config = layout.axes, layout.micro_batches, layout.of(self._config)
        rows = -(-config.batch.size // (axes.dp * m))
        # Once a pipeline is full, each micro-batch adds the same.
        first, second = (min(m, full * axes.pp) for full in (2, 3))
        low, high = (self._simulated(axes, n, rows, layout.recompute) for n in (first, second))
        more = (m - first) / max(1, second - first)
        step = Simulated(*(a + more * (b - a) for a, b in zip(low, high, strict=True)))
        # Of micro-batches of unequal rows all were counted like the largest.
        part = config.batch.size / (axes.dp * m * rows)
        step = step._replace(
            makespan=part * step.makespan,
            computing=part * step.computing,
            tensors=part * step.tensors,
        )
        return Prediction(
            layout,
            step.computing,
            step.tensors,
            max(0.0, step.makespan - step.computing - step.tensors),
            self._exposed(layout, step),
            max(self._activations(axes, m, layout.recompute) + self._state(axes, layout.zero)),
            self._imbalance_of(layout),
        )

    def sent(self, layout: ParallelLayout) -> float:
        """Return the bytes that the busiest rank sends in a step, if all collectives are rings.

        Each rank has the rows of experts of the one with the busiest. NaN if they are not known, as with replication.zero_keep.
        """
        axes, m, config = layout.axes, layout.micro_batches, layout.of(self._config)
        plan, program = self._planned(axes.pp, m)
        bounds = [0, *accumulate(self._cut(len(plan.stage_of)))]

        computed = self._job.device.half or np.dtype(config.precision.stored)

        @cache
        def of_passes(tp: int, cp: int, pp: int, own_rows: int) -> int:
            of_micro = [len(share(own_rows, micro, m)) for micro in range(m)]
            sends = Numbers(of_micro[each.micro] for each in program[pp] if isinstance(each, Send))
            total = 0
            for rows, times in Numbers(of_micro).items():
                units = self._counted(axes, m, rows, layout.recompute)
                total += sends[rows] * self._boundary(axes, units, rows)
                chunks = [units[slice(*bounds[c : c + 2])] for c in own(plan.stage_of, pp)]
                sums = (sum for chunk in chunks for u in chunk for sum in u.counted.sums.items())
                for (axis, operation, nbytes), again in sums:
                    at = {"tp": (tp, axes.tp), "cp": (cp, axes.cp), "ep": (0, axes.ep)}
                    index, ranks = at[axis]
                    elements = _in_ring(operation, index, ranks, nbytes // self._computed)
                    total += times * again * self._computed * elements
                # Before the rows of experts travel their numbers, in each forward.
                mixtures = sum(
                    any("ep" in key for key in u.counted.sums) for c in chunks for u in c
                )
                forwards = times * (1 + (layout.recompute != "none"))
                total += forwards * mixtures * COUNT * config.model.experts * (axes.ep - 1)
            return total

        def of_rank(rank: int) -> float:
            tp, dp, pp, cp = axes.coords(rank)
            between = _of_replicas(
                config, axes, rank, self._hosts, *self._stages(axes)[pp], computed
            )
            return between + of_passes(tp, cp, pp, len(share(config.batch.size, dp, axes.dp)))

        return max(map(of_rank, range(axes.ranks)))

    def tokens_sent(self, layout: ParallelLayout) -> float:
        """Return the bytes of rows that the rank with the busiest experts sends in a step, there and back."""
        axes, m = layout.axes, layout.micro_batches
        plan, _ = self._planned(axes.pp, m)
        bounds = [0, *accumulate(self._cut(len(plan.stage_of)))]
        rows = -(-self._config.batch.size // (axes.dp * m))
        units, sent = self._counted(axes, m, rows, layout.recompute), [0.0] * axes.pp
        for stage, (start, stop) in zip(plan.stage_of, pairwise(bounds), strict=True):
            for unit in units[start:stop]:
                for (axis, _, nbytes), times in unit.counted.sums.items():
                    sent[stage] += m * times * nbytes * (1 - 1 / axes.ep) * (axis == "ep")
        return max(sent)

    def savings(self, given: Config, smallest: Prediction) -> list[tuple[str, float]]:
        """Return the settings that lower the memory of a layout, and their bytes, the least first."""
        found = list[tuple[str, float]]()
        for setting in (*SAVINGS, f"model.context={given.model.context // 2}"):
            with suppress(ConfigError):
                changed = parse(with_settings(given.model_dump(), [setting]))
                planner = Planner(changed, self._hosts, self.rate, self.limit)
                found.append((setting, planner.predict(smallest.layout).nbytes))
        return sorted(
            (each for each in found if each[1] < LESS * smallest.nbytes), key=lambda each: each[1]
        )

    def _count_stages(self, axes: Axes) -> list[tuple[Storage, list[range]]]:
        """Return the layout of the tensors of each stage, as `Counter.storage`."""
        plan, _ = self._planned(axes.pp, axes.pp)
        counts = self._cut(len(plan.stage_of))
        config = self._config.changed(
            {"layout.tp": axes.tp, "pipeline.partition": ",".join(map(str, counts))}
        )
        counter = Counter(self._with_layout(config, axes, plan))
        return [*map(counter.storage, range(axes.pp))]

    def _count_state(self, axes: Axes, zero: int) -> np.ndarray:
        """Return the bytes of parameters, gradients and optimizer state on each stage."""
        config = self._config.changed({"replication.zero": zero})
        job = replace(self._job, config=config, axes=axes)
        replication, nbytes = config.replication, []
        members = range(0, axes.tp * axes.copies, axes.tp)
        hosts = [self._hosts[rank] for rank in members]
        shards = divisor(axes, self._hosts, replication.shard)

        def bucket(storage: Storage) -> float:
            return bucket_bytes(
                replication.bucket_mb,
                hosts,
                self._messages.is_on_device,
                lambda: self._messages.part_bytes(members, storage),
            )

        for storage, chunks in self._stages(axes):
            stage = stage_sizes(job, storage, chunks, shards, bucket)
            nbytes.append(mode_of(config.replication, config.pipeline.schedule).memory(stage))
        return np.array(nbytes)

    def _exposed(self, layout: ParallelLayout, step: Simulated) -> float:
        """Return the seconds of messages between replicas that no computing hides.

        The last bucket has nothing to hide behind.
        """
        zero, members = layout.zero, range(0, layout.tp * layout.axes.copies, layout.tp)
        replication = self._config.replication
        longest, _ = max(self._stages(layout.axes), key=lambda stage: stage[0].length)
        of_experts = sum(
            entry.stop - entry.start
            for entry in longest.entries
            if entry.parameter.holders == EXPERTS
        )
        groups = (members, longest.length - of_experts), (members[:: layout.ep], of_experts)

        def seconds(operation: str) -> float:
            itemsize = self._computed if operation == "all-gather" else self._stored
            return sum(
                self._messages.seconds(
                    operation, ranks, length * itemsize, itemsize, replication.algorithm
                )
                for ranks, length in groups
            )

        total = sum(map(seconds, OF_STEP.get(zero, ())))
        total += layout.micro_batches * sum(map(seconds, OF_MICRO_BATCH.get(zero, ())))
        if not replication.overlap or not self._messages.can_hide(members):
            return total
        hidden = step.computing if zero > 1 else step.backward
        return max(total - hidden, total / len(longest.units))

    def _of_activations(self, unit: CountedUnit, axes: Axes, computing: float) -> float:
        """Return the seconds of a unit's collectives over tp, cp and ep, beside those of its computing.

        A ring of attention shifts keys and values while it computes with those of the last shift.
        """
        algorithm = self._config.layout.algorithm
        within = axes.tp * axes.cp
        members = {"tp": range(axes.tp), "cp": range(0, within, axes.tp)}
        members["ep"] = range(0, within * axes.ep, within)
        seconds = {"shift": 0.0, "": 0.0}
        for (axis, operation, nbytes), times in unit.counted.sums.items():
            choice = operation, members[axis], nbytes, self._computed, algorithm
            kind = operation if operation in seconds else ""
            seconds[kind] += times * self._messages.seconds(*choice)
        hidden = computing if self._messages.can_hide(members["cp"]) else 0.0
        hidden *= 1 - 1 / axes.cp  # During the last part nothing travels.
        return seconds[""] + max(0.0, seconds["shift"] - hidden)

    def _counted(self, axes: Axes, m: int, rows: int, recompute: str) -> list[CountedUnit]:
        return self._counts(Axes(axes.tp, cp=axes.cp, ep=axes.ep), min(m, 2), rows, recompute)

    def _count(self, axes: Axes, m: int, rows: int, recompute: str) -> list[CountedUnit]:
        """Count all units. Those of model.layers after the second repeat the second.

        m  1, or 2 for several micro-batches: all but the first add to gradients
        """
        tp, cp = axes.tp, axes.cp
        layout = ParallelLayout(axes.ep, tp, 1, 0, m, recompute, cp, axes.ep)
        check_each(of_model(layout.of(self._config)))
        deep, plain = self._config.model.layers, layout._replace(recompute="none")
        (two, counts), keeps = self._two(layout, rows), self._kept(layout._replace(micro_batches=1))
        tokens, *rest = self._job.source.shape
        units, shape = list[CountedUnit](), (1, tokens // cp, *rest)
        for counted, once, unit, kept in zip(
            counts, self._two(plain, rows)[1], two, keeps, strict=True
        ):
            shape = unit.layer.output_shape(shape)
            units.append(CountedUnit(counted, counted.flops - once.flops, math.prod(shape), kept))
        one = self._counter(1, plain, 1).model
        of_layer, names = len(two) - len(one), zip(one, two, strict=False)
        end = next((n for n, (a, b) in enumerate(names) if a.name != b.name), 0) + of_layer
        return units[:end] + units[end - of_layer : end] * max(0, deep - 2) + units[end:]

    def _count_kept(self, layout: ParallelLayout) -> list[tuple[bool, bool]]:
        return keeps(self._counter(min(self._config.model.layers, 2), layout, 1))

    def _count_two(
        self, layout: ParallelLayout, rows: int
    ) -> tuple[Sequence[Unit], list[UnitCount]]:
        counter = self._counter(min(self._config.model.layers, 2), layout, rows)
        return counter.model, unit_counts(counter, 0)

    def _counter(self, layers: int, layout: ParallelLayout, rows: int) -> Counter:
        config = self._config.changed(
            layout.settings
            | {
                "model.layers": layers,
                "batch.size": rows * layout.micro_batches * layout.dp,
                "pipeline.partition": "",
            }
        )
        plan = plan_of(SERIAL, 1, layout.micro_batches)
        job = self._with_layout(config, layout.axes, plan)
        return Counter(job, imbalance=self._imbalance_of(layout))

    def _with_layout(self, config: Config, axes: Axes, plan: Plan) -> Job:
        hosts = [self._hosts[0]] * axes.ranks  # What is counted does not depend on hosts.
        return replace(self._job, config=config, axes=axes, hosts=hosts, plan=plan)

    def _imbalance_of(self, layout: ParallelLayout) -> float:
        return min(self.imbalance, most_imbalance(self._config.model, layout.ep))

    def _plan(self, pp: int, m: int) -> tuple[Plan, Program]:
        """Return the schedule of m micro-batches, without and with messages."""
        settings = self._config.pipeline
        plan = find_plan(settings.schedule, pp, m, settings.chunks or None)
        return fused_at_the_input(plan), training_program(plan)

    def _simulate(self, axes: Axes, m: int, rows: int, recompute: str) -> Simulated:
        """Simulate the pipeline of a replica with m micro-batches of so many rows."""
        pp, units = axes.pp, self._counted(axes, m, rows, recompute)
        plan, program = self._planned(pp, m)
        # What a stage receives, for each micro-batch.
        received = self._boundary(axes, units, rows)
        bounds = [0, *accumulate(self._cut(len(plan.stage_of)))]
        chunks = [units[start:stop] for start, stop in pairwise(bounds)]
        seconds = {
            id(unit): (*of_computing, self._of_activations(unit, axes, sum(of_computing)))
            for unit in {id(unit): unit for unit in units}.values()
            for of_computing in [self._of_computing(unit, rows)]
        }
        costs, computing, tensors = [], [0.0] * pp, [0.0] * pp
        for chunk, stage in zip(chunks, plan.stage_of, strict=True):
            once, again, sums = map(sum, zip(*(seconds[id(unit)] for unit in chunk), strict=True))
            costs.append(Cost(once / 3 + sums / 2, once / 3 + again + sums / 2, once / 3))
            computing[stage] += m * (once + again)
            tensors[stage] += m * sums
        ranks = axes.tp * axes.copies
        neighbours = range(0, 2 * ranks, ranks) if pp > 1 else range(1)
        transfer = self._messages.seconds("sendrecv", neighbours, received, self._computed)
        slowest = max(range(pp), key=lambda stage: computing[stage] + tensors[stage])
        return Simulated(
            simulate(program, costs, transfer).makespan,
            computing[slowest],
            tensors[slowest],
            max(sum(sum(costs[c][1:3]) for c in own(plan.stage_of, stage)) for stage in range(pp)),
        )

    def _count_activations(self, axes: Axes, m: int, recompute: str) -> np.ndarray:
        """Return the bytes of activations on each stage of the largest replica."""
        pp, most = axes.pp, -(-self._config.batch.size // axes.dp)
        of_micro = [len(share(most, micro, m)) for micro in range(m)]
        kinds = sorted({*of_micro})
        plan, _ = self._planned(pp, min(m, 3 * pp))
        bounds, sizes = [0, *accumulate(self._cut(len(plan.stage_of)))], list[list[ChunkBytes]]()
        for each in kinds:
            units = self._counted(axes, m, each, recompute)
            boundary = self._boundary(axes, units, each)
            sizes.append([ChunkBytes.of(units, *ends, boundary) for ends in pairwise(bounds)])
        held = self._held(pp, tuple(map(kinds.index, of_micro)))
        return np.array(
            [
                max(cases @ [n for c in own(plan.stage_of, stage) for of in sizes for n in of[c]])
                for stage, cases in enumerate(held)
            ]
        )

    def _boundary(self, axes: Axes, units: Sequence[CountedUnit], rows: int) -> int:
        """Return the bytes that a stage receives for a micro-batch."""
        of_rows = axes.tp if self._config.layout.sequence_parallel else 1
        return rows * units[0].output * self._computed // of_rows

    def _count_held(self, pp: int, sizes: tuple[int, ...]) -> Sequence[np.ndarray]:
        """Return, for each stage, what it has in memory together, as `held`.

        sizes  0 or 1: the smaller or larger size of each micro-batch; all 0 if they are equal
        """
        m = len(sizes)
        if m > 3 * pp and not any(sizes):
            # In most schedules a full pipeline holds no more for more micro-batches.
            low, high = (self._held(pp, (0,) * n * pp) for n in (2, 3))
            if all(map(np.array_equal, low, high)):
                return high
        plan, program = self._planned(pp, m)
        return [
            np.array(held(of_stage, own(plan.stage_of, stage), len(plan.stage_of), sizes))
            for stage, of_stage in enumerate(program)
        ]

    def _count_cut(self, chunks: int) -> list[int]:
        return cut(self._whole, chunks, self._config.pipeline.partition)


@cache
def _in_ring(operation: str, rank: int, ranks: int, count: int) -> int:
    """Return the elements that a rank sends in a collective, as in UnitCount.sums, of so many."""
    algorithm = MESSAGES.get(operation, "ring")
    plans = plans_of(
        operation.replace("all-reduce", "allreduce"), algorithm, rank, ("",) * ranks, count
    )
    return sum(
        stop - start
        for plan in plans
        for step in plan.steps
        for peer, start, stop in step.sends
        if peer != rank
    )


def _of_replicas(
    config: Config,
    axes: Axes,
    rank: int,
    hosts: Sequence[str],
    storage: Storage,
    chunks: Any,
    computed: Any,
) -> float:
    """Return the bytes that a rank sends to other replicas in a step, and in the control message."""
    facts = RankFacts(config, axes, rank, hosts, storage, computed, chunks)
    between = of_replicas(facts)
    if between is None:
        return math.nan
    return between + of_partial_sums(facts) + sent_to_agree(rank, axes.ranks, config.model.experts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class Ranking(NamedTuple):
    """The layouts of a job.

    predictions  of all layouts, the fastest first
    best         those that fit and train, the fastest first, at most SHOWN; of layouts that differ
                 in micro-batches alone only the first
    front        those that fit and train, and need less memory than every faster one, by LESS
    closest      texts about the layouts that differ from the best in one key: why they lose
    """

    predictions: list[Prediction]
    best: list[Prediction]
    front: list[Prediction]
    closest: list[str]


def rank(
    planner: Planner, given: Config, layouts: Iterable[ParallelLayout] | None = None
) -> Ranking:
    """Predict layouts of a job, and rank those that fit and train.

    layouts  None: all
    raises   ConfigError if there is none
    """
    predictions, refused = list[Prediction](), set[tuple[int, ...]]()
    for layout in layouts or planner.layouts(given):
        divided = layout.tp, layout.cp, layout.pp, layout.ep
        if divided not in refused:
            try:
                predictions.append(planner.predict(layout))
            except ConfigError:  # More stages than units, or a number that tp x cp does not divide.
                refused.add(divided)
    # Of equally fast ones the fewest micro-batches: each costs some time that nothing here counts.
    predictions.sort(key=lambda each: (float(f"{each.step_s:.6g}"), each.layout.micro_batches))
    best, front, least = dict[ParallelLayout, Prediction](), list[Prediction](), math.inf
    for each in predictions:
        kind, is_lean = each.layout._replace(micro_batches=0), each.nbytes < LESS * least
        is_new = len(best) < SHOWN and kind not in best
        if each.nbytes > planner.limit or not (is_lean or is_new) or planner.refusal(each.layout):
            continue
        if is_new:
            best[kind] = each
        if is_lean:
            front.append(each)
            least = each.nbytes
    if not best:
        raise _nothing_fits(planner, predictions, given)
    closest = _closest(planner, predictions, next(iter(best.values())))
    return Ranking(predictions, [*best.values()], front, [*closest])


def _nothing_fits(
    planner: Planner, predictions: Sequence[Prediction], given: Config
) -> ConfigError:
    by_size = sorted(predictions, key=lambda each: each.nbytes)
    smallest = next((each for each in by_size if not planner.refusal(each.layout)), None)
    if smallest is None:
        kept = {
            axis: n for axis in ("dp", "cp", "tp", "pp") if (n := getattr(given.layout, axis)) > 1
        }
        ranks, of_replica = planner.ranks, math.prod(kept.values())
        if ranks % of_replica:
            return ConfigError(
                f"Layouts have {' x '.join(f'{axis} {n}' for axis, n in kept.items())} x others, but {of_replica} does "
                f"not divide {ranks} ranks.",
                f"Take {multiples_near(ranks, of_replica)} ranks, or leave one of these to `plan layout`.",
            )
        for layout in planner.layouts(given):
            if error := planner.refusal(layout):
                return error
        return ConfigError(
            f"No layout divides a batch of {given.batch.size} row(s) over these ranks.",
            "Raise batch.size, or set layout.dp to 0.",
        )
    settings = ", ".join(f"{key}={value}" for key, value in smallest.layout.settings.items())
    lower = [
        f"{setting} ({nbytes / 1e9:,.3g} GB)"
        for setting, nbytes in planner.savings(given, smallest)
    ]
    limit, needed = gigabytes(planner.limit, smallest.nbytes)
    return ConfigError(
        f"No layout fits in {limit} a rank: the smallest needs {needed}, with {settings}.",
        f"Take more ranks{', or set ' * bool(lower)}{' or '.join(lower)}.",
    )


def _closest(
    planner: Planner, predictions: Sequence[Prediction], best: Prediction
) -> Iterator[str]:
    """Yield for each layout next to the best one why it loses."""
    for key in KEYS:

        def value(each: Prediction, key: str = key) -> Any:
            return getattr(each.layout, key)

        others = {*KEYS} - {key}
        apart = sorted(
            (
                each
                for each in predictions
                if value(each) != value(best)
                and all(getattr(each.layout, o) == getattr(best.layout, o) for o in others)
            ),
            key=value,
        )
        below = [each for each in apart if value(each) < value(best)][-1:]
        above = [each for each in apart if value(each) > value(best)][:1]
        for each in (*below, *above):
            yield f"{key} {value(each)}: {_reason(planner, each, best)}"


def _reason(planner: Planner, each: Prediction, best: Prediction) -> str:
    if refused := planner.refusal(each.layout):
        return f"refused: {refused.law}"
    if each.nbytes > planner.limit:
        needed, limit = gigabytes(each.nbytes, planner.limit)
        return f"needs {needed} of {limit}"
    more = {part: getattr(each, part) - getattr(best, part) for part in PARTS}
    part = max(more, key=lambda part: more[part])
    slower = each.step_s / best.step_s - 1
    return f"{100 * slower:+.1f}%; {PARTS[part]} {1e3 * more[part]:+.1f} ms"


def _field(name: str) -> Callable[[Prediction], Any]:
    return lambda each: getattr(each.layout, name)


def _ms(name: str) -> Callable[[Prediction], float]:
    return lambda each: 1e3 * getattr(each, name)


def report(ranking: Ranking, planner: Planner, hosts: Sequence[str]) -> list[str]:
    """Return the lines that `plan layout` prints."""
    mark = "~" * planner.is_doubtful

    def marked(name: str) -> Callable[[Prediction], str]:
        return lambda each: f"{1e3 * getattr(each, name):.1f}{mark}"

    has_experts = any(each.layout.ep > 1 for each in ranking.predictions)
    divided = ("dp", *["ep"] * has_experts, "cp", "tp", "pp", "zero")
    columns = TextTable(
        [
            *(TextColumn(key, "4", _field(key)) for key in divided),
            *[TextColumn("imbalance", "9.3g", lambda each: each.imbalance)]
            * (planner.imbalance > 1),
            TextColumn("micro", "6", _field("micro_batches"), unit="batches"),
            TextColumn("recompute", "9", _field("recompute")),
            TextColumn("step time", "10", marked("step_s"), unit="ms"),
            TextColumn("computing", "10", marked("computing"), unit="ms"),
            *(TextColumn(part, "9.1f", _ms(part), unit="ms") for part in [*PARTS][1:]),
            TextColumn("memory", "8.3g", lambda each: each.nbytes / 1e9, unit="GB"),
        ]
    )
    lines = [
        f"{len(ranking.predictions):,} layouts of {len(hosts)} ranks on {len(set(hosts))} host(s), each with "
        f"{planner.rate / 1e9:,.1f} GFLOP/s and {planner.limit / 1e9:,.2f} GB",
        *planner.notes(),
        "",
        *columns.lines(ranking.best),
    ]
    if lean := [each for each in ranking.front if each not in ranking.best]:
        lines += ["", "Slower, with less memory than every faster one:", *columns.lines(lean)[2:]]
    layout = ranking.best[0].layout
    sent = planner.sent(layout) / 1e6
    if not math.isnan(sent):
        lines += ["", f"By rings the busiest rank of the fastest sends {sent:,.3f} MB in a step."]
    if layout.ep > 1:
        tokens = planner.tokens_sent(layout) / 1e6
        lines += [
            "",
            f"The rank with the busiest experts of the fastest sends {tokens:,.3f} MB of tokens in a step.",
        ]
    lines += ["", "Next to the best:", *(f"  {text}" for text in ranking.closest)]
    settings = ranking.best[0].layout.settings
    words = " ".join(f"--set {key}={value}" for key, value in settings.items())
    return [*lines, "", f"mpitrain launch -n {len(hosts)} -- train {words}"]


def draw(ranking: Ranking, limit: float, path: Path) -> None:
    """Draw the step time of all layouts over their memory; the front is a line of numbered points."""
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    figure, axes = subplots()
    for shown, line, mark, colour in (
        (ranking.predictions, "", ".", COLOURS[7]),
        (ranking.front, "-", "o", COLOURS[0]),
    ):
        places = [(each.nbytes / 1e9, each.step_s) for each in shown]
        axes.plot(*zip(*places, strict=True), linestyle=line, marker=mark, color=colour)
    if limit < 2 * max(each.nbytes for each in ranking.predictions):
        axes.axvline(limit / 1e9, color=COLOURS[1], linestyle="--", label="memory of a rank")
    names = list[str]()
    for each, place in zip(ranking.front, places, strict=True):
        keys = ("dp", "cp", "tp", "pp", "zero")
        numbers = [(key, getattr(each.layout, key)) for key in keys]
        words = [f"{key} {n}" for key, n in numbers if n > (key != "zero")] or ["one rank"]
        name = " ".join([*words, *["recompute"] * (each.layout.recompute != "none")])
        if name not in names[-1:]:  # Of layouts that differ in other keys alone, one has a number.
            names.append(name)
            axes.annotate(f"{len(names)}", place, (0, 7), textcoords="offset points", ha="center")
            axes.plot([], [], " ", label=f"{len(names)}: {name}")
    add_legend(figure, axes)
    axes.set(xscale="log", yscale="log", xlabel="memory of a rank, GB", ylabel="predicted step, s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))
    axes.set_title("Layouts, and those that need less memory than every faster one")
    save(figure, path)
