"""The first key that a query of attention sees and the end of these keys, where documents or a window
bound them: from the record `Seen`, for blocks of queries and of keys.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.reference.attention import Seen, first_keys


class Bounds(NamedTuple):
    """Of each query, the first key that it sees and the end of these keys, (B, Q) each.

    They bound the keys up to offset + t, and ascend in a row. None: there is no such bound.
    """

    starts: np.ndarray | None
    ends: np.ndarray | None

    @classmethod
    def of(cls, seen: Seen, sequences: int, queries: int) -> Bounds:
        """Return the bounds that a record on the host sets to these queries."""
        starts, ends = seen.starts, None
        if seen.closed and starts is not None and seen.offset:
            ends = np.empty(starts.shape, np.int64)
            for row, end in zip(starts, ends, strict=True):
                end[:] = row.searchsorted(row, "right")
        if window := seen.window and seen.narrow(queries).window:
            starts = np.zeros((sequences, queries), np.int32) if starts is None else starts
            starts = first_keys(starts, window - seen.offset)
        return cls(starts, ends)

    def keys_of(self, *index: Any, stop: int) -> tuple[slice, Bounds]:
        """Return the keys before `stop` that some of these queries see, and their bounds as columns of these keys."""
        if self.starts is None and self.ends is None:
            return slice(0, stop), self
        own = self.within(*index)
        keys = own.span(stop)
        return keys, own.after(keys.start)

    def within(self, *index: Any) -> Bounds:
        """Return the bounds of some of the queries, as views."""
        return Bounds(*(one if one is None else one[index] for one in self))

    def after(self, key: int) -> Bounds:
        """Return the bounds, int64, as columns of an array whose first column is `key`."""
        return Bounds(*(one if one is None else np.subtract(one, key, dtype="i8") for one in self))

    def span(self, stop: int) -> slice:
        """Return the keys before `stop` that some of a sequence's queries see, as a slice."""
        start = 0 if self.starts is None else max(0, int(self.starts[0]))
        return slice(start, stop if self.ends is None else min(stop, int(self.ends[-1])))
