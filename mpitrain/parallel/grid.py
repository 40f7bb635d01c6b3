"""The grid of ranks: which place each rank has on the axes, and the groups along them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.topology import Topology
from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.config import Config
from mpitrain.config.delays import delays
from mpitrain.errors import ConfigError
from mpitrain.machine.arena import Arena
from mpitrain.transport.base import Transport


class Coords(NamedTuple):
    """Where a rank lies: its number along each axis."""

    tp: int
    dp: int
    pp: int


class Axes(NamedTuple):
    """How many ranks lie along each axis.

    tp varies fastest from rank to rank, so that the chattiest neighbours share a host, then dp, then pp. The servers are the
    last ranks, and lie on no axis.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    servers: int = 0

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.dp * self.pp + self.servers

    def place(self, rank: int) -> Coords:
        """Where a rank that is no server lies."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coords(tp, dp, pp)


def axes(config: Config, ranks: int) -> Axes:
    """The axes for `ranks` ranks, with dp filled in.

    raises  ConfigError if they are not dp x tp x pp + servers, if rows are too few, or if a rank to be delayed computes none
    """
    layout = config.layout
    servers = config.replication.servers if config.replication.mode == "server" else 0
    dp = layout.dp or max(1, (ranks - servers) // (layout.tp * layout.pp))
    found = Axes(layout.tp, dp, layout.pp, servers)
    if found.ranks != ranks:
        beside = f" + servers {servers}" if servers else ""
        ways = ["--dp (0 takes all ranks)"] if layout.dp else []
        ways += [f"--{axis}" for axis in ("tp", "pp") if getattr(layout, axis) > 1]
        if servers:
            ways.append("replication.servers" if servers > 1 else "replication.mode")
        raise ConfigError(
            f"dp {dp} x tp {layout.tp} x pp {layout.pp}{beside} needs {found.ranks} ranks, but {ranks} were started.",
            f"Start with `mpitrain launch -n {found.ranks} -- train`, or change {' or '.join(ways)}.",
        )
    micro_batches, size = config.batch.micro_batches or 1, config.batch.size
    shares = dp * micro_batches
    if shares > size:
        ways = [
            way
            for way, helps in (
                ("lower batch.micro_batches", micro_batches > 1),
                ("start fewer ranks", dp > 1),
            )
            if helps
        ]
        raise ConfigError(
            f"Each of dp {dp} x micro-batches {micro_batches} = {shares} shares needs a sequence, but batch.size is {size}.",
            f"Set batch.size to at least {shares}, or {' or '.join(ways)}.",
        )
    computing = found.ranks - servers
    if absent := [
        delay.rank
        for delay in delays(config.run.delay)
        if delay.rank is not None and delay.rank >= computing
    ]:
        raise ConfigError(
            f"run.delay names rank {absent[0]}, but ranks that compute rows are 0 to {computing - 1}.",
            "Name one of these in run.delay, or leave it empty.",
        )
    return found


def divisor(axes: Axes, hosts: Sequence[str], shard: str) -> int:
    """How many replicas divide among them what ZeRO divides: with `shard` "all" all of them, with "host" those of each host.

    hosts   of every rank, by rank
    raises  ConfigError if hosts have different numbers of them
    """
    if shard == "all":
        return axes.dp
    replicas = Counter(
        (axes.place(rank)._replace(dp=0), hosts[rank]) for rank in range(axes.ranks - axes.servers)
    )
    if len(set(replicas.values())) > 1:
        counts = ", ".join(f"{count} on {host}" for (_, host), count in replicas.items())
        raise ConfigError(
            f"With replication.shard host every host has as many replicas as any other, but there are {counts}.",
            "Start as many ranks on each host, or set replication.shard to all.",
        )
    return next(iter(replicas.values()))


class Grid:
    """This rank's place on the axes, and a group of ranks along each, split off once. Construction and `close` are collective.

    world       all ranks
    tp, dp, pp  the ranks that differ from this one along that axis alone; of a server itself alone
    servers     the servers; None on all other ranks
    speaks      whether this rank tells what all ranks of a replica know, such as its loss: one of the last part's stage does
    holders     {name: the ranks of this replica that hold the same part of some tensors}: "tp" of tensors that are whole on each
                rank of tp, and each tied tensor's full name, on the stages that hold it
    arena       counts what the groups lease (Group.exchange)
    algorithm   of all groups but tp, whose own may be named
    """

    def __init__(
        self,
        transport: Transport,
        axes: Axes,
        algorithm: str = "auto",
        tuning: Tuning = DEFAULT,
        arithmetic: Arithmetic = HOST,
        arena: Arena | None = None,
        tp_algorithm: str = "",
        progress_thread: str = "auto",
    ):
        assert axes.ranks == transport.size
        self.axes, self.transport = axes, transport
        self._parts: list[Transport] = []
        self._groups = groups = list[Group]()
        rank = transport.rank
        self.is_server = rank >= axes.ranks - axes.servers
        self.place = here = axes.place(0 if self.is_server else rank)
        self.speaks = not self.is_server and here.tp == 0 and here.pp == axes.pp - 1

        def group_of(part: Transport) -> Group:
            groups.append(Group(part, algorithm, tuning, arithmetic, arena, progress_thread))
            return groups[-1]  # without a reference to the grid, which would then refer to itself

        self._group_of = group_of

        def axis(others: int) -> Group:
            """The ranks with the same `others`, of which each rank has one."""
            group = self._along(axes.ranks + rank if self.is_server else others)
            assert group is not None
            return group

        self.world = group_of(transport)
        self.tp = axis(here.dp + axes.dp * here.pp)
        self.tp.algorithm = tp_algorithm or algorithm
        self.dp = axis(here.tp + axes.tp * here.pp)
        if axes.tp > 1 and not self._lie_alike(self.dp):
            self.dp.algorithm = "ring"  # sums in one order, whatever hosts there are
        self.pp = axis(here.tp + axes.tp * here.dp)
        self.servers = self._along(0 if self.is_server else None)
        self.holders: dict[str, Group] = {"tp": self.tp}

    def _along(self, color: int | None, among: Transport | None = None) -> Group | None:
        """A group of the ranks that name one colour, of all or of those of a transport; collective there."""
        part = (among or self.transport).split(color)
        if part is None:
            return None
        self._parts.append(part)
        return self._group_of(part)

    def deal(self, place: Sequence[int], tied: Mapping[str, Sequence[int]]) -> None:
        """Learn where the parts of a model lie; collective.

        place  the stage of each part
        tied   {full name of a tied tensor: the stages that hold it}, where several do
        """
        here = self.place
        self.speaks = not self.is_server and here.tp == 0 and here.pp == place[-1]
        for name, stages in sorted(tied.items()):
            is_holder = here.pp in stages and not self.is_server
            group = self._along(here.tp + self.axes.tp * here.dp if is_holder else None)
            if group is not None:
                self.holders[name] = group

    def check(self) -> None:
        """Raise the refusal of an algorithm that cannot run where the ranks of one of this rank's groups are.

        Other groups may lie elsewhere, on one host for example: whoever calls this sees to it that all ranks hear of it.
        """
        for group in {
            id(group): group for group in (self.tp, self.dp, *self.holders.values())
        }.values():
            algorithm = algorithm_table.ALL_REDUCE.get(group.algorithm)
            if refusal := algorithm and algorithm.refusal(Topology(group.transport.hosts)):
                raise refusal

    def _lie_alike(self, group: Group) -> bool:
        """Whether on all ranks such a group lies on hosts in the same way, so that it sums in the same order; collective."""
        hosts = group.transport.hosts
        ways = self.transport.gather_text([hosts.index(host) for host in hosts])
        return all(way == ways[0] for way in ways)

    def divided(self, shard: str) -> tuple[Group, Group]:
        """The replicas that divide among them what ZeRO divides, and those that have the same part as this one; collective.

        shard  "all": all divide, and none has another's part; "host": those of a host do, and all hosts have all parts
        """
        transport = self.dp.transport
        here = transport.hosts[transport.rank]
        near = [rank for rank, host in enumerate(transport.hosts) if shard == "all" or host == here]
        dividing, alike = (
            self._along(near[0], transport),
            self._along(near.index(transport.rank), transport),
        )
        assert dividing is not None and alike is not None
        dividing.algorithm = alike.algorithm = self.dp.algorithm
        return dividing, alike

    def counts(self, holders: str) -> bool:
        """Whether this rank counts, in norms and the like, the tensors that `holders` hold together; "": it alone holds them."""
        return not holders or self.holders[holders].rank == 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes that all collectives of this rank's groups have allocated besides the arrays they work on."""
        return sum(group.scratch_bytes for group in self._groups)

    def close(self) -> None:
        """Give the groups' communicators back, but for the world's, which somebody else has made."""
        while self._parts:
            self._parts.pop().close()


def share(rows: int, part: int, parts: int) -> range:
    """The part-th of `parts` nearly equal runs of rows: any parts <= rows leaves none empty."""
    return range(part * rows // parts, (part + 1) * rows // parts)
