"""memory.release_every: the bits of a run without it; memory of the arena goes back, windows and bound collectives stay."""

import numpy as np

from mpitrain.run.build import build
from mpitrain.tools.report.text import where_the_time_went
from mpitrain.tools.report.time_breakdown import shares
from mpitrain.trace.timeline import read_timeline
from mpitrain.transport.threads import run_ranks
from tests import runs
from tests.laws.exchange import Counted
from tests.ranks.parallel.test_tensor import GPT, source_of
from tests.training import configured
from tests.unit.machine.test_release import resident

LARGE = ["model.layers=2", "model.context=128", "batch.size=16", "run.steps=6"]


def test_a_release_changes_no_bit_and_binds_nothing_again():
    def run(transport, config):
        source = source_of(config)
        trainer = build(transport, config, source=source).trainer
        losses = [trainer.step(0, *trainer.replica.batch(source, 0)).loss]
        counted = [Counted(group) for group in (trainer.grid.world, trainer.grid.tp)]
        before = [(each.calls, each.now()[2]) for each in counted]
        for step in range(1, 4):
            losses.append(trainer.step(step, *trainer.replica.batch(source, step)).loss)
        assert [(each.calls, each.now()[2]) for each in counted] == before
        assert trainer.arena.held == 0 or not config.memory.release_every
        return losses, trainer.evaluate(source), trainer.arena.released

    for settings in (
        ["layout.tp=2", "memory.recompute=unit"],
        ["layout.tp=2", "layout.sequence_parallel=true", "memory.logit_chunks=3"],
        ["layout.pp=2", "batch.micro_batches=4", "replication.zero=3"],
    ):
        base = [*GPT, *settings, "pipeline.schedule=gpipe"]
        plain, released = (
            run_ranks(2, run, configured(*base, f"memory.release_every={every}"))
            for every in (0, 1)
        )
        for (losses, evaluated, nothing), (others, equal, nbytes) in zip(
            plain, released, strict=True
        ):
            assert losses == others and evaluated == equal and nothing == 0 < nbytes


def test_a_release_returns_the_slabs_of_an_evaluation():
    def run(transport):
        job = build(transport, configured(*LARGE, "memory.release_every=3"))
        trainer, data = job.trainer, job.data
        for step in range(2):
            trainer.step(step, *trainer.replica.batch(data, step))
        steady, rows = trainer.arena.held, trainer.replica.batch(data, 0)[0]
        trainer.logits(np.concatenate([rows, rows]))
        held, before, end = trainer.arena.held, [], trainer.arena.release

        def noted():
            before.append(resident())
            return end()

        trainer.arena.release = noted
        trainer.step(2, *trainer.replica.batch(data, 2))
        assert held > 1.3 * steady and trainer.arena.released == held
        return held, before[0] - resident()

    ((held, fallen),) = run_ranks(1, run)
    assert abs(fallen / held - 1) <= 0.05, (held, fallen)


def test_report_names_the_largest_release_of_each_rank(tmp_path):
    def lines(*settings):
        out = tmp_path / f"run-{len(settings)}"
        runs.go(2, [*runs.TINY, *LARGE, f"run.out={out}", *settings])
        timeline = read_timeline(out)
        return [*where_the_time_went(shares(timeline), timeline)]

    assert not any("release" in line for line in lines())
    (line,) = (line for line in lines("memory.release_every=2") if "release" in line)
    assert all(float(number) > 1 for number in line.split()[3:]) and len(line.split()) == 6
