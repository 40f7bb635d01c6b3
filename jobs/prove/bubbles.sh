#!/usr/bin/env bash
# Claim: pipelines of 2 and 4 stages idle as the simulator says, within 3 percentage points, by gpipe, 1f1b, interleaved, zero-bubble,
# zb-v and v-half, with messages of 1 KiB and of 8 MiB; the control message at the end of a step is left out, and the host's time
# before each instruction, measured on one stage beforehand, is simulated.
# Stages sleep, so that two cores are enough for four, but want these for themselves. About 5 minutes; over MPI.
#     bash jobs/prove/bubbles.sh [PYTHON] ["STAGES ..."] ["SCHEDULES ..."]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3} missed=0
for stages in ${2:-2 4}; do
    "$python" jobs/prove/bubbles.py "$stages" "${3:-}" || missed=1
done
[ $missed = 0 ] && echo "as claimed" || { echo "missed"; exit 1; }
