"""Range checks of tokens and targets on the host: device kernels do not check their indices."""

from collections.abc import Callable

import numpy as np

from mpitrain.errors import DataError, on_every_rank
from mpitrain.transport.base import Transport

_WAYS_OUT = {
    "tokens": "Pass tokens of the model's vocabulary, or build the model with a larger one.",
    "targets": "Pass the number of the right class; no number leaves a prediction out of the loss.",
}


class Indices:
    """The range checks of one model's tokens and targets.

    A check costs two passes over integers in host memory, and no message.

    vocabulary  number of tokens that the model takes; 0: its inputs are features
    is_ours     whether the loss is a class of mpitrain; for any other, targets are not checked
    """

    def __init__(self, transport: Transport, vocabulary: int, is_ours: bool):
        self._transport, self._vocabulary, self._is_ours = transport, vocabulary, is_ours
        self._classes = 0  # The first call of `targets` sets it.

    def tokens(self, inputs: np.ndarray, where: str) -> np.ndarray:
        """Return the inputs, tokens as int32 or int64; features are not checked.

        where   the location of the inputs, for messages
        raises  DataError if a token is outside of the vocabulary; see `_known` for several ranks
        """
        return (
            self._known(inputs, self._vocabulary, "tokens", where) if self._vocabulary else inputs
        )

    def targets(self, targets: np.ndarray, classes: Callable[[], int], where: str) -> np.ndarray:
        """Return the targets as int32 or int64.

        classes  returns the number of columns of the logits; it is called once and not stored,
                 since it may hold a reference to a trainer
        raises   DataError if a target is not a column; see `_known` for several ranks
        """
        if not self._is_ours:
            return targets
        self._classes = self._classes or classes()
        return self._known(targets, self._classes, "targets", where)

    def _known(self, array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
        """Check the array, and on an error abort the whole job.

        Only this rank sees its rows. An agreement of all ranks would cost a message per step.
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
    """Return the array as int32 or int64; DataError unless all elements lie in 0 .. count - 1.

    what   "tokens" or "targets"
    where  the location of the array, for the message
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
