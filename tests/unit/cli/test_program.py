"""What `mpitrain launch` starts on every rank: commands, Python files, modules and code, or a refusal."""

import sys
from pathlib import Path

import click
import pytest

from mpitrain.cli.launch import command as launch_command
from mpitrain.cli.launch.program import program
from mpitrain.errors import ConfigError
from tests.processes import mpitrain, run
from tests.terminals import on_a_terminal

OURS, THEIRS = ["-m", "mpitrain"], ["-m", "mpitrain.transport.program"]


@pytest.mark.parametrize(
    "line, command, words",
    [
        ("train --dp 2", "train", [*OURS, "train", "--dp", "2"]),
        ("mpitrain train", "train", [*OURS, "train"]),
        ("python -m mpitrain train --help", "train", [*OURS, "train", "--help"]),
        ("--version", "--version", [*OURS, "--version"]),
        ("own.py --dp 2 -c x", "", [*THEIRS, "own.py", "--dp", "2", "-c", "x"]),
        ("mpitrain own.py", "", [*THEIRS, "own.py"]),
        ("python own.py -m x", "", [*THEIRS, "own.py", "-m", "x"]),
        ("python -u -W a -Xdev own.py -u", "", ["-u", "-W", "a", "-Xdev", *THEIRS, "own.py", "-u"]),
        ("python3 own.py", "", [*THEIRS, "own.py"]),
        ("python -m pkg.mod --dp 2", "", [*THEIRS, "-m", "pkg.mod", "--dp", "2"]),
        ("python -um pkg.mod x", "", ["-u", *THEIRS, "-m", "pkg.mod", "x"]),
        ("python -c print(1) x", "", [*THEIRS, "-c", "print(1)", "x"]),
        ("python -", "", [*THEIRS, "-"]),
        ("python --version", "", ["--version"]),
        (f"{Path(sys.executable).parent}/python own.py", "", [*THEIRS, "own.py"]),
    ],
)
def test_launch_starts_a_command_or_a_python_program(line, command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    assert program(line.split()) == ([sys.executable, *words], command)


@pytest.mark.parametrize(
    "line, error, said",
    [
        ("trian", click.UsageError, "nor a Python file; did you mean train?"),
        ("own.txt", click.UsageError, "nor a Python file. Commands are train, "),
        ("/elsewhere/python own.py", ConfigError, "/elsewhere/python is missing."),
        ("/bin/sh own.py", ConfigError, "/bin/sh is another program."),
        ("none.py", ConfigError, "the file none.py, but there is none here."),
        ("python -u none.py", ConfigError, "the file none.py, but there is none here."),
        ("python", ConfigError, "python needs a program on every rank, but none is named."),
    ],
)
def test_anything_else_is_refused(line, error, said):
    with pytest.raises(error) as refused:
        program(line.split())
    assert said in str(refused.value) + getattr(refused.value, "message", "")


@pytest.mark.slow
def test_a_refusal_is_one_message_and_exit_2_before_anything_is_started():
    for name in ("none.py", "trian"):
        done = mpitrain("launch", "-n", "2", "--", name)
        assert done.returncode == 2 and "mpirun" not in done.stderr
        assert done.stderr.count(name) == 1, done.stderr


@pytest.mark.slow
def test_the_launchers_line_is_dim_on_a_terminal_alone(monkeypatch):
    assert launch_command.dim("line") == "line"
    monkeypatch.setattr(launch_command.sys.stderr, "isatty", lambda: True, raising=False)
    assert launch_command.dim("line") == "\x1b[2mline\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert launch_command.dim("line") == "line"
    words = ["-m", "mpitrain", "launch", "-n", "2", "--dry-run", "--", "train"]
    _, shown = on_a_terminal([sys.executable, *words])
    assert b"-m mpitrain train" in shown and b"\x1b" not in shown, "the result, to be copied"


@pytest.mark.slow
def test_a_rank_that_has_failed_does_not_wait_for_its_threads_for_ever(tmp_path):
    (tmp_path / "own.py").write_text(
        "import sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), name='reader').start()\nsys.exit(3)"
    )
    code = "from mpitrain.transport import program; program.LINGER = 0.1; program.main(['own.py'])"
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert (
        done.returncode == 3 and "has failed, but thread reader did not end within" in done.stderr
    )
