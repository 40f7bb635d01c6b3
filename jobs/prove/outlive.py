"""Claim: a run with run.on_failure=continue outlives killed ranks, whichever they are and whenever they die.

    python jobs/prove/outlive.py [--jobs 25] [--seed 0] [--ranks 5]

Each job has a seed. It starts RANKS ranks, and kills ranks by SIGKILL: at a random time, the lowest
one or any; then, in half of the jobs, another one within 0.3 s, while the others recover; in every
third job the first rank dies by run.inject in an all-reduce, a gather of ZeRO 3, or a checkpoint.
A job passes in place if launch exits with 0, metrics.jsonl has the end with equal replicas, the losses
of each start after a loss are those of fresh ranks of that number from that state (float64), and no
process is left. A job and its fresh run take 8 s on two idle cores.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 120
TOLERANCE = 1e-9
"""Of losses in float64."""
ALONE = {"run.on_failure": "end", "run.inject": "", "run.delay": ""}
"""Settings of the fresh run."""
POINTS = ("backward", "forward", "save", "publish", "evaluation", "step")
SETTINGS = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 32,
    "batch.size": 20,
    "run.steps": 60,
    "run.log_every": 1,
    "run.sample": 0,
    "run.eval_every": 20,
    "run.eval_rows": 20,
    "run.recover_seconds": 60,
    "run.delay": "random:30:1",
    "checkpoint.every": 1,
    "checkpoint.keep": 100,
    "precision.compute": "float64",
    "data.source": "pydocs",
    "run.on_failure": "continue",
}


def command(ranks: int, out: Path, settings: dict, *more: str) -> list[str]:
    words = [f"--set={key}={value}" for key, value in {**SETTINGS, **settings}.items()]
    launch = [sys.executable, "-m", "mpitrain", "launch", "-n", str(ranks), "--fault-tolerant"]
    return [*launch, "--", "train", "--out", str(out), *words, *more]


def ranks_of(out: Path) -> dict[int, int]:
    """Return {rank at the start: process} of the job that writes to `out`."""
    found = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            facts = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = [f.partition(b"=")[2] for f in facts if f.startswith(b"OMPI_COMM_WORLD_RANK=")]
        if str(out).encode() in words and rank:
            found[int(rank[0])] = int(process)
    return found


def records(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill(dice: random.Random, out: Path, lowest: bool, log: list[str]) -> None:
    living = ranks_of(out)
    if len(living) < 2:
        return
    rank = min(living) if lowest else dice.choice(sorted(living))
    step = max((record.get("step", 0) for record in records(out)), default=0)
    try:
        os.kill(living[rank], signal.SIGKILL)
    except ProcessLookupError:
        return
    log.append(f"rank {rank} after step {step}")


def unequal(ranks: int, out: Path, settings: dict) -> str:
    """Return the first loss after the last restart that fresh ranks do not have, or ""."""
    found = records(out)
    restart = [record for record in found if record.get("event") == "resume"][-1]
    copy, step = out.parent / "copy", restart["step"]
    shutil.copytree(out, copy)
    saved = {int(path.name[5:]): path for path in (copy / "checkpoints").glob("step-*")}
    if step and step not in saved:
        return f"there is no checkpoint {step} to compare with"
    for number, path in saved.items():
        if number > step:
            shutil.rmtree(path)
    own = {r["step"]: r["loss"] for r in found if "event" not in r and "loss" in r}
    fresh = subprocess.run(
        command(restart["ranks"], copy, {**settings, **ALONE}, "--resume=auto"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if fresh.returncode:
        return f"the fresh run failed: {fresh.stderr[-300:]}"
    then = {r["step"]: r["loss"] for r in records(copy) if "event" not in r and "loss" in r}
    for number in range(step + 1, max(own) + 1):
        if not abs(own[number] - then[number]) <= TOLERANCE:
            return f"step {number}: loss {own[number]}, fresh {then[number]}"
    return ""


def job(seed: int, ranks: int, folder: Path, **other: object) -> tuple[bool, str]:
    """Run one job; return whether it passed in place, and what happened.    other: settings"""
    dice, log = random.Random(seed), list[str]()
    out = folder / "run"
    settings: dict = {"replication.zero": dice.choice([0, 0, 0, 1, 3]), **other}
    if seed % 3 == 0:
        point = dice.choice(POINTS)
        step = 20 * dice.randint(1, 2) if point == "evaluation" else dice.randint(2, 50)
        rank = 0 if point == "publish" else dice.randrange(ranks)
        settings["run.inject"] = f"kill:{rank}@{step}:{point}"
        log.append(settings["run.inject"])
    began = time.monotonic()
    errors = (folder / "errors").open("w+")
    running = subprocess.Popen(
        command(ranks, out, settings), stdout=subprocess.DEVNULL, stderr=errors
    )
    try:
        while running.poll() is None and time.monotonic() < began + LIMIT:
            found = records(out)
            if found and (seed % 3 or found[-1].get("event") == "resume"):
                time.sleep(dice.uniform(0, 1.5))
                kill(dice, out, seed % 4 == 1, log)
                if seed % 2:
                    time.sleep(dice.uniform(0, 0.3))
                    kill(dice, out, False, log)
                break
            time.sleep(0.02)
        code = running.wait(max(1, began + LIMIT - time.monotonic()))
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGKILL)
        return False, f"HUNG: {log}"
    finally:
        seconds, left = time.monotonic() - began, ranks_of(out)
        for process in left.values():
            os.kill(process, signal.SIGKILL)
    last = records(out)[-1] if records(out) else {}
    restarts = [
        (r["step"], r["ranks"], r.get("filled_from"))
        for r in records(out)
        if r.get("event") == "resume"
    ]
    text = f"{'; '.join(log)} -> {restarts}, {seconds:.0f} s"
    if code or last.get("event") != "end" or not last["replicas_equal"] or left:
        errors.seek(0)
        return False, f"{text}; exit code {code}, left {left}: {errors.read()[-600:]}"
    problem = unequal(ranks, out, settings) if restarts else ""
    return not problem, text + (f"; UNEQUAL: {problem}" if problem else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("jobs", 25), ("seed", 0), ("ranks", 5)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked, passed = parser.parse_args(), 0
    for seed in range(asked.seed, asked.seed + asked.jobs):
        with tempfile.TemporaryDirectory() as folder:
            is_good, text = job(seed, asked.ranks, Path(folder))
            passed += is_good
            print(f"seed {seed}: {'passed' if is_good else 'FAILED'}: {text}", flush=True)
    print(f"{passed} of {asked.jobs} jobs went on in place")
    sys.exit(passed < 0.95 * asked.jobs)


if __name__ == "__main__":
    main()
