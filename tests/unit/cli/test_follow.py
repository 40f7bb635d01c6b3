"""Submission to Slurm and the log of a job, with stand-ins for Slurm's commands."""

import os

import pytest

from mpitrain.cli.slurm import follow as module
from mpitrain.cli.slurm.follow import follow, submit
from mpitrain.errors import ConfigError


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A function that writes a command of Slurm, found on PATH before others."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(module, "STATE_EVERY", 0.01)
    monkeypatch.setattr(module, "LOG_EVERY", 0.01)
    monkeypatch.setattr(module, "UNANSWERED", 0.3)

    def write(name, body):
        (tmp_path / name).write_text(f"#!/bin/bash\ncd '{tmp_path}'\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return write


def states(*fields):
    """The body of an scontrol whose answers follow each other; the last one stays."""
    lines = "\n".join(f"  {number}) {text} ;;" for number, text in enumerate(fields))
    last = len(fields) - 1
    return f"""n=$(cat asked 2>/dev/null || echo 0); echo $((n < {last} ? n + 1 : n)) > asked
case $n in
{lines}
esac"""


def state(name, code="0:0", job="17", log="log"):
    return f'echo "JobId={job} Reason=Priority JobState={name} ExitCode={code} StdOut=$PWD/{log}"'


def test_a_script_is_submitted_as_text(slurm, tmp_path):
    slurm("sbatch", 'cat > script; echo "$@" > words; echo "17;cluster"')
    assert submit("#!/bin/bash\n") == "17"
    assert (tmp_path / "script").read_text() == "#!/bin/bash\n"
    assert (tmp_path / "words").read_text() == "--parsable\n"


def test_a_refusal_of_sbatch_is_quoted(slurm, monkeypatch, tmp_path):
    slurm("sbatch", "echo invalid partition >&2; exit 1")
    with pytest.raises(ConfigError, match="invalid partition"):
        submit("")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="no sbatch"):
        submit("")


@pytest.mark.parametrize(
    "ends, code, wanted",
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "2:0", 2),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 1),
        ("NODE_FAIL", "1:0", 1),
    ],
)
def test_follow_prints_the_log_and_returns_the_code(ends, code, wanted, slurm, capfdbinary):
    runs, last = f"echo a > log; {state('RUNNING')}", f"echo b >> log; {state(ends, code)}"
    slurm("scontrol", states(state("PENDING"), runs, state("PENDING"), last))
    assert follow("17") == wanted
    out, err = capfdbinary.readouterr()
    assert out == b"a\nb\n" and err.count(b"Priority") == 2
    assert (ends.encode() in err) == (ends != "COMPLETED")


def test_a_run_is_followed_into_the_job_that_continues_it(slurm, capfdbinary):
    first = f"echo 'job 18 continues runs/slurm-17' > log; {state('FAILED', '85:0')}"
    second = f"echo end > other; {state('COMPLETED', job='18', log='other')}"
    slurm("scontrol", states(first, second))
    assert follow("17") == 0
    assert capfdbinary.readouterr()[0].endswith(b"end\n")


def test_all_tasks_of_an_array_are_followed(slurm, capfdbinary):
    tasks = [state("COMPLETED", log="0"), state("FAILED", "3:0", log="1")]
    slurm("scontrol", "echo x > 0; echo y > 1; " + "; ".join(tasks))
    assert follow("17") == 3
    assert sorted(capfdbinary.readouterr()[0].split()) == [b"x", b"y"]


def test_the_log_lies_in_a_folder_with_spaces(slurm, tmp_path, capfdbinary):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "log").write_text("hello\n")
    slurm("scontrol", 'echo "JobId=17 JobState=COMPLETED ExitCode=0:0 StdOut=$PWD/a b/log Power= "')
    assert follow("17") == 0
    assert capfdbinary.readouterr()[0] == b"hello\n"


def test_a_job_that_slurm_does_not_know_is_an_error(slurm):
    slurm("scontrol", "exit 1")
    with pytest.raises(ConfigError, match="17"):
        follow("17")
