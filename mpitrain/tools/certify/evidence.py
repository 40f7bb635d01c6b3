"""The measurements of a certificate, as plain data. `verdict.judge` decides on them."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.tools.bench.pairs import Pair


class Facts(NamedTuple):
    """The facts about one rank.

    node       its host name
    machine    boot identifier of the kernel; namespaces and containers of one machine share it
    cores      cores that it may use
    processor  name of the processor; ranks of one processor compute the same bits
    blas       name, version and kernels of NumPy's BLAS
    shared     bytes free in /dev/shm
    """

    node: str
    machine: str
    cores: list[int]
    processor: str
    blas: str
    shared: int


class Speeds(NamedTuple):
    """The samples of one rank, a value for each round.

    gemm    operations per second of a float32 matrix product
    memory  bytes per second that a copy reads and writes
    """

    gemm: list[float]
    memory: list[float]


class WrongCollective(NamedTuple):
    """A collective with wrong elements.

    wrong  number of wrong elements over all ranks
    """

    operation: str
    algorithm: str
    wrong: int


class ProbeFinding(NamedTuple):
    """A problem that a probe of `doctor` found.

    node  the affected host; "" if no single host can be named
    """

    node: str
    text: str


class Jobs(NamedTuple):
    """The short training runs. A digest covers all parameters after the last step.

    first    digest of the run with the ranks in their order
    moved    digest of the run with the ranks on other nodes; "" if it did not run
    resumed  digest of the run that stopped, was read from its checkpoint and went on
    errors   messages of runs that failed
    """

    first: str = ""
    moved: str = ""
    resumed: str = ""
    errors: Sequence[str] = ()


class Evidence(NamedTuple):
    """The measurements of a certificate so far; lists are by rank where no key says otherwise.

    steps         two digests of the same seeded training step, alone on each rank
    pairs         links between nodes, measured from the first rank of each; ranks are node numbers
    collectives   number of checked collectives
    wrong         the collectives with wrong elements
    findings      problems from `doctor`
    absent        {node: reason} of nodes that did not answer
    awaits        the measurement that comes next; "" at the end
    """

    facts: Sequence[Facts] = ()
    speeds: Sequence[Speeds] = ()
    steps: Sequence[tuple[str, str]] = ()
    pairs: Sequence[Pair] = ()
    collectives: int = 0
    wrong: Sequence[WrongCollective] = ()
    findings: Sequence[ProbeFinding] = ()
    jobs: Jobs = Jobs()
    absent: dict[str, str] = {}
    awaits: str = ""

    @property
    def nodes(self) -> list[str]:
        """The nodes that answered, in the order of their first ranks."""
        return list(dict.fromkeys(fact.node for fact in self.facts))

    @property
    def crowded(self) -> set[str]:
        """The nodes whose ranks share cores, perhaps with other nodes of the same machine."""
        ranks = Counter(fact.machine for fact in self.facts)
        cores: dict[str, set[int]] = {}
        for fact in self.facts:
            cores.setdefault(fact.machine, set()).update(fact.cores)
        return {fact.node for fact in self.facts if ranks[fact.machine] > len(cores[fact.machine])}
