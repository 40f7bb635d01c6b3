"""Laws of operations: each backend computes the definition of every row of the table.

A law takes the operations and the backend of their arrays.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpitrain.machine.backend import Backend, HostBackend
from mpitrain.ops import OPERATIONS, Ops
from mpitrain.ops.device import _refuse, reference_ops
from mpitrain.ops.table import Operand, Sizes, dims, operands
from mpitrain.tools.bench.kernels.examples import examples

PRIVATE = ("saved", "pending")
"""Results whose content is private to a backend."""
IMAGES = {"I": 5, "J": 7, "F": 3, "G": 2, "S": 3, "P": 2}
PRIME = {"M": 7, "K": 5, "N": 3, "C": 11, "V": 13, "B": 2, "T": 5, "H": 2, "E": 1, "D": 3, "L": 101}
PRIME |= IMAGES
SIZES: tuple[Sizes, ...] = (
    dict.fromkeys(PRIME, 1),
    PRIME,
    {**PRIME, "M": 0, "B": 0, "L": 0},
    {"M": 130, "K": 40, "N": 515, "C": 515, "V": 300, "B": 2, "T": 67, "H": 4, "D": 8, "L": 70_001}
    | {"E": 2, "I": 9, "J": 11, "F": 8, "G": 20, "S": 5, "P": 3},
)
TOLERANCE = {"float64": 1e-11, "float32": 3e-5}


def drawn(one: Operand, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """The same numbers for the same operand, in float64, or integers below a size."""
    rng = np.random.default_rng(zlib.crc32(one.name.encode()))
    if one.once:
        return rng.permutation(sizes[one.below]).reshape(shape)
    if one.below:
        return rng.integers(sizes[one.below], size=shape)
    if one.coded:
        return rng.integers(256, size=shape, dtype=np.uint8)
    numbers = rng.standard_normal(shape)
    return np.abs(numbers) + 0.5 if one.positive else numbers


def computed(ops: Ops, backend: Backend, name: str, sizes: Sizes, dtype: str) -> dict[str, Any]:
    """What an operation returns and writes on its example, in the memory of the host.

    The numbers of the example are those of float32, so that a float64 example has the same.
    """

    def draw(one: Operand, shape: tuple[int, ...]) -> Any:
        array = drawn(one, shape, sizes)
        return backend.from_host(array if one.is_integer else array.astype("f4").astype(dtype))

    given = examples(ops, sizes, draw, backend.arena())(name)
    line, result = operands(OPERATIONS[name].operands), getattr(ops, name)(**given)
    values = [result] if len(line.results) == 1 else [] if result is None else list(result)
    assert len(values) == len(line.results), f"{name} returns other results than {line.results}"
    found = given | dict(zip(line.results, values, strict=True))
    public = [one for one in line.gives if one.name not in PRIVATE]
    for one in public:
        assert np.shape(found[one.name]) == dims(one.shape or "", sizes), (name, one.name)
    return {one.name: np.float64(backend.to_host(found[one.name])) for one in public}


def is_refused(ops: Ops, name: str) -> bool:
    """Whether a device refuses a row, which has no body on kernels."""
    return getattr(getattr(ops, name, None), "func", None) is _refuse


class OperationLaws:
    """Laws of every row of the table, or of some, in both types or in one, on the backend of a device or of the host.

    A device may refuse a row.
    """

    def __init__(self, rows: Iterable[str] = OPERATIONS, dtypes: Iterable[str] = TOLERANCE) -> None:
        self.rows, self.dtypes = rows, dtypes

    def law_every_operation_computes_its_definition(self, ops: Ops, backend: Backend) -> None:
        for name in self.rows:
            if is_refused(ops, name):
                continue
            coded = [o.name for o in operands(OPERATIONS[name].operands).takes if o.coded]
            for sizes in SIZES:
                truth = computed(reference_ops(), HostBackend(), name, sizes, "float64")
                for dtype in self.dtypes:
                    tolerance = TOLERANCE[dtype]
                    found = computed(ops, backend, name, sizes, dtype)
                    for operand, mine in found.items():
                        if operand in coded:
                            # A number between two codes may be rounded to either.
                            assert np.abs(mine - truth[operand]).max(initial=0) <= 1, name
                            continue
                        scale = max(np.abs(truth[operand]).max(initial=0), 1e-3)
                        error = np.abs(mine - truth[operand]).max(initial=0)
                        assert error <= tolerance * scale, (name, operand, sizes, dtype, error)
