"""The eight ways of mpitrain/README.md: a real run visits their functions in order, and no other file but leaves."""

import json
import os
import re
import sys
from functools import partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest

import mpitrain
from mpitrain.collectives.group import Group
from mpitrain.config import Layout, parse, with_settings
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.initial import normal
from mpitrain.layers.plain import Plain
from mpitrain.machine.arena import Arena
from mpitrain.ops.device import ops_for
from mpitrain.parallel.tensor.layer_factory import layers_for
from mpitrain.parallel.tensor.linear import RowParallelLinear
from mpitrain.pipeline.pipeline import Pipeline
from mpitrain.pipeline.schedules import plan_of
from mpitrain.run.build import build
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.processes import run
from tests.runs import TINY
from tests.training import TINY as TINY_JOB
from tests.training import configured

PACKAGE = Path(mpitrain.__file__).parent
PAGE, ROOT = PACKAGE / "README.md", str(PACKAGE.parent)
SECTION = re.search(r"^## Eight ways$(.*?)^## ", PAGE.read_text(), re.M | re.S).group(1)
# | question | `function` in `file`, `function` in `file`, ... |
WAYS = {
    question: re.findall(r"`([\w.<>]+)` in `([\w/]+\.py)`", way)
    for question, way in re.findall(r"^\| ([^|]+\?) \| (.*) \|$", SECTION, re.M)
}
# | `file or folder/` | why a way may pass it |
LEAVES = re.findall(r"^\| `([\w/.]+)` \| ", SECTION, re.M)
# | in a start: `file or folder/`, ... | why the way of `train` may pass them |, likewise "in a step" and "in a checkpoint"
LEAVES_OF = {
    run: tuple(
        re.findall(
            r"`([\w/.]+)`", "".join(re.findall(rf"^\| in a {run}: ([^|]*) \| ", SECTION, re.M))
        )
    )
    for run in ("start", "step", "checkpoint")
}


def calls_of(function, *arguments):
    """Run a function, and return its calls in the package as (function, file), in their order."""
    calls = []

    def note(frame, event, argument):
        path, is_function = Path(frame.f_code.co_filename), frame.f_code.co_flags & CO_OPTIMIZED
        if event == "call" and is_function and path.is_relative_to(PACKAGE):
            calls.append((frame.f_code.co_qualname, path.relative_to(PACKAGE).as_posix()))

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls


def of_a_ring():
    def calls(transport):
        group, array = Group(transport, "ring"), np.ones(10)
        return calls_of(lambda: group.bind(array).run())

    return run_ranks(2, calls)[0]


def of_a_row_parallel_layer():
    def calls(transport):
        group = Group(transport, "ring")
        layer = RowParallelLinear(
            layers_for(ops_for("cpu"), group, Layout(tp=2)), 8, 4, normal(0.1), bias=False
        )
        rows, weight = np.ones((3, 4), "float32"), np.ones((4, 4), "float32")
        layer.forward({"weight": weight}, rows, Arena())  # makes a buffer, and binds it
        return calls_of(layer.forward, {"weight": weight}, rows, Arena())

    return run_ranks(2, calls)[0]


def of_1f1b():
    """Two stages of one linear layer each, with plain arrays in place of a mode of replication.

    The calls of stage 1, which runs the halves of a backward, then those of stage 0.
    """

    def calls(transport):
        layers, shape = Plain(ops_for("cpu")), (2, 3)
        units = [Unit(name, layers.linear(3, 3, normal(0.1))) for name in ("first", "second")]
        storage = Storage(units[transport.rank :][:1], "float32")
        weights = storage.weights(np.ones(storage.length, "float32"))
        gradients, _ = storage.gradients(np.zeros(storage.length, "float32"))
        replica = SimpleNamespace(
            open=lambda unit, micro: weights[unit],
            gradients=lambda unit: gradients[unit],
            ready=lambda *unit: None,
            poll=lambda: None,
            first=0,
        )

        def step():
            plan, chunks = plan_of("1f1b", 2, 4), [[unit] for unit in units]
            pipe = Pipeline(plan, chunks, transport, replica, Arena(), "float32", layers.now)
            rows = [(0, 2 * micro, 2, True) for micro in range(4)]
            pipe.train(
                rows, [shape] * 4, lambda micro: np.ones(shape, "float32"), lambda micro, y: y
            )

        return calls_of(step)

    first, second = run_ranks(2, calls)
    return second + first


def of_a_cuda_product():
    """The second call: the first one compiles the kernel."""
    arena, ops = Arena(), ops_for("cuda-sim")
    x, w, b = (np.ones(shape, "float32") for shape in ((5, 3), (4, 3), 4))
    ops.linear(x, w, b, arena)
    return calls_of(ops.linear, x, w, b, arena)


def of_a_step(question):
    """Overlap is on, so the reductions of gradients are the only ones to start before `finish`."""

    def calls(transport):
        job = build(transport, configured(*TINY_JOB, "replication.algorithm=ring"))
        trainer, batch = job.trainer, job.trainer.replica.batch(job.data, 0)
        trainer.step(0, *batch)
        return calls_of(trainer.step, 1, *batch)

    return without_leaves_of("step", question, run_ranks(2, calls)[0])


STEP = ["--set", "run.steps=1", "--set", "run.eval_every=-1", "--set", "run.sample=0"]
START = f"""
import json, sys
import mpitrain.run.loop
from mpitrain.cli import main
from tests.ranks.run.test_ways import calls_of
def start():
    try: main(["train", *{STEP}, "--device", "cpu"])
    except SystemExit as end: assert not end.code
print(json.dumps(calls_of(start)), file=sys.stderr)
"""


def of_a_start():
    with TemporaryDirectory() as folder:
        done = run(
            [sys.executable, "-c", START], cwd=folder, env={**os.environ, "PYTHONPATH": ROOT}
        )
    return without_leaves_of("start", TRAIN, json.loads(done.stderr.splitlines()[-1]))


def without_leaves_of(run, question, calls):
    way = {path for _, path in WAYS[question]}
    return [
        (name, path) for name, path in calls if path in way or not path.startswith(LEAVES_OF[run])
    ]


def of_a_checkpoint():
    with TemporaryDirectory() as folder:
        settings = [*TINY, "run.steps=1", "run.eval_every=-1", f"run.out={folder}/run"]
        config = parse(with_settings({}, settings))
        calls = run_ranks(2, lambda own: calls_of(train, own, lambda: config))[0]
    # The run pauses before its only step, too, and saves nothing there.
    del calls[: calls.index(WAYS[SAVE][0]) + 1]
    return without_leaves_of("checkpoint", SAVE, calls)


SAVE = "How is a checkpoint written?"
TRAIN = "How does `train` get to the first forward pass?"
# {question: a function that makes the run, and returns its calls}. Its number is the most files that the way may have.
RUNS = {
    TRAIN: (9, of_a_start),
    "Where is the ring?": (5, of_a_ring),
    "Where is AdamW?": (5, partial(of_a_step, "Where is AdamW?")),
    "Where are gradients averaged?": (4, partial(of_a_step, "Where are gradients averaged?")),
    "Where is the all-reduce of a row-parallel (row-sharded) layer?": (5, of_a_row_parallel_layer),
    "Where is 1F1B?": (5, of_1f1b),
    "Where is a CUDA matrix product?": (4, of_a_cuda_product),
    SAVE: (5, of_a_checkpoint),
}


def test_the_page_and_the_runs_have_the_same_ways():
    assert list(WAYS) == list(RUNS)


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question, marks=[pytest.mark.compile] * ("CUDA" in question))
        for question in WAYS
    ],
)
def test_a_way_visits_its_functions_in_order_and_no_other_file(question):
    way, (most, run) = WAYS[question], RUNS[question]
    calls = run()
    first = end = calls.index(way[0])
    for step in way[1:]:
        assert step in calls[end:], f"{step} does not come after {calls[end]}"
        end = calls.index(step, end)
    files = {path for _, path in way}
    others = {
        path
        for _, path in calls[first : end + 1]
        if path not in files and not path.startswith(tuple(LEAVES))
    }
    assert not others
    assert len(files) <= most
