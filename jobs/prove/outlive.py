"""Claim: a run with run.on_failure=continue outlives killed ranks, whichever they are and whenever they die.

    python jobs/prove/outlive.py [--jobs 76] [--seed 0]       100 ranks are killed, in the mix of NEEDED
    python jobs/prove/outlive.py --spares [--jobs 81]         the same with spares: each of MODES in each of WAYS
        [--kept FILE]     adds the jobs to FILE, and prints the table of all jobs in it
        [--way WORDS]     only jobs of this one of WAYS
    python jobs/prove/outlive.py --load 40 [--minutes 20]     nobody is declared dead on a busy machine
    python jobs/prove/outlive.py --turns 5                    what a step costs without a loss

A job has a seed, and its kind is that of the seed in KINDS, in turn. Ranks are killed by SIGKILL: at a
random time, in a collective, in a split of communicators or in a save; in half of the jobs
another one dies within 0.3 s, while the others recover. A job passes in place if launch exits with 0
without a restart, metrics.jsonl has the end with equal replicas, the losses of each start after a
loss are those of fresh ranks of that number from that state (float64), no process is left, and no
rank has to be ended by run.grace. A job and its fresh run take 8 s on two idle cores.

With --spares a job is one of MODES and WAYS. If no loss was without a spare, all losses must be bitwise
those of an undisturbed job. Seconds are those from a kill to the end of the next step; those of an injected kill
(in a save) are not known.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

LIMIT = 300
TOLERANCE = 1e-9
"""Of losses in float64."""
ALONE = {"run.on_failure": "end", "run.inject": "", "run.delay": ""}
"""Settings of the fresh run."""
ZERO = {"replication.zero": 3, "run.copies_every": 3, "checkpoint.every": 3}
TP = {"layout.tp": 2}
KINDS: tuple[tuple[str, int, dict], ...] = (
    ("any rank", 5, {}),
    ("rank 0", 5, {"replication.zero": 1, "run.copies_every": 2, "checkpoint.every": 2}),
    ("all-reduce", 4, {"run.inject": "backward"}),
    ("ZeRO gather", 5, {**ZERO, "run.inject": "forward"}),
    ("split", 5, {}),
    ("save", 5, {"replication.zero": 2, "run.inject": "save publish thread snapshot"}),
    ("any rank", 6, TP),
    ("all-reduce", 6, {**TP, **ZERO, "run.inject": "backward"}),
    ("ZeRO gather", 5, {"replication.zero": 3, "run.inject": "forward"}),
    ("split", 5, ZERO),
    ("save", 4, {"run.inject": "save publish evaluation"}),
    ("any rank", 5, {"replication.mode": "server", "run.copies_every": 2, "checkpoint.every": 2}),
)
"""(where the first rank dies, ranks, settings; run.inject has the points from which one is drawn)."""
ALL = ("all ranks", 4, TP)
"""The kind of each 20th job: all ranks die at once, and `launch` starts it again."""
RECOVERY, FIRST = "recovery", "rank 0"
NEEDED = {
    "": 100,
    RECOVERY: 20,
    FIRST: 10,
    "all-reduce": 10,
    "ZeRO gather": 10,
    "split": 10,
    "save": 10,
}
"""Kills of the whole claim: in all, by kind, and of rank 0, whichever the kind."""
SPLITS = """
import os, signal
from mpitrain.transport.mpi import MpiTransport
split, left = MpiTransport.split, [{number}]

def dies(*arguments, **more):
    left[0] -= 1
    if os.environ.get("OUTLIVE") == os.environ["OMPI_COMM_WORLD_RANK"] and not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return split(*arguments, **more)

MpiTransport.split = dies
"""
"""A plugin that kills a rank in one of its splits, of the first start or of one after a loss."""
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


TIMED = {
    "replication.zero": 3,
    "replication.algorithm": "ring",
    "run.delay": "",
    "run.steps": 300,
    "run.log_every": 50,
    "run.eval_every": 0,
    "checkpoint.every": 0,
}
COSTS: dict[str, dict] = {
    "usual mode, windows off": {"run.on_failure": "end"},
    "usual mode, windows on": {"run.on_failure": "end", "replication.algorithm": "auto"},
    "run.on_failure=continue": {},
    "with run.copies_every=50": {"run.copies_every": 50},
    "with run.copies_every=1": {"run.copies_every": 1},
}
"""Settings whose steps are timed, in turns."""


def command(ranks: int, out: Path, settings: dict, *more: str, spares: int = 0) -> list[str]:
    words = [f"--set={key}={value}" for key, value in {**SETTINGS, **settings}.items()]
    launch = [sys.executable, "-m", "mpitrain", "launch", "-n", str(ranks + spares)]
    launch += ["--fault-tolerant", *([f"--spares={spares}"] if spares else [])]
    return [*launch, "--", "train", "--out", str(out), *words, *more]


COPIED = {"run.copies_every": 2, "checkpoint.every": 4}
MODES: tuple[tuple[str, int, dict], ...] = (
    ("dp", 3, {}),
    ("ZeRO 1", 3, {"replication.zero": 1, **COPIED}),
    ("tp 2", 4, {"layout.tp": 2}),
    ("ZeRO 2", 3, {"replication.zero": 2, **COPIED}),
    ("pp 2", 4, {"layout.pp": 2, "batch.micro_batches": 2}),
    ("ZeRO 3", 3, {"replication.zero": 3, **COPIED}),
    ("cp 2", 4, {"layout.cp": 2}),
    ("tp 2, one replica", 2, {"layout.tp": 2, **COPIED}),
    ("ep 2", 4, {"layout.ep": 2, "model.experts": 4}),
)
"""(name, ranks with a place, settings) of the jobs with spares."""
WAYS: tuple[tuple[str, int], ...] = (
    ("any rank", 1),
    ("two at once", 2),
    ("during recovery", 2),
    ("rank 0", 1),
    ("a save", 1),
    ("a spare, then a rank", 2),
    ("one after the other", 2),
    ("without a spare", 0),
    ("four in turn", 4),
)
"""(what is killed, spares)."""


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


def resumes(out: Path) -> list[dict]:
    return [record for record in records(out) if record.get("event") == "resume"]


def kill(
    choose: Callable[[list[int]], list[int]], out: Path, log: list[tuple[str, str]], kind: str
) -> None:
    living = ranks_of(out)
    if kind != ALL[0] and len(living) == 1:
        return
    step = max((record.get("step", 0) for record in records(out)), default=0)
    for rank in choose(sorted(living)):
        with suppress(ProcessLookupError):
            os.kill(living[rank], signal.SIGKILL)
            log.append((kind, f"rank {rank} after step {step}"))


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


def chosen(dice: random.Random, seed: int, folder: Path, log: list[tuple[str, str]]) -> tuple:
    """Return the kind of a job, its ranks, the one that dies first, and its settings."""
    kind, ranks, usual = KINDS[seed % len(KINDS)] if seed % 20 else ALL
    settings, rank = dict(usual), dice.randrange(ranks)
    if points := str(settings.get("run.inject", "")).split():
        point = dice.choice(points)
        step = 20 * dice.randint(1, 2) if point == "evaluation" else dice.randint(2, 50)
        settings["run.inject"] = f"kill:{0 if point == 'publish' else rank}@{step}:{point}"
        if point in ("thread", "publish", "snapshot"):
            settings["checkpoint.background"] = "true"
        log.append((kind, settings["run.inject"]))
    if kind == "split":
        (folder / "splits.py").write_text(SPLITS.format(number=dice.randint(1, 5)))
        settings["run.plugins"] = json.dumps([str(folder / "splits.py")])
    return kind, ranks, rank, settings


def job(seed: int, folder: Path, **other: object) -> tuple[bool, bool, list[tuple[str, str]], str]:
    """Run one job.    other: settings

    returns  whether it ended well, and in place; the kind and the words of each kill; what happened
    """
    dice, log = random.Random(seed), list[tuple[str, str]]()
    out = folder / "run"
    kind, ranks, first, settings = chosen(dice, seed, folder, log)
    settings |= other
    began = time.monotonic()
    errors = (folder / "errors").open("w+")
    running = subprocess.Popen(
        command(ranks, out, settings),
        env={**os.environ, "OUTLIVE": str(first)},
        stdout=subprocess.DEVNULL,
        stderr=errors,
    )
    has_own = bool(log) or kind == "split"

    def one(living: list[int]) -> list[int]:
        return [dice.choice(living)] if living else []

    choices = {FIRST: lambda living: living[:1], ALL[0]: list}
    try:
        while running.poll() is None and time.monotonic() < began + LIMIT:
            found = records(out)
            if kind == ALL[0] and not any(r.get("event") == "checkpoint" for r in found):
                found = []  # It could not be started again from a checkpoint.
            if found and (not has_own or found[-1].get("event") == "resume"):
                if not has_own:
                    time.sleep(dice.uniform(0, 1.5))
                    kill(choices.get(kind, one), out, log, kind)
                if kind != ALL[0] and dice.random() < 0.5:
                    time.sleep(dice.uniform(0, 0.3))
                    kill(one, out, log, RECOVERY)
                break
            time.sleep(0.02)
        code = running.wait(max(1, began + LIMIT - time.monotonic()))
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGKILL)
        return False, False, log, f"HUNG: {log}"
    finally:
        seconds, left = time.monotonic() - began, ranks_of(out)
        for process in left.values():
            os.kill(process, signal.SIGKILL)
    errors.seek(0)
    said = errors.read()
    last = records(out)[-1] if records(out) else {}
    restarts = [
        (r["step"], r["ranks"], r.get("filled_from"))
        for r in records(out)
        if r.get("event") == "resume"
    ]
    if kind == "split" and "ranks are lost" in said:
        log.insert(0, (kind, "in a split"))
    text = f"{'; '.join(' '.join(one) for one in log)} -> {restarts}, {seconds:.0f} s"
    is_slow = "Timeout (" in said  # A rank could not leave within run.grace.
    if code or last.get("event") != "end" or not last["replicas_equal"] or left or is_slow:
        return False, False, log, f"{text}; exit code {code}, left {left}: {said[-600:]}"
    problem = unequal(restarts[-1][1], out, settings) if restarts else ""
    in_place = "starting it again" not in said
    return not problem, in_place, log, text + (f"; UNEQUAL: {problem}" if problem else "")


def told(out: Path) -> dict[int, float]:
    """Return {step: loss} of a run, with the losses that a rank noted for a lost one."""
    logged = [r for r in records(out) if r.get("event", "resume") == "resume"]
    return {r["step"]: r["loss"] for r in logged if r.get("loss") is not None}


def undisturbed(
    ranks: int, settings: dict, cached: dict[str, dict[int, float]]
) -> dict[int, float]:
    key = json.dumps([ranks, settings])
    if key not in cached:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            words = command(ranks, out, settings, spares=1)
            subprocess.run(words, check=True, capture_output=True, timeout=LIMIT)
            cached[key] = told(out)
    return cached[key]


class Spared(NamedTuple):
    """A job with spares.

    passed   whether it finished with the right losses
    how      "bitwise" those of an undisturbed job, or with "fewer" ranks those of fresh ones
    seconds  of each recovery, to the end of the next step
    """

    seed: int
    mode: str
    way: str
    kills: int
    passed: bool
    how: str
    seconds: list[float]
    text: str


def recoveries(found: list[dict], kills: list[float]) -> list[float]:
    """Return the seconds from the last kill before each new start to the end of its first step."""
    times = []
    for number, record in enumerate(found):
        steps = [r for r in found[number + 1 :] if "event" not in r and "loss" in r]
        before = [at for at in kills if at < record.get("time", 0)]
        if record.get("event") == "resume" and before and steps:
            step_s = steps[0]["wall_s"] - record["wall_s"]
            times.append(record["time"] + step_s - max(before))
    return times


def with_spares(seed: int, folder: Path, cached: dict, ways: Sequence[tuple[str, int]]) -> Spared:
    """Run one job with spares."""
    dice, out = random.Random(seed), folder / "run"
    mode, ranks, settings = MODES[seed % len(MODES)]
    way, spares = ways[(seed + seed // len(MODES)) % len(ways)]
    if ranks == 2 and way in ("two at once", "during recovery", "without a spare"):
        mode, ranks = f"{mode} twice", 4
    if way == "four in turn":
        settings = {**settings, "run.steps": 120, "checkpoint.every": 10}
    if not spares:
        settings = {**settings, "checkpoint.every": 1}  # Fresh ranks begin from any step.
    same, inject, kills = undisturbed(ranks, settings, cached), {}, list[tuple[int, float]]()
    if way == "a save":
        inject = {"run.inject": f"kill:{dice.randrange(ranks)}@{4 * dice.randint(1, 10)}:save"}
    with (folder / "errors").open("w+") as errors:
        words = command(ranks, out, {**settings, **inject}, spares=spares)
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors)

        def shot(*chosen: int) -> None:
            living = ranks_of(out)
            for number in {*chosen} & {*living}:
                with suppress(ProcessLookupError):
                    os.kill(living[number], signal.SIGKILL)
                    kills.append((number, time.time()))

        def resumed(times: int) -> bool:
            while running.poll() is None and time.monotonic() < until:
                if len(resumes(out)) >= times:
                    return True
                time.sleep(0.02)
            return False

        began, until, first = time.monotonic(), time.monotonic() + LIMIT, dice.randrange(ranks)
        while running.poll() is None and not records(out) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 2))
        if way == "a save":
            resumed(1)
            kills.append((int(inject["run.inject"].split(":")[1].split("@")[0]), math.inf))
        elif way == "two at once":
            shot(*dice.sample(range(ranks), 2))
        elif way == "a spare, then a rank":
            shot(ranks + dice.randrange(2))
            time.sleep(dice.uniform(0, 0.5))
            shot(first)
        else:
            shot(0 if way == "rank 0" else first)
        if way == "during recovery":
            time.sleep(dice.uniform(0, 1.5))
            shot((first + 1) % ranks)
        elif way == "one after the other" and resumed(1):
            time.sleep(dice.uniform(0, 1))
            shot(ranks)
        elif way == "four in turn":
            placed = [*range(ranks)]
            for number in range(1, spares):
                if not resumed(number):
                    break
                for rank, process in resumes(out)[-1].get("replaced", ()):
                    placed[rank] = process
                time.sleep(dice.uniform(0, 0.5))
                shot(dice.choice(placed))
        try:
            code = running.wait(max(1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.kill()
            code = -1
        left = ranks_of(out)
        for process in left.values():
            os.kill(process, signal.SIGKILL)
        errors.seek(0)
        said = errors.read()
    last = records(out)[-1] if records(out) else {}
    starts = resumes(out)
    facts = [(r["step"], r["ranks"], r.get("replaced"), r.get("filled_from")) for r in starts]
    times = recoveries(records(out), [at for _, at in kills])
    seconds, numbers = time.monotonic() - began, [number for number, _ in kills]
    took = ", ".join(f"{one:.1f}" for one in times) or "?"
    text = f"{mode}, {way}: killed {numbers} -> {facts}, {took} of {seconds:.0f} s"

    def result(passed: bool, how: str, text: str) -> Spared:
        return Spared(seed, mode, way, len(kills), passed, how, times, text)

    is_good = not code and last.get("event") == "end" and last["replicas_equal"] and not left
    is_good = is_good and "starting it again" not in said
    if not is_good:
        return result(False, "", f"{text}; exit code {code}, left {left}: {said[-600:]}")
    if all(r["ranks"] == ranks for r in starts):
        wrong = [step for step, loss in same.items() if told(out).get(step) != loss]
        text += "; bitwise" if not wrong else f"; OTHER LOSSES in steps {wrong}"
        return result(not wrong, "bitwise", text)
    problem = unequal(starts[-1]["ranks"], out, settings)
    return result(not problem, "fewer", text + (f"; UNEQUAL: {problem}" if problem else ""))


def table_of(jobs: list[Spared]) -> Iterator[str]:
    """Yield the lines of a table of jobs with spares: by way, by mode, and in all."""
    yield f"{'':22}{'jobs':>6}{'kills':>7}{'finished':>10}{'bitwise':>9}{'fewer':>7}{'median s':>10}{'most s':>8}"
    named = [(f"{one.way}", one) for one in jobs], [(one.mode, one) for one in jobs]
    for pairs in (*named, [("in all", one) for one in jobs]):
        for name in dict(pairs):
            own = [one for other, one in pairs if other == name]
            seconds = [one for job in own for one in job.seconds] or [math.nan]
            ways = [
                sum(job.how == how and job.passed for job in own) for how in ("bitwise", "fewer")
            ]
            yield (
                f"{name:22}{len(own):6}{sum(job.kills for job in own):7}{sum(job.passed for job in own):10}{ways[0]:9}"
                f"{ways[1]:7}{median(seconds):10.1f}{max(seconds):8.1f}"
            )


def all_with_spares(seeds: range, kept: Path | None, ways: Sequence[tuple[str, int]]) -> bool:
    """Run the jobs; print a line of each, and the table of all, with those in the file `kept` before."""
    cached, jobs = dict[str, dict[int, float]](), list[Spared]()
    for line in kept.read_text().splitlines() if kept and kept.exists() else ():
        job, same = json.loads(line)
        jobs.append(Spared(*job))
        cached |= {
            key: {int(step): loss for step, loss in own.items()} for key, own in same.items()
        }
    for seed in seeds:
        known = [*cached]
        with tempfile.TemporaryDirectory() as folder:
            jobs.append(with_spares(seed, Path(folder), cached, ways))
        print(
            f"seed {seed}: {'passed' if jobs[-1].passed else 'FAILED'}: {jobs[-1].text}", flush=True
        )
        if kept:
            with kept.open("a") as file:
                same = {key: own for key, own in cached.items() if key not in known}
                file.write(json.dumps([jobs[-1], same]) + "\n")
    print(*table_of(jobs), sep="\n")
    return all(job.passed for job in jobs)


def busy(load: int, minutes: float) -> bool:
    """Train beside `load` busy processes; return whether no rank was declared dead."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            out, until = Path(folder) / "run", time.monotonic() + 60 * minutes
            settings = {"run.steps": 10**6, "checkpoint.every": 100, "checkpoint.keep": 2}
            running = subprocess.Popen(
                command(3, out, {**settings, **ZERO}), stdout=subprocess.DEVNULL
            )
            while running.poll() is None and time.monotonic() < until:
                time.sleep(1)
            lived = running.poll() is None and len(ranks_of(out)) == 3
            steps = max((r.get("step", 0) for r in records(out)), default=0)
            starts = sum(r.get("event") in ("start", "resume") for r in records(out))
            running.send_signal(signal.SIGTERM)
            code = running.wait(600)
    finally:
        for burner in burners:
            burner.kill()
    print(
        f"{minutes:g} minutes at a load of {load}: {steps} steps, {starts} start, exit code {code}"
    )
    return lived and steps > 0 and starts == 1 and code == 85


def table(kills: Counter[str]) -> str:
    rows = [
        f"{count:5} of {NEEDED.get(kind, '-'):>3}  {kind or 'in all'}"
        for kind, count in kills.items()
    ]
    return "\n".join(["kills of needed", *rows])


def step_seconds(settings: dict) -> float:
    """Return the seconds of a step of 2 ranks, with its copies, over the second half of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = command(2, out, {**TIMED, **settings})
        if settings.get("run.on_failure"):
            words.remove("--fault-tolerant")
        subprocess.run(words, check=True, capture_output=True, timeout=LIMIT)
        half, whole = (
            r["wall_s"] for r in records(out) if r.get("step") in (150, 300) and "lr" in r
        )
    return (whole - half) / 150


def cost(turns: int) -> None:
    """Print the time of a step of each of COSTS over that of the first one in the same turn."""
    times = [[step_seconds(settings) for settings in COSTS.values()] for _ in range(turns)]
    print("median (least, most) over the first")
    for name, own in zip(COSTS, zip(*times, strict=True), strict=True):
        ratios = [one / turn[0] for one, turn in zip(own, times, strict=True)]
        print(f"{median(ratios):5.2f} ({min(ratios):.2f}, {max(ratios):.2f})  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("jobs", 0), ("seed", 0), ("load", 0), ("minutes", 20), ("turns", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--spares", action="store_true")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--way", choices=[way for way, _ in WAYS])
    asked = parser.parse_args()
    asked.jobs = asked.jobs or (len(MODES) * len(WAYS) if asked.spares else 76)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # A reader of the lines may have enough.
    if asked.spares:
        ways = [way for way in WAYS if asked.way in (None, way[0])]
        sys.exit(not all_with_spares(range(asked.seed, asked.seed + asked.jobs), asked.kept, ways))
    if asked.load:
        sys.exit(not busy(asked.load, asked.minutes))
    if asked.turns:
        sys.exit(cost(asked.turns))
    kills, ended, in_place, began = Counter(dict.fromkeys(NEEDED, 0)), 0, 0, time.monotonic()
    seeds = range(asked.seed, asked.seed + asked.jobs)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            is_good, is_in_place, log, text = job(seed, Path(folder))
        ranks = [words for _, words in log if words.startswith((f"{FIRST} ", "kill:0@"))]
        kills.update([*("" for _ in log), *(kind for kind, _ in log if kind != FIRST)])
        kills[FIRST] += len(ranks)
        ended += is_good
        in_place += is_good and is_in_place
        how = "passed" if is_in_place else "passed by restart"
        print(f"seed {seed}: {how if is_good else 'FAILED'}: {text}", flush=True)
    print(table(kills))
    seconds = time.monotonic() - began
    print(
        f"{asked.jobs} jobs in {seconds:.0f} s: {in_place} in place, {ended - in_place} by restart, "
        f"{asked.jobs - ended} failed"
    )
    needed = 0.95 * sum(1 for seed in seeds if seed % 20)
    sys.exit(ended < asked.jobs or in_place < needed)


if __name__ == "__main__":
    main()
