"""All-reduce in a wire format: all ranks end with the same bits, which are nearly the sum.

All sums are in float32. Formats quantize every element (fp16, bf16, int8), send the largest
elements (topk), or send matrices as products of two factors (powersgd).
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.engine.arithmetic import BLOCK, HOST, Arithmetic, Codec, Wire
from mpitrain.collectives.engine.compose import Chain, LocalReduction, PipelinedChain
from mpitrain.collectives.engine.executor import WINDOW, Execution, Reduction, agree
from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.exchanges import all_to_all, pairwise_all_gather
from mpitrain.collectives.plans.steps import Plan, at_once
from mpitrain.errors import CommError, ConfigError
from mpitrain.machine.backend import on_device
from mpitrain.transport.base import Transport


class Matrix(NamedTuple):
    """Location of a matrix in a flat array, in elements; the stride is from row to row."""

    start: int
    rows: int
    columns: int
    stride: int

    def of(self, flat: np.ndarray) -> np.ndarray:
        """Return the matrix as a view (rows, columns) of a flat array."""
        strides = self.stride * flat.itemsize, flat.itemsize
        return np.lib.stride_tricks.as_strided(
            flat[self.start :], (self.rows, self.columns), strides
        )


def tiles(start: int, rows: int, columns: int) -> list[Matrix]:
    """Divide a matrix along its longer side into tiles that are as nearly square as possible.

    Factors of K columns then keep the same share of every matrix, whatever its shape. The factors of
    the tiles have at most twice as many elements as the factors of the whole matrix.
    """
    short, long = sorted((rows, columns))
    parts = round(long / short) if short > 1 else 1
    cuts = list(pairwise(long * part // parts for part in range(parts + 1)))
    if rows == long:
        return [Matrix(start + low * columns, high - low, columns, columns) for low, high in cuts]
    return [Matrix(start + low, rows, high - low, columns) for low, high in cuts]


def square(count: int) -> Matrix:
    """Return the most nearly square matrix within the first `count` elements."""
    rows = max(1, math.isqrt(count))
    return Matrix(0, rows, count // rows, count // rows)


def bind_lossy(
    transport: Transport,
    array: np.ndarray,
    wire: Wire,
    matrices: Sequence[Matrix] = (),
    arithmetic: Arithmetic = HOST,
    compares: bool = True,
) -> Reduction:
    """Bind a sum of `array` over all ranks, in place, with messages in a wire format.

    array       float32, contiguous; of the same length on all ranks
    matrices    for powersgd: matrices within the array; empty: the array as one, nearly square
    arithmetic  encodes, adds and selects elements
    compares    as of `agree`
    raises      CommError on every rank if arguments differ, or if the array is not float32;
                ConfigError on every rank if the array is in GPU memory, and the format has
                residuals, which must be in host memory
    """
    tag, _ = agree(
        transport,
        "lossy all-reduce",
        array,
        (wire.name,),
        wire.name,
        compares=compares,
        amount=wire.amount,
        matrices=len(matrices),
    )
    if array.dtype != np.float32:
        raise CommError(
            f"rank {transport.rank}: wire format {wire.name} takes float32, but the array is {array.dtype}.",
            "Use wire none.",
        ).on_every_rank()
    if wire.name in ("topk", "powersgd") and on_device(array):
        raise ConfigError(
            f"Wire format {wire.name} keeps its residuals in host memory, but this array is in a GPU's.",
            "Use wire fp16, bf16, int8 or none, or device.kind cpu.",
        ).on_every_rank()
    flat = array.reshape(-1)
    if wire.name == "topk":
        return TopK(transport, flat, math.ceil(wire.amount * flat.size), tag, arithmetic.largest)
    if wire.name == "powersgd":
        return PowerSgd(transport, flat, int(wire.amount), matrices, tag)
    return bind_coded(transport, flat, arithmetic.codecs[wire.name], tag)


RECENT = 0.1
"""Weight of the newest sum in the moving average that predicts the next; as momentum with 0.9."""

CACHED = 1 << 16
"""Elements processed together in several passes, so that all passes but the first hit the cache."""


class Feedback:
    """Residual and prediction of a format that sends only some of the elements.

    A rank sends the difference between its array and a prediction, a moving average of past sums.
    It adds the residual that it did not send before. The residual decays at the same rate as old
    sums in the prediction. In every run, over all ranks,

        sum + new residuals = inputs + (1 - RECENT) x old residuals.

    Without a prediction, an element sent in one step of ten arrives as ten gradients at once. In
    between, it arrives as none. The prediction has a cost: one huge but finite gradient stays in the
    moving average, ever weaker, until it has decayed.

    residual    elements not sent yet, (count,); differs between ranks
    prediction  moving average, in which the newest sum weighs RECENT, (count,); same on all ranks
    source      Adikari & Draper 2021, IEEE JSAIT 2(3); arXiv:2108.07827
    """

    def __init__(self, array: np.ndarray, ranks: int):
        self.residual, self.prediction = np.zeros_like(array), np.zeros_like(array)
        self.state = {"residual": self.residual, "prediction": self.prediction}
        self.scratch = np.empty_like(array, shape=min(CACHED, array.size))
        self._share = np.float32(1 / ranks)

    def take(self, array: np.ndarray) -> None:
        """Set `residual` to what this rank has to send; the format then subtracts what it sends."""
        for start in range(0, array.size, CACHED):
            part = slice(start, start + CACHED)
            kept, prediction = self.residual[part], self.prediction[part]
            kept *= 1 - RECENT
            kept += array[part]
            kept -= np.multiply(prediction, self._share, out=self.scratch[: kept.size])

    def learn(self, total: np.ndarray) -> None:
        """Update the prediction with a sum that was sent whole, unless it is not finite.

        The residual decays in any case.
        """
        is_finite = math.isfinite(np.dot(total, total))
        for start in range(0, total.size, CACHED):
            part = slice(start, start + CACHED)
            self.residual[part] *= 1 - RECENT
            if is_finite:
                prediction = self.prediction[part]
                prediction *= 1 - RECENT
                prediction += np.multiply(
                    total[part], np.float32(RECENT), out=self.scratch[: prediction.size]
                )


class TopK(Chain):
    """Top-k all-reduce with error feedback.

    state    as in `Feedback`
    traffic  each rank sends (n - 1) x 8 x k bytes
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
            [LocalReduction(choose), exchange, LocalReduction(add_up)],
            everyone.nbytes + feedback.scratch.nbytes,
        )


class PowerSgd(Chain):
    """PowerSGD all-reduce: sends each matrix M as P Q', where P has k orthonormal columns.

    Each run takes one step of power iteration from the Q of the previous run. M is the array that
    `Feedback` gives a rank to send. The residual is M - P P' M.

    state    as in `Feedback`, where the prediction is unused outside the matrices; factors: all Q,
             the same on all ranks (their scale does not matter)
    traffic  two ring all-reduces, of 4 x k x (sum of rows) bytes, and of 4 x k x (sum of columns)
             + 4 x (elements outside the matrices) bytes
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
    """Orthonormalise columns in place (Gram-Schmidt); a column that depends on earlier ones becomes 0."""
    for i in range(columns.shape[1]):
        column, before = columns[:, i], columns[:, :i]
        length = np.linalg.norm(column)
        for _ in range(2):  # a second pass removes rounding errors of the first
            column -= before @ (before.T @ column)
        rest = np.linalg.norm(column)
        column *= 1 / rest if not rest <= 1e-4 * length else 0


def _factors(flat: np.ndarray, lengths: Sequence[int], k: int) -> list[np.ndarray]:
    return [
        flat[k * start : k * stop].reshape(-1, k)
        for start, stop in pairwise(accumulate(lengths, initial=0))
    ]


# Quantized sums. No element is encoded more often than necessary: each chunk goes straight to the rank
# that sums it, and the encoded sum goes to all ranks. That rank decodes its own sum too, so that all
# ranks have the same bits.

LANE = 30 << 10
"""Elements of a rank's chunk that are encoded at a time, while others are sent.

In a format of two bytes per element, they fill one message between hosts.
"""


def bind_coded(transport: Transport, array: np.ndarray, codec: Codec, tag: int) -> PipelinedChain:
    """Bind a sum in a format that encodes block by block: fp16, bf16 or int8.

    The array is cut into parts of n x LANE elements, with a chain for each.

    traffic  each chain sends 2 x (n - 1) encoded chunks of LANE elements. In the last chain a chunk
             has 1 / n of the remaining elements, rounded up to blocks
    """
    n, most = transport.size, transport.size * LANE
    lanes = [array[start : start + most] for start in range(0, array.size, most)] or [array]
    width = min(len(lanes), max(2, 2 * WINDOW // n))
    tags = [tag, *(transport.claim_tag() for _ in range(2 * width - 1))]
    desks = [Workspace(lanes[0], n, codec, tags[2 * i : 2 * i + 2]) for i in range(width)]
    return PipelinedChain(
        transport,
        [_links(transport, part, codec, desks[i % width]) for i, part in enumerate(lanes)],
        width,
        sum(desk.nbytes for desk in desks),
    )


class Workspace:
    """Scratch and tags of one chain; a later chain may reuse them.

    values              n chunks of whole blocks, float32
    scratch             one such chunk
    outgoing, incoming  encoded chunks to and from all ranks
    """

    def __init__(self, part: np.ndarray, n: int, codec: Codec, tags: Sequence[int]):
        self.tags = tags
        blocks = n * -(-part.size // (n * BLOCK))
        self.values, self.scratch = (
            np.empty_like(part, shape=count * BLOCK) for count in (blocks, blocks // n)
        )
        self.outgoing, self.incoming = (
            np.empty_like(part, np.uint8, shape=blocks * codec.block_bytes) for _ in range(2)
        )
        self.nbytes = sum(
            array.nbytes for array in (self.values, self.scratch, self.outgoing, self.incoming)
        )


def _links(
    transport: Transport, part: np.ndarray, codec: Codec, desk: Workspace
) -> list[Reduction]:
    """Return the links of one chain, which sums a part of the array.

    They scatter encoded chunks, sum them, gather the encoded sums and decode these.
    """
    rank, n = transport.rank, transport.size
    blocks = -(-part.size // (n * BLOCK))
    flat, scratch = desk.values[: n * blocks * BLOCK], desk.scratch[: blocks * BLOCK]
    values = flat.reshape(n, -1)
    outgoing, incoming = (
        buffer[: n * blocks * codec.block_bytes].reshape(n, -1)
        for buffer in (desk.outgoing, desk.incoming)
    )
    others = [(rank + step) % n for step in range(1, n)]

    def scatter() -> None:
        flat[: part.size] = part
        flat[part.size :] = 0
        for peer in others:
            codec.encode(values[peer], outgoing[peer])

    def gather() -> None:
        for peer in others:
            codec.add(incoming[peer], values[rank], scratch)
        codec.encode(values[rank], incoming[rank])

    def finish() -> None:
        for owner in range(n):
            codec.decode(incoming[owner], values[owner])
        part[:] = flat[: part.size]

    plans = (
        _without_self(all_to_all(rank, n, incoming.size), rank),
        pairwise_all_gather(rank, n, incoming.size),
    )
    # All messages are in flight at once: a rank that encodes late then delays no other exchange.
    to_all, from_all = (
        Execution(transport, incoming, "add", at_once(plan), tag, source)
        for plan, tag, source in zip(plans, desk.tags, (outgoing, incoming), strict=True)
    )
    return [
        LocalReduction(scatter),
        to_all,
        LocalReduction(gather),
        from_all,
        LocalReduction(finish),
    ]


def _without_self(plan: Plan, rank: int) -> Plan:
    return plan._replace(
        steps=tuple(step for step in plan.steps if all(t.peer != rank for t in step.sends))
    )


def bind_coded_all_gather(
    transport: Transport, array: np.ndarray, codec: Codec, bind: Callable[[np.ndarray], Reduction]
) -> Chain:
    """Bind an all-gather of encoded chunks: chunk r of rank r ends, decoded, in every rank's array.

    Rank r also decodes its own chunk, so that all ranks have the same bits.

    array    float32; its size divides into one chunk per rank
    bind     binds an all-gather of bytes
    traffic  as an all-gather of n chunks, each rounded up to blocks and encoded
    """
    chunks = array.reshape(transport.size, -1)
    length = chunks.shape[1]
    blocks = -(-length // BLOCK)
    values = np.empty_like(array, shape=blocks * BLOCK)
    coded = np.empty_like(array, np.uint8, shape=transport.size * blocks * codec.block_bytes)
    parts = coded.reshape(transport.size, -1)

    def encode() -> None:
        values[:length] = chunks[transport.rank]
        values[length:] = 0
        codec.encode(values, parts[transport.rank])

    def decode() -> None:
        for chunk, part in zip(chunks, parts, strict=True):
            codec.decode(part, values)
            chunk[:] = values[:length]

    return Chain(
        [LocalReduction(encode), bind(coded), LocalReduction(decode)], values.nbytes + coded.nbytes
    )
