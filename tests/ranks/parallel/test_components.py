"""The laws of replicas, over every mode."""

import pytest

from mpitrain.data import open_source
from mpitrain.parallel import modes
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.laws.replication import GradientLaws, ParameterLaws, RowsLaws, StepLaws
from tests.laws.transport import laws_of
from tests.processes import skip_without
from tests.training import configured

skip_without("sklearn")
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
    "stash-2bw": (["pipeline.schedule=async-2bw", "batch.micro_batches=1"], (2,)),
}
"""Settings and numbers of ranks."""


@pytest.mark.product
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("laws", (ParameterLaws, GradientLaws))
def test_parameters_and_gradients_obey(laws, mode):
    settings, sizes = MODES[mode]
    micro = f"batch.micro_batches={1 if mode.startswith('stash') else 2}"

    def run(transport, law, precision):
        trainer = build(
            transport, configured(*MLP, *settings, micro, precision), source=DIGITS
        ).trainer
        getattr(laws(), law)(trainer)

    for law in laws_of(laws):
        for n in sizes:
            run_ranks(n, run, law, "precision.compute=float32")
        if laws is ParameterLaws:
            run_ranks(sizes[-1], run, law, "precision.compute=bfloat16")


@pytest.mark.product
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("laws", (StepLaws, RowsLaws))
def test_steps_and_rows_obey(laws, mode):
    settings, sizes = MODES[mode]

    def run(transport, law):
        trainer, source, _ = build(transport, configured(*MLP, *settings), source=DIGITS)
        getattr(laws(), law)(trainer, source)

    for law in laws_of(laws):
        for n in sizes:
            run_ranks(n, run, law)


def test_the_laws_meet_every_class():
    def run(transport, settings):
        return type(build(transport, configured(*MLP, *settings), source=DIGITS).trainer.replica)

    met = {kind for own, sizes in MODES.values() for kind in run_ranks(sizes[-1], run, own)}
    rows = {*modes.MODES.values(), *modes.ZERO.values(), *modes.STREAMS.values()}
    assert rows <= met, rows - met
