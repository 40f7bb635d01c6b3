"""The measurements of `certify` as plain data, the limits for them, and the verdict on each node.

The verdict depends on nothing but measurements and limits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mpitrain.config import read_toml
from mpitrain.errors import ConfigError
from mpitrain.strict_json import complaint
from mpitrain.tools.bench.pairs import BETWEEN, Pair, bad_everywhere, hosts_of, odd_pairs
from mpitrain.tools.doctor.facts import Facts, by_host, small_shm
from mpitrain.tools.doctor.probes import Problem
from mpitrain.tools.text_table import figure

RATES = {"gemm": ("matrix products", 1e9, "GFLOP/s"), "memory": ("memory", 1e9, "GB/s")}
"""{field of `Speeds`: (name, unit, name of the unit)}."""
FAR_OFF = {"bandwidth": 4.0, "latency": 100.0}
"""Limits of the links of nodes whose ranks may wait for a core, as `ODD` of pairs."""
LISTED = 8
"""Largest number of ranks that a reason lists."""


class Speeds(NamedTuple):
    """The measured rates of one rank, by round.

    gemm    operations per second of a float32 matrix product
    memory  bytes per second that a copy reads and writes
    """

    gemm: list[float]
    memory: list[float]


class WrongCollective(NamedTuple):
    """An algorithm of a collective that had wrong elements.

    wrong  their number, over all ranks
    """

    operation: str
    algorithm: str
    wrong: int


class Jobs(NamedTuple):
    """The results of the short training runs. A digest covers all parameters after the last step.

    first    digest of the run with the ranks in their order
    moved    digest of the run with the ranks on other nodes; "" if it did not run
    resumed  digest of the run that stopped and was resumed from its checkpoint
    errors   messages of runs that failed
    """

    first: str = ""
    moved: str = ""
    resumed: str = ""
    errors: Sequence[str] = ()


class Evidence(NamedTuple):
    """The measurements of `certify` so far. Lists are by rank unless said otherwise.

    steps         digests of a training step with the same seed, taken twice on each rank alone
    pairs         links between the first ranks of two nodes; the numbers of its ranks are nodes
    collectives   number of collectives that were checked
    wrong         those with wrong elements
    findings      problems that `doctor` found
    absent        {node: reason} of nodes that did not answer
    awaits        the measurement that comes next; "" at the end
    """

    facts: Sequence[Facts] = ()
    speeds: Sequence[Speeds] = ()
    steps: Sequence[tuple[str, str]] = ()
    pairs: Sequence[Pair] = ()
    collectives: int = 0
    wrong: Sequence[WrongCollective] = ()
    findings: Sequence[Problem] = ()
    jobs: Jobs = Jobs()
    absent: dict[str, str] = {}
    awaits: str = ""

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(fact.host for fact in self.facts))

    @property
    def crowded(self) -> set[str]:
        """Nodes whose ranks share cores, perhaps with other nodes of the same machine."""
        ranks = Counter(fact.machine for fact in self.facts)
        cores: dict[str, set[int]] = {}
        for fact in self.facts:
            cores.setdefault(fact.machine, set()).update(fact.cores)
        return {fact.host for fact in self.facts if ranks[fact.machine] > len(cores[fact.machine])}


class Limits(BaseModel):
    """The limits of a node. A limit of 0 is not applied.

    nodes        names of the nodes that must answer
    gemm_GFLOPs  lowest accepted rate of a matrix product on each rank, 1e9 operations per second
    memory_GBs   lowest accepted bandwidth of main memory of each rank
    link_GBs     lowest accepted bandwidth between two nodes, one way
    link_us      highest accepted latency between two nodes, one way
    ratio        lowest accepted rate of a rank, relative to the median of nodes with the same
                 processor
    shm_MB       least accepted free space in /dev/shm
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    nodes: list[str] = []
    gemm_GFLOPs: float = Field(0.0, ge=0, allow_inf_nan=False)
    memory_GBs: float = Field(0.0, ge=0, allow_inf_nan=False)
    link_GBs: float = Field(0.0, ge=0, allow_inf_nan=False)
    link_us: float = Field(0.0, ge=0, allow_inf_nan=False)
    ratio: float = Field(0.5, ge=0, le=1)
    shm_MB: float = Field(64.0, ge=0, allow_inf_nan=False)


def read_limits(path: Path) -> Limits:
    """Read limits from a TOML file.

    raises  ConfigError that names the file and the key
    """
    try:
        return Limits.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(
            f"{path} is no file of limits: {complaint(error)}.",
            f"Its keys are {', '.join(Limits.model_fields)}.",
        ) from None


class NodeVerdict(NamedTuple):
    """The verdict on one node. Without reasons the node passes, or is not judged yet."""

    node: str
    reasons: list[str]


class Certificate(NamedTuple):
    """The verdicts on all nodes.

    others  failures that no single node explains: of pairs, collectives, and training runs
    awaits  the measurement that is missing, before which no node passes; "" after all of them
    """

    nodes: list[NodeVerdict]
    others: list[str]
    awaits: str = ""

    @property
    def passes(self) -> bool:
        return not (self.awaits or self.others or any(verdict.reasons for verdict in self.nodes))


def judge(evidence: Evidence, limits: Limits) -> Certificate:
    """Judge every node. Nodes are in the order of the evidence; those that did not answer are last."""
    reasons: dict[str, list[str]] = {node: [] for node in evidence.nodes}
    others: list[str] = []
    for node, reason in (
        *_small_shm(evidence, limits),
        *_different_steps(evidence),
        *_slow_rates(evidence, limits),
        *_links(evidence, limits),
        *_bytes(evidence),
        *evidence.findings,
        *_failed_runs(evidence),
    ):
        known = reasons.get(node, others)
        if reason not in known:
            known.append(reason)
    for node in limits.nodes:
        if node not in reasons and node not in evidence.absent:
            reasons[node] = ["it is expected, but has no rank"]
    return Certificate(
        [NodeVerdict(node, node_reasons) for node, node_reasons in reasons.items()]
        + [NodeVerdict(node, [reason]) for node, reason in evidence.absent.items()],
        others,
        evidence.awaits,
    )


def best(speeds: Speeds, name: str) -> float:
    """Return the fastest sample of a rank: the one that other work on the machine slowed least."""
    return max((rate for rate in getattr(speeds, name) if rate > 0), default=0.0)


def usual_rates(facts: Sequence[Facts], speeds: Sequence[Speeds], name: str) -> list[float]:
    """Return, by rank, the usual rate of its processor.

    It is the median over the nodes with this processor of each node's median rank.
    """
    usual = []
    for judged in facts:
        nodes: dict[str, list[float]] = {}
        for fact, own in zip(facts, speeds, strict=True):
            if fact.processor == judged.processor:
                nodes.setdefault(fact.host, []).append(best(own, name))
        # A single node is compared with itself: a slow rank differs from the others.
        usual.append(median(median(of) for of in nodes.values()))
    return usual


def slow_ranks(facts: Sequence[Facts], speeds: Sequence[Speeds], limits: Limits) -> list[int]:
    slow = set()
    for name in RATES:
        least = _least(name, limits)
        for rank, usual in enumerate(usual_rates(facts, speeds, name)):
            if not (best(speeds[rank], name) >= max(limits.ratio * usual, least)):
                slow.add(rank)
    return sorted(slow)


def _least(name: str, limits: Limits) -> float:
    return 1e9 * {"gemm": limits.gemm_GFLOPs, "memory": limits.memory_GBs}[name]


def _small_shm(evidence: Evidence, limits: Limits) -> Iterator[tuple[str, str]]:
    for node, ranks in by_host(evidence.facts).items():
        if short := small_shm(ranks, limits.shm_MB * 1e6):
            yield node, short


def _different_steps(evidence: Evidence) -> Iterator[tuple[str, str]]:
    facts, steps = evidence.facts, evidence.steps
    for rank, (first, again) in enumerate(steps):
        if first != again:
            yield facts[rank].host, f"rank {rank} computes one step twice with different bits"
    for processor in dict.fromkeys(fact.processor for fact in facts):
        ranks = [
            rank
            for rank, fact in enumerate(facts)
            if fact.processor == processor and steps and steps[rank][0] == steps[rank][1]
        ]
        counts = Counter(steps[rank][0] for rank in ranks).most_common()
        if len(counts) < 2:
            continue
        (usual, most), (_, second), *_ = counts
        if most == second:
            bits = "compute one step with different bits, and no majority agrees"
            yield "", f"ranks {_listed(ranks)} {bits}"
            continue
        blas = Counter(facts[rank].blas for rank in ranks if steps[rank][0] == usual)
        other = blas.most_common(1)[0][0]
        for rank in ranks:
            if steps[rank][0] != usual:
                bits = f"computes one step with other bits than {most} ranks of {processor}"
                by = f"; BLAS {facts[rank].blas}, theirs {other}" * (facts[rank].blas != other)
                yield facts[rank].host, f"rank {rank} {bits}{by}"


def _slow_rates(evidence: Evidence, limits: Limits) -> Iterator[tuple[str, str]]:
    for name, (what, unit, units) in RATES.items():
        if not evidence.speeds:
            return
        usual = usual_rates(evidence.facts, evidence.speeds, name)
        least = _least(name, limits)
        for rank, (fact, own) in enumerate(zip(evidence.facts, evidence.speeds, strict=True)):
            rate = best(own, name)
            slow = f"{what} of rank {rank} at {figure(rate / unit)} {units}"
            if not (rate >= limits.ratio * usual[rank]):
                yield fact.host, f"{slow}, where {figure(usual[rank] / unit)} is usual"
            elif not (rate >= least):
                yield fact.host, f"{slow}, and the limit is {figure(least / unit)}"


def _links(evidence: Evidence, limits: Limits) -> Iterator[tuple[str, str]]:
    """Yield (node, reason) for nodes with only bad links, and ("", reason) for other bad pairs.

    A link is bad if it is slow, loses frames, or both. Ranks of crowded nodes may wait for a core,
    so their links are slow only far beyond the usual.
    """
    slow: dict[tuple[int, int], str] = {}
    crowded = evidence.crowded
    quiet = [pair for pair in evidence.pairs if not crowded & {pair.first_host, pair.second_host}]
    for odd in (*odd_pairs(evidence.pairs, (BETWEEN,), FAR_OFF), *odd_pairs(quiet, (BETWEEN,))):
        value, unit = odd.value
        slow[odd.pair[:2]] = (
            f"{odd.what} {figure(value)} {unit}, where {figure(odd.usual)} is usual"
        )
    slow |= {pair[:2]: reason for pair in evidence.pairs if (reason := _beyond(pair, limits))}
    lossy = {
        pair[:2]: f"{pair.resent:,} of {pair.sent:,} segments were sent again"
        for pair in evidence.pairs
        if pair.loses_frames
    }
    nodes = hosts_of(evidence.pairs)
    guilty = bad_everywhere(evidence.pairs, {*slow, *lossy})
    for number in guilty:
        for fault, bad in (("are slow", slow), ("lose frames", lossy)):
            if reasons := [reason for pair, reason in bad.items() if number in pair]:
                links = f"{'all ' * (len(reasons) == len(nodes) - 1)}{len(reasons)} links {fault}"
                yield nodes[number], f"{links}: {reasons[0]}"
    for fault, bad in (("is slow", slow), ("loses frames", lossy)):
        for (first, second), reason in bad.items():
            if not {first, second} & {*guilty}:
                yield "", f"the link of {nodes[first]} and {nodes[second]} {fault}: {reason}"


def _bytes(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield (node, reason) for wrong bytes of messages and collectives; node is "" if none explains
    them.
    """
    wrong = [pair for pair in evidence.pairs if pair.wrong]
    ends = Counter(node for pair in wrong for node in (pair.first_host, pair.second_host))
    most, second, *_ = [*(count for _, count in ends.most_common(2)), 0, 0]
    worst = bad_everywhere(evidence.pairs, {pair[:2] for pair in wrong})
    corrupt = {evidence.nodes[number] for number in worst}
    corrupt |= {node for node, count in ends.items() if count == most > max(1, second)}
    for node in sorted(corrupt):
        yield node, f"bytes of {ends[node]} of its {len(evidence.nodes) - 1} links arrive wrong"
        if evidence.wrong:
            yield node, f"{len(evidence.wrong)} collectives with it have wrong elements"
    for pair in wrong:
        both = pair.first_host, pair.second_host
        if not corrupt & {*both}:
            yield "", f"{pair.wrong} bytes between {' and '.join(both)} arrived wrong"
    for row in () if corrupt else evidence.wrong:
        yield "", f"{row.operation} by {row.algorithm} has {row.wrong} wrong elements"


def _beyond(pair: Pair, limits: Limits) -> str:
    if limits.link_GBs and not (pair.best_GBs >= limits.link_GBs):
        return f"bandwidth {figure(pair.best_GBs)} GB/s, and the limit is {limits.link_GBs:g}"
    if limits.link_us and not (pair.fastest_us <= limits.link_us):
        return f"latency {figure(pair.fastest_us)} us, and the limit is {limits.link_us:g}"
    return ""


def _failed_runs(evidence: Evidence) -> Iterator[tuple[str, str]]:
    jobs = evidence.jobs
    for error in jobs.errors:
        yield "", f"a training run failed: {error}"
    # A moved run may differ without a fault of the new node. Its processor may be another, or its
    # ranks already compute other bits alone.
    is_comparable = (
        len({fact.processor for fact in evidence.facts}) == 1 and len(set(evidence.steps)) == 1
    )
    if is_comparable and jobs.first and jobs.moved and jobs.first != jobs.moved:
        yield "", "a training run has other bits with its ranks on other nodes"
    if jobs.first and jobs.resumed and jobs.first != jobs.resumed:
        yield "", "a training run has other bits when resumed from its checkpoint"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:LISTED])) + ", ..." * (len(ranks) > LISTED)
