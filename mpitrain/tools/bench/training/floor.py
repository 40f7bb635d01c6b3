"""Seconds of a training step by kind of unit, and of its matrix products alone: the step's floor.

Legend: M rows, K inputs, N outputs of a linear layer.
"""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops
from mpitrain.ops.host.attention_whole import QUERIES
from mpitrain.ops.host.product import put_product
from mpitrain.run.build import Job, model
from mpitrain.run.trainer import Trainer
from mpitrain.tools.bench.training.steps import Ours, Result
from mpitrain.tools.bench.turns import ratios, spread
from mpitrain.tools.text_table import TextColumn, TextTable
from mpitrain.trace.recorder import NO_PHASE, Recorder
from mpitrain.transport.base import Transport
from mpitrain.transport.decorators import Recorded

BETWEEN, COMMUNICATION = "between operations", "communication"
SPANS = {"the loss": "loss", "the norm": "optimizer", "the parameters": "optimizer"}
"""{name of a recorded span that is no forward or backward of a unit: its kind of work}."""


class ProductArray(NamedTuple):
    """An array of a matrix product that was recorded in a step. Equal records are one array in the floor.

    address        of the array's first byte in the step: arrays that are one there are one here, so
                   that caches help as much
    is_transposed  whether the product reads the transpose
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    is_transposed: bool = False

    @property
    def transposed(self) -> "ProductArray":
        return self._replace(is_transposed=not self.is_transposed)


Operands = tuple[ProductArray, ProductArray, ProductArray]
"""a, b and the result of a product."""


class Product(NamedTuple):
    """A matrix product a b in units of one kind. Leading dims of the arrays are a batch.

    kind  of unit, such as "mlp"
    """

    kind: str
    a: ProductArray
    b: ProductArray
    out: ProductArray


def _of(array: np.ndarray) -> ProductArray:
    return ProductArray(array.__array_interface__["data"][0], array.shape, array.dtype.str)


def _forward(arguments: Sequence[Any], result: Any) -> list[Operands]:
    """The product of a linear layer's forward, x w^T. x: (M, K); w: (N, K)"""
    return [(_of(arguments[0]), _of(arguments[1]).transposed, _of(result[0]))]


def _input_half(arguments: Sequence[Any], result: Any) -> list[Operands]:
    """The product for the gradient of the input, dy w. dy: (M, N); w: (N, K)"""
    return [(_of(arguments[0]), _of(arguments[1]), _of(result[0]))]


def _weight_half(arguments: Sequence[Any], result: Any) -> list[Operands]:
    """The product for the gradient of the weight (N, K), dy^T x. dy: (M, N); x: (M, K)"""
    dy, x = arguments[0]
    return [(_of(dy).transposed, _of(x), _of(arguments[1]))]


def attention_products(
    batch: int, length: int, heads: int, width: int, dtype: str, offset: int = 0
) -> list[Operands]:
    """Return the matrix products of attention's forward: for each block of queries, scores and values.

    A block of queries sees the keys up to its last query, and `offset` more. The backward has twice
    as many products.
    """
    products: list[Operands] = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        q = ProductArray(-1, (heads, stop - start, width), dtype)
        seen = min(stop + offset, length)
        keys = ProductArray(-2, (heads, seen, width), dtype)
        scores = ProductArray(-3, (heads, stop - start, seen), dtype)
        products += [(q, keys.transposed, scores), (scores, keys, q)]
    return products * batch


def _attention(arguments: Sequence[Any], result: Any) -> list[Operands]:
    q, _, heads = arguments[:3]
    batch, length, columns = q.shape
    return attention_products(batch, length, heads, columns // heads, q.dtype.str, *arguments[5:6])


FORWARDS = ("linear", "logits", "linear_gelu", "linear_relu")
PRODUCTS: Mapping[str, Callable[[Sequence[Any], Any], list[Operands]]] = {
    **dict.fromkeys(FORWARDS, _forward),
    **{f"{name}_backward_input": _input_half for name in FORWARDS if name != "logits"},
    "gelu_linear_backward_input": _input_half,
    "linear_backward_weight": _weight_half,
    "attention": _attention,
}
"""{operation: (arguments, result) -> its products as (a, b, out)}. Those of attention's backward
follow from its forward.
"""


def products_of(kind: str, name: str, arguments: Sequence[Any], result: Any) -> list[Product]:
    """Return the matrix products of a call of an operation, backward included for attention.

    The list is empty for an operation without such products.
    """
    if name not in PRODUCTS:
        return []
    products = [Product(kind, *each) for each in PRODUCTS[name](arguments, result)]
    return products * 3 if name == "attention" else products


class BareProducts:
    """A side of a comparison that computes the matrix products of a step, and nothing else.

    seconds  by step: {kind of unit: seconds of its products}
    """

    name = "bare products"

    def __init__(self, recorded: Sequence[Product]):
        """recorded  the matrix products of a step; the list may grow until `step` is first called"""
        self._recorded, self._arrays = recorded, dict[ProductArray, np.ndarray]()
        self._bound: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
        self.seconds: list[dict[str, float]] = []

    def _array(self, described: ProductArray) -> np.ndarray:
        """Return an array as recorded, with numbers so small that no product of them overflows."""
        is_transposed, plain = described.is_transposed, described._replace(is_transposed=False)
        if plain not in self._arrays:
            self._arrays[plain] = np.full(plain.shape, 1e-3, plain.dtype)
        array = self._arrays[plain]
        return array.swapaxes(-1, -2) if is_transposed else array

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        """Compute all products once; the loss returned is 0."""
        if not self._bound:
            self._bound = [
                (kind, self._array(a), self._array(b), self._array(out))
                for kind, a, b, out in self._recorded
            ]
        spent: dict[str, float] = defaultdict(float)
        arena, last = Arena(), time.perf_counter()
        for kind, a, b, out in self._bound:
            if out.ndim == 2:
                put_product(a, b, out, False, arena)
            else:
                np.matmul(a, b, out=out)
            now = time.perf_counter()
            spent[kind] += now - last
            last = now
        self.seconds.append(spent)
        return 0.0

    def close(self) -> None:
        self._arrays.clear()
        self._bound.clear()


def kind_of(unit: str) -> str:
    """Return the kind of a unit: the last word of its name, such as "mlp" of "blocks.3.mlp"."""
    return re.findall(r"[^.\d]+", unit)[-1] if re.search(r"[^.\d]", unit) else unit


class Stopwatch(Recorder):
    """A recorder that sums the seconds of one rank by kind of work. Each moment counts for one kind.

    seconds   {kind: seconds} since `restart`
    products  the matrix products of the first step
    """

    is_on = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        # It has no ring buffer, so the constructor of Recorder is not called.
        self.clock, self.products = clock, list[Product]()
        self.step = self.micro = -1
        self.naming, self.topic = "", 0
        self._owner, self._labels = threading.get_ident(), [""]
        # Operations outside all spans are updates of parameters, for example on a parameter server.
        self._is_recording, self._units = True, ["optimizer"]
        self.restart()

    def restart(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack, self._last = [BETWEEN], self.clock()

    def stop(self) -> None:
        """End a step: count the time up to now. Later matrix products are not recorded."""
        self._spend()
        self._is_recording = False

    def _spend(self) -> None:
        now = self.clock()
        self.seconds[self._stack[-1]] += now - self._last
        self._last = now

    def enter(self, kind: str) -> None:
        self._spend()
        self._stack.append(kind)

    def leave(self) -> None:
        self._spend()
        self._stack.pop()

    def name(self, what: str, ranks: Sequence[int] = ()) -> int:
        self._labels.append(what)
        return len(self._labels) - 1

    def facts(self, **facts: Any) -> None:
        pass

    def computes_on(self, mark: Callable[[], Any]) -> None:
        pass

    def begin(self, *fields: int, **more: int) -> int:
        return 0

    def compute(self, name: int, phase: int = NO_PHASE, unit: int = -1, micro: int = -1) -> int:
        label = self._labels[name]
        kind = SPANS.get(label, BETWEEN)
        self._units.append(kind_of(label) if unit >= 0 else kind)
        self.enter(kind)
        return 1

    def end(self, span: int) -> None:
        if span:
            self._units.pop()
            self.leave()

    def wait(self, name: int, peer: int = -1, message: int = 0) -> int:
        if threading.get_ident() != self._owner:
            return 0
        self.enter(COMMUNICATION)
        return 1

    def go_on(self, wait: int) -> None:
        if wait:
            self.leave()

    def timed(self, ops: Ops) -> Ops:
        """Return the operations so that each call counts for the kind of its operation or unit."""

        def wrapped(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                kind = self._stack[-1]
                if kind == BETWEEN:
                    kind = "norm" if name.startswith("layer_norm") else self._units[-1]
                self.enter(kind)
                result = body(*arguments, **named)
                self.leave()
                if self._is_recording:
                    self.products += products_of(kind, name, arguments, result)
                return result

            return run

        bodies = {name: wrapped(name, body) for name, body in vars(ops).items()}
        return cast(Ops, SimpleNamespace(**bodies))

    def communicates(self, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self.enter(COMMUNICATION)
            call()
            self.leave()

        return run


class ByKind(Ours):
    """A side of a comparison that trains a copy of a job, and measures each step by kind of unit.

    seconds  by step: {kind: seconds}
    """

    def __init__(self, transport: Transport, job: Job):
        resolved, self.watch = job.trainer.resolved, Stopwatch()
        if resolved.device.kind != "cpu":
            raise on_every_rank(
                ConfigError(
                    "The floor is measured on the host, but device.kind is "
                    f"{resolved.device.kind}.",
                    "Use --device cpu, or leave out --floor.",
                )
            )
        device = resolved.device._replace(ops=self.watch.timed(resolved.device.ops))
        trainer = Trainer(
            Recorded(transport, self.watch),
            lambda layers: model(resolved.config, job.source, layers),
            resolved._replace(device=device),
        )
        mode = trainer.replication
        for each in (mode.store, mode.reducer, mode.step_end, trainer.pipe.channel):
            vars(each)["poll"] = self.watch.communicates(each.poll)
        self.seconds: list[dict[str, float]] = []
        super().__init__(Job(trainer, job.source, job.done), "by kind of unit")

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        self.watch.restart()
        loss = super().step(index, inputs, targets)
        self.watch.stop()
        self.seconds.append(dict(self.watch.seconds))
        return loss


def kind_rows(
    transport: Transport, measured: Sequence[dict[str, float]], floor: Sequence[dict[str, float]]
) -> list[tuple[str, float, float]]:
    """Return (kind, seconds of a step, seconds of its bare products), means over ranks. Collective.

    Of each rank, the median over its steps is used.

    measured, floor  by step: {kind: seconds} on this rank
    """

    def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
        kinds = dict.fromkeys(kind for step in steps for kind in step)
        return {kind: median(step.get(kind, 0.0) for step in steps) for kind in kinds}

    everyone = transport.gather_text([medians(measured), medians(floor)])
    kinds = sorted(
        dict.fromkeys(kind for seconds, _ in everyone for kind in seconds),
        key=lambda kind: (kind == BETWEEN, kind == COMMUNICATION),
    )

    def mean(kind: str, side: int) -> float:
        return fmean(each[side].get(kind, 0.0) for each in everyone)

    return [(kind, mean(kind, 0), mean(kind, 1)) for kind in kinds]


KINDS = TextTable(
    [
        TextColumn("kind of unit", "<20", 0),
        TextColumn("ms a step", "10.2f", lambda row: row[1] * 1e3),
        TextColumn("bare products", "14.2f", lambda row: row[2] * 1e3 or None),
        TextColumn("above", "8.2f", lambda row: (row[1] - row[2]) * 1e3),
    ]
)
"""A line for each kind of unit: (its name, seconds of a step, seconds of its bare products)."""


def floor_table(ours: Result, floor: Result, rows: Sequence[tuple[str, float, float]]) -> list[str]:
    total = "measured in all", sum(row[1] for row in rows), sum(row[2] for row in rows)
    lines = KINDS.lines([*rows, total])
    if all(floor.blocks):
        times = ratios(floor.blocks, ours.blocks)
        lines.append(
            f"{ours.name}: a step is {median(times):.3f} times its bare products (blocks "
            f"{spread(times, 3)})"
        )
    return lines
