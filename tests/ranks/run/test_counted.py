"""Counted activations are the arena's high-water mark of a real step; what does not fit is refused."""

import re

import pytest

from mpitrain.errors import ConfigError
from mpitrain.kernels.loader import Argument, Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine import process
from mpitrain.ops.device import KERNELS
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.training import MLP, TINY, configured, stepped

pytestmark = pytest.mark.counted

TINY, MLP = ([*keys, "memory.limit_gb=1e6"] for keys in (TINY, MLP))
"""Jobs that count their step: it has a limit."""

LLAMA = ["model.kind=llama", "model.kv_heads=2", "model.heads=4", "model.qkv_bias=true"]
DOCUMENTS = ["data.attend=document", "data.separator=10"]
BERT = ["model.kind=bert", "model.dropout=0.2", "model.attention_dropout=0.1"]
LAYOUTS = {
    "one rank": (1, []),
    "micro-batches": (1, ["batch.micro_batches=5"]),
    "dp": (3, ["layout.dp=3"]),
    "tp": (2, ["layout.tp=2"]),
    "sequence_parallel": (2, ["layout.tp=2", "layout.sequence_parallel=true"]),
    "keep_gathered": (
        2,
        ["layout.tp=2", "layout.sequence_parallel=true", "layout.keep_gathered=true"],
    ),
    "pp": (2, ["layout.pp=2"]),
    "gpipe": (2, ["layout.pp=2", "pipeline.schedule=gpipe"]),
    "zero-bubble": (2, ["layout.pp=2", "pipeline.schedule=zero-bubble"]),
    "interleaved": (2, ["layout.pp=2", "pipeline.schedule=interleaved"]),
    "all axes": (4, ["layout.tp=2", "layout.pp=2"]),
    "tied": (2, ["layout.pp=2", "model.tied=true"]),
    "zero 3": (2, ["replication.zero=3"]),
    "recompute unit": (2, ["layout.tp=2", "memory.recompute=unit"]),
    "recompute 2": (2, ["layout.pp=2", 'memory.recompute="2"', "pipeline.schedule=zero-bubble"]),
    "recompute attention": (1, ["memory.recompute=attention"]),
    "logits by chunks": (2, ["layout.tp=2", "memory.logit_chunks=4"]),
    "release": (1, ["memory.release_every=1"]),
    "tiled attention": (1, ["memory.attention=tiled", "model.context=80"]),
    "tiled, dropout": (
        1,
        ["memory.attention=tiled", "model.context=80", "model.attention_dropout=0.1"],
    ),
    "passes of NumPy": (1, ["device.passes=numpy"]),
    "documents": (2, ["layout.tp=2", "batch.micro_batches=5", *DOCUMENTS]),
    "documents, sequence_parallel": (
        2,
        ["layout.tp=2", "layout.sequence_parallel=true", *DOCUMENTS],
    ),
    "cp": (4, ["layout.cp=2", "memory.recompute=unit", *DOCUMENTS]),
    "cp, all axes": (4, ["layout.cp=2", "layout.pp=2", "model.dropout=0.2"]),
    "cp, tp": (4, ["layout.cp=2", "layout.tp=2", "layout.sequence_parallel=true", "model.heads=4"]),
    "ring": (3, ["layout.cp=3", "layout.cp_mode=ring", "model.context=90", *DOCUMENTS]),
    "ring, tp": (4, ["layout.cp=2", "layout.cp_mode=ring", "layout.tp=2", "memory.recompute=unit"]),
    "experts": (2, ["model.experts=4", "model.shared=8", "memory.recompute=unit"]),
    "frozen": (2, ["layout.pp=2", 'model.freeze=["embedding*", "blocks.0*"]']),
    "dropout": (
        2,
        [
            "layout.tp=2",
            "model.dropout=0.2",
            "model.attention_dropout=0.1",
            "memory.recompute=unit",
        ],
    ),
    "bfloat16": (1, ["precision.compute=bfloat16", "model.dropout=0.2"]),
    "float16": (2, ["precision.compute=float16", "layout.tp=2"]),
    "llama": (1, ["memory.attention=tiled", "model.context=80", *LLAMA]),
    "llama, tp": (2, [*LLAMA, "layout.tp=2", "layout.sequence_parallel=true", *DOCUMENTS]),
    "llama, one kv head": (
        2,
        [*LLAMA, "model.kv_heads=1", "layout.pp=2", "memory.recompute=unit", "model.tied=true"],
    ),
    "bert": (1, [*BERT, "memory.recompute=attention"]),
    "bert, tiled": (1, ["memory.attention=tiled", "model.context=80", *BERT]),
    "bert, tp": (2, [*BERT, "layout.tp=2", "layout.sequence_parallel=true", "model.tied=true"]),
    "bert, cp": (2, [*BERT, "layout.cp=2", "memory.recompute=unit", "memory.logit_chunks=3"]),
    "bert, documents": (2, [*BERT, "layout.pp=2", "precision.compute=bfloat16", *DOCUMENTS]),
}
SIMULATED = {
    "kernels": (1, ["model.dropout=0.2", "model.attention_dropout=0.1"]),
    "kernels, tp": (2, ["layout.tp=2", "layout.sequence_parallel=true"]),
    "kernels, chunks": (1, ["memory.logit_chunks=4", "memory.recompute=unit"]),
    "kernels, documents": (1, ["batch.micro_batches=5", *DOCUMENTS]),
    "kernels, cp": (2, ["layout.cp=2", "model.dropout=0.2"]),
    "kernels, ring": (2, ["layout.cp=2", "layout.cp_mode=ring"]),
    "kernels, llama": (2, [*LLAMA, "layout.tp=2", "memory.recompute=attention"]),
    "kernels, bert": (1, [*BERT, "precision.compute=bfloat16", *DOCUMENTS]),
    "kernels, experts": (2, ["layout.tp=2", "model.experts=4", "model.shared=8"]),
    "kernels, pp": (2, ["layout.pp=2", "precision.compute=bfloat16"]),
}

COMPUTED = ("kernels, experts",)
"""Of these the numbers are computed: sizes that experts get depend on them."""


def peaks(transport, settings):
    """Counted and measured bytes of this rank, after three steps."""
    trainer, source, _ = build(transport, configured(*settings))
    stepped(trainer, source, range(3))
    return trainer.job.counts.peak, trainer.pipe.peak_bytes


def assert_counted(ranks, settings):
    for counted, measured in run_ranks(ranks, peaks, settings):
        assert counted == measured > 0


class Idle(Simulator):
    """Checks launches and writes zeros: sizes of activations depend on no number, and nothing is compiled."""

    def load(self, source, signature, defines):
        def launched(grid, block, arguments, shared):
            for each in arguments:
                if isinstance(each, Argument) and each.fresh and each.array is not None:
                    each.array[...] = 0

        return launched


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.compile) for name in SIMULATED)]
)
def test_the_counted_peak_of_a_layout_is_the_measured_one(layout, monkeypatch):
    ranks, settings = (LAYOUTS | SIMULATED)[layout]
    if layout in SIMULATED and layout not in COMPUTED:
        kernels = Kernels(Idle())
        monkeypatch.setitem(KERNELS, "cuda-sim", lambda: kernels)
    on_kernels = ["model.layers=1", "device.kind=cuda-sim"] if layout in SIMULATED else []
    assert_counted(ranks, [*TINY, *on_kernels, *settings])


@pytest.mark.parametrize("layout", ["one rank", "micro-batches", "dp", "tp", "pp"])
def test_the_counted_peak_of_an_mlp_is_the_measured_one(layout):
    ranks, settings = LAYOUTS[layout]
    assert_counted(ranks, [*MLP, *settings])


def test_a_partition_by_time_is_counted_as_it_is_cut(monkeypatch):
    monkeypatch.setattr("mpitrain.pipeline.partition.by_time", lambda *given: [4, 2])
    cut = ["layout.pp=2", "pipeline.partition=time", "memory.recompute=2"]
    assert_counted(2, [*TINY, *cut])


def leaves(monkeypatch, built, nbytes):
    """Let a machine have so many bytes beside the state of the model that `built()` makes."""
    monkeypatch.setattr(process, "free_memory", lambda kind: 10**9)
    real, rooms = build.__globals__["check_memory"], []
    monkeypatch.setitem(
        build.__globals__, "check_memory", lambda *args: rooms.append(real(*args)) or rooms[-1]
    )
    built()
    monkeypatch.setattr(process, "free_memory", lambda kind: int(rooms[0].needed) + nbytes)


@pytest.mark.parametrize("ranks, layout", [(1, []), (2, []), (2, ["layout.tp=2"])])
def test_too_large_activations_are_refused_with_fitting_micro_batches(ranks, layout, monkeypatch):
    settings = [*TINY, *layout]
    before = run_ranks(ranks, peaks, [*settings, "batch.micro_batches=3"])
    needed = sum(counted for counted, _ in before)

    def built(*more):
        run_ranks(ranks, lambda transport: build(transport, configured(*settings, *more)))

    leaves(monkeypatch, built, needed)
    with pytest.raises(ConfigError) as refused:
        built()
    assert refused.value.exit_code == 2 and refused.value.agreed
    found = int(re.search(r"micro_batches to (\d+)", str(refused.value))[1])
    assert found == 3
    built(f"batch.micro_batches={found}")
    with pytest.raises(ConfigError, match="activations"):
        built(f"batch.micro_batches={found - 1}")


def test_no_micro_batches_are_proposed_that_leave_a_replica_without_a_row(monkeypatch):
    """Of 5 rows the last of 3 ranks has one, so no second micro-batch."""
    needed = sum(counted for counted, _ in run_ranks(3, peaks, [*TINY, "batch.size=3"]))
    config = configured(*TINY, "batch.size=5")

    def built():
        run_ranks(3, lambda transport: build(transport, config))

    leaves(monkeypatch, built, int(1.2 * needed))
    with pytest.raises(ConfigError, match="no larger number of micro-batches fits"):
        built()


def test_a_context_that_is_refused_on_one_rank_trains_on_four_that_divide_it():
    """Each rank is on a host of its own; activations fall to a quarter, and state does not."""
    common = [*TINY, "model.heads=4", "model.context=256", "batch.size=4", "memory.limit_gb=0.004"]
    with pytest.raises(ConfigError, match="for activations on this host"):
        run_ranks(1, peaks, common)
    for counted, measured in run_ranks(4, peaks, [*common, "layout.cp=4"], hosts="abcd"):
        assert counted == measured < 0.004e9


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ([], "Set memory.recompute to unit, or lower model.width"),
        (
            ["memory.attention=whole"],
            "Set memory.attention to tiled or memory.recompute to unit, or lower model.width",
        ),
        (
            ["memory.attention=whole", "memory.recompute=unit"],
            "Set memory.attention to tiled, or lower model.width",
        ),
        (["memory.recompute=unit"], "Lower model.width"),
    ],
)
def test_no_number_of_micro_batches_is_proposed_if_none_fits(settings, ways, monkeypatch):
    config = configured(*TINY, *settings)
    leaves(monkeypatch, lambda: run_ranks(1, lambda transport: build(transport, config)), 1)
    with pytest.raises(ConfigError) as refused:
        run_ranks(1, lambda transport: build(transport, config))
    assert "micro_batches to" not in str(refused.value)
    assert ways in str(refused.value)
