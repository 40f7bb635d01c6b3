"""mpitrain: distributed training with nothing but message passing.

What a program may count on is here, and is loaded when it is first asked for; modules beneath may move without notice.

ranks     connect, from_communicator: a transport over MPI; run_ranks: ranks as threads, to try things out
reduce    Group, bind: all-reduce your own arrays by an algorithm of ours
model     Plain: constructors of layers; Unit, Sequential, Residual: what lists of them are made of; normal: how weights begin;
          ops_for: the operations of a kind of device; gpt, mlp: whole networks; ColumnParallelLinear, RowParallelLinear: linear
          layers that several ranks share
train     parse: a Config from tables; Trainer: the step over a list of units; build: a whole run from its Config;
          replicas_equal: whether all ranks hold the same bits
errors    MpitrainError: all that is raised on purpose
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.collectives.bind import bind as bind
    from mpitrain.collectives.group import Group as Group
    from mpitrain.config import Config as Config
    from mpitrain.config import parse as parse
    from mpitrain.errors import MpitrainError as MpitrainError
    from mpitrain.layers.base import Unit as Unit
    from mpitrain.layers.compose import Residual as Residual
    from mpitrain.layers.compose import Sequential as Sequential
    from mpitrain.layers.initial import normal as normal
    from mpitrain.layers.plain import Plain as Plain
    from mpitrain.models.gpt import gpt as gpt
    from mpitrain.models.mlp import mlp as mlp
    from mpitrain.ops.device import ops_for as ops_for
    from mpitrain.parallel.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
    from mpitrain.parallel.tensor.linear import RowParallelLinear as RowParallelLinear
    from mpitrain.run.build import build as build
    from mpitrain.run.trainer import Trainer as Trainer
    from mpitrain.run.trainer import replicas_equal as replicas_equal
    from mpitrain.transport.mpi import connect as connect
    from mpitrain.transport.mpi import from_communicator as from_communicator
    from mpitrain.transport.threads import run_ranks as run_ranks
else:  # hidden from type checkers, which would believe that any name is offered

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(
                f"module 'mpitrain' has no attribute {name!r}; it offers {', '.join(_HOMES)}"
            )
        return getattr(_import_module(f"mpitrain.{_HOMES[name]}"), name)


__version__ = "0.1.0"

_HOMES = {
    "ColumnParallelLinear": "parallel.tensor.linear",
    "Config": "config",
    "Group": "collectives.group",
    "MpitrainError": "errors",
    "Plain": "layers.plain",
    "Residual": "layers.compose",
    "RowParallelLinear": "parallel.tensor.linear",
    "Sequential": "layers.compose",
    "Trainer": "run.trainer",
    "Unit": "layers.base",
    "bind": "collectives.bind",
    "build": "run.build",
    "connect": "transport.mpi",
    "from_communicator": "transport.mpi",
    "gpt": "models.gpt",
    "mlp": "models.mlp",
    "normal": "layers.initial",
    "ops_for": "ops.device",
    "parse": "config",
    "replicas_equal": "run.trainer",
    "run_ranks": "transport.threads",
}
"""Where each public name lives: for programs, as the imports above are for type checkers."""

__all__ = [name for name in _HOMES if name != "Config"]
"""Config is for annotations: help() would list the sixty methods that pydantic gives it."""


def __dir__() -> list[str]:
    return sorted(
        {
            *_HOMES,
            *(
                name
                for name in globals()
                if name.startswith("__") and name not in ("__dir__", "__getattr__")
            ),
        }
    )
