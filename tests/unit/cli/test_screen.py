"""A bar and other text on one terminal: nothing runs into a bar, no bar is wider than the window, no line is lost."""

import os
import pty
import sys
import termios

import pytest

from mpitrain.cli.terminal import output, progress
from mpitrain.machine.status import FLAG
from tests.golden.curves import TEXT
from tests.mpi.test_commands import TINY
from tests.processes import PROGRAM
from tests.terminals import on_a_terminal, rendered

pytestmark = pytest.mark.slow

BAR = b"\r 33%|## | 4/12\x1b[K"
KEYS = "--set", f"data.source=text:{TEXT}", "--set", "run.eval_every=4"
TRAIN = [*PROGRAM, "train", *TINY, *KEYS, "--out", "run"]
STEPS = [f"step {step:>2}/12  loss " for step in range(1, 13)]
SAID = [
    "gpt, 1 layer of width 16: ",
    "972 tokens to train on, 108 held out ",
    *(*STEPS[:4], "step 4: validation loss "),
    *(*STEPS[4:8], "step 8: validation loss "),
    *(*STEPS[8:], "step 12: validation loss "),
    "done: parameters bitwise equal on all ranks, ",
]
NEXT = ["the run is in ", *(f"  mpitrain {word} " for word in ("eval", "generate", "runs", "runs"))]


@pytest.mark.parametrize(
    "pieces, shown",
    [
        (
            (BAR, b"rank 1: lost\n", BAR, b"\n"),
            [" 33%|## | 4/12", "rank 1: lost", " 33%|## | 4/12", ""],
        ),
        (
            (b"a traceback, ", BAR, b"that goes on\n"),
            ["a traceback,", " 33%|## | 4/12", "that goes on", ""],
        ),
        ((BAR, b"\r\x1b[K", b"a line\n", BAR), ["a line", " 33%|## | 4/12"]),
        ((BAR[:7], BAR[7:], BAR, b"one\n"), [" 33%|## | 4/12", "one", ""]),
        ((b"one\n", b"two", b" three\n"), ["one", "two three", ""]),
        ((b"40%\r", b"50%\r", b"done\n"), ["done", ""]),
    ],
)
def test_text_beside_a_bar_begins_a_line_of_its_own(pieces, shown):
    line = output.Screen()
    placed = b"".join(line.lead(piece) + piece for piece in pieces)
    assert rendered(placed.replace(b"\n", b"\r\n"), 80) == shown
    whole = output.Screen().place(b"".join(pieces))
    assert rendered(whole.replace(b"\n", b"\r\n"), 80) == shown, "in one piece"


def test_a_bar_fits_a_window_that_has_become_narrower(monkeypatch, capsys):
    monkeypatch.setattr(output, "columns", lambda: 11)
    placed = output.Screen().place(b"long text\n" + BAR + BAR)
    assert placed == b"long text\n" + 2 * b"\r 33%|## | \x1b[K"
    sizes = [120]
    monkeypatch.setattr(progress, "width", lambda: sizes[-1])
    shown = progress.bar(12)
    for columns in (120, 50, 10, 1):
        sizes.append(columns)
        shown.refresh()
    drawn = capsys.readouterr().err.split("\r")[1:]
    widths = [max(len(text.removesuffix("\x1b[K")), 1) for text in drawn]
    assert widths == [119, 119, 49, 9, 1], drawn


def test_an_unknown_terminal_width_comes_from_the_environment(monkeypatch):
    for said, columns in (("120", 120), ("0", 80), ("wide", 80)):
        monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
        monkeypatch.setenv("COLUMNS", said)
        assert output.columns() == columns


def begins(shown, wanted):
    return len(shown) == len(wanted) and all(
        line.startswith(begin) for line, begin in zip(shown, wanted, strict=True)
    )


def test_a_launcher_that_forwards_two_pipes_in_any_order_breaks_no_line(tmp_path):
    """It passes standard output on when the run has ended: lines that came by it would stand behind the bar's."""
    launcher = (
        "import subprocess, sys\n"
        f"said = subprocess.run({[TRAIN[0], '-X', FLAG, *TRAIN[1:]]!r}, stdout=subprocess.PIPE).stdout\n"
        "sys.stdout.buffer.write(said)"
    )
    supervised = (
        "import sys\nfrom mpitrain.cli.terminal.output import open_output\n"
        "from mpitrain.cli.launch.supervise import Requests, run\n"
        f"open_output(); sys.exit(run([sys.executable, '-c', {launcher!r}], {{}}, Requests(), True))"
    )
    code, data = on_a_terminal([sys.executable, "-c", supervised], 200, cwd=tmp_path)
    shown = rendered(data, 200)
    assert code == 0 and begins(shown, [*SAID[:-1], "100%|", *SAID[-1:], *NEXT, ""]), shown
    assert len(shown[len(SAID) - 1]) == 199, "as wide as the window, but for the last column"


@pytest.mark.parametrize("columns, rows", [(80, 24), (40, 1), (120, 0)])
def test_one_rank_shows_each_line_whole_and_one_bar(columns, rows, tmp_path):
    """Also where the terminal has one row, or does not know how many it has."""
    code, data = on_a_terminal(TRAIN, columns, rows=rows, cwd=tmp_path)
    assert code == 0, data
    drawn = data.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    whole = [text for text in drawn if text and not text.endswith("\x1b[K")]
    assert begins(whole, [*SAID, *NEXT]), data
    last = [text.removesuffix("\x1b[K") for text in drawn if text.startswith("100%|")][-1]
    wanted = "".join(
        f"{line}\r\n" for line in [*whole[: len(SAID) - 1], last, *whole[len(SAID) - 1 :]]
    )
    assert rendered(data, columns) == rendered(wanted.encode(), columns), data


def test_a_redirected_output_loses_no_line_to_the_bar(tmp_path):
    with (tmp_path / "out").open("w+") as out:
        code, bar = on_a_terminal(TRAIN, stdout=out, cwd=tmp_path)
        out.seek(0)
        kept = out.read().split("\n")
    shown = rendered(bar, 80)
    assert code == 0 and len(shown) == 2 and shown[0].startswith("100%|"), shown
    wanted = [*SAID, *NEXT, ""]
    assert begins(kept, wanted), kept
    with open(os.devnull, "w") as nowhere:
        code, data = on_a_terminal([*TRAIN[:-1], "other"], 200, stderr=nowhere, cwd=tmp_path)
    assert code == 0 and begins(rendered(data, 200), wanted), data


def test_the_streams_are_one_terminal_only_where_both_end_on_the_same(monkeypatch):
    one, other = (pty.openpty()[1] for _ in range(2))
    for out, err, same in ((one, one, True), (one, other, False)):
        termios.tcsetwinsize(err, (24, 90))
        real = os.dup(1), os.dup(2)
        try:
            os.dup2(out, 1)
            os.dup2(err, 2)
            found = output.is_one_terminal(), output.columns()
        finally:
            os.dup2(real[0], 1)
            os.dup2(real[1], 2)
        assert found == (same, 90)
