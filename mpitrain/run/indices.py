"""Tokens and targets, checked on the host before they go to the device: no operation there can tell
a wrong one.
"""

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from mpitrain.errors import DataError, on_every_rank
from mpitrain.transport.base import Transport

Shape = tuple[int, ...]
_WAYS_OUT = {
    "tokens": "Pass tokens of the model's vocabulary, or build the model with a larger one.",
    "targets": "Pass the number of the right class; no number leaves a prediction out of the loss.",
}


class Indices:
    """The checks of one model's tokens and targets. A check costs two passes over integers of the
    host, and no message.

    vocabulary  tokens that the model takes; 0: its input is no tokens
    is_ours     whether the loss is: one of somebody's own knows what its targets are
    """

    def __init__(self, transport: Transport, vocabulary: int, is_ours: bool):
        self._transport, self._vocabulary, self._is_ours = transport, vocabulary, is_ours
        self._inputs: Shape = ()  # of the last targets
        self._predictions: list[int] = []
        self._classes = 0

    def tokens(self, inputs: np.ndarray, where: str) -> np.ndarray:
        """Inputs, tokens as int32 or int64; every rank ends if the model lacks one of them."""
        return (
            self._known(inputs, self._vocabulary, "tokens", where) if self._vocabulary else inputs
        )

    def rows(self, inputs: np.ndarray, share: range, where: str) -> None:
        """Every rank ends if this rank has more rows than its share of the global batch.

        The loss is divided by batch.size, so a rank that passed the whole batch would multiply the
        loss and the gradient by the number of replicas. Fewer rows are a part of the sum.
        """
        if len(inputs) <= len(share):
            return
        self._end(
            DataError(
                f"A rank computes at most its share of batch.size rows, {len(share)}, but "
                f"{self._on(where)} has {len(inputs)}.",
                "Pass the rows trainer.share() of the global batch.",
            )
        )

    def targets(
        self, targets: np.ndarray, inputs: Shape, output: Callable[[Shape], Shape], where: str
    ) -> np.ndarray:
        """Targets as int32 or int64; every rank ends unless each prediction has one, which is a
        column of the logits.

        inputs  the shape of the inputs
        output  the shape of the whole logits, by that of the inputs; not kept: it may hold a trainer
        """
        if not self._is_ours:
            return targets
        if inputs != self._inputs:
            *self._predictions, self._classes = output(inputs)
            self._inputs = inputs
        if targets.shape != (predictions := tuple(self._predictions)) and (
            inputs[0] or targets.size
        ):
            self._end(
                DataError(
                    f"Targets must have the shape {predictions}, one for each prediction, but those of "
                    f"{self._on(where)} have {targets.shape}.",
                    "Pass the number of the right class for each prediction.",
                )
            )
        return self._known(targets, self._classes, "targets", where)

    def _known(self, array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
        """Only this rank sees its rows, and to agree on them would cost every step a message: one
        rank ends all.
        """
        try:
            return known(array, count, what, self._on(where))
        except DataError as error:
            self._end(error)

    def _on(self, where: str) -> str:
        rank = self._transport.rank
        return f"{where} on rank {rank} ({self._transport.hosts[rank]})"

    def _end(self, error: DataError) -> NoReturn:
        if self._transport.size == 1:
            raise on_every_rank(error) from None
        self._transport.abort(str(error))
        raise error


def known(array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
    """The array as int32 or int64; DataError unless all of it lies in 0 .. count - 1.

    what   "tokens" or "targets"
    where  what holds them, for the message
    """
    if array.dtype.kind not in "iu":
        raise DataError(
            f"{what.capitalize()} must be integers, but those of {where} are {array.dtype}.",
            "Convert them, for example with array.astype(numpy.int64).",
        )
    if array.size and not (array.min() >= 0 and array.max() < count):
        first = np.unravel_index(np.argmax((array < 0) | (array >= count)), array.shape)
        raise DataError(
            f"{what.capitalize()} must lie in 0..{count - 1}, but {where} has {array[first]} at "
            f"[{', '.join(map(str, first))}].",
            _WAYS_OUT[what],
        )
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)
