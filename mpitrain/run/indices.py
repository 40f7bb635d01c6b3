"""Tokens and targets, checked on the host before they go to the device: no operation there can tell
a wrong one.
"""

from collections.abc import Callable

import numpy as np

from mpitrain.errors import DataError, on_every_rank
from mpitrain.transport.base import Transport

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
        self._classes = 0  # known with the first input

    def tokens(self, inputs: np.ndarray, where: str) -> np.ndarray:
        """Inputs, tokens as int32 or int64; every rank ends if the model lacks one of them."""
        return (
            self._known(inputs, self._vocabulary, "tokens", where) if self._vocabulary else inputs
        )

    def targets(self, targets: np.ndarray, classes: Callable[[], int], where: str) -> np.ndarray:
        """Targets as int32 or int64; every rank ends if one is no column of the logits.

        classes  how many columns there are; asked once, and not kept: it may hold a trainer
        """
        if not self._is_ours:
            return targets
        self._classes = self._classes or classes()
        return self._known(targets, self._classes, "targets", where)

    def _known(self, array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
        """Only this rank sees its rows, and to agree on them would cost every step a message: one
        rank ends all.
        """
        transport = self._transport
        try:
            return known(
                array,
                count,
                what,
                f"{where} on rank {transport.rank} ({transport.hosts[transport.rank]})",
            )
        except DataError as error:
            if transport.size == 1:
                raise on_every_rank(error) from None
            transport.abort(str(error))
            raise


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
