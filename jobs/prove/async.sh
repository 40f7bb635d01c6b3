#!/usr/bin/env bash
# Claims, for 2 and 4 stages and 8 micro-batches. Where computing sleeps, stages of async and async-2bw compute within 5% of the
# rate of a stage that never stands still. After the same number of sequences, a small GPT that async has trained has a validation
# loss of at most 0.1 above that of 1f1b. Beside them stand synchronous schedules, whose losses are all that of 1f1b, and the loss
# of async-2bw, for which nothing is claimed. Each of a stage's two units sleeps MS in its forward and each half of its backward:
# on a busy machine take more, for sleepers wake late there. About 8 minutes on two free cores; "rate" or "loss" alone is a part.
#     bash jobs/prove/async.sh [PYTHON] ["rate loss"] [STEPS] [MS] ["SCHEDULES ..."]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3} what=${2:-rate loss} steps=${3:-200} ms=${4:-25} schedules=${5:-gpipe 1f1b zero-bubble async async-2bw}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_osc=^ucx OMPI_MCA_mpi_yield_when_idle=1 OPENBLAS_NUM_THREADS=1
export PYTHONPATH="$PWD/jobs/prove${PYTHONPATH:+:$PYTHONPATH}"
cat > "$folder/rate.py" <<'PY'
"""Median seconds of a step on the slowest stage, of sleeping units: of each schedule over that of a stage alone."""
import json, sys, time
from statistics import fmean, median

import numpy as np
from sleeping import configured, sleeper

from mpitrain.cli.session import mpi_session

UNITS, SECONDS, M, WARM, STEPS = 2, float(sys.argv[2]) / 1e3, 8, 2, 5    # units of a stage


def seconds(transport, schedule, stages, units):
    config = configured("run.steps=1000", f"batch.size={M}", f"batch.micro_batches={M}", f"layout.pp={stages}",
                        f"pipeline.schedule={schedule}", "checkpoint.every=0")
    trainer, _ = sleeper(transport, config, units, ((SECONDS, 0.0),) * 3, 2)
    inputs, targets = np.zeros((M, 2), np.float32), np.zeros(M, np.int64)
    times = []
    for step in range(WARM + STEPS):
        began = time.perf_counter()
        trainer.step(step, inputs, targets)
        times.append(time.perf_counter() - began)
    trainer.close()
    return median(times[WARM:])


with mpi_session() as transport:
    n, found = transport.size, {}
    alone = transport.split(transport.rank)
    alone_s = fmean(transport.gather_text(seconds(alone, "1f1b", 1, UNITS)))
    for schedule in sys.argv[3:]:
        found[schedule] = max(transport.gather_text(seconds(transport, schedule, n, n * UNITS))) / alone_s
    if transport.rank == 0:
        json.dump({"alone_ms": 1e3 * alone_s, "ratios": found}, open(sys.argv[1], "w"))
PY
for stages in ${STAGES:-2 4}; do
    if [[ $what == *rate* ]]; then
        mpirun -n "$stages" "$python" "$folder/rate.py" "$folder/rate-$stages.json" "$ms" $schedules > "$folder/log" 2>&1 \
            || { tail -5 "$folder/log"; exit 1; }
    fi
    if [[ $what == *loss* ]]; then
        for schedule in 1f1b async async-2bw; do
            "$python" -m mpitrain launch -n "$stages" -- train --pp "$stages" --out "$folder/$schedule-$stages" \
                --set pipeline.schedule="$schedule" --set batch.micro_batches=8 --set run.steps="$steps" --set model.width=64 \
                --set model.context=64 --set run.eval_rows=1000 --set run.sample=0 --set checkpoint.every=0 \
                > "$folder/log" 2>&1 || { tail -5 "$folder/log"; exit 1; }
        done
    fi
done
"$python" - "$folder" <<'PY'
import json, sys
from pathlib import Path

folder, missed = Path(sys.argv[1]), False
for stages in (2, 4):
    rate = folder / f"rate-{stages}.json"
    rates = json.loads(rate.read_text()) if rate.exists() else {"ratios": {}, "alone_ms": 0}
    losses = {run.name.rsplit("-", 1)[0]: json.loads([line for line in open(run / "metrics.jsonl") if "val_loss" in line][-1])
              for run in folder.glob(f"*-{stages}") if run.is_dir()}
    if not (rates["ratios"] or losses):
        continue
    print(f"{stages} stages, 8 micro-batches" + f"; a stage alone takes {rates['alone_ms']:.1f} ms for a step" * rate.exists())
    for schedule in dict.fromkeys([*rates["ratios"], *losses]):
        line = f"  {schedule:<12}"
        if ratio := rates["ratios"].get(schedule):
            line += f" {ratio:.3f} x that time, {100 / ratio:3.0f}% of the rate"
            missed |= schedule.startswith("async") and not ratio <= 1.05
        if schedule in losses:
            line += f"   validation loss {losses[schedule]['val_loss']:.4f}"
            line += f" ({losses[schedule]['val_loss'] - losses['1f1b']['val_loss']:+.4f})"
            missed |= schedule == "async" and not losses[schedule]["val_loss"] <= losses["1f1b"]["val_loss"] + 0.1
        print(line)
print("missed" if missed else "as claimed")
sys.exit(missed)
PY
