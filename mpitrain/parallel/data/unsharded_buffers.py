"""Full-size buffers for sharded buckets.

A model has more buckets than buffers. A buffer is called a slot, and its buckets use it in turn.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.layers.flat import Bucket, Storage
from mpitrain.transport.base import Transport

TURNS = 2
"""Slots for alternating buckets (double buffering): one bucket computes while the other one is
communicated.
"""


class UnshardedBuffers:
    """Full-size buffers for sharded buckets (as FSDP's unsharded flat parameter).

    A bucket always uses the same slot, so its bound collectives stay valid. With one model chunk,
    consecutive buckets alternate. With several chunks, one chunk is unsharded at a time: the n-th
    buckets of all chunks share the n-th slot. Buckets of different kinds (holders, `partial`,
    `frozen`) never share a slot, since one unit may need both. Each bucket of `alone` has its own slot.

    slot     {bucket: number of its slot}
    views    {bucket: view of its elements in the slot}
    tensors  {full name: view of the tensor in its bucket's slot}
    flat     one array with all slots
    """

    def __init__(
        self,
        storage: Storage,
        buckets: Collection[Bucket],
        alone: Collection[Bucket],
        transport: Transport,
        chunks: Sequence[range] = (),
        dtype: Any = None,
    ):
        """Allocate the slots; collective, since shared-memory transports allocate them in windows.

        alone   buckets that get their own slot
        chunks  as in `ReplicationContext`; no bucket has units of two chunks
        dtype   dtype of the slots; None: the dtype of the storage
        """
        numbers: dict[Any, int] = {}
        turns: dict[Any, count] = {}
        self.slot: dict[Bucket, int] = {}
        for bucket in sorted(set(buckets) - set(alone)):
            chunk = next(
                (number for number, units in enumerate(chunks) if bucket.units[0] in units), None
            )
            kind = bucket.holders, bucket.partial, bucket.frozen
            turn = next(turns.setdefault((kind, chunk), count()))
            self.slot[bucket] = numbers.setdefault(
                (kind, turn if chunks else turn % TURNS), len(numbers)
            )
        self.slot |= {bucket: number for number, bucket in enumerate(sorted(alone), len(numbers))}
        lengths = [
            max(b.stop - b.start for b, slot in self.slot.items() if slot == number)
            for number in range(len(numbers) + len(alone))
        ]
        self.flat = flat = transport.allocate(sum(lengths), dtype or storage.dtype)
        self.views = {}
        self.tensors: dict[str, Any] = {}
        for bucket, slot in self.slot.items():
            start = sum(lengths[:slot])
            self.views[bucket] = view = flat[start : start + bucket.stop - bucket.start]
            for entry in storage.within(bucket):
                in_bucket = entry._replace(start=entry.start - bucket.start)
                self.tensors[entry.name] = in_bucket.view(view)

    def bind(self, bind: Callable[[Any], Reduction]) -> dict[Bucket, Reduction]:
        """Bind a reduction for each bucket; collective.

        Buckets of equal length in one slot share a reduction and its scratch.
        """
        bound: dict[tuple[int, int], Reduction] = {}
        for bucket, view in self.views.items():
            key = self.slot[bucket], view.size
            if key not in bound:
                bound[key] = bind(view)
        return {bucket: bound[self.slot[bucket], view.size] for bucket, view in self.views.items()}


def buckets_used(storage: Storage, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Return, for each unit, the buckets of the tensors that it uses, in order of storage.

    A tied tensor counts for each unit that uses it.
    """
    names = {bucket: {entry.name for entry in storage.within(bucket)} for bucket in sorted(buckets)}
    used = [{entry.name for entry in storage.used(unit)} for unit in range(len(storage.units))]
    return [[bucket for bucket, stored in names.items() if stored & tensors] for tensors in used]


def users(storage: Storage, buckets: Sequence[Bucket]) -> dict[Bucket, set[int]]:
    """Return, for each bucket, the units that compute with its tensors.

    A unit that only shares a tied tensor of the bucket is one of them.
    """
    used = buckets_used(storage, buckets)
    return {
        bucket: {unit for unit, of_unit in enumerate(used) if bucket in of_unit}
        for bucket in buckets
    }


def shared_by_ties(storage: Storage, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets with tensors that units of other buckets use as well."""
    return [
        bucket for bucket, units in users(storage, buckets).items() if not units <= {*bucket.units}
    ]
