"""All-reduce through a wire format: every rank ends with the same bits, which are near the sum.

Sums are taken in float32. Nothing is coded more often than it must be: a chunk goes straight to the rank that sums it,
and the coded sum to everyone; the rank that made it decodes it like the others.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from itertools import pairwise as pairs
from typing import NamedTuple

import numpy as np

from mpitrain.collectives import pairwise, ring
from mpitrain.collectives.arithmetic import HOST, Arithmetic
from mpitrain.collectives.check import agree
from mpitrain.collectives.compose import Chain, Lanes, Local
from mpitrain.collectives.execute import WINDOW, Execution, Reduction
from mpitrain.collectives.plans import Plan, at_once
from mpitrain.collectives.wire import BLOCK, Codec, Wire
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.machine.backend import on_device
from mpitrain.transport.base import Transport

LANE = 30 << 10
"""Elements of a rank's chunk that are coded at a time, so that coding some hides behind sending others: two bytes of each
are one message between hosts."""

RECENT = 0.1
"""Weight of the newest sum in the average that predicts the next: that of momentum with 0.9."""

CACHED = 1 << 16
"""Elements worked on together in several passes, so that all but the first find them in a cache."""


class Matrix(NamedTuple):
    """Where a matrix lies in a flat array: its first element, its shape, and the elements from row to row."""

    start: int
    rows: int
    columns: int
    stride: int

    def fits(self, count: int) -> bool:
        """Whether it lies in an array of `count` elements."""
        end = self.start + (self.rows - 1) * self.stride + self.columns
        return self.start >= 0 and 0 <= self.columns <= self.stride and self.rows >= 0 and (self.rows == 0 or end <= count)

    def of(self, flat: np.ndarray) -> np.ndarray:
        """The matrix in such an array, which must reach to its end."""
        strides = self.stride * flat.itemsize, flat.itemsize
        return np.lib.stride_tricks.as_strided(flat[self.start:], (self.rows, self.columns), strides)


def tiles(start: int, rows: int, columns: int) -> list[Matrix]:
    """A matrix cut along its longer side into tiles as nearly square as that allows.

    K directions are then the same part of every matrix's elements, whatever its shape. The factors of the tiles hold at most
    twice the elements that those of the whole would hold.
    """
    short, long = sorted((rows, columns))
    parts = round(long / short) if short > 1 else 1
    cuts = list(pairs(long * part // parts for part in range(parts + 1)))
    if rows == long:
        return [Matrix(start + low * columns, high - low, columns, columns) for low, high in cuts]
    return [Matrix(start + low, rows, high - low, columns) for low, high in cuts]


def bind_lossy(transport: Transport, array: np.ndarray, wire: Wire, matrices: Sequence[Matrix] = (),
               arithmetic: Arithmetic = HOST) -> Reduction:
    """Bind a sum of `array` over all ranks, in place, that travels in a wire format.

    array       float32, contiguous; one length on all ranks
    matrices    for powersgd: what in the array is a matrix; the whole array as one, nearly square, if none is given
    arithmetic  what codes, adds and chooses
    raises      CommError on every rank if ranks differ or the array is not float32; ConfigError on every rank if the
                array lies in a GPU's memory and the format's residuals cannot
    """
    tag = agree(transport, "lossy all-reduce", array, (wire.name,), wire.name, amount=wire.amount, matrices=len(matrices))
    if array.dtype != np.float32:
        raise on_every_rank(CommError(
            f"rank {transport.rank}: wire format {wire.name} takes float32, but the array is {array.dtype}.", "Use wire none."))
    if wire.name in ("topk", "powersgd") and on_device(array):
        raise on_every_rank(ConfigError(
            f"Wire format {wire.name} keeps its residuals in host memory, but this array lies in a GPU's.",
            "Use wire fp16, bf16, int8 or none, or device.kind cpu."))
    flat = array.reshape(-1)
    if wire.name == "topk":
        return TopK(transport, flat, math.ceil(wire.amount * flat.size), tag, arithmetic.largest)
    if wire.name == "powersgd":
        beyond = [matrix for matrix in matrices if not matrix.fits(flat.size)]
        if beyond:
            raise on_every_rank(CommError(f"Matrices lie within their array, but {beyond[0]} does not in {flat.size} elements."))
        return PowerSgd(transport, flat, int(wire.amount), matrices, tag)
    return coded(transport, flat, arithmetic.codecs[wire.name], tag)


def coded(transport: Transport, array: np.ndarray, codec: Codec, tag: int) -> Lanes:
    """A sum in which every element is coded on its own.

    traffic  2(n-1) chunks, each coded: LANE elements of every whole lane, ceil(rest / n) rounded up to blocks of the last
    """
    n, most = transport.size, transport.size * LANE
    lanes = [array[start:start + most] for start in range(0, array.size, most)] or [array]
    width = min(len(lanes), max(2, 2 * WINDOW // n))
    tags = [tag, *(transport.claim_tag() for _ in range(2 * width - 1))]
    desks = [Desk(lanes[0], n, codec, tags[2 * i:2 * i + 2]) for i in range(width)]
    return Lanes(transport, [links(transport, part, codec, desks[i % width]) for i, part in enumerate(lanes)], width)


class Desk:
    """Scratch and tags to code one lane with, which the next lane may use: elements, and bytes to and from all ranks."""

    def __init__(self, part: np.ndarray, n: int, codec: Codec, tags: Sequence[int]):
        self.tags = tags
        blocks = n * -(-part.size // (n * BLOCK))
        self.values, self.scratch = (np.empty_like(part, shape=count * BLOCK) for count in (blocks, blocks // n))
        self.outgoing, self.incoming = (np.empty_like(part, np.uint8, shape=blocks * codec.block_bytes) for _ in range(2))


def links(transport: Transport, part: np.ndarray, codec: Codec, desk: Desk) -> list[Reduction]:
    """One lane: code, send each chunk to the rank that sums it; sum, code, send the sums to all; decode."""
    rank, n = transport.rank, transport.size
    blocks = -(-part.size // (n * BLOCK))
    flat, scratch = desk.values[:n * blocks * BLOCK], desk.scratch[:blocks * BLOCK]
    values = flat.reshape(n, -1)
    outgoing, incoming = (buffer[:n * blocks * codec.block_bytes].reshape(n, -1) for buffer in (desk.outgoing, desk.incoming))
    others = [(rank + step) % n for step in range(1, n)]

    def scatter() -> None:
        flat[:part.size] = part
        flat[part.size:] = 0
        for peer in others:
            codec.encode(values[peer], outgoing[peer])

    def gather() -> None:
        for peer in others:
            codec.add(incoming[peer], values[rank], scratch)
        codec.encode(values[rank], incoming[rank])

    def finish() -> None:
        for owner in range(n):
            codec.decode(incoming[owner], values[owner])
        part[:] = flat[:part.size]

    plans = without_self(pairwise.all_to_all(rank, n, incoming.size), rank), pairwise.all_gather(rank, n, incoming.size)
    # All peers at once: a rank that is late to code its chunk then holds up nobody's exchange with the others.
    to_all, from_all = (Execution(transport, incoming, "add", at_once(plan), tag, source)
                        for plan, tag, source in zip(plans, desk.tags, (outgoing, incoming), strict=True))
    return [Local(scatter), to_all, Local(gather), from_all, Local(finish)]


def without_self(plan: Plan, rank: int) -> Plan:
    """The plan but for what a rank sends itself."""
    return plan._replace(steps=tuple(step for step in plan.steps if all(t.peer != rank for t in step.sends)))


class Memory:
    """What a format that sends a part of an array remembers, so that the rest is late instead of lost.

    A rank takes what differs from a prediction, and adds what it could not send before, which fades at the rate at which
    the prediction, an average of past sums, forgets. In every run, over all ranks,

        sum + residuals = what was put in + (1 - RECENT) x the residuals before.

    Without a prediction an element that is sent in one step of ten arrives as ten gradients at once and as none in between.
    The price: one huge but finite gradient is felt, ever weaker, until it has faded from the average.

    residual    what was not sent yet, (count,); of each rank
    prediction  the average, in which the newest sum weighs RECENT, (count,); the same on all ranks
    source      Adikari & Draper 2021, IEEE JSAIT 2(3); arXiv:2108.07827
    """

    def __init__(self, array: np.ndarray, ranks: int):
        self.residual, self.prediction = np.zeros_like(array), np.zeros_like(array)
        self.state = {"residual": self.residual, "prediction": self.prediction}
        self._scratch = np.empty_like(array, shape=min(CACHED, array.size))
        self._share = np.float32(1 / ranks)

    def take(self, array: np.ndarray) -> None:
        """Make the residual what this rank has to send."""
        for start in range(0, array.size, CACHED):
            part = slice(start, start + CACHED)
            kept, prediction = self.residual[part], self.prediction[part]
            kept *= 1 - RECENT
            kept += array[part]
            kept -= np.multiply(prediction, self._share, out=self._scratch[:kept.size])

    def learn(self, total: np.ndarray) -> None:
        """Put a sum that travelled whole into the prediction, unless it is not finite; what was not sent before fades."""
        is_finite = math.isfinite(np.dot(total, total))
        for start in range(0, total.size, CACHED):
            part = slice(start, start + CACHED)
            self.residual[part] *= 1 - RECENT
            if is_finite:
                prediction = self.prediction[part]
                prediction *= 1 - RECENT
                prediction += np.multiply(total[part], np.float32(RECENT), out=self._scratch[:prediction.size])


class TopK(Chain):
    """The largest elements only.

    state    of `Memory`
    traffic  (n-1) x 8 k bytes
    source   Stich, Cordonnier & Jaggi 2018, NeurIPS; arXiv:1809.07599
    """

    def __init__(self, transport: Transport, array: np.ndarray, k: int, tag: int,
                 largest: Callable[[np.ndarray, int], np.ndarray]):
        rank, n = transport.rank, transport.size
        memory = Memory(array, n)
        self.state, self.learn = memory.state, memory.learn
        everyone = np.empty_like(array, np.int32, shape=(n, 2, k))

        def choose() -> None:
            memory.take(array)
            chosen = largest(memory.residual, k)
            everyone[rank, 0] = chosen
            everyone[rank, 1].view(np.float32)[:] = memory.residual[chosen]
            memory.residual[chosen] = 0

        def add_up() -> None:
            array[:] = memory.prediction
            for positions, values in everyone:
                array[positions] += values.view(np.float32)
            if not np.isfinite(array[everyone[:, 0]]).all():
                memory.residual[:] = 0  # the step will be skipped: what it left behind must not spoil the next
                return
            for positions, values in everyone:
                memory.prediction[positions] += np.float32(RECENT) * values.view(np.float32)

        exchange = Execution(transport, everyone, "add", ring.all_gather(rank, n, everyone.size), tag)
        super().__init__(transport, [Local(choose), exchange, Local(add_up)])


class PowerSgd(Chain):
    """Every matrix M as P Q', P of orthonormal columns: one step of power iteration from the Q of the run before.

    M is what `Memory` gives a rank to send; M - P P' M is what it could not.

    state    of `Memory`, whose prediction is of no use outside the matrices; factors: all Q, which are the same on all ranks
             and matter up to a factor
    traffic  two rings over 4 k (sum of rows), and over 4 k (sum of columns) + 4 (elements outside the matrices) bytes
    source   Vogels, Karimireddy & Jaggi 2019, NeurIPS; arXiv:1905.13727
    """

    def __init__(self, transport: Transport, array: np.ndarray, k: int, matrices: Sequence[Matrix], tag: int):
        matrices = [m for m in matrices or [square(array.size)] if k * (m.rows + m.columns) < m.rows * m.columns]
        outside = np.ones(array.size, bool)
        for m in matrices:
            m.of(outside)[:] = False
        outside = np.flatnonzero(outside)
        heights, widths = [m.rows for m in matrices], [m.columns for m in matrices]
        memory = Memory(array, transport.size)
        factors = np.random.default_rng(0).standard_normal(k * sum(widths)).astype(np.float32)
        self.state, self.learn = {**memory.state, "factors": factors}, memory.learn
        left = np.empty(k * sum(heights), np.float32)
        right = np.empty(factors.size + outside.size, np.float32)
        views = list(zip(matrices, _factors(left, heights, k), _factors(right, widths, k), _factors(factors, widths, k),
                         strict=True))
        scratch = np.empty(max((m.rows * m.columns for m in matrices), default=0), np.float32)

        def product(m: Matrix, p: np.ndarray, q: np.ndarray) -> np.ndarray:
            return np.matmul(p, q.T, out=scratch[:m.rows * m.columns].reshape(m.rows, m.columns))

        def project() -> None:
            memory.take(array)
            memory.residual[outside] = array[outside]
            for m, p, _, old in views:
                np.matmul(m.of(memory.residual), old, out=p)

        def reproject() -> None:
            for m, p, q, _ in views:
                orthonormalise(p)
                lost = m.of(memory.residual)
                np.matmul(lost.T, p, out=q)
                lost -= product(m, p, q)
            right[factors.size:] = memory.residual[outside]
            memory.residual[outside] = 0

        def rebuild() -> None:
            is_finite = np.isfinite(left).all() and np.isfinite(right).all()
            for m, p, q, old in views:
                sent, prediction = product(m, p, q), m.of(memory.prediction)
                np.add(prediction, sent, out=m.of(array))
                if is_finite:
                    sent *= np.float32(RECENT)
                    prediction += sent
                    is_live = p.any(axis=0)
                    old[:, is_live] = q[:, is_live]  # a direction that vanished is tried again
            array[outside] = right[factors.size:]
            if not is_finite:  # as for topk
                memory.residual[:] = 0

        rings = [Execution(transport, buffer, "add", ring.all_reduce(transport.rank, transport.size, buffer.size), tag)
                 for buffer in (left, right)]
        super().__init__(transport, [Local(project), rings[0], Local(reproject), rings[1], Local(rebuild)])


def square(count: int) -> Matrix:
    """The most nearly square matrix that fits into `count` elements, from the first one on."""
    rows = max(1, math.isqrt(count))
    return Matrix(0, rows, count // rows, count // rows)


def orthonormalise(columns: np.ndarray) -> None:
    """Gram-Schmidt, in place; a column that depends on those before it becomes zero instead of normalised rounding."""
    for i in range(columns.shape[1]):
        column, before = columns[:, i], columns[:, :i]
        length = np.linalg.norm(column)
        for _ in range(2):  # once leaves what rounding left
            column -= before @ (before.T @ column)
        rest = np.linalg.norm(column)
        column *= 1 / rest if not rest <= 1e-4 * length else 0


def _factors(flat: np.ndarray, lengths: Sequence[int], k: int) -> list[np.ndarray]:
    """Views (length, k) of a flat buffer, one after the other."""
    return [flat[k * start:k * stop].reshape(-1, k) for start, stop in pairs(accumulate(lengths, initial=0))]
