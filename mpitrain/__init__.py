"""mpitrain: distributed training with nothing but message passing.

The names below are the public interface. Each is imported at its first use.
All other modules may move without notice.

ranks     ranks: connect all ranks of a job, and end it if one raises;
          connect, from_communicator: make a transport over MPI;
          run_ranks: run ranks as threads of one process, for tests and examples
reduce    Group, bind: all-reduce arrays of your own with the algorithms of mpitrain
model     Plain: constructors of layers; Unit, Sequential, Residual: the elements of a model;
          normal: an initializer of weights; ops_for: the operations of a kind of device;
          gpt, llama, bert, mlp, cnn: whole networks;
          ColumnParallelLinear, RowParallelLinear: tensor-parallel linear layers, as in Megatron-LM
train     train: a whole run with its files, as `mpitrain train`; load: open the directory of a
          run, which then writes text and is evaluated; Watcher: an observer of a run;
          parse: make a Config from tables; build: make its model and data;
          Trainer: the training step over a list of units;
          replicas_equal: compare the parameters of all replicas bit by bit;
          Replicated: average the gradients of your own training loop
teach     learn: explanations, claims and exercises for a notebook, as `mpitrain learn`
errors    MpitrainError: the base class of all errors that mpitrain raises on purpose;
          PeerLost: a peer has died or left the job
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.collectives.group import Group as Group
    from mpitrain.collectives.group import bind as bind
    from mpitrain.config import Config as Config
    from mpitrain.errors import MpitrainError as MpitrainError
    from mpitrain.errors import PeerLost as PeerLost
    from mpitrain.layers.base import Unit as Unit
    from mpitrain.layers.base import normal as normal
    from mpitrain.layers.plain import Plain as Plain
    from mpitrain.layers.plain import Residual as Residual
    from mpitrain.layers.plain import Sequential as Sequential
    from mpitrain.models.bert import bert as bert
    from mpitrain.models.classifiers import cnn as cnn
    from mpitrain.models.classifiers import mlp as mlp
    from mpitrain.models.gpt import gpt as gpt
    from mpitrain.models.llama import llama as llama
    from mpitrain.ops.device import ops_for as ops_for
    from mpitrain.parallel.replicated import Replicated as Replicated
    from mpitrain.parallel.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
    from mpitrain.parallel.tensor.linear import RowParallelLinear as RowParallelLinear
    from mpitrain.run.build import build as build
    from mpitrain.run.choices import parse as parse
    from mpitrain.run.replicas import replicas_equal as replicas_equal
    from mpitrain.run.trainer import Trainer as Trainer
    from mpitrain.run.watcher import Watcher as Watcher
    from mpitrain.run.whole import load as load
    from mpitrain.run.whole import train as train
    from mpitrain.tools.textbook import learn as learn
    from mpitrain.transport.mpi import connect as connect
    from mpitrain.transport.mpi import from_communicator as from_communicator
    from mpitrain.transport.mpi import ranks as ranks
    from mpitrain.transport.threads import run_ranks as run_ranks
else:  # Type checkers must not see this: they would accept any name.

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
    "PeerLost": "errors",
    "Plain": "layers.plain",
    "Replicated": "parallel.replicated",
    "Residual": "layers.plain",
    "RowParallelLinear": "parallel.tensor.linear",
    "Sequential": "layers.plain",
    "Trainer": "run.trainer",
    "Unit": "layers.base",
    "Watcher": "run.watcher",
    "bert": "models.bert",
    "bind": "collectives.group",
    "build": "run.build",
    "cnn": "models.classifiers",
    "connect": "transport.mpi",
    "from_communicator": "transport.mpi",
    "gpt": "models.gpt",
    "learn": "tools.textbook",
    "llama": "models.llama",
    "load": "run.whole",
    "mlp": "models.classifiers",
    "normal": "layers.base",
    "ops_for": "ops.device",
    "parse": "run.choices",
    "ranks": "transport.mpi",
    "replicas_equal": "run.replicas",
    "run_ranks": "transport.threads",
    "train": "run.whole",
}
"""The module of each public name, for `__getattr__`; type checkers read the imports above."""

__all__ = [name for name in _HOMES if name not in ("Config", "PeerLost", "learn")]
"""learn is a module, Config is for annotations, and PeerLost for `except`. With them help() would list sixty methods of
pydantic, and the methods of MpitrainError twice.
"""


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
