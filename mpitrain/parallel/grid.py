"""The grid of ranks: each rank's coordinates and process groups (as torch's DeviceMesh)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic
from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.group import Group
from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Arena
from mpitrain.optim.optimizer import FactSums
from mpitrain.transport.agreement import listed
from mpitrain.transport.base import Transport


class Coords(NamedTuple):
    """The coordinates of a rank: its index along each axis."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


class Axes(NamedTuple):
    """The number of ranks along each axis, and the number of servers.

    tp varies fastest with the rank, then cp, dp and pp. So the ranks of a tensor-parallel group,
    which communicate most, share a host. The servers are the last ranks and have no coordinates.
    dp divides the rows of a batch, and cp the tokens of each row. Over both, ranks have the same
    parameters (`copies`), so gradients are summed and ZeRO shards over dp x cp. ep divides dp: of so
    many neighbours along dp each has a part of the experts.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    servers: int = 0
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.copies * self.pp + self.servers

    @property
    def copies(self) -> int:
        """Number of ranks that have the same parameters."""
        return self.dp * self.cp

    @property
    def product(self) -> str:
        """The sizes in words; cp and ep are absent if they are 1."""
        context = f" x cp {self.cp}" if self.cp > 1 else ""
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        return f"dp {self.dp}{experts}{context} x tp {self.tp} x pp {self.pp}"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes as a checkpoint has them: cp and ep are absent if 1, as in older checkpoints."""
        return {axis: n for axis, n in self._asdict().items() if axis not in ("cp", "ep") or n > 1}

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of a rank, which must not be a server."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(tp, dp, pp, cp)


def divisor(axes: Axes, hosts: Sequence[str], shard: str, ep: int = 1) -> int:
    """Return the number of ranks in a ZeRO sharding group.

    shard   "all": all ranks that have the same parameters; "host": those of one host
    hosts   host of every rank, by rank
    ep      layout.ep, for the tensors of experts: ranks with the same part of them share
    raises  ConfigError if hosts have different numbers of them, or of ranks with the same experts
    """
    return axes.copies // ep if shard == "all" else replicas_of_host(axes, hosts)[ep]


def replicas_of_host(axes: Axes, hosts: Sequence[str]) -> dict[int, int]:
    """Return the number of replicas on a host, by 1, and of each part of the experts, by layout.ep.

    raises  ConfigError if hosts differ in one of them
    """
    coords = [axes.coords(rank) for rank in range(axes.ranks - axes.servers)]
    numbers = {}
    for parts, noun in ((axes.ep, "replicas of each part of the experts"), (1, "replicas")):
        replicas = Counter(
            (here._replace(dp=here.dp % parts, cp=0), host)
            for here, host in zip(coords, hosts, strict=False)
        )
        if len(set(replicas.values())) > 1:
            counts = ", ".join(f"{count} on {host}" for (_, host), count in replicas.items())
            raise ConfigError(
                f"With replication.shard host every host has as many {noun} as any other, but there are {counts}.",
                "Start as many ranks on each host, or set replication.shard to all.",
            )
        numbers[parts] = next(iter(replicas.values()))
    return numbers


def lie_alike(axes: Axes, hosts: Sequence[str]) -> bool:
    """Return whether all groups along dp x cp are distributed over hosts in the same way.

    Only then do all these groups sum in the same order.

    hosts   host of every rank, by rank
    """
    groups: dict[Coords, list[str]] = {}
    for rank in range(axes.ranks - axes.servers):
        groups.setdefault(axes.coords(rank)._replace(dp=0, cp=0), []).append(hosts[rank])
    return len({tuple(map(names.index, names)) for names in groups.values()}) == 1


def check_hosts(
    axes: Axes,
    hosts: Sequence[str],
    algorithm: str,
    tp_algorithm: str = "",
    tied: Mapping[str, Sequence[int]] = {},
) -> None:
    """Raise ConfigError if a group of any rank has an algorithm that its hosts rule out.

    All ranks raise the same error, since each looks at the groups of all.

    algorithm, tp_algorithm, tied  as of `Grid` and `Grid.place_model`
    """
    alike = axes.tp == 1 or lie_alike(axes, hosts)
    groups = dict[tuple[Any, ...], list[int]]()
    for rank in range(axes.ranks - axes.servers):
        here = axes.coords(rank)
        groups.setdefault((tp_algorithm or algorithm, here._replace(tp=-1)), []).append(rank)
        own = algorithm if alike else "ring"
        groups.setdefault((own, here._replace(dp=-1, cp=-1)), []).append(rank)
        for name, stages in tied.items():
            if here.pp in stages:
                groups.setdefault((algorithm, here._replace(pp=-1), name), []).append(rank)
    for (name, *_), ranks in groups.items():
        row = algorithm_table.ALL_REDUCE.get(name)
        if refusal := row and row.refusal(Topology([hosts[rank] for rank in ranks])):
            among = f"On rank {listed(ranks, hosts)}: " if len(ranks) < len(hosts) else ""
            raise ConfigError(f"{among}{refusal.law}", refusal.way_out)


EXPERTS = "ep"
"""`Parameter.holders` of a part of the experts: no other rank of its replica has it, and only some
copies of the replica have the same part.
"""


class Grid:
    """This rank's coordinates, and its process group along each axis. Construction and `close` are
    collective.

    world         all ranks
    tp, pp        the group along that axis: all ranks that share this rank's other coordinates;
                  on a server, only itself
    copies        the group along dp and cp together: all ranks with the same parameters
    cp            the group along cp: the ranks that divide the tokens of a row; None if there are no
                  others
    ep            the group along ep, whose ranks hold the parts of all experts; None if there are no
                  others
    same_experts  the ranks of `copies` with the same part of the experts
    exchanged     the time that this rank has been blocked in collectives of activations
    servers       the group of the servers; None on all other ranks
    reports_loss  whether this rank reports its replica's loss: one rank of the stage with the last
                  model chunk does, or with layout.cp one for each run of tokens
    holders       {name: tied group}, the ranks of this replica that store the same elements of some
                  tensors. "tp": the tensor-parallel group, for tensors that all its ranks store; a
                  tied tensor's full name: the stages that use it.
    arena         counts the bytes of activation buffers (`Group.exchange`)
    algorithm     all-reduce algorithm of all groups except tp
    tp_algorithm  all-reduce algorithm of tp; empty: `algorithm`
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
    ):
        assert axes.ranks == transport.size
        self.axes, self.transport = axes, transport
        self._parts: list[Transport] = []
        rank = transport.rank
        self.is_server = rank >= axes.ranks - axes.servers
        self.coords = here = axes.coords(0 if self.is_server else rank)
        self.reports_loss = not self.is_server and here.tp == 0 and here.pp == axes.pp - 1
        # The ranks have agreed on configuration and code, so all bind equal arrays.
        settings = algorithm, tuning, arithmetic, arena, transport.is_strict
        self._group_of = lambda part: Group(part, *settings)
        self.world = self._group_of(transport)
        self._groups = [self.world]
        copy = here.cp + axes.cp * here.dp
        self.tp = self._axis(copy + axes.copies * here.pp)
        self.tp.algorithm = tp_algorithm or algorithm
        self.copies = self._axis(here.tp + axes.tp * here.pp)
        if axes.tp > 1 and not lie_alike(axes, transport.hosts):
            # A ring's order of summation does not depend on the hosts.
            self.copies.algorithm = "ring"
        self.pp = self._axis(here.tp + axes.tp * copy)
        row = here.dp + axes.dp * here.pp
        self.cp = self._axis(here.tp + axes.tp * row) if axes.cp > 1 else None
        self.ep: Group | None = None
        self.same_experts = self.copies
        if axes.ep > 1:
            among, own = divmod(here.dp, axes.ep)
            outer = among + axes.dp // axes.ep * (here.cp + axes.cp * here.pp)
            self.ep = self._axis(here.tp + axes.tp * outer)
            self.same_experts = self._axis(here.tp + axes.tp * (own + axes.ep * here.pp))
        self.exchanged = self.tp.exposed
        for group in (self.cp, self.ep):
            if group:
                group.exposed = self.exchanged
        self.servers = self._along(0 if self.is_server else None)
        self.holders: dict[str, Group] = {"tp": self.tp}

    def _axis(self, others: int) -> Group:
        """Return the group along some axes; `others` numbers the other coordinates."""
        alone = self.axes.ranks + self.transport.rank
        group = self._along(alone if self.is_server else others)
        assert group is not None
        return group

    def _along(self, color: int | None, among: Transport | None = None) -> Group | None:
        """Split a transport by colour (as MPI_Comm_split) and return this rank's group; collective.

        color  None: this rank joins no group, and None is returned
        among  the transport to split; None: all ranks
        """
        part = (among or self.transport).split(color)
        if part is None:
            return None
        self._parts.append(part)
        self._groups.append(self._group_of(part))
        return self._groups[-1]

    def place_model(self, stage_of: Sequence[int], tied: Mapping[str, Sequence[int]]) -> None:
        """Set `reports_loss` and build the tied groups, once the partition of the model is known;
        collective.

        stage_of  the stage of each model chunk
        tied      {full name of a tied tensor: its stages}, for tensors on several stages
        """
        here = self.coords
        self.reports_loss = not self.is_server and here.tp == 0 and here.pp == stage_of[-1]
        for name, stages in sorted(tied.items()):
            is_holder = here.pp in stages and not self.is_server
            color = here.tp + self.axes.tp * self.copies.rank
            group = self._along(color if is_holder else None)
            if group is not None:
                self.holders[name] = group

    def summing(self, holders: str) -> Group:
        """Return the group that sums the gradients of tensors with these `Parameter.holders`."""
        return self.same_experts if holders == EXPERTS else self.copies

    def shard_groups(self, shard: str, holders: str = "") -> tuple[Group, Group]:
        """Return the ZeRO sharding group and the replication group (as FSDP's hybrid sharding);
        collective.

        All ranks of the replication group have the same shard.

        shard  "all": the sharding group has all replicas, the replication group this rank alone;
               "host": the sharding group has the replicas of this host, so each host has a complete
               set of shards
        holders  as `Parameter.holders` of the tensors
        """
        transport = self.summing(holders).transport
        here = transport.hosts[transport.rank]
        near = [rank for rank, host in enumerate(transport.hosts) if shard == "all" or host == here]
        dividing, alike = (
            self._along(near[0], transport),
            self._along(near.index(transport.rank), transport),
        )
        assert dividing is not None and alike is not None
        dividing.algorithm = alike.algorithm = self.copies.algorithm
        return dividing, alike

    def counts(self, holders: str) -> bool:
        """Return whether this rank includes the tensors of a tied group in norms and similar sums.

        It is true on one rank of each group.

        holders  key of `Grid.holders`; "": tensors that only this rank stores
        """
        return holders in ("", EXPERTS) or self.holders[holders].rank == 0

    def fact_sums(self, *groups: Group) -> FactSums:
        """Return the all-reduce of an update rule's sums over whole tensors (`FactSums`).

        It runs over the ranks with other elements of the same tensors. Recursive doubling adds
        every element in the same order, whatever its offset and the hosts. So the sums have the
        same bits on all ranks that store the same elements.

        groups  an all-reduce runs over each of these groups in turn
        """

        def bind(facts: Any) -> Callable[[], None]:
            with self.transport.recorder.called("sums over tensors"):
                links = [
                    Group(
                        group.transport,
                        "recursive-doubling",
                        group.tuning,
                        group.arithmetic,
                        compares=group.compares,
                    ).bind(facts)
                    for group in groups
                ]
            return Chain(links).run

        def counts(holders: str) -> bool:
            return self.holders.get(holders) is not self.tp or self.counts(holders)

        shards = [group.transport for group in groups if group is not self.tp and group.size > 1]
        return FactSums(bind, counts, shards[0] if shards else None)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch that the collectives of this rank's groups have allocated."""
        return sum(group.scratch_bytes for group in self._groups)

    def close(self) -> None:
        """Free the groups' communicators. The world's belongs to the caller of the constructor and
        stays open.
        """
        while self._parts:
            self._parts.pop().close()
