"""The Python calls that one more micro-batch costs, counted: seconds vary, calls do not."""

import sys
from collections import Counter
from pathlib import Path

import mpitrain
from mpitrain import build, parse, run_ranks

PACKAGE = Path(mpitrain.__file__).parent
PASSES = 20
"""Forwards and backwards of the units of a GPT with 4 layers."""


def calls_of_a_step(transport, micro_batches):
    """Count the calls of Python functions in a step, by file of the package and name."""
    keys = {
        "batch": {"size": 4, "micro_batches": micro_batches},
        "model": {"width": 16, "heads": 2, "context": 8},
        "layout": {"pp": transport.size},
        "run": {"steps": 2},
    }
    job = build(transport, parse(keys))
    rows = job.trainer.replica.batch(job.data, 0)
    job.trainer.step(0, *rows)
    calls = Counter()

    def note(frame, event, argument):
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            calls[path.relative_to(PACKAGE).as_posix(), code.co_qualname] += 1

    sys.setprofile(note)
    job.trainer.step(1, *rows)
    sys.setprofile(None)
    return calls


def test_a_micro_batch_costs_few_calls_beside_its_layers():
    one, two = run_ranks(1, lambda own: [calls_of_a_step(own, count) for count in (1, 2)])[0]
    more = two - one
    leases = more["machine/backend.py", "Arena.take"]
    arena = sum(count for (_, name), count in more.items() if name.startswith(("Arena.", "Lease.")))
    assert leases > PASSES and arena == 2 * leases
    assert sum(more.values()) <= 73 * PASSES
    runtime = sum(
        count
        for (file, _), count in more.items()
        if file.startswith(
            ("pipeline/", "parallel/", "collectives/", "trace/", "run/", "transport/")
        )
    )
    assert more["pipeline/pipeline.py", "Stage.forward"] == 1 and runtime <= 15 * PASSES


def test_a_micro_batch_costs_each_stage_few_calls_of_the_pipeline():
    two, four = (run_ranks(2, calls_of_a_step, count) for count in (2, 4))
    passes = [PASSES // 2, PASSES // 2 + PASSES // 4]  # The second stage has three phases.
    for rank, phases in enumerate(passes):
        more = four[rank] - two[rank]
        calls = sum(count for (file, _), count in more.items() if file.startswith("pipeline/"))
        assert more["pipeline/pipeline.py", "Channel.complete"] == 4
        assert calls <= 2 * (21 + 3 * phases)
