"""Loss curves: where each point of a run's metrics lies, and the picture."""

import json
import math
import re

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands, main
from mpitrain.tools.bench.plot_loss import draw, legible, points, shared_folder, smooth

LINES = [
    {"event": "start", "step": 0, "wall_s": 0.5},
    {"step": 10, "loss": 5.0, "wall_s": 60.0, "tokens_seen": 1000},
    {"step": 15, "val_loss": 4.0, "wall_s": 80.0},
    {"step": 20, "loss": None, "nonfinite": True, "wall_s": 120.0, "tokens_seen": 2000},
    {"step": 20, "val_loss": 3.0, "wall_s": 150.0},
    {"event": "resume", "step": 20, "wall_s": 160.0},
    {"step": 25, "val_loss": 2.5, "eval_s": 7.0, "wall_s": 175.0},
    {"step": 30, "loss": 2.0, "wall_s": 180.0, "tokens_seen": 4000},
    {"event": "end", "step": 30, "wall_s": 181.0},
]


@pytest.mark.parametrize(
    "over, trained, validated",
    [
        ("steps", [(10, 5.0), (30, 2.0)], [(15, 4.0), (20, 3.0), (25, 2.5)]),
        ("tokens", [(1000, 5.0), (4000, 2.0)], [(1500, 4.0), (2000, 3.0), (3000, 2.5)]),
        ("time", [(60, 5.0), (180, 2.0)], [(80, 4.0), (120, 3.0), (168, 2.5)]),
        ("samples", [], []),
    ],
)
def test_a_point_lies_where_its_step_does(over, trained, validated):
    assert points(LINES, "loss", over) == trained
    assert points(LINES, "val_loss", over) == validated


@pytest.mark.slow
def test_curves_of_many_runs_are_told_apart_and_steps_are_whole_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    draw({f"run {number}": LINES for number in range(14)}, "steps", False, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert len(set(re.findall(r'style="fill: none;([^"]*); stroke-width: 1.8', drawn))) == 14
    short = {"short": [{"step": step, "loss": 1.0, "wall_s": 0.1 * step} for step in range(1, 18)]}
    for over, told, untold in (
        ("steps", "16", "2.5"),
        ("time", "seconds, evaluations included", "0.01"),
    ):
        draw(short, over, False, tmp_path / "short.svg")
        drawn = (tmp_path / "short.svg").read_text()
        assert f"<!-- {told} -->" in drawn and f"<!-- {untold} -->" not in drawn


@pytest.mark.slow
def test_a_plot_has_its_runs_as_title_and_a_legend(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("a$\\frac{$", "bytes\udcff", "_under")
    assert [legible(name) for name in names] == ["a$\\frac{$", "bytes\\udcff", "./_under"]
    only_trained = [record for record in LINES if "val_loss" not in record]
    many = {f"run {number}": only_trained for number in range(6)}
    for runs, title, has_validation in (
        ({"a_1$": LINES}, "a_1$", True),
        (dict.fromkeys(names, LINES), "a$\\frac{$, bytes\\udcff, ./_under", True),
        ({"a": LINES, "b": only_trained}, "a, b", True),
        ({"a": only_trained}, "a", False),
        (many, "run 0, run 1, run 2, and 3 more", False),
    ):
        draw(runs, "steps", False, tmp_path / "curves.svg")
        drawn = (tmp_path / "curves.svg").read_text()
        assert f"<!-- {title} -->" in drawn and ("<!-- validation -->" in drawn) == has_validation
    draw({"ring": LINES}, "time", False, tmp_path / "curves.svg", "a job")
    assert "<!-- a job -->" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize(
    ("runs", "folder"),
    [
        (["runs/a"], ""),
        (["a", "b"], ""),
        (["runs/a", "runs/b"], "runs/"),
        (["/x/y/a/run", "/x/y/b/run"], "/x/y/"),
        (["runs/a", "/x/runs/a"], ""),
        (["runs", "runs/a"], ""),
    ],
)
def test_runs_of_one_folder_have_it_as_their_title(runs, folder):
    assert shared_folder(runs) == folder


def test_a_run_in_legs_has_no_kink_where_they_join():
    legs = [(10, 20, 30, 33), (40, 50), (60, 61)]
    lines = [
        line
        for leg in legs
        for line in ({"event": "resume", "step": 0}, *({"step": n, "loss": 1.0} for n in leg))
    ]
    assert [step for step, _ in points(lines, "loss", "steps")] == [10, 20, 30, 40, 50, 60, 61]


def test_odd_records_are_no_points():
    odd = [
        {"step": "x", "loss": 1.0},
        {"loss": 1.0},
        {"step": 1, "loss": "2"},
        {"step": 1, "loss": math.inf},
        {"step": 1, "loss": 10**400},
        {"step": 2, "loss": 3},
    ]
    assert points(odd, "loss", "steps") == [(2, 3)]


@pytest.mark.parametrize("count", (1, 2, 60, 119, 120, 1000))
def test_a_smooth_curve_keeps_its_places_its_start_and_a_straight_line(count):
    line = [(x, 2.0 * x) for x in range(count)]
    assert smooth(line)[: count - 8] == line[: count - 8]
    ragged = [(x, 5.0 * (x % 2)) for x in range(count)]
    smoothed = smooth(ragged)
    assert [x for x, _ in smoothed] == list(range(count)) and smoothed[0] == ragged[0]
    assert (smoothed == ragged) == (count < 120)
    if count == 1000:
        assert all(2 < y < 3 for _, y in smoothed[8:])


def write(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_runs_are_drawn_into_one_picture(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "one", LINES)
    other = [{"step": step, "loss": 5 / step, "wall_s": step * 0.1} for step in range(1, 300)]
    write(tmp_path / "other", other)
    for more in ([], ["--log"], ["--over", "time"]):
        (tmp_path / "c.png").unlink(missing_ok=True)
        paths = tmp_path / "one", tmp_path / "other", "--out", tmp_path / "c.png"
        shown = CliRunner().invoke(commands, ["plot", *map(str, paths), *more])
        assert shown.exit_code == 0, shown.output
        assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["nowhere"], "There is no run in nowhere: it has no metrics.jsonl."),
        (["young"], "The metrics of young have no losses over steps."),
        (["run", "--over", "samples"], "The metrics of run have no losses over samples."),
        (["run", "--out", "c.xyz"], "--out draws files that end in"),
    ],
)
def test_what_cannot_be_drawn_is_one_message_and_exit_2(
    words, complaint, tmp_path, monkeypatch, capfd
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", LINES)
    write(tmp_path / "young", LINES[:1])
    with pytest.raises(SystemExit) as end:
        main(["plot", *words])
    assert end.value.code == 2 and complaint in capfd.readouterr().err
