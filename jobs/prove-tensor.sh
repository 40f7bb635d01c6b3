#!/usr/bin/env bash
# Claim: ranks that share layers train as one rank does, in every layout dp x tp of 1, 2, 3, 4, 6 and 8 ranks, with whole rows and
# with rows of their own (gathered again, and kept), the GPT tied and untied and the MLP, for every optimizer: over 20 steps in
# float64 losses, gradient norms, an evaluation and all parameters within 1e-9; in float32 losses within 1e-5, and 1e-4 for AdamW.
# With fp16 and int8 between replicas losses stay within 1 and 5%, and what several ranks hold has equal bits. Ranks are threads.
# RANKS and MODELS choose some of them.
#     bash jobs/prove-tensor.sh [PYTHON] ["RANKS ..."] ["MODELS ..."]
set -euo pipefail
cd "$(dirname "$0")/.."
"${1:-python3}" - "${2:-1 2 3 4 6 8}" "${3:-tied untied wide mlp}" <<'PY'
import sys
import time

import numpy as np

from mpitrain.transport.threads import run_ranks
from tests.ranks.test_tensor import check_equal, configured, curve

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
LOSSY = {"fp16": 1e-2, "int8": 5e-2}
ranks, chosen = list(map(int, sys.argv[1].split())), sys.argv[2].split()
began, done = time.perf_counter(), 0


def near(alone, together, tolerance):
    """Losses alone."""
    (told, *_), = alone
    for others, *_ in together:
        apart = np.abs(others[:STEPS, 0] / told[:STEPS, 0] - 1)
        assert np.all(apart <= tolerance), apart.max()


for name in chosen:
    settings, splits = MODELS[name]
    layouts = [(n // tp, tp) for n in ranks for tp in splits if n % tp == 0]
    for optimizer, (lr, tolerance) in OPTIMIZERS.items():
        base = [*BASE, *settings, f"optimizer.name={optimizer}", f"optimizer.lr={lr}"]
        exact, single = [*base, "precision.compute=float64"], [*base, "precision.compute=float32"]
        alone, alone_single = (run_ranks(1, curve, configured(*each), STEPS) for each in (exact, single))
        for dp, tp in layouts:
            for way, more in WAYS.items() if name != "mlp" and tp > 1 else [("whole rows", [])]:
                layout = [f"layout.dp={dp}", f"layout.tp={tp}", *more]
                check_equal(alone, run_ranks(dp * tp, curve, configured(*exact, *layout), STEPS), steps=STEPS)
                near(alone_single, run_ranks(dp * tp, curve, configured(*single, *layout), STEPS), tolerance)
                for wire, limit in LOSSY.items() if dp > 1 and optimizer == "adamw" else ():
                    near(alone_single, run_ranks(dp * tp, curve, configured(*single, *layout, f"replication.wire={wire}"),
                                                 STEPS), limit)
                    done += 1
                done += 2
                print(f"{name}, {optimizer}, dp {dp} x tp {tp}, {way}: equal ({time.perf_counter() - began:.0f} s)", flush=True)
print(f"{done} runs are equal to one rank, or near it in lossy wire formats")
PY
