"""What a benchmark prints and draws of rows that are given."""

import csv
import math
import warnings

import pytest

from mpitrain import plots
from mpitrain.plots import readable
from mpitrain.tools.bench.collectives.sweep import CollectiveRow
from mpitrain.tools.bench.collectives.table import columns, footer, too_slow
from mpitrain.tools.bench.pictures import plot
from mpitrain.tools.bench.results import write_csv
from mpitrain.tools.text_table import TextTable, figure

FACTS = {
    "ranks": 2,
    "hosts": 1,
    "processor": "Abacus 3000",
    "cores": 2,
    "mpi": "Open MPI v0",
    "device": "cpu",
    "mpitrain": "0",
}


def line(row, places=("window",)):
    return TextTable(columns(places)).line(row)


def row(
    algorithm, nbytes, microseconds, p99=0.0, chosen=None, error=math.nan, wrong=0, fastest=0.9
):
    bandwidth = nbytes / microseconds / 1e3
    return CollectiveRow(
        "allreduce",
        algorithm,
        "window",
        nbytes,
        nbytes // 4,
        "float32",
        2,
        microseconds,
        fastest * microseconds,
        p99 or microseconds,
        bandwidth,
        bandwidth,
        microseconds,
        wrong,
        chosen or algorithm,
        error,
        1,
    )


QUIET = [
    row(name, nbytes, time)
    for name, times in (("ring", (1.0, 3.0)), ("native", (2.0, 1.5)))
    for nbytes, time in zip((1000, 9000), times, strict=True)
]


def said(rows):
    return [" ".join(text.split()) for text in footer(rows)]


def test_averages_are_per_algorithm_with_the_ratio_to_mpi_if_that_was_measured():
    assert said(QUIET) == [
        "algorithm buffers average busbw times native's speed: mean, least",
        "ring window 2.00 GB/s 1.00, 0.500 at 9000 bytes",
        "native window 3.25 GB/s",
        "wrong elements 0",
    ]
    alone = ["algorithm buffers average busbw", "ring window 1.00 GB/s", "wrong elements 0"]
    assert said(QUIET[:1]) == alone and footer([]) == ["nothing was measured"]


def test_what_auto_has_chosen_and_where_arrays_lie_are_told_apart():
    auto = row("auto", 64, 1.0, chosen="shared")
    assert "  auto: shared  " in line(auto)
    assert "  auto: shared, window  " in line(auto, ["window", "plain"])
    pinned = "/home/me/own.py sha256:" + 64 * "a"
    assert "  own.py  " in line(row("own.py", 64, 1.0, chosen=pinned))


def test_a_row_whose_p99_is_far_from_its_median_is_marked():
    rows = [row("ring", 64, 10.0, p99=19.0), row("tree", 64, 10.0, p99=21.0)]
    assert " 19.0  " in line(rows[0]) and " 21.0~ " in line(rows[1])
    (marked,) = [text for text in footer(rows) if text.startswith("~")]
    assert marked.startswith("~ 1 of 2 rows: p99 above 2 times the median")


def test_a_noisy_row_is_marked_and_not_used():
    """131 ms in the median, 2 ms at best: other work ran most of the time."""
    spoilt = [
        row("ring", 4000, 131e3, fastest=2 / 131),
        row("native", 4000, 1.0),
        row("tree", 9000, 5.0, fastest=0.49),
    ]
    assert "131000~ " in line(spoilt[0]) and "~" not in line(row("ring", 64, 1.0, fastest=0.5))
    lines = said([*QUIET, *spoilt])
    assert lines[1:4] == [
        "ring window 2.00 GB/s 1.00, 0.500 at 9000 bytes",
        "native window 3.50 GB/s",
        "tree window all marked ~",
    ]
    assert lines[4].startswith("~ 2 of 7 rows: median above 2 times the fastest run")
    assert max(map(len, footer([*QUIET, *spoilt]))) <= 80


def test_of_a_wire_format_the_error_is_printed_and_replicas_are_counted():
    rows = [
        row("ring", 64, 1.0),
        row("wire int8", 64, 1.0, error=0.0123, wrong=3),
        row("wire bf16", 64, 1.0, error=math.nan),
    ]
    assert [line(each).split()[-2:] for each in rows[:2]] == [["-", "0"], ["1.23e-02", "3"]]
    assert footer(rows)[-2:] == ["wrong elements 0", "replicas that differ 3"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123456.0, "123000"),
        (26447.8, "26400"),
        (999.6, "1000"),
        (123.4, "123"),
        (9.996, "10.0"),
        (1.0, "1.00"),
        (0.12345, "0.123"),
        (0.001, "0.00100"),
        (0.00012345, "1.23e-04"),
        (0.0, "0"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_figures_have_three_significant_digits(value, text):
    assert figure(value) == text


def test_80_columns_get_the_main_columns_and_a_pipe_gets_all():
    def titles(width, has_wires=False):
        table = TextTable(columns(["window"], has_wires), width)
        return [column.title for column in table.columns]

    widest = row("auto", 1 << 30, 123456.0, p99=1e6, chosen="recursive-doubling")
    for has_wires in (False, True):
        main = ["bytes", "algorithm", "time", "p99", "busbw", "#wrong"]
        assert titles(80, has_wires) == main
        lines = TextTable(columns(["window"], has_wires), 80).lines([widest])
        assert max(map(len, lines)) <= 80 and "count, dtype, min, algbw," in lines[0]
    assert titles(90, True)[-2:] == ["error", "#wrong"]
    assert [len(titles(width)) for width in (0, 140, 141)] == [12, 11, 12]
    assert "left out" not in TextTable(columns(["window"]), 141).heading()[0]


def test_fail_below_names_slow_rows_at_the_largest_size():
    rows = [*QUIET[:2], row("tree", 1000, 1.0), row("tree", 9000, 4.5)]
    assert too_slow(rows, 2.0) == []
    assert too_slow(rows, 2.5) == [
        "too slow: tree (window) has a bus bandwidth of 2.00 GB/s at 9000 bytes, below 2.5"
    ]
    spoilt = row("tree", 9000, 90.0, fastest=0.1)
    assert too_slow([*rows, spoilt], 2.0) == [], "another sweep was quiet"
    assert too_slow([row("ring", 9000, 3.0), spoilt], 2.0)[0].endswith(
        "below 2; its median is marked ~, so measure again"
    )


def test_a_table_for_spreadsheets_has_every_field_of_every_row(tmp_path):
    rows = [row("ring", 64, 1.5), row("wire a,b", 64, 1.0, error=0.25)]
    write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [list(each) for each in found] == [list(CollectiveRow._fields)] * 2
    cells = [[each[name] for name in ("algorithm", "time_us", "error")] for each in found]
    assert cells == [["ring", "1.5", ""], ["wire a,b", "1.0", "0.25"]]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (64, "64 B"),
        (4096, "4 KiB"),
        (4092, "4 KiB"),
        (1020, "1 KiB"),
        (1 << 20, "1 MiB"),
        (3 << 19, "1.5 MiB"),
        ((1 << 20) - 4, "1 MiB"),
        (1 << 30, "1 GiB"),
    ],
)
def test_sizes_are_readable(nbytes, text):
    assert readable(nbytes) == text


@pytest.mark.slow
def test_the_picture_tells_the_machine_the_sizes_and_what_auto_chose(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(*what)
        for nbytes, chosen in ((4096, "shared"), (1 << 20, "ring"))
        for what in (("ring", nbytes, nbytes / 1e3), ("auto", nbytes, nbytes / 1e3, 0, chosen))
    ]
    plot(rows, FACTS, tmp_path / "rows.svg")
    drawn = (tmp_path / "rows.svg").read_text()
    titles = ("allreduce of float32, 2 ranks on 1 host(s)", "Abacus 3000, 2 cores a host")
    for text in (*titles, "bus bandwidth", "4 KiB", "1 MiB", "auto: shared", "auto: ring"):
        assert text in drawn, text


@pytest.mark.slow
def test_predictions_far_from_what_was_measured_do_not_flatten_the_picture(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    measured = [
        row(name, nbytes, nbytes / speed, p99=1e9)
        for name, speed in (("ring", 1e3), ("tree", 2e3))
        for nbytes in (4096, 1 << 20)
    ]
    for factor in (1e-4, 1.0, 1e4):
        rows = [each._replace(predicted_us=each.time_us * factor) for each in measured]
        plot(rows, FACTS, tmp_path / "rows.png")
        time, bandwidth = (axes.get_ylim() for axes in kept[-1].axes)
        assert 0 < time[0] <= 1.8432 and 1048.576 <= time[1] < 2000, factor
        assert bandwidth[0] == 0 and 2 <= bandwidth[1] < 3, factor
    monkeypatch.undo()
    pyplot.close("all")


@pytest.mark.parametrize("font", [None, "DejaVu Serif"])
def test_letters_that_the_font_lacks_are_a_note_or_drawn_by_another_font(
    font, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    asked = []
    monkeypatch.setattr(plots, "font_with", lambda letters: asked.append(letters) or font)
    drawn, axes = plots.subplots()
    axes.set_title("run \uc2e4\ud589")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.save(drawn, tmp_path / "a.svg", 50)
    said = capsys.readouterr().err
    assert asked == ["\uc2e4\ud589"] and (tmp_path / "a.svg").stat().st_size > 1000
    assert said.count("no font of this machine has \uc2e4\ud589") == (font is None)
