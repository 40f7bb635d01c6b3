"""The table of operations: every backend has every row, and a row from outside is complete."""

import inspect
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import ConfigError, KernelError
from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.ops import OPERATIONS, Operation
from mpitrain.ops.device import cuda_ops, device_for, host_ops, reference_ops, rounded
from mpitrain.ops.table import dims, operands
from mpitrain.tools.bench.kernels.examples import examples
from tests.cases import launches
from tests.laws.operations import PRIME, OperationLaws, computed, drawn, is_refused
from tests.laws.transport import laws_of
from tests.rows import replaced

KERNELS = Kernels(launches.Nothing(takes_plain=True))
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("law", laws_of(OperationLaws))
def test_operations_of_the_host_obey(law):
    getattr(OperationLaws(), law)(host_ops(), HostBackend())


def differences(ops):
    """Rows whose operation is missing, or has other parameters than the definition. A device may refuse a row."""
    definitions = reference_ops()
    return [
        name
        for name in OPERATIONS
        if not is_refused(ops, name)
        and parameters(getattr(ops, name, lambda: None)) != parameters(getattr(definitions, name))
    ]


@pytest.mark.parametrize(
    "make",
    [
        host_ops,
        lambda: cuda_ops(KERNELS),
        lambda: rounded("bfloat16").ops,
        lambda: rounded("float16").ops,
    ],
    ids=["host", "cuda", "bfloat16", "float16"],
)
def test_every_backend_has_the_rows_with_the_parameters_of_the_definition(make):
    ops = make()
    assert vars(ops).keys() == OPERATIONS.keys() and differences(ops) == []
    ops.linear, ops.add = (lambda w, x, arena: None), None
    assert differences(SimpleNamespace(**{**vars(ops), "add": lambda a, b: None})) == [
        "add",
        "linear",
    ]


def test_the_operands_of_a_row_are_the_parameters_up_to_the_arena():
    for name, row in OPERATIONS.items():
        names, line = parameters(row.reference), operands(row.operands)
        assert names[: names.index("arena")] == [one.name for one in line.takes], name
        assert {*row.rounds.split()} <= {*names, *line.results, "nothing"}, name


def test_a_function_of_an_arena_beside_the_operations_is_in_the_table():
    """A body without a row would never be called."""
    device = vars(cuda_ops(KERNELS))
    functions = {device[name].func for name, row in OPERATIONS.items() if row.launches}
    functions |= {getattr(body, "func", body) for body in vars(host_ops()).values()}
    functions |= {*vars(reference_ops()).values()}
    for module in {inspect.getmodule(body) for body in functions}:
        for name, found in inspect.getmembers(module, inspect.isfunction):
            is_own = found.__module__ == module.__name__ and name[0] != "_"
            if is_own and "arena" in parameters(found):
                # `attended` is the attention with saved exponentials, which memory.attention may choose.
                assert name in {*OPERATIONS, "attended"}, f"{module.__name__}.{name}"


def test_launches_of_the_examples_are_those_of_the_rows():
    made = launches.operations(KERNELS)
    for name, row in ((name, row) for name, row in OPERATIONS.items() if row.launches):
        assert launches.calls(KERNELS, made[name])[1] == row.launches, name


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_rounds_the_operand_that_the_row_names_and_no_other(dtype):
    """The host computes the truth in float32; the cast is NumPy's."""
    half = rounded(dtype).ops
    for name, row in OPERATIONS.items():
        # Rounding also changes the operands that other operations of the example return.
        if any(one.after for one in operands(row.operands).takes):
            continue
        truth, found = (
            computed(ops, HostBackend(), name, PRIME, "float32") for ops in (host_ops(), half)
        )
        for operand in truth:
            if operand == row.rounds:
                with np.errstate(over="ignore"):
                    truth[operand] = truth[operand].astype(HALVES[dtype]).astype(float)
            np.testing.assert_array_equal(found[operand], truth[operand], f"{name}: {operand}")


def test_a_row_that_rounds_no_operand_is_refused_in_words():
    row = OPERATIONS["gelu"]._replace(rounds="second")
    with replaced(OPERATIONS, "gelu", row), pytest.raises(ConfigError) as caught:
        rounded("bfloat16")
    message = (
        "ConfigError: In half precision an operation rounds one of its operands or nothing, but "
        "`gelu` rounds 'second'.\n"
        "             Its row in OPERATIONS may name z, arena, y, saved or nothing."
    )
    assert caught.value.named() == message


@pytest.mark.parametrize("line", ["x:M,K", "x:M y -> z: -> w", "x:m/2 -> y:M"])
def test_operands_that_cannot_be_read_are_refused_in_words(line):
    with pytest.raises(KernelError, match="but a row has") as caught:
        operands(line)
    assert line in caught.value.named()


def test_shapes_and_bytes_of_operands():
    sizes = {"M": 3, "H": 2, "D": 5}
    assert dims("2,M,3HD", sizes) == (2, 3, 30) and dims("", sizes) == ()
    line = operands("x:M,D rows<H:M kept@y|M+2M,D a=0.5 out:M|0 -> out loss y:D saved")
    assert line.results == ["loss", "y", "saved"]
    assert line.nbytes(sizes, 2) == 2 * (15 + 3 + 30 + 0 + 3 + 5) + 8 * 3


def test_a_row_s_bytes_are_those_of_its_arrays():
    """Those that `bench kernels` counts, worked out by hand: x, y and two rows of parameters."""
    assert OPERATIONS["layer_norm"].nbytes(M=7, C=5) == 4 * (2 * 35 + 2 * 5)
    assert OPERATIONS["adamw"].nbytes(L=10) == 4 * 7 * 10
    assert OPERATIONS["add"].nbytes(itemsize=2, L=10) == 2 * 3 * 10
    assert OPERATIONS["cross_entropy_loss"].nbytes(M=3, V=11) == 4 * 33 + 8 * 3


@pytest.mark.parametrize(
    "name", [name for name, row in OPERATIONS.items() if row.rounds == "mirror"]
)
def test_a_step_without_decay_equals_the_definition(name):
    """The host skips a pass over the parameters then."""
    found = []
    for ops in (reference_ops(), host_ops()):
        arguments = examples(ops, PRIME, lambda one, shape: drawn(one, shape, PRIME), Arena())(name)
        getattr(ops, name)(**(arguments | {"weight_decay": 0.0}))
        found.append(arguments["p"])
    np.testing.assert_allclose(*found, rtol=1e-12)


def halve(x, arena):
    return x / 2


def test_a_row_from_outside_is_computed_and_rounded_as_a_built_in_one(monkeypatch):
    row = Operation("x:L -> y:L", "y", halve)
    monkeypatch.setitem(OPERATIONS, "halve", row)
    x = np.float32([2.004, -6])
    np.testing.assert_array_equal(device_for("cpu").ops.halve(x, Arena()), x / 2)
    half = device_for("cpu", compute="bfloat16").ops.halve(x, Arena())
    np.testing.assert_array_equal(half, np.float32([1, -3]))
    for law in laws_of(OperationLaws):
        getattr(OperationLaws(["halve"]), law)(host_ops(), HostBackend())
    assert row.nbytes(L=6) == 48


def test_a_row_without_kernels_is_refused_on_a_device_in_words(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "halve", Operation("x:L -> y:L", "y", halve))
    with pytest.raises(ConfigError) as caught:
        cuda_ops(KERNELS).halve(np.zeros(3), Arena())
    message = (
        "ConfigError: Devices compute with kernels, but the operation `halve` has none.\n"
        "             Use --device cpu, or give its row in OPERATIONS a body for cuda."
    )
    assert caught.value.named() == message
    assert "halve" not in launches.operations(KERNELS)


def test_a_row_from_outside_may_have_a_body_on_kernels(monkeypatch):
    row = Operation("x:L -> y:L", "y", halve, 1, cuda=lambda *first: first)
    monkeypatch.setitem(OPERATIONS, "halve", row)
    launcher, x, arena = cuda_ops(KERNELS).halve(3, None)
    assert (launcher.launch, x, arena) == (KERNELS.launch, 3, None)
