"""Prefetching: a wrapper of a data source that reads the next batches in a thread."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mpitrain.data.source import Source

Rows = tuple[np.ndarray, np.ndarray]


class BatchRequest(NamedTuple):
    seed: int
    step: int
    size: int
    rows: range
    before: int | None

    def following(self) -> "BatchRequest":
        before = None if self.before is None else self.before + self.size
        return self._replace(step=self.step + 1, before=before)


class HeldOutRequest(NamedTuple):
    rows: tuple[int, ...]

    def following(self, previous: "HeldOutRequest") -> "HeldOutRequest":
        """Return the next request, with rows as far from this one's as these are from the previous."""
        pairs = zip(self.rows, previous.rows, strict=False)
        return HeldOutRequest(tuple(2 * now - then for now, then in pairs))


class Prefetched:
    """A data source that reads the next `ahead` batches in a thread (as a PyTorch DataLoader).

    All reads of the inner source happen in this one thread, so the inner source needs no lock. Rows
    are those of the inner source, bit for bit. An error of a read is raised by the call that needs
    the rows. A request that was not expected cancels the reads ahead.

    source  the inner source
    ahead   batches to read ahead, at least 1
    steps   number of steps of the run: no batch of a later step is read
    """

    def __init__(self, source: Source, ahead: int, steps: int):
        self.form, self.shape = source.form, source.shape
        self.inputs, self.classes, self.held_out = source.inputs, source.classes, source.held_out
        self._source, self._ahead, self._steps = source, ahead, steps
        self._thread = ThreadPoolExecutor(1, "mpitrain-prefetch")
        self._batches: dict[BatchRequest, Future[Rows]] = {}
        self._expected: BatchRequest | None = None
        self._held_out: dict[HeldOutRequest, Future[Rows]] = {}
        self._evaluated: HeldOutRequest | None = None

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> Rows:
        request = BatchRequest(seed, step, size, rows, before)
        if not rows:  # A parameter server reads nothing and needs no thread.
            return self._source.batch(*request)
        is_expected = self._expected in (None, request)
        future = _taken(self._batches, request) or self._thread.submit(self._source.batch, *request)
        self._expected = following = request.following()
        for _ in range(self._ahead if is_expected else 0):
            if following.step < self._steps and following not in self._batches:
                self._batches[following] = self._thread.submit(self._source.batch, *following)
            following = following.following()
        return future.result()

    def held_out_rows(self, rows: Sequence[int]) -> Rows:
        request, previous = HeldOutRequest(tuple(rows)), self._evaluated
        future = _taken(self._held_out, request) or self._evaluates(request)
        self._evaluated = request
        following = request.following(previous) if previous else request
        if following != request and all(0 <= row < self.held_out for row in following.rows):
            self._held_out[following] = self._evaluates(following)
        return future.result()

    def _evaluates(self, request: HeldOutRequest) -> Future[Rows]:
        return self._thread.submit(self._source.held_out_rows, request.rows)

    def close(self) -> None:
        """End the thread after its present read."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _taken(futures: dict[Any, Future[Rows]], request: Any) -> Future[Rows] | None:
    """Remove the read of a request and return it; if there is none, cancel all reads."""
    if request in futures:
        return futures.pop(request)
    for future in futures.values():
        future.cancel()
    futures.clear()
    return None
