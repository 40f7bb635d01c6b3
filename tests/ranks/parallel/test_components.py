"""The laws of replication components, over every mode."""

import importlib
import pkgutil

import pytest

import mpitrain.parallel
from mpitrain.data import open_source
from mpitrain.parallel.replication.protocol import GradientReducer, ParameterStore, Rows, StepEnd
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.laws.replication import GradientReducerLaws, ParameterStoreLaws, RowsLaws, StepEndLaws
from tests.laws.transport import laws_of
from tests.training import configured

pytest.importorskip("sklearn")
MLP = [
    "data.source=digits",
    "model.kind=mlp",
    "model.layers=2",
    "model.width=8",
    "batch.size=12",
    "run.steps=4",
    "optimizer.warmup=0",
    "replication.bucket_mb=0.001",
]
DIGITS = open_source("digits", 0, "float32")
SERVER = "replication.mode=server"
MODES = {
    "all-reduce": ([], (1, 3)),
    "zero-1": (["replication.zero=1"], (3,)),
    "zero-2": (["replication.zero=2"], (2,)),
    "zero-3": (["replication.zero=3"], (1, 3)),
    "master": (["replication.mode=master"], (3,)),
    "servers": ([SERVER, "replication.servers=2"], (4,)),
    "async": ([SERVER, "replication.update=async"], (2,)),
    "local": (["replication.mode=local", "replication.period=1"], (3,)),
    "gossip": (["replication.mode=gossip", "replication.period=1"], (2,)),
    "stash": (["pipeline.schedule=async", "batch.micro_batches=1"], (2,)),
}
"""Settings and numbers of ranks."""


def classes():
    """All classes of the room of replication."""
    found = set()
    for module in pkgutil.walk_packages(mpitrain.parallel.__path__, "mpitrain.parallel."):
        if ".tensor" not in module.name:
            for thing in vars(importlib.import_module(module.name)).values():
                if isinstance(thing, type) and thing.__module__ == module.name:
                    found.add(thing)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("laws", (ParameterStoreLaws, GradientReducerLaws))
def test_stores_and_reducers_obey(laws, mode):
    settings, sizes = MODES[mode]
    micro = f"batch.micro_batches={1 if mode == 'stash' else 2}"

    def run(transport, law, precision):
        trainer = build(
            transport, configured(*MLP, *settings, micro, precision), source=DIGITS
        ).trainer
        getattr(laws(), law)(trainer)

    for law in laws_of(laws):
        for n in sizes:
            run_ranks(n, run, law, "precision.compute=float32")
        if laws is ParameterStoreLaws:
            run_ranks(sizes[-1], run, law, "precision.compute=bfloat16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("laws", (StepEndLaws, RowsLaws))
def test_step_ends_and_rows_obey(laws, mode):
    settings, sizes = MODES[mode]

    def run(transport, law):
        trainer, source, _ = build(transport, configured(*MLP, *settings), source=DIGITS)
        getattr(laws(), law)(trainer, source)

    for law in laws_of(laws):
        for n in sizes:
            run_ranks(n, run, law)


@pytest.mark.parametrize("protocol", (ParameterStore, GradientReducer, StepEnd, Rows))
def test_laws_meet_every_component_and_protocols_are_small(protocol):
    def run(transport, settings):
        replication = build(
            transport, configured(*MLP, *settings), source=DIGITS
        ).trainer.replication
        parts = (replication.store, replication.reducer, replication.step_end, replication.rows)
        return {type(part) for part in parts}

    met = set()
    for settings, sizes in MODES.values():
        met |= set().union(*run_ranks(sizes[-1], run, settings))
    names = {name for name in vars(protocol) if not name.startswith("_")}
    names -= {"delayed", "is_sharded"}  # facts, no methods
    assert 4 <= len(names) <= 8, names
    made = {kind for kind in classes() if protocol in kind.__mro__} - {protocol}
    leaves = {kind for kind in made if not any(kind in other.__bases__ for other in made)}
    assert protocol is Rows or made
    assert leaves <= met, leaves - met
