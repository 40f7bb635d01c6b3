#!/usr/bin/env bash
# Claim: wherever a rank is killed with signal 9 (before the first message, in forward, while it waits for a sum, while it writes a
# checkpoint, as a worker of an asynchronous server), the job ends and is not waited for; the traces can be read, and
# `mpitrain runs report` says of each rank what it did last. After a kill during a checkpoint the run goes on from the one before, and
# its losses are bitwise those of a run that nobody disturbed. About half a minute.
#     bash jobs/prove/kills.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${1:-python3}" - "$folder" <<'PY'
import json, os, re, subprocess, sys
from pathlib import Path

folder = Path(sys.argv[1])
TINY = ["--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=2", "--set", "model.context=16", "--set",
        "batch.size=12", "--set", "run.steps=12", "--set", "run.log_every=1", "--set", "run.eval_every=-1", "--set", "run.sample=0",
        "--set", "checkpoint.every=3", "--set", "replication.algorithm=ring", "--set", "run.stall_seconds=20.0"]
SERVERS = ["--set", "replication.mode=server", "--set", "replication.update=async"]
# Where a rank is killed: what is put around, when, and what is said of it and of another rank.
KILLS = {
    "before": ("import mpitrain.transport.mpi as m; at = m, 'connect'; when = lambda *a: not time.sleep(2)",
               [r"rank 1 on \S+, .*: finding the other ranks", r"rank 0 on \S+, .*: finding the other ranks"], []),
    "forward": ("import mpitrain.layers.plain as p; at = p.LayerNorm, 'forward'; when = lambda *a: n.setdefault('n', []).append(1) "
                "or len(n['n']) == 11",
                [r"rank 1 on \S+, .*: in step \d+, forward of \S+", r"rank 0 on \S+, .*: in step \d+, .*waiting for ",
                 "First to fall silent was rank 1."], []),
    "collective": ("import mpitrain.transport.mpi as m; at = m.MpiTransport, 'wait_until'; "
                   "when = lambda *a: n.setdefault('n', []).append(1) or len(n['n']) == 5",
                   [r"rank 1 on \S+, .*: in step \d+, waiting for ", r"rank 0 on \S+, .*: in step \d+, .*waiting for "], []),
    "save": ("import mpitrain.formats.safetensors_files as s; at = s.Writing, 'write'; when = lambda self, *a: '00000006' in os.readlink(f'/proc/self/fd/{self._file.fileno()}')",
             [r"rank 1 on \S+, .*: checkpoint", r"rank 0 on \S+, .*: in checkpoint, waiting for words of all ranks"], []),
    "worker": ("import mpitrain.layers.plain as p; at = p.LayerNorm, 'forward'; when = lambda *a: n.setdefault('n', []).append(1) "
               "or len(n['n']) == 11", [r"rank 1 on \S+, .*forward of \S+", r"rank 0 on \S+, .*: in step \d+, waiting for a header, from rank 2"], SERVERS),
}


def train(name, code, ranks, *more):
    """A run of which rank 1 may be killed; what it says, and its exit code."""
    program = (f"import os, signal, time\nfrom mpitrain.machine import process\nprocess.limit_blas_threads()\nn = {{}}\n{code}\n"
               f"from mpitrain.cli import main; main(['train', '--out', {name!r}, *{[*TINY, *more]!r}])")
    (folder / "tmp").mkdir(exist_ok=True)
    done = subprocess.run(["mpirun", "--oversubscribe", "-n", str(ranks), sys.executable, "-c", program], cwd=folder, timeout=120,
                          capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder / "tmp"),
                          "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    return done.returncode, done.stdout + done.stderr


def report(name):
    done = subprocess.run([sys.executable, "-m", "mpitrain", "report", str(name)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(name):
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


KILL = """
owner, name = at
whole = getattr(owner, name)
def kill(*a, **k):
    if process.launched().rank == 1 and when(*a): os.kill(os.getpid(), signal.SIGKILL)
    return whole(*a, **k)
setattr(owner, name, kill)
"""
for name, (at, sayings, more) in KILLS.items():
    code, said = train(name, at + KILL, 3, *more)
    assert code not in (0, 2, 85), said
    told = report(*(folder / "tmp").glob("mpitrain-*/*") if name == "before" else [name])
    for saying in sayings:
        assert re.search(saying, told), f"{name}: no {saying!r} in\n{told}\n{said[-2000:]}"
    print(f"killed {name}: exit code {code}")
    print("\n".join(line for line in told.splitlines() if re.match(r"  rank \d+ on|First", line)))
code, said = train("whole", "", 3)
assert code == 0, said
code, said = train("save", "", 3, "--resume")
assert code == 0 and losses("save") == losses("whole") and len(losses("whole")) == 12, said
start = next(json.loads(line) for line in (folder / "save/metrics.jsonl").read_text().splitlines() if '"resume"' in line)
print(f"the run that was killed as it wrote its checkpoint of step 6 goes on from step {start['step']}, with the losses of one that "
      "nobody disturbed, bit for bit")
PY
