"""What a save in the background costs the steps beside it, of one rank: ratio of step times, pause, and speed of the save.

    python jobs/prove/save-speed.py [STEPS]

With run.delay the steps mostly sleep; then they compute; then the disk takes 20 MB/s. A step counts as beside a save if any
part of it was. Ratios of wall time need a machine without other work. Those of processor time, of the step's own thread, need
none.
"""

import sys
import tempfile
import time
from typing import Any

import numpy as np

from mpitrain.config import parse, with_settings
from mpitrain.formats.safetensors_files import Writing
from mpitrain.run.checkpoint.saving import Save
from mpitrain.run.loop import train
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks

JOB = ["model.layers=4", "model.width=384", "model.heads=6", "model.context=64", "batch.size=2"]
JOB += ["run.eval_every=-1", "run.sample=0", "checkpoint.keep=1", "run.trace=false"]
DISK = 20e6


def measure(steps: int, *settings: str) -> str:
    """Train, and return a line of figures."""
    saves: list[Save] = []
    beside: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    trainers: Any = Trainer
    begun: Any = Save
    step, start = Trainer.step, Save.start

    def timed(trainer, index, *rest):
        saving = bool(saves) and not saves[-1].is_published
        began, before = time.perf_counter(), time.thread_time()
        outcome = step(trainer, index, *rest)
        still = bool(saves) and not saves[-1].is_published
        if index > 1:
            times = time.perf_counter() - began, time.thread_time() - before
            beside[saving or still].append(times)
        return outcome

    def started(save, reach):
        saves.append(save)
        start(save, reach)

    trainers.step, begun.start = timed, started
    try:
        with tempfile.TemporaryDirectory() as folder:
            keys = [*JOB, f"run.steps={steps}", f"run.out={folder}/run", *settings]
            config = parse(with_settings({}, keys))
            run_ranks(1, lambda own: train(own, lambda: config))
    finally:
        trainers.step, begun.start = step, start
    saved = [save for save in saves if save.is_published and save.nbytes]
    seconds = np.mean([save.seconds for save in saved])
    wall, processor = np.median(beside[True], 0) / np.median(beside[False], 0)
    return (
        f"{len(beside[True])} steps beside saves, {len(beside[False])} without: "
        f"x {wall:.3f} (processor time x {processor:.3f}); {len(saved)} saves of {saved[0].nbytes / 1e6:.0f} MB, "
        f"{seconds:.2f} s each, {saved[0].nbytes / seconds / 1e9:.3f} GB/s, "
        f"longest pause {max(save.paused_s for save in saved):.3f} s"
    )


def main() -> None:
    steps = int([*sys.argv[1:], "60"][0])
    print("sleeping steps: ", measure(steps, "run.delay=0:300", "checkpoint.every=5"), flush=True)
    print("computing steps:", measure(steps, "checkpoint.every=10"), flush=True)
    files: Any = Writing
    write = Writing.write

    def slow(file, data):
        time.sleep(memoryview(data).nbytes / DISK)
        write(file, data)

    files.write = slow
    print("disk of 20 MB/s:", measure(steps, "run.delay=0:200", "checkpoint.every=15"), flush=True)


if __name__ == "__main__":
    main()
