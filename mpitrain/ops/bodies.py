"""The operations of each backend, put together from the table.

Plugins may add rows until then.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

from mpitrain.errors import ConfigError
from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Backend, HostBackend
from mpitrain.ops.compiled.bodies import bodies as compiled
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.linear import Multiply
from mpitrain.ops.cuda.steps import LaunchNumbers
from mpitrain.ops.host.attention import FORWARDS
from mpitrain.ops.runs import GroupRun
from mpitrain.ops.table import OPERATIONS, Operation, Ops


def reference() -> Ops:
    """Return the definitions."""
    return _each(lambda name, row: row.reference or row.host)


def host(attention: str = "auto", passes: str = "numpy") -> Ops:
    """Return the operations on NumPy arrays.

    attention  as memory.attention
    passes     as device.passes
    raises     ConfigError or KernelError if this machine cannot compile the passes
    """
    chosen = {**FORWARDS[attention]._asdict(), **(compiled() if passes == "compiled" else {})}
    return _each(lambda name, row: chosen.get(name, row.host))


def cuda(
    kernels: Kernels, multiply: Multiply = product.gemm, backend: Backend | None = None
) -> Ops:
    """Return the operations, launched through these kernels.

    multiply  the matrix product of linear layers
    backend   the backend of the arrays; None: host memory
    """
    arguments = {
        "kernels": kernels,
        "multiply": multiply,
        "numbers": LaunchNumbers(backend or HostBackend()),
    }

    def bound(name: str, row: Operation) -> Callable:
        if row.cuda is None:
            return partial(_refuse, name)
        first = [arguments[known] for known in signature(row.cuda).parameters if known in arguments]
        return (_OverRuns if row.takes_runs else partial)(row.cuda, *first)

    return _each(bound)


class _OverRuns(partial):
    """A step on a device that takes runs of several parameter groups in one launch."""

    def over_runs(self, runs: Sequence[GroupRun]) -> Callable[..., None]:
        """Return the step of these runs, as `ops.runs.over_runs` describes it."""
        numbers: LaunchNumbers = self.args[1]
        return partial(self, weight_decay=numbers.runs(runs))


def _refuse(name: str, *arguments: Any, **named: Any) -> None:
    raise ConfigError(
        f"Devices compute with kernels, but the operation `{name}` has none.",
        "Use --device cpu, or give its row in OPERATIONS a body for cuda.",
    )


def _each(body: Callable[[str, Operation], Callable]) -> Ops:
    return cast(Ops, SimpleNamespace(**{name: body(name, row) for name, row in OPERATIONS.items()}))
