#!/usr/bin/env bash
# Claim: ranks that share layers train as one rank does, in every layout dp x tp of 1, 2, 3, 4, 6 and 8 ranks, with whole rows and
# with rows of their own (gathered again, and kept), the GPT tied and untied and the MLP, for every optimizer: over 20 steps in
# float64 losses, gradient norms, an evaluation and all parameters within 1e-9; in float32 losses within 1e-5, and 1e-4 for AdamW.
# With fp16 and int8 between replicas no step's sum of gradients is further from the sum of what the replicas have computed than
# these formats round (tests/ranks/parallel/test_tensor.py, `rounded`), and what several ranks hold has equal bits. Ranks are threads.
# 568 runs of 4 to 20 s each. Those that are written in FILE are not run again: what was interrupted goes on, in pieces of MINUTES.
#     bash jobs/prove/tensor.sh [PYTHON] [FILE] [MINUTES] ["RANKS ..."] ["MODELS ..."] ["KINDS ..."]
set -euo pipefail
cd "$(dirname "$0")/../.."
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1    # threads are ranks here
"${1:-python3}" - "${2:-/dev/null}" "${3:-inf}" "${4:-1 2 3 4 6 8}" "${5:-tied untied wide mlp}" \
    "${6:-float64 float32 fp16 int8}" <<'PY'
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel.test_tensor import check_equal, configured, curve, rounded

STEPS = 20
BASE = ["optimizer.warmup=0", "optimizer.clip=0.5", f"run.steps={STEPS}", "model.context=24", "data.vocabulary=251",
        "batch.size=24"]
NARROW = ["model.layers=8", "model.width=48", "model.heads=6"]
MODELS = {    # tp divides the heads, of the MLP the width
    "tied": ([*NARROW, "model.tied=true"], (1, 2, 3, 6)),
    "untied": ([*NARROW, "model.tied=false"], (1, 2, 3, 6)),
    "wide": (["model.layers=8", "model.width=64", "model.heads=8"], (4, 8)),
    "mlp": (["model.kind=mlp", "model.layers=3", "model.width=48"], (1, 2, 3, 4, 6, 8)),
}
OPTIMIZERS = {"sgd": (0.1, 1e-5), "momentum": (0.05, 1e-5), "adamw": (0.01, 1e-4)}    # learning rate, of float32 losses
WAYS = {"whole rows": [], "own rows": ["layout.sequence_parallel=true"],
        "own rows, kept": ["layout.sequence_parallel=true", "layout.keep_gathered=true"]}
KINDS = {"float64": ["precision.compute=float64"], "float32": [], "fp16": ["replication.wire=fp16"],
         "int8": ["replication.wire=int8"]}
file, end = Path(sys.argv[1]), time.monotonic() + 60 * float(sys.argv[2])
ranks, models, kinds = list(map(int, sys.argv[3].split())), sys.argv[4].split(), sys.argv[5].split()


def job(model, rule, kind):
    return [*BASE, *MODELS[model][0], f"optimizer.name={rule}", f"optimizer.lr={OPTIMIZERS[rule][0]}", *KINDS[kind]]


@cache
def alone(model, rule, kind):
    return run_ranks(1, curve, configured(*job(model, rule, kind)), STEPS)


def check(model, rule, kind, n, layout):
    """Train, and compare."""
    config = configured(*job(model, rule, kind), *layout)
    if kind in ("fp16", "int8"):
        run_ranks(n, rounded, config, STEPS)
        return
    found = run_ranks(n, curve, config, STEPS)
    if kind == "float64":
        check_equal(alone(model, rule, kind), found, steps=STEPS)
    (told, *_), = alone(model, rule, kind)
    for others, *_ in found:
        apart = np.abs(others[:STEPS, 0] / told[:STEPS, 0] - 1)
        assert np.all(apart <= OPTIMIZERS[rule][1]), apart.max()


runs = {}
for kind, model, rule, n in product(kinds, models, OPTIMIZERS, ranks):
    for tp in (tp for tp in MODELS[model][1] if n % tp == 0):
        for way, more in WAYS.items() if model != "mlp" and tp > 1 else [("whole rows", [])]:
            if kind in ("float64", "float32") or (n > tp and rule == "adamw"):
                line = f"{kind}, {model}, {rule}, dp {n // tp} x tp {tp}, {way}"
                runs[line] = model, rule, kind, n, [f"layout.dp={n // tp}", f"layout.tp={tp}", *more]
known = {*file.read_text().splitlines()} & runs.keys() if file.is_file() else set()
for line, run in runs.items():
    if line not in known and time.monotonic() < end:
        began = time.monotonic()
        check(*run)
        known.add(line)
        with file.open("a") as written:
            written.write(line + "\n")
        print(f"{line} ({time.monotonic() - began:.0f} s)", flush=True)
print(f"{len(known)} of {len(runs)} runs are as claimed")
PY
