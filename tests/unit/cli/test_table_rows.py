"""What a benchmark shows while it runs: a bar on a terminal alone, in the stream of the rows where both are one terminal."""

import pytest

from mpitrain.cli.terminal.screen import OUTPUT_TERMINAL, TERMINAL, output_columns
from mpitrain.cli.terminal.table_rows import Rows


@pytest.mark.parametrize(
    ("output", "errors", "where"),
    [("80", "80", "out"), ("0", "80", "err"), ("0", "", ""), ("", "", ""), ("80", "", "out")],
)
def test_the_rest_of_the_time_is_shown_on_a_terminal_alone(
    output, errors, where, monkeypatch, capsys
):
    monkeypatch.setenv(OUTPUT_TERMINAL, output)
    monkeypatch.setenv(TERMINAL, errors)
    assert output_columns() == int(output or 0)
    rows = Rows(3)
    rows.say("titles")
    rows.row("first")
    rows.row("second")
    rows.close()
    shown = capsys.readouterr()
    for stream in ("out", "err"):
        text = getattr(shown, stream)
        assert ("2/3 rows, 00:" in text and "left" in text) == (stream == where), stream
        pieces = [piece.rstrip(" ") for line in text.split("\n") for piece in line.split("\r")]
        assert all(len(piece) < 80 for piece in pieces)
        assert [piece for piece in pieces if piece and "left" not in piece] == [
            "titles",
            "first",
            "second",
        ] * (stream == "out")
