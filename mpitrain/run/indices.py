"""Range checks of tokens and targets on the host: device kernels do not check their indices."""

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from mpitrain.data import IGNORED
from mpitrain.errors import DataError, on_every_rank
from mpitrain.transport.base import Transport

Shape = tuple[int, ...]
_WAYS_OUT = {
    "tokens": "Pass tokens of the model's vocabulary, or build the model with a larger one.",
    "targets": f"Pass the number of the right class, or {IGNORED} for a prediction that does not count.",
}


class Indices:
    """The range checks of one model's tokens and targets.

    A check costs two passes over integers in host memory, and no message.

    vocabulary  number of tokens that the model takes; 0: its inputs are features
    is_ours     whether the loss is a class of mpitrain; for any other, targets are not checked
    """

    def __init__(self, transport: Transport, vocabulary: int, is_ours: bool):
        self._transport, self._vocabulary, self._is_ours = transport, vocabulary, is_ours
        # The first call of `targets` sets these for its shape of inputs.
        self._inputs: Shape = ()
        self._predictions: list[int] = []
        self._classes = 0

    def tokens(self, inputs: np.ndarray, where: str) -> np.ndarray:
        """Return the inputs, tokens as int32 or int64; features are not checked.

        where   the location of the inputs, for messages
        raises  DataError if a token is outside of the vocabulary; see `_known` for several ranks
        """
        return (
            self._known(inputs, self._vocabulary, "tokens", where) if self._vocabulary else inputs
        )

    def rows(self, inputs: np.ndarray, share: range, where: str) -> None:
        """Refuse more rows than this rank's share of the global batch; see `_end` for several ranks.

        The loss is divided by batch.size. A rank that passed the whole batch would multiply the loss
        and the gradient by the number of replicas. Fewer rows are a part of the sum.
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
        """Return the targets as int32 or int64.

        inputs  the shape of the inputs
        output  maps the shape of the inputs to the shape of the whole logits; it is not stored,
                since it may hold a reference to a trainer
        raises  DataError unless each prediction has one target, which is a column of the logits or
                IGNORED; see `_end` for several ranks
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

    def ignored(self, targets: np.ndarray) -> int:
        """Return the number of targets that do not count."""
        return int(np.count_nonzero(targets == IGNORED)) if self._is_ours else 0

    def _known(self, array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
        """Check the array, and on an error abort the whole job.

        Only this rank sees its rows. An agreement of all ranks would cost a message per step.
        """
        try:
            return known(array, count, what, self._on(where))
        except DataError as error:
            self._end(error)

    def _on(self, where: str) -> str:
        rank = self._transport.rank
        return f"{where} on rank {rank} ({self._transport.hosts[rank]})"

    def _end(self, error: DataError) -> NoReturn:
        """Raise the error on a rank that is alone; of several ranks one aborts the whole job."""
        if self._transport.size == 1:
            raise on_every_rank(error) from None
        self._transport.abort(str(error))
        raise error


def known(array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
    """Return the array as int32 or int64; DataError unless all elements are in 0 .. count - 1.

    A target may also be IGNORED.

    what   "tokens" or "targets"
    where  the location of the array, for the message
    """
    if array.dtype.kind not in "iu":
        raise DataError(
            f"{what.capitalize()} must be integers, but those of {where} are {array.dtype}.",
            "Convert them, for example with array.astype(numpy.int64).",
        )
    if array.size and not (array.min() >= 0 and array.max() < count):
        is_wrong = (array < 0) | (array >= count)
        if what == "targets":
            is_wrong &= array != IGNORED
        if not is_wrong.any():
            return _wide(array)
        first = np.unravel_index(np.argmax(is_wrong), array.shape)
        raise DataError(
            f"{what.capitalize()} must lie in 0..{count - 1}, but {where} has {array[first]} at "
            f"[{', '.join(map(str, first))}].",
            _WAYS_OUT[what],
        )
    return _wide(array)


def _wide(array: np.ndarray) -> np.ndarray:
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)
