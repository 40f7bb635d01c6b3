"""What a run does when nobody takes what it prints: it goes on, for its results are in its directory."""

import os

import pytest

from tests.mpi.test_commands import TINY, records
from tests.processes import PROGRAM, mpitrain, python_ranks, shell

TRAIN = ["train", "--out", "run", *TINY]


@pytest.mark.parametrize(
    "behind", ["1>/dev/full", "1>/dev/full 2>/dev/full", "1>&-", "0<&- 1>&- 2>&-", "| true"]
)
def test_a_run_goes_on_when_its_output_is_full_or_closed(behind, tmp_path):
    line = " ".join([*PROGRAM, *TRAIN, behind])
    done = shell(line, cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (
        records(tmp_path / "run")[-1]["event"] == "end"
        and (tmp_path / "run/checkpoints/step-00000012").is_dir()
    )
    assert done.stderr.count("the run goes on") == (behind in ("1>/dev/full", "| true")), (
        done.stderr
    )


@pytest.mark.parametrize("lose", ["os.close(1)", "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"])
def test_ranks_whose_output_is_full_or_closed_train_to_the_end(lose, tmp_path):
    done = python_ranks(
        2, f"import os; {lose}\nfrom mpitrain.cli import main; main({TRAIN!r})", tmp_path
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert records(tmp_path / "run")[-1]["event"] == "end"


def test_a_command_that_cannot_print_its_result_fails_in_one_line(tmp_path):
    for words in ("train --help-config", "bench gemm --shapes 8"):
        line = " ".join([*PROGRAM, words, "> /dev/full"])
        done = shell(line)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("Standard output takes no more: No space left on device") == 1, (
            done.stderr
        )


def test_a_locale_without_a_name_s_characters_is_no_traceback(tmp_path):
    plain = dict(os.environ, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    (tmp_path / "c.toml").write_text('[run]\nout = "größe"\n', encoding="utf-8")
    for words in (["eval", "größe"], ["train", "größe.toml"], ["train", "c.toml"], ["größe"]):
        done = mpitrain(*words, cwd=tmp_path, env=plain)
        assert (
            done.returncode == 2 and "Traceback" not in done.stderr and "Error: " in done.stderr
        ), done.stderr
