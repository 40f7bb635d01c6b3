"""Heads of keys and values: processor time of a step and bytes of the cache, with as many as heads, a quarter, and one.

    OPENBLAS_NUM_THREADS=1 python jobs/prove/groups.py [SECTION.KEY=VALUE ...]

The three models train in turns on one core. Of each the fastest of 9 steps counts, after one that does not.
"""

import sys
import time

from mpitrain.config import parse, with_settings
from mpitrain.run import inference
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks

MODEL = [
    "model.kind=llama",
    "model.layers=4",
    "model.width=256",
    "model.heads=8",
    "model.context=512",
    "batch.size=4",
]
STEPS, SEQUENCES = 9, 8


def main(transport):
    """Print the table."""
    jobs = {}
    for shared in (8, 2, 1):
        settings = [*MODEL, f"model.kv_heads={shared}", "device.kind=cpu", *sys.argv[1:]]
        jobs[shared] = build(transport, parse(with_settings({}, settings)))
    seconds: dict[int, list[float]] = {shared: [] for shared in jobs}
    for index in range(1 + STEPS):
        for shared, job in jobs.items():
            batch = job.trainer.replica.batch(job.data, index)
            before = time.process_time()
            job.trainer.step(index, *batch)
            seconds[shared].append(time.process_time() - before)
    print("kv heads   parameters   step, s   cache of 8 rows, MB")
    for shared, job in jobs.items():
        context, trainer = job.trainer.config.model.context, job.trainer
        reader = inference.reader(trainer, SEQUENCES, context)
        reader.read([[1] * (context - 1)] * SEQUENCES, context)
        assert reader._decoder
        cache = sum(k.nbytes + v.nbytes for k, v in reader._decoder._past._arrays)
        step = min(seconds[shared][1:])
        print(f"{shared:8} {trainer.parameter_count:12,} {step:9.3f} {cache / 1e6:21.1f}")


run_ranks(1, main)
