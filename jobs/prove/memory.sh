#!/usr/bin/env bash
# Claim: recomputation and release change no bit in any layout dp x tp x pp of 1, 2, 3, 4 and 6 ranks, by every schedule of pipelines:
# a GPT, tied and untied, and an MLP. Each run has one memory.recompute in turns, with memory.release_every=1, and is compared with the
# plain run of the same layout: losses, gradient norms, an evaluation and all parameters of 3 steps. memory.logit_chunks of each GPT
# agrees within 1e-9 in float64, with SGD. Ranks are threads. DEVICE is cpu or cuda-sim.
# 528 pairs of runs of 1 to 20 s each. Those that are written in FILE are not run again: an interrupted proof goes on.
#     bash jobs/prove/memory.sh [PYTHON] [FILE] [MINUTES] ["RANKS ..."] [DEVICE]
set -euo pipefail
cd "$(dirname "$0")/../.."
"${1:-python3}" - "${2:-/dev/null}" "${3:-inf}" "${4:-1 2 3 4 6}" "${5:-cpu}" <<'PY'
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from mpitrain.parallel.grid import Axes
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel.test_tensor import check_equal, configured, curve

ROWS, STEPS = 17, 3    # ragged, whatever they are divided by
BASE = [f"batch.size={ROWS}", "optimizer.warmup=0", "optimizer.lr=0.01", "optimizer.clip=0.5", f"run.steps={STEPS}",
        "precision.compute=float64", "model.width=24"]
GPT = [*BASE, "model.layers=5", "model.heads=12", "model.context=8", "data.vocabulary=101"]
MODELS = {"untied": GPT, "tied": [*GPT, "model.tied=true"], "mlp": [*BASE, "model.kind=mlp", "model.layers=9"]}
SGD = ["optimizer.name=sgd"]
WAYS, RANKS, IN_PASSES = ("unit", "2", "attention", "3"), (1, 2, 3, 4, 6), ("gpipe", "breadth-first")
file, end = Path(sys.argv[1]), time.monotonic() + 60 * float(sys.argv[2])
ranks, device = list(map(int, sys.argv[3].split())), sys.argv[4]
layouts = [Axes(tp, dp, n // dp // tp) for n in RANKS for dp in range(1, n + 1) for tp in range(1, n + 1) if n % (dp * tp) == 0]



@cache
def alone(model):
    return run_ranks(1, curve, configured(*MODELS[model], *SGD, f"device.kind={device}"), STEPS)


runs = {}
for (place, axes), (order, name), (turn, model) in product(*map(enumerate, (layouts, SCHEDULES, MODELS))):
    zero = (place + order + turn) % (4 if name in IN_PASSES else 2)
    way = WAYS[len(runs) % len(WAYS)]
    if model == "mlp" and way == "attention" or zero == 3 and axes.pp == 1:
        way = "unit"    # an MLP has no attention, and ZeRO 3 would gather again
    micro_batches = axes.pp * max(1, min(2, ROWS // axes.dp // axes.pp))
    settings = [*(f"layout.{axis}={getattr(axes, axis)}" for axis in ("dp", "tp", "pp")), f"pipeline.schedule={name}",
                f"replication.zero={zero}", f"batch.micro_batches={micro_batches}", f"device.kind={device}"]
    runs[" ".join([model, *settings, way])] = axes.ranks, model, settings, way
runs = {line: run for line, run in runs.items() if run[0] in ranks}
known = {*file.read_text().splitlines()} & runs.keys() if file.is_file() else set()
for line, (n, model, settings, way) in runs.items():
    if line not in known and time.monotonic() < end:
        base = [*MODELS[model], *settings]
        again = configured(*base, f"memory.recompute={way}", "memory.release_every=1")
        plain = run_ranks(n, curve, configured(*base), STEPS)
        for (told, whole, _), (others, found, _) in zip(plain, run_ranks(n, curve, again, STEPS), strict=True):
            assert np.array_equal(told, others), line
            assert all(np.array_equal(values, found[name][1]) for name, (_, values) in whole.items()), line
        if model != "mlp":
            check_equal(alone(model), run_ranks(n, curve, configured(*base, *SGD, "memory.logit_chunks=3"), STEPS), steps=STEPS)
        known.add(line)
        with file.open("a") as written:
            written.write(line + "\n")
        print(line, flush=True)
print(f"{len(known)} of {len(runs)} runs have the bits of the plain run")
PY
