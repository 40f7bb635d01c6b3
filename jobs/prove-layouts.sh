#!/usr/bin/env bash
# Claim: the GPT trains as on one rank in every layout dp x tp x pp of 1, 2, 3, 4, 6 and 8 ranks, by every schedule of pipelines, tied
# and untied: losses, gradient norms, an evaluation and all parameters of 5 steps in float64, within 1e-9. Ranks are threads.
# 512 runs, of up to 10 s each on two busy cores; RANKS and SCHEDULES choose some of them.
#     bash jobs/prove-layouts.sh [PYTHON] ["RANKS ..."] ["SCHEDULES ..."]
set -euo pipefail
cd "$(dirname "$0")/.."
"${1:-python3}" - "${2:-1 2 3 4 6 8}" "${3:-}" <<'PY'
import sys
import time

from mpitrain.parallel.grid import Axes
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.transport.threads import run_ranks
from tests.ranks.test_tensor import check_equal, configured, curve

ROWS, STEPS = 17, 5    # ragged, whatever they are divided by
GPT = ["model.layers=7", "model.width=48", "model.heads=24", "model.context=8", "data.vocabulary=101", f"batch.size={ROWS}",
       "optimizer.warmup=0", "optimizer.lr=0.01", "optimizer.clip=0.5", f"run.steps={STEPS}", "precision.compute=float64"]
ranks, names = list(map(int, sys.argv[1].split())), sys.argv[2].split() or list(SCHEDULES)
layouts = [Axes(tp, dp, n // dp // tp) for n in ranks for dp in range(1, n + 1) for tp in range(1, n + 1) if n % (dp * tp) == 0]
began, done = time.perf_counter(), 0
for tied in ("true", "false"):
    alone = run_ranks(1, curve, configured(*GPT, f"model.tied={tied}"), STEPS)
    for axes in layouts:
        for name in names:
            micro_batches = axes.pp * max(1, ROWS // axes.dp // axes.pp)
            settings = [f"layout.{axis}={getattr(axes, axis)}" for axis in ("dp", "tp", "pp")]
            settings += [f"model.tied={tied}", f"pipeline.schedule={name}", f"batch.micro_batches={micro_batches}"]
            check_equal(alone, run_ranks(axes.ranks, curve, configured(*GPT, *settings), STEPS))
            done += 1
        print(f"dp {axes.dp} x tp {axes.tp} x pp {axes.pp}, tied {tied}: equal by {', '.join(names)}", flush=True)
print(f"{done} runs are equal to one rank ({time.perf_counter() - began:.0f} s)")
PY
