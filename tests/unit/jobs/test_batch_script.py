"""Batch scripts without Slurm: where they find their environment, and when a job is queued again."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import SECONDS, mpitrain, run
from tests.unit.jobs.test_slurm_scripts import EXAMPLES, written

ROOT = Path(__file__).parents[3]
NONE = {name: os.environ[name] for name in {*os.environ} - {"MPITRAIN_VENV", "VIRTUAL_ENV"}}


def environment(folder, programs):
    """A virtual environment with these programs, by their text."""
    (folder / "bin").mkdir(parents=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin/activate").write_text(f"PATH='{folder}'/bin:$PATH\n")
    return folder


@pytest.mark.parametrize(
    "variable, at, runs",
    [
        ("MPITRAIN_VENV", "elsewhere/env", True),
        ("VIRTUAL_ENV", "elsewhere/env", True),
        ("", "here/.venv", True),
        ("", "elsewhere/.venv", False),
        ("MPITRAIN_VENV", "", False),
    ],
)
def test_the_batch_script_works_from_any_folder(variable, at, runs, tmp_path):
    """Slurm runs a copy, from whose place nothing can be told; mpitrain is on PATH only where the environment puts it there."""
    (tmp_path / "here").mkdir()
    (tmp_path / "spool").mkdir()
    script = shutil.copy(ROOT / "jobs/train.sbatch", tmp_path / "spool/slurm_script")
    named = {variable: str(tmp_path / (at or "nowhere"))} if variable else {}
    if at:
        environment(tmp_path / at, {"mpitrain": 'echo "$PWD: $@"; exit 0'})
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path / "here"), "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}
    environ = {**NONE, "PATH": "/usr/bin:/bin", **slurm, **named}
    done = run(["bash", script, "own.toml"], cwd=tmp_path / "spool", env=environ)
    if runs:
        line = f"{tmp_path}/here: launch --launcher srun -- train --out runs/slurm-17 --resume=auto own.toml\n"
        assert done.returncode == 0 and done.stdout.startswith(line), done
    else:
        wanted = named.get("MPITRAIN_VENV", tmp_path / "here/.venv")
        assert done.returncode == 2 and done.stdout == "", done
        assert f"no mpitrain in {wanted}." in done.stderr


@pytest.mark.parametrize(
    "asked, ends, requeued",
    [
        ("USR1", 85, True),
        ("", 85, True),
        ("TERM", 85, False),
        ("USR1 TERM", 85, False),
        ("", 0, False),
        ("", 1, False),
        ("USR1", 1, False),
    ],
)
@pytest.mark.parametrize(
    "words", ("-- train", f"--mpirun {EXAMPLES['sweep']}", EXAMPLES["own_program"])
)
def test_a_stopped_job_queues_itself_again_unless_it_is_cancelled(
    words, asked, ends, requeued, tmp_path
):
    """With a launcher that waits to be asked as often as it will be, and a scontrol that notes its words."""
    programs = {
        "mpitrain": f"n=0; trap 'n=$((n+1))' USR1 TERM; echo $$ > pid\nwhile [ ! -e go ]; do sleep 0.02; done; exit {ends}",
        "scontrol": 'echo "$@" > requeued',
    }
    environment(tmp_path / ".venv", programs)
    text = written(shlex.split(words)).replace("SECONDS < 20", "SECONDS < 0")
    (tmp_path / "job.sbatch").write_text(text)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "16"}
    nowhere, environ = subprocess.DEVNULL, {**NONE, **slurm}
    job = subprocess.Popen(["bash", "job.sbatch"], cwd=tmp_path, stdout=nowhere, env=environ)
    pid, deadline = tmp_path / "pid", time.monotonic() + SECONDS
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for name in asked.split():
        job.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.2)  # the shell takes one after the other
    (tmp_path / "go").touch()
    assert job.wait(SECONDS) == (0 if requeued else ends)
    assert (tmp_path / "requeued").exists() == requeued


OWN = "jobs/slurm/own_program.py"
LEG = """trap '' USR1; [ -z "$WARNED" ] || { kill -USR1 $PPID; sleep 0.3; }
[ -z "$SAVED" ] || { sleep 0.05; touch $SAVED; }; exit $CODE"""
ASKS = "let it ask mpitrain.torch.stop_requested()"


@pytest.mark.parametrize(
    "system", ("--slurm", "--pbs --cores-per-rank 2", "--lsf --cores-per-rank 2")
)
@pytest.mark.parametrize(
    "options, legs, ends, said",
    [
        # Each leg: whether it is warned, the file that it writes, its exit code.
        ("", [(0, "", 85), (0, "", 85)], 1, "before it was asked to stop"),
        ("", [(1, "", 85), (1, "", 85)], 1, "or without a new file"),
        ("", [(0, "a.pt", 85), (0, "a.pt", 85)], 1, "is not queued again"),
        ("", [(1, "a.pt", 85), (1, "a.pt", 85), (1, "", 85)], 85, ""),
        ("", [(0, "", 85), (1, "a.pt", 85), (0, "", 85)], 85, ""),
        ("--checkpoint b", [(1, "a.pt", 85), (1, "a.pt", 85)], 1, "a new checkpoint in b"),
        ("--checkpoint b", [(0, "b", 85), (0, "b", 85), (0, "", 0)], 0, ""),
        ("", [(0, "", 3)], 3, ""),
        ("", [(1, "", 0)], 0, ""),
        ("", [(1, "", 143)], 143, ASKS),
    ],
)
def test_two_legs_of_a_program_without_progress_end_its_job(
    options, legs, ends, said, system, tmp_path
):
    programs = {"mpitrain": LEG, "scontrol": "exit 1", "sbatch": "exit 1", "qsub": "exit 1"}
    environment(tmp_path / ".venv", programs)
    script = tmp_path / "mpitrain-7.sbatch"
    text = written(shlex.split(f"{system} {options} -- {OWN} --epochs 3"))
    script.write_text(text.replace("SECONDS < 20", "SECONDS < 0"))
    ids = dict.fromkeys(("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"), "7")
    for number, (is_warned, saved, code) in enumerate(legs, 1):
        facts = {"WARNED": "1" * is_warned, "SAVED": saved, "CODE": str(code)}
        with open(tmp_path / "job.log", "a+") as log:
            environ = {**NONE, **ids, **facts}
            done = subprocess.run(
                ["bash", script], cwd=tmp_path, env=environ, stdout=log, stderr=log, timeout=SECONDS
            )
        is_last = number == len(legs)
        assert done.returncode == (ends if is_last else 85), (number, log.name)
        assert (said in (tmp_path / "job.log").read_text()) >= is_last
        assert is_last or "not queued again" not in (tmp_path / "job.log").read_text()
    assert (tmp_path / "mpitrain-7.leg").exists() == (ends == 85)


def test_a_site_that_starts_requeued_jobs_first_is_asked_to(tmp_path):
    """With the commands of such a Slurm (25.11)."""
    says = "echo 'SlurmctldParameters     = enable_configless,enable_expedited_requeue'"
    programs = {"scontrol": says, "sbatch": "cat > submitted; echo 7"}
    venv = environment(tmp_path / ".venv", programs)
    for words, is_asked in ((["--", "x.py"], True), (["--", "bench", "all-reduce"], False)):
        (tmp_path / "x.py").touch()
        environ = {**NONE, "PATH": f"{venv}/bin:{os.environ['PATH']}"}
        done = mpitrain("slurm", "--submit", *words, cwd=tmp_path, env=environ)
        text = (tmp_path / "submitted").read_text()
        assert not done.returncode and ("#SBATCH --requeue=expedite " in text) == is_asked, done


def test_where_a_requeue_is_forbidden_another_job_continues_the_run(tmp_path):
    sbatch = 'printf "%s\\n" "$@" > submitted; echo 18'
    programs = {"mpitrain": "exit 85", "scontrol": "exit 1", "sbatch": sbatch}
    environment(tmp_path / ".venv", programs)
    slurm = {"JOB_ID": "17", "JOB_PARTITION": "main", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "3"}
    named = {f"SLURM_{name}": value for name, value in slurm.items()}
    script = ROOT / "jobs/train.sbatch"
    done = run(["bash", script, "own.toml"], cwd=tmp_path, env={**NONE, **named})
    assert done.returncode == 85 and "job 18 continues" in done.stdout
    again = ["--parsable", "--dependency=afterany:17", "--export=ALL,MPITRAIN_JOB=17"]
    same = ["--partition=main", "--nodes=2", "--ntasks-per-node=3"]
    submitted = (tmp_path / "submitted").read_text().splitlines()
    assert submitted == [*again, *same, str(script), "own.toml"]
    again = {**NONE, **named, "MPITRAIN_JOB": "17", "SLURM_JOB_ID": "18"}
    assert "runs/slurm-17" in run(["bash", script], cwd=tmp_path, env=again).stdout


@pytest.mark.slow
def test_the_last_run_of_a_sweep_draws_all(tmp_path):
    """Each task trains in a directory of its own; a stand-in for mpitrain writes the last line of its metrics. A task that
    ends at the same time, as the last one here does again, draws nothing."""
    programs = {
        "mpitrain": """if [ "$1" = runs ]; then echo "$@"; exit; fi
while [ "$1" != --out ]; do shift; done
mkdir -p "$2"; echo '{"event": "end"}' > "$2/metrics.jsonl\""""
    }
    environment(tmp_path / ".venv", programs)
    said = []
    for task in "0122":
        slurm = {
            "SLURM_ARRAY_JOB_ID": "17",
            "SLURM_ARRAY_TASK_ID": task,
            "SLURM_JOB_ID": "2" + task,
        }
        script = ROOT / "jobs/slurm/sweep.sbatch"
        done = run(["bash", script], cwd=tmp_path, env={**NONE, **slurm})
        assert done.returncode == 0, done
        said += done.stdout.splitlines()
    runs = " ".join(f"runs/sweep-17/optimizer.lr=0.00{number}" for number in (1, 2, 4))
    drawn = [line for line in said if line.startswith("runs plot")]
    assert drawn == [f"runs plot {runs} --out runs/sweep-17.png"]


@pytest.mark.parametrize("system", ("--pbs", "--lsf"))
def test_a_timer_ends_with_its_job(system, tmp_path):
    """Its sleep would else keep the log open until the time limit."""
    environment(tmp_path / ".venv", {"mpitrain": "exit 3"})
    text = written([system, "--cores-per-rank", "2", "--", "train"])
    assert run(["bash", "-c", text], cwd=tmp_path, env=NONE).returncode == 3


@pytest.mark.slow
def test_a_timer_warns_the_run(tmp_path):
    program = "trap 'exit 85' USR1; while :; do sleep 0.02; done"
    environment(tmp_path / ".venv", {"mpitrain": program, "qsub": "env >> queued"})
    words = ["--pbs", "--cores-per-rank", "2", "--", "train"]
    text = (
        written(words)
        .replace("SECONDS < 3540", "SECONDS < 1")
        .replace("SECONDS < 20", "SECONDS < 0")
    )
    done = run(["bash", "-c", text], cwd=tmp_path, env={**NONE, "PBS_JOBID": "7"})
    assert done.returncode == 85 and "MPITRAIN_JOB=7" in (tmp_path / "queued").read_text()


TRAINS = """printf '%s\\0' "$@" "$LISTED" "$LINES" >> trained
[ -e stopped ] || { touch stopped; exit 85; }"""
QSUB = """while [[ $1 == -* ]]; do case $1 in
  -V) [ ! -e forbidden ] || exit 1; mapfile -td '' given < <(env -0); shift ;;
  -v) IFS=, read -ra names <<< "$2"; shift 2
      for name in "${names[@]}"; do [[ $name == *=* ]] || name="$name=${!name}"; given+=("$name"); done ;;
  *) echo "$1 $2" >> options; shift 2 ;;
esac; done
[ $# = 1 ] || exit 2  # PBS passes no arguments to a script
printf '%s\\0' "${given[@]}" > submitted; echo 8.server"""
FLUX = """case $1 in
  run) until [ "$1" = mpitrain ]; do shift; done; "$@" ;;
  --parent) [ "$2" = batch ] && shift 3 && printf '%s\\0' "$@" > arguments && env -0 > submitted ;;
  *) exit 1 ;;  # this Flux ends with the job
esac"""
ARGUMENTS = ["--set", "data.source=text:a,b 'c'", "two\nlines"]
VALUES = {"LISTED": "a,'b' \"c\"", "LINES": "one\ntwo,three=4"}
NONE_LEFT = {"PATH": "/usr/bin:/bin"}


def zeros(path):
    return path.read_text().split("\0")[:-1] if path.exists() else []


@pytest.mark.parametrize("given, code", [("--set 'a=b c'", 85), ("--set it's", 2)])
def test_arguments_that_are_no_words_of_a_shell_train_nothing(given, code, tmp_path):
    environment(tmp_path / ".venv", {"mpitrain": TRAINS})
    words = ["--lsf", "--cores-per-rank", "2", "--", "train"]
    environ = {**NONE, **VALUES, "LSB_JOBID": "7", "MPITRAIN_ARGS": given}
    done = run(["bash", "-c", written(words)], cwd=tmp_path, env=environ)
    assert done.returncode == code
    assert ("a=b c" in zeros(tmp_path / "trained")) == (code == 85)


@pytest.mark.parametrize("system", ("pbs", "pbs forbids -V", "pbs sweep", "lsf", "flux"))
def test_a_continued_job_has_the_environment_and_the_arguments_of_the_first(system, tmp_path):
    """With a qsub that knows no variables but those it is given, and no arguments."""
    programs = {"mpitrain": TRAINS, "qsub": QSUB, "flux": FLUX}
    venv, script = environment(tmp_path / "env", programs), tmp_path / "script"
    sweep = ["--sweep", "optimizer.lr=0.1,0.2"] if system == "pbs sweep" else []
    if system == "flux":
        shutil.copy(ROOT / "jobs/site/train.flux.sh", script)
    else:
        words = [f"--{system.split()[0]}", "--cores-per-rank", "2", *sweep, "--", "train"]
        script.write_text(written(words))
    if "forbids" in system:
        (tmp_path / "forbidden").touch()
    first = {"PBS_JOBID": "7.server", "LSB_JOBID": "7"}
    if sweep:
        first |= {"PBS_JOBID": "7[1].server", "PBS_ARRAY_ID": "7[].server", "PBS_ARRAY_INDEX": "1"}
    environ = {**NONE_LEFT, **VALUES, "MPITRAIN_VENV": str(venv), **first}
    arguments = ARGUMENTS
    if system == "lsf":  # bsub passes no arguments either, and LSF itself runs the same job again.
        arguments, environ["MPITRAIN_ARGS"] = [], shlex.join(ARGUMENTS)
    path = environ | {"PATH": f"{venv}/bin:/usr/bin:/bin"}
    done = run(["bash", script, *arguments], cwd=tmp_path, env=path)
    assert done.returncode == 85, done
    if system != "lsf":
        given = dict(text.split("=", 1) for text in zeros(tmp_path / "submitted"))
        arguments, environ = zeros(tmp_path / "arguments"), NONE_LEFT | given
        environ["PBS_JOBID"] = "8.server"
    done = run(["bash", script, *arguments], cwd=tmp_path, env=environ)
    assert done.returncode == 0, done
    trained = zeros(tmp_path / "trained")
    half = len(trained) // 2
    assert trained[:half] == trained[half:]
    assert trained[half - 5 : half] == [*ARGUMENTS, *VALUES.values()]
    if sweep:
        assert "--out runs/sweep-7/optimizer.lr=0.2" in " ".join(trained[half:])
        options = (tmp_path / "options").read_text().splitlines()
        assert options == ["-W depend=afterany:7[].server", "-J 1-2:2"]
