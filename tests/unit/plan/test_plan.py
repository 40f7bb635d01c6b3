"""`mpitrain plan schedule`: charts, of asynchronous schedules too, and schedules in files."""

import json
import random
import re
import struct
import sys
from bisect import bisect
from itertools import accumulate, product
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedule_files import find_plan, read_plan, write_plan
from mpitrain.pipeline.schedules import SCHEDULES, plan_of
from mpitrain.pipeline.simulate import Cost, staleness, weights
from mpitrain.tools.plan.schedule import stream
from tests.processes import run
from tests.unit.plan.shown import shown

ROOMS = Path(__file__).parents[3] / "mpitrain"


def test_a_chart_has_a_row_per_stage_and_what_it_comes_to_in_words():
    assert (
        shown("schedule", "--stages", 3, "--micro-batches", 4)
        == """\
1f1b: 3 stage(s), 4 micro-batch(es)

ms       0              5              10             15
stage 0  F0 F1 F2 ..... B0 W0 F3 B1 W1 .. B2 W2 .. B3 W3
stage 1  .. F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 .. B3 W3 ..
stage 2  ..... F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 .....

F forward, B input half of backward, W weight half, dots idle
makespan 16 ms, of which a stage computes 12: bubble 25.0%
peak live, by stage: 3, 2, 1 micro-batches
of these, with a pending weight half: at most 1, 1, 1
backwards are cut into B and W, as in `train`; --whole-backward draws them as textbooks do
"""
    )
    whole = shown("schedule", "--stages", 3, "--micro-batches", 4, "--whole-backward")
    assert ": bubble 33.3%" in whole and "\nbackwards are whole, as in textbooks;" in whole
    assert "\nstage 2  ..... F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- ...........\n" in whole


def test_the_pipeline_page_has_every_schedules_bubble_and_peak():
    page = (ROOMS / "pipeline" / "README.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)`(?:[^|]*\|){3} ([\d.]+%) \| ([\d.]+) \|$", page, re.M)
    assert [name for name, _, _ in listed] == list(SCHEDULES)
    for name, bubble, most in listed:
        printed = shown("schedule", "--schedule", name)
        live, parts = re.search(
            r"^peak live, by stage: ([\d, ]+) micro-batches( of one chunk each)?$", printed, re.M
        ).groups()
        assert f": bubble {bubble}\n" in printed
        assert max(map(int, live.split(", "))) / (2 if parts else 1) == float(most)


def test_the_page_of_plans_shows_a_printed_chart():
    page = (ROOMS / "tools/plan" / "README.md").read_text()
    command, _, printed = page.partition("$ mpitrain plan ")[2].partition("\n")
    assert printed.startswith(shown(*command.split()))


def test_a_chart_letters_the_chunks_of_a_stage():
    assert (
        shown(
            *[
                "schedule",
                "--schedule",
                "interleaved",
                "--stages",
                "2",
                "--micro-batches",
                "2",
                "--forward-ms",
                "2",
            ],
            *[
                "--backward-ms",
                "3",
                "--weight-ms",
                "1",
                "--transfer-ms",
                "0.5",
                "--receive-ms",
                "0.25",
                "--saved-mb",
                "8",
            ],
        )
        == """\
interleaved: 2 stage(s), 2 micro-batch(es)

ms       0                   5                   10                  15
stage 0  F0a F1a ..... F0b  F1b ............ BW0b--- .... BW1b---  BW0a--- .... BW1a---
stage 1  ...... F0a  F1a .... F0b BW0b---  F1b BW1b---  BW0a--- .... BW1a--- ..........

F forward, BW both halves, dots idle; chunks of a stage a, b, ...
makespan 19.75 ms, of which a stage computes 12: bubble 39.2%
peak live, by stage: 4, 3 micro-batches of one chunk each
peak activations, by stage: 16, 12 MB
"""
    )


@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_chart_fits_the_terminal_and_shows_every_instruction_once(name, columns):
    output = shown("schedule", "--schedule", name, columns=columns)
    lines = output.splitlines()
    assert max(map(len, lines)) <= columns
    for stage, mine in enumerate(plan_of(name, 4, 8).by_stage):
        row = " ".join(line for line in lines if line.startswith(f"stage {stage}"))
        seen = [word for word in row.replace(f"stage {stage}", "").split() if word.strip("-.")]
        assert len(seen) == len(mine), (name, stage)


@pytest.mark.parametrize(
    "halves", [(1e12, 1e-12, 0), (1e-12, 1, 1), (1e-12, 0, 0), (1 / 3, 0.7, 1e-9)]
)
def test_a_chart_of_any_times_fits_the_terminal(halves):
    options = [
        word
        for name, time in zip(("forward", "backward", "weight"), halves, strict=True)
        for word in (f"--{name}-ms", time)
    ]
    assert max(map(len, shown("schedule", "--schedule", "zb-v", *options).splitlines())) <= 100


def test_saving_at_dalys_interval_loses_the_least():
    """A sample of failures, not the formula: work between saves is lost when the job fails."""
    words = ("--days", 0.5, "--ranks", 100, "--pause", 10, "--restart", 5, "--step", 3)
    lines = shown("checkpoints", *words).splitlines()
    told = {line.split()[0]: line for line in lines[1:]}
    every = [float(told[name].split()[3]) for name in ("Daly", "half", "twice")]
    part = [float(told[name].split()[-6].rstrip("%")) / 100 for name in ("Daly", "half", "twice")]
    assert f"checkpoint.every={round(every[0] / 3)}:" in told["Daly"]
    assert part[0] < min(part[1:])
    draw = random.Random(1)
    for interval, lost in zip(every, part, strict=True):
        clock, saves = 0.0, 20_000
        for _ in range(saves):
            while (fails := draw.expovariate(1 / 432)) < interval + 10:
                clock += fails + 5
                while (fails := draw.expovariate(1 / 432)) < 5:
                    clock += fails
            clock += interval + 10
        assert 1 - saves * interval / clock == pytest.approx(lost, abs=0.01)


def test_spares_lose_what_a_sample_of_failures_loses():
    """A restart costs what all failures cost without a spare; a spare idles until it is needed."""
    words = ("--days", 30, "--ranks", 64, "--pause", 20, "--restart", 300, "--replace", 9)
    lines = shown("checkpoints", *words, "--spares", 3).splitlines()
    lost = [float(line.split()[4].rstrip("%")) / 100 for line in lines if "spare(s)," in line]
    every, day, draw = float(lines[1].split()[3].replace(",", "")), 86400, random.Random(1)
    in_saves, days = 20 / (every + 20), 20_000
    failures = [
        bisect(list(accumulate(draw.expovariate(1 / 40_500) for _ in range(30))), day)
        for _ in range(days)
    ]
    restart = (lost[0] - in_saves) * day * days / sum(failures)
    for spares, part in enumerate(lost):
        took = sum(9 * min(n, spares) + restart * max(0, n - spares) for n in failures)
        alone = in_saves + took / day / days
        assert 1 - (1 - alone) * 64 / (64 + spares) == pytest.approx(part, abs=1e-3)


def test_checkpoints_are_planned_from_what_runs_have_measured(tmp_path):
    records = [
        {"event": "start", "ranks": 2},
        {"step": 1, "step_s": 0.25},
        {"event": "checkpoint", "step": 1, "checkpoint_pause_s": 20.0},
        {"event": "resume", "step": 1, "startup_s": 200.0, "waited_s": 100.0},
        {"event": "resume", "step": 1, "startup_s": 1.0, "lost": 1, "filled_from": "ranks"},
        {"step": 2, "step_s": 2.0},
        {"event": "checkpoint", "step": 2, "checkpoint_pause_s": 30.0},
        {
            "event": "resume",
            "startup_s": 3.0,
            "waited_s": 6.0,
            "replaced": [[0, 2]],
            "filled_from": "ranks",
        },
        {"step": 3, "step_s": 4.0},
    ]
    lines = [json.dumps({"step": 0, **record}) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    words = ("checkpoints", "--days", 1000, "--ranks", 512, "--spares", 2)
    first, *rest = shown(*words, "--run", tmp_path).splitlines()
    told = [
        "--pause=25 (2 seen)",
        "--restart=300 (1 seen)",
        "--replace=9 (1 seen)",
        "--step=2 (1 seen)",
    ]
    assert first == f"measured: {', '.join(told)}"
    given = ("--pause", 25, "--restart", 300, "--replace", 9, "--step", 2)
    assert rest == shown(*words, *given).splitlines()
    assert shown(*words, "--run", tmp_path, "--pause", 20).splitlines()[1:] != rest


def test_a_chart_too_long_for_its_numbers_is_drawn_smaller():
    lines = shown("schedule", "--micro-batches", 300, "--forward-ms", 0.001).splitlines()
    assert max(map(len, lines)) <= 100 and sum(line.startswith("stage 0") for line in lines) == 6
    lines = shown("schedule", "--stages", 300)
    assert "the last one begins at 299 ms" in lines and "makespan 622 ms" in lines
    assert "peak live, by stage: 8, 8, 8, 8, ... (292 stages), 4, 3, 2, 1 micro-b" in lines


def test_two_async_steps_are_drawn_with_updates_and_versions():
    assert (
        shown("schedule", "--schedule", "async-2bw", "--stages", 2, "--micro-batches", 3)
        == """\
async-2bw: 2 stages, 3 micro-batches a step; the first 2 steps of a stream that goes on

ms       0              5              10             15             20
stage 0  F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 F4 B3 W3 F5 B4 W4 F6 B5 W5
version  0  0     0  0  0  0  0  0  0  0* 0  0  0  0  0  0  1  0  0*
stage 1  .. F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 F4 B4 W4 F5 B5 W5 F6
version     0  0  0  0  0  0  0  0  0* 0  0  0  0  0  0  0  0  0* 1

F forward, B input half of backward, W weight half, dots idle
version: of its weights, which a stage computes with; * an update follows, which makes the next
  version
a step in the steady state 9 ms, of which a stage computes 9: idle 0.0%, no bubble between steps
the pipe fills at the start, and after evaluations and checkpoints: the last stage begins after 1 ms
1 update a step on each stage
versions of the weights that are held, by stage: 2, 2
staleness of a gradient when it is applied, by stage: 1, 1 updates
peak live, by stage: 2, 1 micro-batches
of these, with a pending weight half: at most 1, 1
"""
    )


def test_pipedream_holds_a_version_for_each_stage_to_come():
    printed = shown("schedule", "--schedule", "async")
    assert "bubble 20" not in printed and "makespan" not in printed
    for line in (
        "a step in the steady state 24 ms, of which a stage computes 24: idle 0.0%, no bubble between steps",
        "8 updates a step on each stage",
        "versions of the weights that are held, by stage: 4, 3, 2, 1",
        "staleness of a gradient when it is applied, by stage: 3, 2, 1, 0 updates",
    ):
        assert f"\n{line}\n" in printed


def test_versions_and_staleness_are_those_of_pipedream_and_2bw():
    for p, m in product((1, 2, 5), (5, 8)):
        lists = plan_of("async", p, 4 * m).by_stage
        assert [staleness(mine) for mine in lists] == [p - 1 - s for s in range(p)], (p, m)
        assert {staleness(mine, m) for mine in lists} == {1}, (p, m)
        assert all(sum(each.is_updated for each in weights(mine)) == 4 * m for mine in lists)
        assert all(sum(each.is_updated for each in weights(mine, m)) == 4 for mine in lists)


@pytest.mark.parametrize("name", ["async", "async-2bw"])
def test_no_stage_idles_in_the_steady_state_of_an_async_chart(name):
    for p, m in product((1, 2, 4, 7), (8, 11)):
        cost = Cost(1, 1.5, 0.5)
        found = stream(name, p, m, None, [cost] * p, 0, 0)
        assert found.step_ms == pytest.approx(3 * m) and found.idle == pytest.approx(0)
        end = max(mine[-1].end for mine in found.drawn.timeline)
        assert all(mine[-1].end == end for mine in found.drawn.timeline), (p, m)


def test_a_slow_stage_makes_the_others_wait_with_and_without_a_flush():
    slow = [
        word for half in ("forward", "backward", "weight") for word in (f"--{half}-ms", "1,1,2,1")
    ]
    # The slow stage computes 48 ms, and waits 3 ms for the fill and the drain; the mean is 30 ms.
    assert "makespan 51 ms, of which a stage computes 30: bubble 41.2%" in shown("schedule", *slow)
    assert "step in the steady state 48 ms, of which a stage computes 30: idle 37.5%" in shown(
        "schedule", "--schedule", "async", *slow
    )


@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.parametrize("micro_batches", [4, 9, 200])
@pytest.mark.slow
def test_no_line_of_a_stream_is_wider_than_the_terminal(columns, micro_batches):
    words = "schedule", "--schedule", "async", "--micro-batches", micro_batches
    output = shown(*words, columns=columns)
    assert max(map(len, output.splitlines())) <= columns


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_written_schedule_is_read_as_it_was(name, tmp_path):
    assert "written to" in shown("schedule", "--schedule", name, "--json", tmp_path / "own.json")
    plan = plan_of(name, 4, 8)
    assert str(read_plan(tmp_path / "own.json")) == str(plan), (
        "texts, since instructions of two kinds are equal as tuples"
    )
    again = shown("schedule", "--schedule", tmp_path / "own.json").splitlines()
    assert again[1:] == shown("schedule", "--schedule", name).splitlines()[1:]


def test_a_schedule_from_a_file_knows_its_numbers(tmp_path):
    write_plan(tmp_path / "own.json", plan_of("zb-v", 2, 3))
    name = str(tmp_path / "own.json")
    assert find_plan(name) == find_plan(name, 2, 3) == plan_of("zb-v", 2, 3)
    for numbers in ((3, 3), (2, 4), (2, 3, 2)):
        with pytest.raises(ConfigError, match="2 stages and 3"):
            find_plan(name, *numbers)


def times(chunk, half, micro, count):
    return f"chunk {chunk} has the {half} of micro-batch {micro} {count} times, not once"


@pytest.mark.parametrize(
    "place, stages, faults",
    [
        ([0, 1], ["F0.0 BW0.0", "F1.0 B1.0"], [times(1, "weight half", 0, 0)]),
        (
            [0, 1],
            ["F0.0 F0.1 BW0.0 W0.0", "F1.0 BW1.0"],
            [
                times(0, "input half", 1, 0),
                times(0, "weight half", 0, 2),
                times(0, "weight half", 1, 0),
                times(1, "forward", 1, 0),
                "... and 2 more",
            ],
        ),
        (
            [0, 1],
            ["F0.1 F0.0 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"],
            ["chunk 0 has the forward of micro-batch 0 after that of 1, but messages keep order"],
        ),
        ([0], ["F0.0 W0.0 B0.0"], ["chunk 0 computes W0.0 before B0.0"]),
        ([0], ["BW0.0 F0.0"], ["chunk 0 computes BW0.0 before F0.0"]),
        ([0, 1], ["F0.0 BW0.0", "F0.0 BW1.0"], ["F0.0 is on stage 1, but its chunk is on stage 0"]),
        ([0, 1], ["F0.0 BW0.0", "F7.0 BW1.0"], ["F7.0 is on stage 1, but its chunk is on none"]),
        (
            [0, 2],
            ["F0.0 BW0.0", "F1.0 BW1.0"],
            [
                "chunk 1 is on stage 2, but there are stages 0 to 1",
                "stage 1 has no chunk",
                "F1.0 is on stage 1, but its chunk is on stage 2",
                "BW1.0 is on stage 1, but its chunk is on stage 2",
            ],
        ),
        ([], [], ["there are no stages"]),
        ([0], [""], ["there are no micro-batches"]),
        (
            [0, 1],
            ["F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"],
            [
                "stage 0 waits for the gradient of micro-batch 0 for chunk 0, from stage 1",
                "stage 1 waits for the activation of micro-batch 1 for chunk 1, from stage 0",
            ],
        ),
        (
            [0, 0],
            ["F1.0 F0.0 BW1.0 BW0.0"],
            ["stage 0 waits for the activation of micro-batch 0 for chunk 1, from stage 0"],
        ),
    ],
)
def test_an_order_that_cannot_train_a_model_is_refused_with_its_faults(
    place, stages, faults, tmp_path
):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"place": place, "stages": stages}))
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    assert caught.value.law == "\n".join([f"The schedule {path} cannot be run:", *faults])
    assert caught.value.way_out == "`mpitrain plan schedule --json FILE` writes one that can."


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("\0", "is no JSON"),
        ("{}", "must hold a list of stages"),
        ('{"place": [0.5], "stages": [""]}', "must hold"),
        ('{"place": [true], "stages": ["F0.0"]}', "must hold"),
        ('{"place": [0], "stages": ["F0.0 BW0"]}', "stage 0: 'BW0' is no instruction"),
        ('{"place": [0], "stages": ["F0.-1"]}', "'F0.-1' is no instruction"),
        ('{"place": [0], "stages": ["F0.99999999999"]}', "is no instruction"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text, said, tmp_path):
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_plan(tmp_path / "own.json")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--stages", 257, "--plot", "a.png"], "257 are too many"),
        (["--schedule", "."], "The schedule . cannot be read"),
        (
            ["--schedule", "async", "--micro-batches", 3],
            "A stream has at least as many micro-batches in a step as stages, but these are 3 and 4.",
        ),
        (["--schedule", "async", "--whole-backward"], "async goes on over the ends of steps."),
        (["--schedule", "x" * 5000], "The schedule must be one of naive"),
        (
            ["--forward-ms", "nan"],
            "Times and sizes are 0 or from 1e-12 to 1e+12, and a stage takes time, but these are forward_ms "
            "nan, backward_ms 1",
        ),
        (["--forward-ms", 0, "--backward-ms", 0, "--weight-ms", 0], "more than 0"),
        (["--forward-ms", "1,2,3"], "one for each stage, but has 3 for 4 stages"),
        (["--forward-ms", "1e-310"], "but these are forward_ms 1e-310"),
        (["--forward-ms", "inf"], "but these are forward_ms inf"),
        (["--json", "/dev/null/own.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_simulated_read_or_written_is_refused(words, said):
    done = CliRunner().invoke(commands, ["plan", "schedule", *map(str, words)])
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)


@pytest.mark.slow
def test_a_chart_needs_neither_numpy_nor_mpi_nor_the_validation_library():
    code = (
        "import sys\n"
        "from mpitrain.cli import main\n"
        "try: main(['plan', 'schedule', '--schedule', 'zb-v'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'numpy', 'mpi4py', 'cupy', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0 and "bubble 5.9%" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "count"),
    [(("v-half", "--weight-ms", 0), 2), (("async", "--stages", 2, "--micro-batches", 2), 1)],
)
def test_a_chart_is_drawn_for_a_wall(words, count, tmp_path):
    pytest.importorskip("matplotlib")
    picture = "--plot", tmp_path / "chart.png"
    assert "drawn in" in shown("schedule", "--schedule", *words, *picture)
    drawn = [file.read_bytes()[16:24] for file in tmp_path.glob("chart*.png")]
    assert drawn == [struct.pack(">2I", 1280, 720)] * count
    done = CliRunner().invoke(
        commands, ["plan", "schedule", "--plot", str(tmp_path / "chart.bogus")]
    )
    assert isinstance(done.exception, ConfigError) and "--plot draws files that end in" in str(
        done.exception
    )
