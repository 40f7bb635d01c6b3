#!/usr/bin/env bash
# Claim: a model trains as on one rank in every layout dp x tp x pp of 1, 2, 3, 4, 6 and 8 ranks, by every schedule of pipelines: a
# GPT, tied and untied, and an MLP; each layout and schedule with SGD, momentum and AdamW, one for each of these models; with every
# all-reduce and ZeRO 0 and 1 in turns, and ZeRO 2 and 3 where the schedule allows it. Losses, gradient norms, an evaluation and all
# parameters of 5 steps in float64, within 1e-9. Ranks are threads.
# 768 runs of 1 to 10 s each. Those that are written in FILE are not run again: what was interrupted goes on, in pieces of MINUTES.
#     bash jobs/prove/layouts.sh [PYTHON] [FILE] [MINUTES] ["RANKS ..."] ["SCHEDULES ..."]
set -euo pipefail
cd "$(dirname "$0")/../.."
"${1:-python3}" - "${2:-/dev/null}" "${3:-inf}" "${4:-1 2 3 4 6 8}" "${5:-}" <<'PY'
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

from mpitrain.collectives.selection.table import choices
from mpitrain.parallel.grid import Axes
from mpitrain.pipeline.schedules import SCHEDULES, plan_of
from mpitrain.pipeline.simulate import goes_in_passes
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel.test_tensor import curve
from tests.training import assert_alike, configured

ROWS, STEPS = 17, 5    # ragged, whatever they are divided by
BASE = [f"batch.size={ROWS}", "optimizer.warmup=0", "optimizer.lr=0.01", "optimizer.clip=0.5", f"run.steps={STEPS}",
        "precision.compute=float64", "model.width=48"]
GPT = [*BASE, "model.layers=7", "model.heads=24", "model.context=8", "data.vocabulary=101"]
MODELS = {"untied": GPT, "tied": [*GPT, "model.tied=true"], "mlp": [*BASE, "model.kind=mlp", "model.layers=15"]}
RULES, RANKS = ("sgd", "momentum", "adamw"), (1, 2, 3, 4, 6, 8)
IN_PASSES = [name for name in SCHEDULES if all(map(goes_in_passes, plan_of(name, 2, 4).by_stage))]
ALGORITHMS = choices("allreduce")
file, end = Path(sys.argv[1]), time.monotonic() + 60 * float(sys.argv[2])
ranks, names = list(map(int, sys.argv[3].split())), sys.argv[4].split() or list(SCHEDULES)
layouts = [Axes(tp, dp, n // dp // tp) for n in RANKS for dp in range(1, n + 1) for tp in range(1, n + 1) if n % (dp * tp) == 0]


@cache
def alone(model, rule):
    return run_ranks(1, curve, configured(*MODELS[model], rule), STEPS)[0]


runs = {}
for (place, axes), (order, name), (turn, model) in product(*map(enumerate, (layouts, SCHEDULES, MODELS))):
    rule = f"optimizer.name={RULES[(place + order + turn) % 3]}"
    zero = f"replication.zero={(place + order + turn) % (4 if name in IN_PASSES else 2)}"
    algorithm = f"replication.algorithm={ALGORITHMS[len(runs) % len(ALGORITHMS)]}"
    micro_batches = axes.pp * max(1, min(2, ROWS // axes.dp // axes.pp))
    settings = [*(f"layout.{axis}={getattr(axes, axis)}" for axis in ("dp", "tp", "pp")), f"pipeline.schedule={name}", rule, zero,
                f"batch.micro_batches={micro_batches}", algorithm]
    runs[" ".join([model, *settings])] = axes.ranks, name, model, rule, settings
runs = {line: run for line, run in runs.items() if run[0] in ranks and run[1] in names}
known = {*file.read_text().splitlines()} & runs.keys() if file.is_file() else set()
for line, (n, _, model, rule, settings) in runs.items():
    if line not in known and time.monotonic() < end:
        assert_alike(alone(model, rule), run_ranks(n, curve, configured(*MODELS[model], *settings), STEPS), line)
        known.add(line)
        with file.open("a") as written:
            written.write(line + "\n")
        print(line, flush=True)
print(f"{len(known)} of {len(runs)} runs are equal to one rank")
PY
