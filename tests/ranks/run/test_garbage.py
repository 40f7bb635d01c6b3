"""Ranks collect garbage at different times, so what they decide together must not wait for that."""

import gc
import threading

import pytest

from mpitrain.collectives.group import BoundBuffer
from mpitrain.machine.backend import Lease
from mpitrain.run.loop import Run
from tests.runs import go
from tests.training import TINY

RUN = ["run.steps=3", "run.eval_every=1", "checkpoint.every=2", "run.sample=8", "device.kind=cpu"]

LAYOUTS = {
    "tp": (2, "layout.tp=2"),
    "sequence parallel": (2, "layout.tp=2 layout.sequence_parallel=true model.dropout=0.1"),
    "cp": (2, "layout.cp=2"),
    "ring attention": (2, "layout.cp=2 layout.cp_mode=ring"),
    "experts": (2, "layout.ep=2 model.experts=4"),
    "pp x tp": (4, "layout.tp=2 layout.pp=2 batch.micro_batches=2 model.tied=true"),
    "recomputed": (2, "layout.tp=2 memory.recompute=unit memory.logit_chunks=2"),
    "ZeRO 3 x tp": (4, "layout.tp=2 replication.zero=3"),
    "llama": (2, "layout.tp=2 model.kind=llama model.kv_heads=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_lease_of_a_group_ends_in_the_garbage_collector(layout, tmp_path, monkeypatch):
    """Ranks lease the same buffers of a group only if the same earlier leases have ended."""
    ranks, settings = LAYOUTS[layout]
    ended, collects, end = [], threading.local(), Lease.__del__

    def noted(lease):
        leased = lease.state[2]
        if getattr(collects, "now", False) and isinstance(leased, BoundBuffer):
            ended.append(leased.elements.shape)
        end(lease)

    def collecting(call):
        """Collect after a call, on one rank alone."""

        def collects_after(run, *arguments, **named):
            result = call(run, *arguments, **named)
            if run.transport.rank == 0:
                collects.now = True
                gc.collect()
                collects.now = False
            return result

        return collects_after

    for name in ("start", "step", "pause", "end"):
        monkeypatch.setattr(Run, name, collecting(getattr(Run, name)))
    monkeypatch.setattr(Lease, "__del__", noted)
    gc.collect()
    gc.freeze()  # what is older has no lease of this run, and takes most of the time of a collection
    try:
        gc.disable()
        go(ranks, [*TINY, *settings.split(), f"run.out={tmp_path / 'run'}", *RUN])
    finally:
        gc.enable()
        gc.unfreeze()
    assert not ended
