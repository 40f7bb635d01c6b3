"""Figures on the pages that are exact by construction are what the code says today: bytes, parameters, bubbles, charts."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.compare import TrainingJob
from mpitrain.config import parse
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import with_messages
from mpitrain.pipeline.simulate import Cost, peak, simulate
from mpitrain.run.build import build
from mpitrain.tools.bench.comparison.formulas import predicted, words_of
from mpitrain.tools.bench.comparison.modes import jobs, usual
from mpitrain.transport.threads import run_ranks

HERE = Path(__file__).parents[3]
HOUSE = HERE / "mpitrain" / "README.md"
ROOMS = "parallel", "pipeline", "tools/plan", "tools/bench"
README = HERE / "README.md"
PARALLEL, PIPELINE, PLAN, BENCH = (HERE / "mpitrain" / room / "README.md" for room in ROOMS)
ROW = re.compile(r"^([\w-]+) +(\d+) +[\d.]+ +[\d.]+ +[\d.]+ +([\d,]+) +([\d,]+|-) ", re.M)
"""A mode, its workers, the bytes that its busiest rank sent, and those by formula."""


def by_formula(hosts, settings):
    """{mode: (workers, bytes as the table shows them)} of `compare` on these hosts; nothing is trained."""

    def one(transport):
        source, found = None, {}
        for word, config in jobs(usual(), settings, hosts).items():
            if not words_of(config, len(hosts)):
                continue
            job = build(transport, config, source=source)
            source, axes = job.source, job.trainer.grid.axes
            found[word] = str(axes.ranks - axes.servers), f"{predicted(transport, job):,.0f}"
            job.close()
        return found

    return run_ranks(len(hosts), one, hosts=hosts)[0]


@pytest.mark.parametrize(
    ("command", "hosts", "settings"),
    [
        ("mpitrain launch -n 4 -- compare", "aaaa", ["run.steps=12", "model.context=64"]),
        (
            "bash jobs/hosts/compare.sh",
            "aabbccdd",
            ["run.steps=8", "model.context=32", "replication.period=4"],
        ),
    ],
    ids=["within-a-host", "between-hosts"],
)
def test_the_bytes_of_modes_are_those_of_their_formulas(command, hosts, settings):
    table = PARALLEL.read_text().partition(f"$ {command}")[2].partition("```")[0]
    shown = {word: (workers, sent, formula) for word, workers, sent, formula in ROW.findall(table)}
    assert set(shown) == set(usual())
    right = by_formula(hosts, ["run.eval_rows=512", "model.layers=2", "model.width=64", *settings])
    assert {word: figures for word, figures in shown.items() if word in right} == {
        word: (workers, nbytes, nbytes) for word, (workers, nbytes) in right.items()
    }


def test_tables_of_modes_have_the_bytes_of_formulas_and_sums_of_kinds():
    blocks = re.findall(r"^\$ mpitrain .* compare --job .*\n((?s:.*?))```", BENCH.read_text(), re.M)
    assert len(blocks) == 4
    for block in blocks:
        first, second = re.split(r"^side +idle .*\n", block, flags=re.M)
        row = r"^\S+ +\d+ +[\d.]+~? +[\d.]+ +[\d.]+ +([\d,]+) +([\d,]+|-) "
        rows = re.findall(row, first, re.M)
        assert len(rows) > 5 and all(formula in (sent, "-") for sent, formula in rows)
        for line in second.split("\n\n")[0].splitlines():
            _, _, *kinds, whole, _, _ = line.split()
            assert sum(map(float, kinds)) == pytest.approx(float(whole), abs=0.05)


@cache
def parameters(kind):
    """Of the job that `train` trains unless told otherwise, or of the job gpt's."""
    config = parse({}) if kind == "train" else TrainingJob([], 1, 1).configured(1)
    return run_ranks(1, lambda transport: build(transport, config).trainer.parameter_count)[0]


@pytest.mark.parametrize("page", [README, PIPELINE, PLAN, BENCH])
def test_numbers_of_parameters_are_those_of_the_jobs(page):
    """With commas `train` and `plan` write them, `compare` without."""
    found = re.findall(r" ([\d,]+) parameters[, ]", page.read_text())
    assert found
    assert set(found) <= {f"{parameters('train'):,}", f"{parameters('bench')}"}


def test_the_chart_of_a_schedule_is_what_the_command_prints():
    block = re.search(r"^\$ mpitrain (plan schedule .*)\n((?s:.*?))```", PLAN.read_text(), re.M)
    done = CliRunner(env={"COLUMNS": "100"}).invoke(commands, shlex.split(block[1]))
    assert done.exit_code == 0 and done.output == block[2]


def test_bubbles_and_live_counts_are_those_of_the_simulator():
    row = re.compile(r"^\| `([\w-]+)`(?:[^|]*\|){3} ([\d.]+)% \| ([\d.]+) \|$", re.M)
    rows = row.findall(PIPELINE.read_text())
    assert len(rows) == 8
    for name, idle, live in rows:
        plan = find_plan(name, 4, 8, 2 if name in ("interleaved", "breadth-first") else None)
        costs = [Cost(1, 1, 1, saved=4 / len(plan.stage_of))] * len(plan.stage_of)
        simulation = simulate(with_messages(plan), costs)
        assert f"{100 * simulation.bubble:.1f}" == idle, name
        most = max(peak(mine, costs).nbytes for mine in plan.by_stage)
        assert most == pytest.approx(float(live)), name


def test_the_five_levels_of_a_tensor_have_the_sizes_of_the_page():
    section = re.search(r"^## Five levels of a tensor$(.*?)^## ", HOUSE.read_text(), re.M | re.S)[1]
    layout = {"dp": 2, "tp": 2}
    config = parse({"layout": layout, "replication": {"zero": 1, "bucket_mb": 0.5}})

    def levels(transport):
        job = build(transport, config)
        trainer = job.trainer
        storage = trainer.storage
        entry = next(e for e in storage.entries if e.name == "blocks.0.mlp.up.weight")
        entries = [e for e in storage.entries if e.unit == entry.unit and not e.parameter.holders]
        span, bucket = (
            next(part for part in parts if part.start <= entry.start < part.stop)
            for parts in (storage.spans, trainer.replica.buckets.buckets)
        )
        found = entry, entries, span, bucket, trainer.replica.optimizer.pieces[0]
        job.close()
        return found

    ranks = run_ranks(4, levels)
    entry, entries, span, bucket, first = ranks[0]
    second = ranks[2][-1]
    rows, columns = entry.parameter.shape
    words = [
        f"{entry.name}, {rows} x {columns} = {rows * columns:,}",
        f"rows 0..{entry.parameter.local_shape[0] - 1} on tp rank 0: {entry.stop - entry.start:,}",
        f"at {entry.start:,} of its flat buffer",
        ", ".join(f"{e.name.removeprefix('blocks.0.mlp.')} {e.stop - e.start:,}" for e in entries),
        f"{span.stop - span.start:,} at {span.start:,}",
        f"{bucket.stop - bucket.start:,} at {bucket.start}",
        f"dp rank 0: {first.start}..{first.stop - 1:,}",
        f"dp rank 1: {second.start:,}..{second.stop - 1:,}",
    ]
    assert [line for line in words if line not in section] == []
    assert bucket.units == (2, 1, 0) and entry.start < first.stop < entry.stop
