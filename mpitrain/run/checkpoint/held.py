"""The state that living ranks hold, their own and copies for neighbours, from which new ranks are filled.

A *unit* is an array of the state, the same on all ranks that have its name: the parameters of a
replica, or the shard of one rank. The state of a step is complete if living ranks hold each unit.
With run.copies_every each rank takes snapshots, and sends the units that it alone has to a
neighbour. ZeRO on 4 ranks, 2 on each host:

    host                   a      a      b      b
    rank                   0      1      2      3
    also holds shards of   2      3      0      1
"""

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from mpitrain.regions import common
from mpitrain.run.checkpoint.loading import put, taken
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.run.checkpoint.regions import HeldRegion, described, holdings, runs
from mpitrain.run.checkpoint.snapshot import KEPT, Snapshots, changed, values_of
from mpitrain.run.trainer import Trainer
from mpitrain.transport.base import Transport


class StateUnit(NamedTuple):
    """An array of the state on a rank.

    name   equal for equal arrays
    entry  the element of the list "kept" of `described`, with its tensors
    """

    name: str
    entry: list[Any]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.entry[2])

    def empty(self) -> np.ndarray:
        return np.empty(self.entry[3], self.dtype)


def units_of(rank: int, description: Mapping[str, Any]) -> list[StateUnit]:
    """Return the units of a rank, from its `described`."""
    units = []
    for entry in description["kept"]:
        entry = [*entry[:5], entry[5] or description["tensors"]]
        kind = entry[1]
        text = json.dumps([entry, kind != "agreed" and rank])
        units.append(StateUnit(sha256(text.encode()).hexdigest()[:16], entry))
    return units


def units_of_all(trainer: Trainer) -> list[list[StateUnit]]:
    """Return the units of each rank, in the order of `changed`; collective."""
    trainer.sync_parameters()
    transport = trainer.transport
    units = units_of(transport.rank, described(trainer.storage, changed(trainer)))
    return [[StateUnit(*unit) for unit in listed] for listed in transport.gather_text(units)]


def digest(names: Iterable[str]) -> str:
    """Return the name of a state, from the names of all units in it."""
    return sha256("".join(sorted({*names})).encode()).hexdigest()[:16]


class Held(NamedTuple):
    """What a rank holds of the state after a step.

    of       "ranks": arrays of a trainer, which no message changes; "copies": those of `NeighbourCopies`
    state    `digest` of the units of all ranks
    units    {name: (its `StateUnit.entry`, its array)}
    done     the progress of the run
    scalars  as in a `Manifest`
    loss     of the last step; None: it is not known
    """

    of: str
    state: str
    units: Mapping[str, tuple[list[Any], Any]]
    done: Done
    scalars: Mapping[str, float]
    loss: float | None = None


class CompleteState(NamedTuple):
    """A state of which living ranks hold each unit.

    holders  {unit: the rank that gives it}
    facts    a `Held` without units
    """

    holders: Mapping[str, int]
    facts: Held

    @property
    def step(self) -> int:
        return self.facts.done.step


def newest(held: Sequence[Held], transport: Transport) -> CompleteState | None:
    """Return the complete state of the highest step, the ranks' own before copies; collective."""
    regions = [[one._replace(units={}), [*one.units]] for one in held]
    states: dict[tuple[int, str, str], CompleteState] = {}
    for rank, own in enumerate(transport.gather_text(regions)):
        for listed, names in own:
            facts = Held(*listed)
            facts = facts._replace(done=Done(*facts.done))
            key = facts.done.step, facts.of, facts.state
            holders: Any = states.setdefault(key, CompleteState({}, facts)).holders
            for name in names:
                holders.setdefault(name, rank)
    return max(
        (one for one in states.values() if digest(one.holders) == one.facts.state),
        key=lambda one: (one.step, one.facts.of == "ranks"),
        default=None,
    )


def fill(trainer: Trainer, complete: CompleteState, held: Sequence[Held]) -> None:
    """Fill the state of a trainer; collective.

    Where the layout is that of the state, each rank gets its own arrays, bit for bit. Else it is filled one tensor
    at a time, as a checkpoint does in another layout: state that is "own" is summed, and divided by the replicas.

    complete  of `newest`, on these ranks
    held      the argument of `newest`
    """
    facts = complete.facts
    own = next(
        (
            one.units
            for one in held
            if (one.of, one.state, one.done) == (facts.of, facts.state, facts.done)
        ),
        {},
    )
    everyone = units_of_all(trainer)
    if digest(unit.name for units in everyone for unit in units) == facts.state:
        _fill_alike(trainer, everyone, own)
    else:
        _fill_anew(trainer, complete.holders, own)
    trainer.replica.restore(facts.scalars)


def _fill_alike(
    trainer: Trainer,
    everyone: Sequence[Sequence[StateUnit]],
    own: Mapping[str, tuple[list[Any], Any]],
) -> None:
    """Let each rank keep the units that it holds, and get the others from a near rank that does; as in `fill`."""
    transport, backend = trainer.transport, trainer.backend
    arrays = [buffer.array for buffer in changed(trainer)]
    known, hosts = transport.gather_text([*own]), transport.hosts

    def distance(rank: int, other: int) -> tuple[bool, int]:
        return hosts[other] != hosts[rank], (other - rank) % len(hosts)

    with transport.recorder.called("state of the living ranks"):
        tag = transport.claim_tag()
    for rank, units in enumerate(everyone):
        for index, unit in enumerate(units):
            having = [other for other, names in enumerate(known) if unit.name in names]
            holder = min(having, key=partial(distance, rank))
            if transport.rank not in (rank, holder):
                continue
            if transport.rank == holder:
                values = np.asarray(backend.to_host(own[unit.name][1][:]), unit.dtype)
            else:
                values = _in_place(arrays[index], unit)
                transport.recv(values, holder, tag)
            if transport.rank != rank:
                transport.send(values, rank, tag)
            elif values is not arrays[index]:
                arrays[index][:] = backend.from_host(values)


def _in_place(array: Any, unit: StateUnit) -> np.ndarray:
    """Return the memory into which a unit is received: its array itself if that holds these elements."""
    is_alike = isinstance(array, np.ndarray) and array.dtype == unit.dtype
    return array if is_alike else unit.empty()


def _fill_anew(
    trainer: Trainer, given_by: Mapping[str, int], own: Mapping[str, tuple[list[Any], Any]]
) -> None:
    """Fill another layout than that of the state, whose "bound" arrays begin anew; as in `fill`."""
    backend, world, me = trainer.backend, trainer.grid.world, trainer.transport.rank
    giving = [
        (entry, array)
        for name, (entry, array) in own.items()
        if given_by[name] == me and entry[1] != "bound"
    ]
    arrays = [array for _, array in giving]
    everyone = trainer.transport.gather_text([entry for entry, _ in giving])
    holders = defaultdict[tuple[str, str], list[tuple[int, HeldRegion]]](list)
    for rank, entries in enumerate(everyone):
        for region in holdings({"kept": entries, "tensors": []}):
            holders[region.name, region.part.tensor].append((rank, region))
    kept = trainer.replica.state()
    wanted = defaultdict[tuple[str, str], list[HeldRegion]](list)
    for region in holdings(described(trainer.storage, kept)):
        wanted[region.name, region.part.tensor].append(region)
    for key, sources in holders.items():
        regions = [(region, np.zeros(region.part.length, region.dtype)) for region in wanted[key]]
        for rank, source in sources:
            values = np.empty(source.part.length, source.dtype)
            if rank == me:
                values[:] = taken(arrays[source.number], source, backend)
            world.broadcast(values, rank)
            for region, elements in regions:
                _place(elements, region, values, source)
        for region, elements in regions:
            if region.kind == "own":
                elements /= trainer.grid.axes.copies
            put(kept[region.number].array, region, elements, backend)


def _place(
    elements: np.ndarray, region: HeldRegion, values: np.ndarray, source: HeldRegion
) -> None:
    """Copy or add the elements that two regions of a tensor have in common; both arrays are packed."""
    shared = common(runs(region.part.packed()), runs(source.part.packed()))
    for to, at, length in zip(*(column.tolist() for column in shared), strict=True):
        if source.kind == "agreed":
            elements[to : to + length] = values[at : at + length]
        else:
            elements[to : to + length] += values[at : at + length]


def neighbour(places: Sequence[tuple[int, str]]) -> int:
    """Return the distance s: rank r sends its copies to rank r + s, modulo the number of ranks.

    As few ranks as possible have a neighbour in their replica, then on their host.

    places  the replica and the host of each rank, at least 2
    """
    n = len(places)

    def shared(distance: int) -> tuple[int, int]:
        pairs = [(places[rank], places[(rank + distance) % n]) for rank in range(n)]
        return sum(a[0] == b[0] for a, b in pairs), sum(a[1] == b[1] for a, b in pairs)

    return min(range(1, n), key=shared)


class NeighbourCopies:
    """Snapshots of a rank's state, and copies of the units that its neighbour alone holds.

    held    the newest two; of the job before, too, until all ranks surely have those of this job
    nbytes  of all snapshots and copies of this rank
    """

    def __init__(
        self,
        trainer: Trainer,
        state: str,
        everyone: Sequence[Sequence[StateUnit]],
        places: Sequence[tuple[int, str]],
        held: list[Held],
    ):
        """Collective; the arguments are the same on all ranks.

        state     as in `Held`
        everyone  as `units_of_all`
        places    as in `neighbour`
        held      is changed in place
        """
        self._transport, self._snapshots = trainer.transport, Snapshots(trainer, values_of)
        self.held, self._state = held, state
        n, me, distance = len(everyone), trainer.transport.rank, neighbour(places)
        self._to, self._source = (me + distance) % n, (me - distance) % n
        holders = Counter(unit.name for units in everyone for unit in units)
        self._units = everyone[me]
        self._alone, theirs = (
            [index for index, unit in enumerate(everyone[rank]) if holders[unit.name] == 1]
            for rank in (me, self._source)
        )
        self._of_source = [everyone[self._source][index] for index in theirs]
        self._received = deque([unit.empty() for unit in self._of_source] for _ in range(KEPT))
        own = sum(unit.empty().nbytes for unit in self._units)
        self.nbytes = KEPT * (own + sum(array.nbytes for array in self._received[0]))
        with trainer.transport.recorder.called("copies of the state"):
            self._tag = trainer.transport.claim_tag()

    def take(self, done: Done) -> None:
        """Take a snapshot, send what this rank alone holds, and receive the neighbour's; collective."""
        if len(self.held) == KEPT:
            self.held.pop(0)  # Its arrays are written now.
        _, scalars, copies = self._snapshots.take(done.step)
        received = self._received[0]
        self._received.rotate()
        start_recv, start_send = self._transport.start_recv, self._transport.start_send
        requests = [start_recv(array, self._source, self._tag) for array in received]
        requests += [start_send(copies[index], self._to, self._tag) for index in self._alone]
        for request in requests:
            request.wait()
        pairs = [
            *zip(self._units, copies, strict=True),
            *zip(self._of_source, received, strict=True),
        ]
        units = {unit.name: (unit.entry, array) for unit, array in pairs}
        self.held.append(Held("copies", self._state, units, done, scalars))
