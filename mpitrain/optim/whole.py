"""Results that follow from whole tensors: each is computed on one rank, its owner.

ZeRO cuts its shards anywhere, so elements of a tensor may be on several ranks. The owner is one of
these ranks. They send their elements of the operand to the owner, and receive their elements of the
result. A tensor on one rank sends nothing.

bytes sent  by all ranks together, for each divided tensor, twice the elements that are not on its
            owner
memory      the owner stores the whole operand, every other rank its own elements
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.layers.base import Parameter
from mpitrain.machine.backend import Backend
from mpitrain.transport.base import Request, Transport

Elements = tuple[int, int]
"""Elements [start, stop) of a flattened tensor."""


class Divided(NamedTuple):
    """A tensor on several ranks.

    array   the whole operand on the owner, this rank's elements elsewhere
    owner   the rank that computes
    others  on the owner: {rank: its elements}; elsewhere empty
    """

    tensor: Parameter
    array: Any
    own: Elements
    owner: int
    others: Mapping[int, Elements]

    @property
    def is_owner(self) -> bool:
        """Whether this rank computes."""
        return bool(self.others)

    @property
    def elements(self) -> Any:
        """This rank's elements, (count,)."""
        return self.array[slice(*self.own)] if self.is_owner else self.array


class Results:
    """Operands and results of the divided tensors of this rank.

    tensors  by full name
    """

    def __init__(
        self,
        own: Mapping[str, tuple[Parameter, Elements]],
        dtype: Any,
        backend: Backend,
        transport: Transport | None,
    ):
        """Agree on the owners, and allocate; collective over the transport.

        own        {full name: (tensor, its elements on this rank)}
        transport  the ranks with other elements of the same tensors; None: there are none
        """
        self.tensors: dict[str, Divided] = {}
        if transport is None:
            return
        self._transport = transport
        with transport.recorder.called("whole tensors"):
            self._tag = transport.claim_tag()
        listed = [
            [name, *elements, _cost(tensor.local_shape)] for name, (tensor, elements) in own.items()
        ]
        for name, owner, ranks in _owners(transport.gather_text(listed)):
            if transport.rank not in ranks:
                continue
            tensor, elements = own[name]
            is_owner = owner == transport.rank
            count = (
                max(stop for _, stop in ranks.values()) if is_owner else elements[1] - elements[0]
            )
            self.tensors[name] = Divided(
                tensor,
                backend.zeros(count, dtype),
                elements,
                owner,
                {rank: ranks[rank] for rank in ranks if rank != owner} if is_owner else {},
            )

    def run(self, compute: Callable[[Any], None]) -> None:
        """Replace the operands by the results; collective over the ranks of each tensor.

        compute  (operand in the tensor's shape): overwrites it by the result
        """
        self._exchange(to_owner=True)
        for divided in self.tensors.values():
            if divided.is_owner:
                compute(divided.array.reshape(divided.tensor.local_shape))
        self._exchange(to_owner=False)

    def _exchange(self, to_owner: bool) -> None:
        requests = list[Request]()
        for divided in self.tensors.values():
            start = (
                self._transport.start_recv
                if divided.is_owner == to_owner
                else self._transport.start_send
            )
            peers = divided.others.items() if divided.is_owner else [(divided.owner, None)]
            for rank, elements in peers:
                array = divided.array if elements is None else divided.array[slice(*elements)]
                requests.append(start(array, rank, self._tag))
        for request in requests:
            request.wait()


def _cost(shape: Sequence[int]) -> int:
    """Return a number in proportion to the time of a matrix times its transpose."""
    cost = min(shape)
    for length in shape:
        cost *= length
    return cost


def _owners(
    everyone: Sequence[Iterable[Sequence[Any]]],
) -> Iterator[tuple[str, int, dict[int, Elements]]]:
    """Yield (full name, owner, {rank: elements}) of the divided tensors, in one order on all ranks.

    The costliest tensor comes first. Each goes to the least loaded of its ranks.

    everyone  by rank: full name, start, stop and cost of each tensor with elements on it
    """
    ranks, costs = dict[str, dict[int, Elements]](), dict[str, int]()
    for rank, listed in enumerate(everyone):
        for name, start, stop, cost in listed:
            ranks.setdefault(name, {})[rank] = start, stop
            costs[name] = cost
    loads = [0] * len(everyone)
    for name, holders in ranks.items():
        if len(holders) == 1:
            loads[next(iter(holders))] += costs[name]
    divided = [name for name, holders in ranks.items() if len(holders) > 1]
    for name in sorted(divided, key=lambda name: (-costs[name], name)):
        owner = min(ranks[name], key=lambda rank: (loads[rank], rank))
        loads[owner] += costs[name]
        yield name, owner, ranks[name]
