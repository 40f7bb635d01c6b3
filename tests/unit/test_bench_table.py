"""What a benchmark prints and draws of rows that are given."""

import math

import pytest

from mpitrain.bench.plot import plot, readable
from mpitrain.bench.sweep import Row
from mpitrain.bench.table import COLUMNS, footer, line

FACTS = {"ranks": 2, "hosts": 1, "processor": "Abacus 3000", "cores": 2, "mpi": "Open MPI v0", "device": "cpu", "mpitrain": "0"}


def row(algorithm, nbytes, microseconds, p99=0.0, chosen=None, error=math.nan, wrong=0):
    bandwidth = nbytes / microseconds / 1e3
    return Row("allreduce", algorithm, "window", nbytes, nbytes // 4, "float32", 2, microseconds, 0.9 * microseconds,
               p99 or microseconds, bandwidth, bandwidth, microseconds, wrong, chosen or algorithm, error, 1)


def test_averages_are_those_of_each_algorithm_and_stand_beside_its_ratio_to_mpi():
    rows = [row("ring", 1000, 1.0), row("ring", 9000, 3.0), row("native", 1000, 2.0), row("native", 9000, 1.5)]
    assert [" ".join(text.split()) for text in footer(rows)] == [
        "algorithm buffers average busbw against native, geometric mean and least",
        "ring window 2.000 GB/s 1.00 times as fast, 0.50 at 9000 bytes",
        "native window 3.250 GB/s",
        "wrong elements 0"]


def test_without_mpi_s_own_there_are_averages_and_nothing_is_measured_of_nothing():
    assert [" ".join(text.split()) for text in footer([row("ring", 1000, 1.0)])] == [
        "algorithm buffers average busbw", "ring window 1.000 GB/s", "wrong elements 0"]
    assert footer([]) == ["nothing was measured"]


def test_what_auto_has_chosen_and_where_arrays_lie_are_told_apart():
    assert "  auto: shared  " in line(row("auto", 64, 1.0, chosen="shared"), ["window"])
    assert "  auto: shared, window  " in line(row("auto", 64, 1.0, chosen="shared"), ["window", "plain"])


def test_a_row_whose_p99_is_far_from_its_median_is_marked():
    rows = [row("ring", 64, 10.0, p99=19.0), row("tree", 64, 10.0, p99=21.0)]
    assert [" 19.0  " in line(rows[0], ["window"]), " 21.0~ " in line(rows[1], ["window"])] == [True, True]
    assert any(text.startswith("~ 1 of 2 rows: p99 above 2 times the median") for text in footer(rows))
    assert not any(text.startswith("~") for text in footer(rows[:1]))


def test_of_a_wire_format_the_error_is_printed_and_replicas_are_counted():
    rows = [row("ring", 64, 1.0), row("wire int8", 64, 1.0, error=0.0123, wrong=3), row("wire bf16", 64, 1.0, error=math.nan)]
    assert line(rows[1], ["window"]).split()[-2:] == ["1.2e-02", "3"] and line(rows[0], ["window"]).split()[-2:] == ["-", "0"]
    assert footer(rows)[-2:] == ["wrong elements 0", "replicas that differ 3"]
    assert len(line(rows[1], ["window"])) == len(COLUMNS)


@pytest.mark.parametrize(("nbytes", "text"), [(64, "64 B"), (4096, "4 KiB"), (4092, "4 KiB"), (1 << 20, "1 MiB"),
                                              (3 << 19, "1.5 MiB"), ((1 << 20) - 4, "1 MiB"), (1 << 30, "1 GiB")])
def test_sizes_are_readable(nbytes, text):
    assert readable(nbytes) == text


@pytest.mark.slow
def test_the_picture_tells_the_machine_the_sizes_and_what_auto_chose(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(*what) for nbytes, chosen in ((4096, "shared"), (1 << 20, "ring"))
            for what in (("ring", nbytes, nbytes / 1e3), ("auto", nbytes, nbytes / 1e3, 0, chosen))]
    plot(rows, FACTS, tmp_path / "rows.svg")
    drawn = (tmp_path / "rows.svg").read_text()
    for text in ("allreduce of float32, 2 ranks on 1 host(s)", "Abacus 3000, 2 cores a host", "bus bandwidth", "4 KiB", "1 MiB",
                 "auto: shared", "auto: ring"):
        assert text in drawn, text


@pytest.mark.slow
def test_predictions_far_from_what_was_measured_do_not_flatten_the_picture(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    measured = [row(name, nbytes, nbytes / speed, p99=1e9) for name, speed in (("ring", 1e3), ("tree", 2e3))
                for nbytes in (4096, 1 << 20)]
    for factor in (1e-4, 1.0, 1e4):
        plot([each._replace(predicted_us=each.time_us * factor) for each in measured], FACTS, tmp_path / "rows.png")
        time, bandwidth = (axes.get_ylim() for axes in kept[-1].axes)
        assert 0 < time[0] <= 1.8432 and 1048.576 <= time[1] < 2000, factor
        assert bandwidth[0] == 0 and 2 <= bandwidth[1] < 3, factor
    monkeypatch.undo()
    pyplot.close("all")
