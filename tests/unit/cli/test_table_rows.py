"""What a benchmark shows while it runs: its rows on standard output, and a bar on standard error if that is a terminal."""

import pytest

from mpitrain.cli.bench.rows import BenchReport
from mpitrain.cli.terminal.output import OUTPUT_TERMINAL, TERMINAL, output_columns


@pytest.mark.parametrize(
    ("output", "errors", "has_bar"),
    [("80", "80", True), ("0", "80", True), ("0", "", False), ("", "", False), ("80", "", False)],
)
def test_the_rest_of_the_time_is_shown_on_a_terminal_alone(
    output, errors, has_bar, monkeypatch, capsys
):
    monkeypatch.setenv(OUTPUT_TERMINAL, output)
    monkeypatch.setenv(TERMINAL, errors)
    assert output_columns() == int(output or 0)
    rows = BenchReport(None, {}, {})
    rows.begin(["titles"], 3)
    for row in ("first", "second"):
        rows.count()
        rows.say(row)
    rows.close()
    shown = capsys.readouterr()
    assert shown.out == "titles\nfirst\nsecond\n"
    bars = [piece for piece in shown.err.replace("\x1b[K", "").split("\r") if piece.strip()]
    assert all(len(piece) < 80 and piece.rstrip().endswith(" left") for piece in bars), bars
    assert any("2/3 rows, 00:" in piece for piece in bars) == has_bar
