"""Standard output that is full, that nobody reads, that is closed, or whose encoding lacks a character."""

import io
import os
import sys
from contextlib import suppress

import pytest

from mpitrain.cli.job_options import Outputs, check_files
from mpitrain.cli.launch.supervise import LauncherOutput, Passage
from mpitrain.cli.launch.supervise import OutputFilter as OutputWords
from mpitrain.cli.terminal.output import Output, OutputError
from mpitrain.errors import ConfigError
from tests.processes import SECONDS, run


def test_a_rank_that_is_silent_leaves_no_warning_of_python():
    code = "from mpitrain.cli.terminal.output import silence; silence(); print('nothing')"
    done = run([sys.executable, "-W", "error", "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_two_outputs_have_two_files(tmp_path):
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    (tmp_path / "link").symlink_to(tmp_path)
    check_files(0, [one, other, None])
    check_files(1, [one, one])
    for path in (one, tmp_path / "link" / "a.json"):
        with pytest.raises(ConfigError, match="given twice"):
            check_files(0, [one, path])


def stream(path, encoding="utf-8"):
    raw = Output(path, "w")
    return raw, io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True
    )


def test_a_full_output_is_one_error_and_then_silence():
    _, text = stream("/dev/full")
    with pytest.raises(OutputError, match="Standard output takes no"):
        print("one", file=text)
    print("two", file=text)
    text.close()


def test_a_pipe_that_nobody_reads_is_a_broken_pipe_once():
    read, write = os.pipe()
    _, text = stream(write)
    os.close(read)
    with pytest.raises(BrokenPipeError):
        print("one", file=text)
    print("two", file=text)
    text.close()


def test_an_output_that_is_a_courtesy_raises_nothing():
    raw, text = stream("/dev/full")
    raw.is_courtesy = True
    for _ in range(3):
        print("lost", file=text)
        text.buffer.write(b"\xff" * 100_000)
    text.close()


def test_what_the_encoding_lacks_is_written_as_an_escape(tmp_path):
    _, text = stream(tmp_path / "out", "ascii")
    print("größer 😀 \udcff", file=text)
    text.close()
    assert (tmp_path / "out").read_text() == "gr\\xf6\\xdfer \\U0001f600 \\udcff\n"


@pytest.mark.parametrize("is_courtesy", [True, False])
def test_launch_hears_a_run_to_its_end_though_its_own_output_is_full(is_courtesy):
    read, write = os.pipe()
    words = LauncherOutput()
    full = os.open("/dev/full", os.O_WRONLY)
    passage = Passage(read, full, words, OutputWords(words), is_courtesy)
    with suppress(BrokenPipeError):
        for text in ("step 1\n" * 30_000, '\x1e{"mpitrain": "ended", "run_dir": ""}\n'):
            os.write(write, text.encode())
    os.close(write)
    passage.join(SECONDS)
    assert words.end == ("ended" if is_courtesy else "")


def test_what_may_not_be_written_beside_anothers_run_is_a_note_and_no_error(tmp_path, capsys):
    errors = [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")]
    outputs = Outputs()
    for error in errors:
        with outputs.to(tmp_path, "pictures"):
            raise error
    outputs.settle()
    assert (
        f"no pictures: {tmp_path} cannot be written: Permission denied." in capsys.readouterr().err
    )
    outputs = Outputs()
    for error in errors:
        with outputs.to(tmp_path):
            raise error
    with pytest.raises(ConfigError, match="Permission denied"):
        outputs.settle()
