"""Symbols as numbers, and a model that computes with them.

A cell of a buffer is a vector with a coefficient for each symbol. The code that is shown adds and
scales these vectors like any numbers. So `a0+a1` in a cell proves that the values of two ranks were
added there, each once. Coefficients are exact in float64.

The layers of the model pass rows on unchanged, and the gradient of a row is a symbol, the same in
all units. So the contents of a buffer show which rows reached it. Trainer, pipeline and replication
are the package's own. The optimizer is gradient descent with learning rate 1: parameters become
`w-(g0+g1)/2`, since the loss divides by the rows of an update.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config, with_settings
from mpitrain.data import Form
from mpitrain.layers.base import Gradients, Parameter, Unit, Weights
from mpitrain.run.choices import parse

IN_FLIGHT = "~"
"""A cell whose elements a message is about to replace."""
MIXED = "?"
"""A cell whose repetitions differ: no linear form describes it."""
SHORT = 4
"""Summands of a group that are written one by one; longer groups are cut in the middle."""
LARGEST = 64
"""The largest denominator of a coefficient."""


class Symbols:
    """The symbols of a run, and the number of elements that stand for one.

    size  elements of a vector, at least one for each symbol; a cell repeats the vector
    """

    def __init__(self, names: Sequence[str], size: int = 0):
        self.names, self.size = tuple(names), max(size, len(names))
        self._index = {name: number for number, name in enumerate(self.names)}

    def vector(self, name: str) -> np.ndarray:
        vector = np.zeros(self.size)
        vector[self._index[name]] = 1
        return vector

    def cell(self, name: str, count: int) -> np.ndarray:
        """Return `count` elements that repeat the vector of a symbol; `size` divides `count`."""
        return np.tile(self.vector(name), count // self.size)

    def read(self, cell: np.ndarray) -> str:
        vectors = np.asarray(cell).reshape(-1, self.size)
        if not len(vectors):
            return ""
        if np.isnan(vectors).any():
            return IN_FLIGHT
        if (vectors != vectors[0]).any() or vectors[0, len(self.names) :].any():
            return MIXED
        return written({n: float(c) for n, c in zip(self.names, vectors[0], strict=False) if c})

    def read_all(self, array: np.ndarray, cells: int) -> tuple[str, ...]:
        """Return the contents of an array as text, by cell.

        cells  number of cells; they divide the array evenly
        """
        return tuple(self.read(cell) for cell in np.split(np.asarray(array).reshape(-1), cells))


def written(terms: dict[str, float]) -> str:
    """Return a sum of symbols as text: {a: 1, b: -0.5, c: -0.5} is a-(b+c)/2. The empty sum is 0."""
    form = ""
    keyed = [(Fraction(c).limit_denominator(LARGEST), name) for name, c in terms.items()]
    for value, group in groupby(keyed, lambda pair: pair[0]):
        names = [name for _, name in group]
        total = "+".join(names) if len(names) <= SHORT else f"{names[0]}+..+{names[-1]}"
        if len(names) > 1 and value != 1:
            total = f"({total})"
        times = f"{abs(value.numerator)}" if abs(value.numerator) > 1 else ""
        over = f"/{value.denominator}" if value.denominator > 1 else ""
        form += ("-" if value < 0 else "+") + times + total + over
    return form.removeprefix("+") or "0"


VECTOR = 32
"""Elements of a symbol's vector: ZeRO pads units to multiples of 32 elements on each rank."""
STEPS = "ghk"
"""The letter of gradients in each step: g0 is the gradient of row 0 in the first step."""

INPUTS = "xyz"
"""The letter of inputs in each step, where activations are shown."""

PLAIN = (
    "device.kind=cpu",
    "precision.compute=float64",
    "optimizer.name=sgd",
    "optimizer.lr=1",
    "optimizer.weight_decay=0",
    "optimizer.clip=0",
    "optimizer.warmup=0",
    "optimizer.schedule=constant",
    "replication.algorithm=ring",
)


def configured(*settings: str) -> Config:
    return parse(with_settings({}, [*PLAIN, *settings]))


def basis(steps: int, rows: int, has_inputs: bool = False) -> Symbols:
    """Return the symbols of a run: the parameters w, and a gradient for each row of each step.

    has_inputs  whether the input of each row has a symbol, too, and so have other parameters v
    """
    letters = [*STEPS[:steps], *(INPUTS[:steps] if has_inputs else "")]
    parameters = ["w", "v"] if has_inputs else ["w"]
    return Symbols(
        [*parameters, *(f"{letter}{row}" for letter in letters for row in range(rows))], VECTOR
    )


class Pass(NamedTuple):
    """The forward of a layer for one micro-batch, or a half of its backward, with the arrays that it saw.

    Reading a batch, and the loss, are passes as well, of no unit (-1).

    kind   "forward", "input" or "weight"; "batch" or "loss"
    array  parameters; after the weight half, gradients; of the loss, the gradients of its logits
    rows   activations; in the halves of backward, their gradients
    """

    kind: str
    unit: int
    array: Any
    rows: Any


class SymbolLayer:
    """A layer that passes its input on. The gradient of its parameter is the gradient of its output.

    elements  number of elements of the parameter: a multiple of VECTOR
    seen      called after the forward, and after each half of backward
    """

    output_is_free = True

    def __init__(self, unit: int, elements: int, symbols: Symbols, seen: Callable[[Pass], None]):
        self._unit, self._elements, self._symbols, self._seen = unit, elements, symbols, seen

    def parameters(self) -> list[Parameter]:
        return [
            Parameter(
                "w",
                (self._elements,),
                lambda generator, shape: self._symbols.cell("w", self._elements),
                decayed=False,
            )
        ]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(self, w: Weights, x: Any, now: Any, arena: Any) -> tuple[Any, Any]:
        y = arena.take(x.shape, x.dtype)
        y[...] = x
        self._seen(Pass("forward", self._unit, w["w"], x))
        return y, x

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Any) -> tuple[Any, Any]:
        dx = arena.take(dy.shape, dy.dtype)
        dx[...] = dy
        self._seen(Pass("input", self._unit, w["w"], dy))
        return dx, dy

    def backward_weight(self, pending: Any, dw: Gradients, arena: Any) -> None:
        gradient, summed = dw["w"], np.tile(pending.sum(0), self._elements // VECTOR)
        if gradient.claim():
            gradient.array += summed
        else:
            gradient.array[...] = summed
        self._seen(Pass("weight", self._unit, gradient.array, pending))


class SymbolLoss:
    """A loss of 0. Its gradient for a row is a symbol, and the target is the symbol's number.

    seen  called after each loss
    """

    def __init__(self, seen: Callable[[Pass], None] = lambda _: None):
        self._seen = seen

    def gradient(self, logits: Any, targets: Any, scale: float, arena: Any) -> tuple[float, Any]:
        """Return 0, and for each row the vector of a symbol times `scale`, as every loss does."""
        gradient = np.zeros_like(logits)
        gradient[np.arange(len(targets)), targets] = scale
        self._seen(Pass("loss", -1, gradient, logits))
        return 0.0, gradient

    def value(self, logits: Any, targets: Any, arena: Any) -> float:
        return 0.0

    def correct(self, logits: Any, targets: Any, arena: Any) -> float:
        return 0.0


def units(count: int, elements: int, symbols: Symbols, seen: Callable[[Pass], None]) -> list[Unit]:
    return [
        Unit(f"unit{number}", SymbolLayer(number, elements, symbols, seen))
        for number in range(count)
    ]


class SymbolSource:
    """A data source. The target of a row is the number of the symbol of the row's gradient.

    seen  called after each batch
    """

    form: Form = "samples"
    shape: tuple[int, ...] = (VECTOR,)
    inputs = classes = VECTOR
    held_out = 0

    def __init__(self, symbols: Symbols, seen: Callable[[Pass], None] = lambda _: None):
        self._symbols, self._seen = symbols, seen

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of some rows. Inputs are symbols; without symbols for them
        they are 0.
        """
        wanted = [self._symbols.names.index(f"{STEPS[step]}{row}") for row in rows]
        inputs = np.zeros((len(wanted), VECTOR))
        if f"{INPUTS[step]}0" in self._symbols.names:
            for number, row in enumerate(rows):
                inputs[number] = self._symbols.vector(f"{INPUTS[step]}{row}")
        self._seen(Pass("batch", -1, None, inputs))
        return inputs, np.array(wanted, np.int64)

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((0, VECTOR)), np.zeros(0, np.int64)
