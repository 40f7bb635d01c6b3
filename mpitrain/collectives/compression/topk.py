"""All-reduce of the elements of largest magnitude only."""

from collections.abc import Callable

import numpy as np

from mpitrain.collectives.compression.error_feedback import RECENT, Feedback
from mpitrain.collectives.engine.compose import Chain, LocalReduction
from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.plans import ring
from mpitrain.transport.base import Transport


class TopK(Chain):
    """Top-k all-reduce with error feedback.

    state    as in `Feedback`
    traffic  each rank sends (n - 1) x 8 k bytes
    source   Stich, Cordonnier & Jaggi 2018, NeurIPS; arXiv:1809.07599
    """

    def __init__(
        self,
        transport: Transport,
        array: np.ndarray,
        k: int,
        tag: int,
        largest: Callable[[np.ndarray, int], np.ndarray],
    ):
        rank, n = transport.rank, transport.size
        feedback = Feedback(array, n)
        self.state, self.learn = feedback.state, feedback.learn
        everyone = np.empty_like(array, np.int32, shape=(n, 2, k))

        def choose() -> None:
            feedback.take(array)
            chosen = largest(feedback.residual, k)
            everyone[rank, 0] = chosen
            everyone[rank, 1].view(np.float32)[:] = feedback.residual[chosen]
            feedback.residual[chosen] = 0

        def add_up() -> None:
            array[:] = feedback.prediction
            for positions, values in everyone:
                array[positions] += values.view(np.float32)
            if not np.isfinite(array[everyone[:, 0]]).all():
                # The trainer skips this step, so its residual must not spoil the next one.
                feedback.residual[:] = 0
                return
            for positions, values in everyone:
                feedback.prediction[positions] += np.float32(RECENT) * values.view(np.float32)

        exchange = Execution(
            transport, everyone, "add", ring.all_gather(rank, n, everyone.size), tag
        )
        super().__init__(
            transport,
            [LocalReduction(choose), exchange, LocalReduction(add_up)],
            everyone.nbytes + feedback.scratch.nbytes,
        )
