"""SIGKILL at the points of saves in the background: all checkpoints always verify, nothing is left behind, no bit changes,
also of a job that goes back to a snapshot.

    python jobs/prove/save-kills.py [KILLS]

Jobs of 1, 2 and 3 ranks are killed by run.inject and resumed until they end; then their losses are those of a job that nobody
disturbed. Exit code 1 if not. 200 kills take about 15 minutes.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mpitrain.run.checkpoint.manifest import read_manifest, steps, verify

POINTS = ("snapshot", "thread", "publish", "save", "step", "evaluation")
SETTINGS = {  # With this lr and run.spike each job goes back from step 14 to step 12.
    "optimizer.lr": 0.4,
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.context": 16,
    "batch.size": 12,
    "run.steps": 24,
    "run.log_every": 1,
    "run.eval_every": 6,
    "run.eval_rows": 24,
    "run.sample": 0,
    "checkpoint.every": 2,
    "checkpoint.keep_every": 6,
    "checkpoint.best": "true",
    "checkpoint.background": "true",
    "replication.zero": 1,
    "run.trace": "false",
    "run.on_spike": "back",
    "run.spike": 0.02,
    "run.snapshot_every": 3,
}
LEFT = re.compile(r"step-\d{8}|\.step-\d{8}\.(partial|dropped|replaced)")


def train(folder: Path, ranks: int, inject: str = "") -> int:
    """Start or resume a job; return its exit code."""
    words = [sys.executable, "-m", "mpitrain", "train", "--resume=auto", "--out", str(folder)]
    for key, value in {**SETTINGS, **({"run.inject": inject} if inject else {})}.items():
        words += ["--set", f"{key}={value}"]
    launcher = ["mpirun", "--oversubscribe", "-n", str(ranks)] if ranks > 1 else []
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*launcher, *words], timeout=300, capture_output=True, env={**os.environ, **allowed}
    )
    return done.returncode


def saved(folder: Path) -> list[Path]:
    """Verify all checkpoints, and return them; CheckpointError if one is damaged."""
    found = steps(folder / "checkpoints")
    for path in found:
        verify(path, read_manifest(path), 0, 1)
    names = os.listdir(folder / "checkpoints") if found else []
    assert all(LEFT.fullmatch(name) for name in names), names
    return found


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line.get("loss", line.get("val_loss")) for line in lines if "event" not in line]


def check_ended(folder: Path, whole: Path) -> None:
    """Compare a job that has ended with one that nobody disturbed."""
    best = 24  # the loss falls in this job
    assert {path.name for path in saved(folder)} == set(os.listdir(folder / "checkpoints"))
    kept = {int(path.name[-8:]) for path in saved(folder)}
    assert {6, 12, 18, best} <= kept and len(kept) <= 5, kept
    assert losses(folder) == losses(whole)
    assert '"event": "back"' in (folder / "metrics.jsonl").read_text()


def main() -> int:
    kills = int([*sys.argv[1:], "200"][0])
    drawn, killed, ended = random.Random(0), dict.fromkeys(POINTS, 0), 0
    with tempfile.TemporaryDirectory() as name:
        for ranks in (1, 2, 3):
            whole = Path(name, f"whole{ranks}")
            assert train(whole, ranks) == 0
            while sum(killed.values()) < kills * ranks / 3:
                folder = Path(name, f"run{ended}")
                step, code = 0, 1
                while code:
                    point = drawn.choice(POINTS)
                    rank = 0 if point == "publish" else drawn.randrange(ranks)
                    at = drawn.randint(step + 1, min(24, step + 8))
                    before, code = step, train(folder, ranks, f"kill:{rank}@{at}:{point}")
                    assert code in (0, 137, -9), code
                    killed[point] += code != 0
                    step = int(found[-1].name[-8:]) if (found := saved(folder)) else 0
                    assert step >= before
                    if step == 24:
                        code = train(folder, ranks)
                check_ended(folder, whole)
                ended += 1
    counts = ", ".join(f"{count} at {point}" for point, count in killed.items())
    print(
        f"{sum(killed.values())} kills ({counts}), {ended} jobs ended between them: as undisturbed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
