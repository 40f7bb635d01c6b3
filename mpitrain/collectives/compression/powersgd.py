"""All-reduce of matrices as the products of two narrow factors (PowerSGD)."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from mpitrain.collectives.compression.error_feedback import RECENT, Feedback
from mpitrain.collectives.compression.matrices import Matrix, square
from mpitrain.collectives.engine.compose import Chain, LocalReduction
from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.plans import ring
from mpitrain.transport.base import Transport


class PowerSgd(Chain):
    """PowerSGD all-reduce: sends each matrix M as P Q', where P has k orthonormal columns.

    Each run takes one step of power iteration from the Q of the previous run. M is the array that
    `Feedback` gives a rank to send. The residual is M - P P' M.

    state    as in `Feedback`, where the prediction is unused outside the matrices; factors: all Q,
             the same on all ranks (their scale does not matter)
    traffic  two ring all-reduces: 4 k (sum of rows) bytes, then 4 k (sum of columns) +
             4 (elements outside the matrices) bytes
    source   Vogels, Karimireddy & Jaggi 2019, NeurIPS; arXiv:1905.13727
    """

    def __init__(
        self, transport: Transport, array: np.ndarray, k: int, matrices: Sequence[Matrix], tag: int
    ):
        matrices = [
            m
            for m in matrices or [square(array.size)]
            if k * (m.rows + m.columns) < m.rows * m.columns
        ]
        outside = np.ones(array.size, bool)
        for m in matrices:
            m.of(outside)[:] = False
        outside = np.flatnonzero(outside)
        heights, widths = [m.rows for m in matrices], [m.columns for m in matrices]
        feedback = Feedback(array, transport.size)
        factors = np.random.default_rng(0).standard_normal(k * sum(widths)).astype(np.float32)
        self.state, self.learn = {**feedback.state, "factors": factors}, feedback.learn
        left = np.empty(k * sum(heights), np.float32)
        right = np.empty(factors.size + outside.size, np.float32)
        views = list(
            zip(
                matrices,
                _factors(left, heights, k),
                _factors(right, widths, k),
                _factors(factors, widths, k),
                strict=True,
            )
        )
        scratch = np.empty(max((m.rows * m.columns for m in matrices), default=0), np.float32)

        def product(m: Matrix, p: np.ndarray, q: np.ndarray) -> np.ndarray:
            return np.matmul(p, q.T, out=scratch[: m.rows * m.columns].reshape(m.rows, m.columns))

        def project() -> None:
            feedback.take(array)
            feedback.residual[outside] = array[outside]
            for m, p, _, old in views:
                np.matmul(m.of(feedback.residual), old, out=p)

        def reproject() -> None:
            for m, p, q, _ in views:
                orthonormalise(p)
                lost = m.of(feedback.residual)
                np.matmul(lost.T, p, out=q)
                lost -= product(m, p, q)
            right[factors.size :] = feedback.residual[outside]
            feedback.residual[outside] = 0

        def rebuild() -> None:
            is_finite = np.isfinite(left).all() and np.isfinite(right).all()
            for m, p, q, old in views:
                sent, prediction = product(m, p, q), m.of(feedback.prediction)
                np.add(prediction, sent, out=m.of(array))
                if is_finite:
                    sent *= np.float32(RECENT)
                    prediction += sent
                    is_live = p.any(axis=0)
                    old[:, is_live] = q[
                        :, is_live
                    ]  # a column that vanished starts again from `old`
            array[outside] = right[factors.size :]
            if not is_finite:  # the trainer skips this step, as in TopK
                feedback.residual[:] = 0

        rings = [
            Execution(
                transport,
                buffer,
                "add",
                ring.all_reduce(transport.rank, transport.size, buffer.size),
                tag,
            )
            for buffer in (left, right)
        ]
        super().__init__(
            transport,
            [
                LocalReduction(project),
                rings[0],
                LocalReduction(reproject),
                rings[1],
                LocalReduction(rebuild),
            ],
            sum(kept.nbytes for kept in (left, right, scratch, outside, feedback.scratch)),
        )


def orthonormalise(columns: np.ndarray) -> None:
    """Orthonormalise columns by Gram-Schmidt, in place.

    A column that depends on earlier columns becomes zero, not normalised rounding errors.
    """
    for i in range(columns.shape[1]):
        column, before = columns[:, i], columns[:, :i]
        length = np.linalg.norm(column)
        for _ in range(2):  # a second pass removes rounding errors of the first
            column -= before @ (before.T @ column)
        rest = np.linalg.norm(column)
        column *= 1 / rest if not rest <= 1e-4 * length else 0


def _factors(flat: np.ndarray, lengths: Sequence[int], k: int) -> list[np.ndarray]:
    """Return views (length, k) of successive regions of a flat buffer."""
    return [
        flat[k * start : k * stop].reshape(-1, k)
        for start, stop in pairwise(accumulate(lengths, initial=0))
    ]
