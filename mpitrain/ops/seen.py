"""Which keys a query sees: the causal mask, documents, a window and parts of a ring, in one record.

B sequences, Q queries, T keys.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from typing import Any, NamedTuple

import numpy as np


class Seen(NamedTuple):
    """Which keys the queries of an attention see.

    Query t of a sequence sees key s if every bound lets it:

        offset  s <= t + offset               0: the causal mask; T - 1 or more: there is none
        window  s > t + offset - window       0: there is none
        starts  s >= starts[t]                None: there is none
        closed  starts[s] == starts[t], too   of the same tokens, and without a window

    So every query sees a run of keys, and neither its first key nor its end ever falls from one
    query to the next. With all bounds of a block of queries and a block of keys an operation knows
    whether to skip it (no query sees a key), to compute it as it is (each sees all), or to mask it.

    starts  (B, Q) int32, ascending in a row, in the memory of the operations. Of tokens in
            documents: the first token of each one's document
    closed  whether starts are of documents that end, too; the causal mask hides the end without it
    """

    starts: Any = None
    offset: int = 0
    window: int = 0
    closed: bool = False

    def narrow(self, queries: int) -> Seen:
        """Return the record without a window that hides no key of so many queries."""
        return self._replace(window=0) if self.window >= queries + self.offset else self

    def keys_of_a_query(self, keys: int) -> int:
        """Return how many of so many keys a query computes with, if scores are whole squares."""
        return min(keys, self.window or keys)

    def mask(self, queries: int, keys: int) -> np.ndarray:
        """Return whether each query sees each key, (B or 1, 1, Q, T)."""
        last, every, starts = (
            np.arange(queries)[:, None] + self.offset,
            np.arange(keys),
            self.starts,
        )
        is_seen = every <= last
        if self.window:
            is_seen = is_seen & (every > last - self.window)
        if starts is None:
            return is_seen[None, None]
        own = starts[:, :, None]
        return (is_seen & (own == starts[:, None] if self.closed else own <= every))[:, None]


CAUSAL = Seen()


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
        if window := seen.narrow(queries).window:
            starts = np.zeros((sequences, queries), np.int32) if starts is None else starts
            starts = first_keys(starts, window - seen.offset)
        return cls(starts, ends)

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

    def hide_others(self, scores: Any) -> None:
        """Set the scores of the other keys to -inf, in place.    scores: (..., Q, K)"""
        count = scores.shape[-1]
        if self.starts is not None and self.starts[-1] > 0:
            np.copyto(scores, -np.inf, where=np.arange(count) < self.starts[:, None])
        if self.ends is not None and self.ends[0] < count:
            np.copyto(scores, -np.inf, where=np.arange(count) >= self.ends[:, None])


def first_keys(starts: np.ndarray, window: int) -> np.ndarray:
    """Return the first keys of queries whose window ends at their own token, (B, Q) int32.

    starts  (B, Q), the first keys without a window
    window  0: there is none
    """
    if not window:
        return starts
    tokens = np.arange(1, starts.shape[1] + 1, dtype=np.int64)
    return np.maximum(starts, tokens - window).astype(np.int32)
