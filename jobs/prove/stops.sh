#!/usr/bin/env bash
# Claim: of runs that plain mpirun (Open MPI 5) ends after INT, as after Ctrl-C, 20 of 20 keep a checkpoint of the very end and say
# "stopped at step" before mpirun ends, where step and save take less than half of the 0.25 s between TERM and KILL; and runs that
# `mpitrain launch` ends do so however long that takes. It wants the cores for itself. About a minute and a half.
#     bash jobs/prove/stops.sh [FOLDER OF mpirun AND mpitrain] [TRIES]
set -euo pipefail
cd "$(dirname "$0")/../.."
programs=${1:-$(dirname "$(command -v mpitrain)")} tries=${2:-20} missed=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
small="--set model.layers=1 --set model.width=64 --set model.heads=2 --set model.context=16 --set batch.size=4"
long="--set run.steps=1000000 --set run.log_every=1 --set run.eval_every=-1 --set checkpoint.every=0"
for starts in "mpirun --oversubscribe --mca osc ^ucx -n 2 $programs/mpitrain" "mpitrain launch -n 2 --"; do
    kept=0 said=0
    for try in $(seq "$tries"); do
        run="$folder/run" out="$folder/out"
        rm -rf "$run" "$out"
        # shellcheck disable=SC2086
        "$programs"/$starts train --out "$run" $small $long > "$out" 2>&1 &
        until grep -qs "^step *5/" "$out"; do
            kill -0 $! 2> /dev/null || { cat "$out"; exit 1; }
            sleep 0.05
        done
        sleep "0.$((RANDOM % 90 + 10))"
        kill -INT $!
        wait $! || true
        last=$(grep -o "stopped at step [0-9]*" "$out" | grep -o "[0-9]*$" || true)
        [ -n "$last" ] && said=$((said + 1))
        [ -n "$last" ] && [ -d "$run/checkpoints/step-$(printf %08d "$last")" ] && kept=$((kept + 1))
    done
    echo "${starts%% *}: kept $kept of $tries, said in $said"
    [ $kept = "$tries" ] || missed=1
done
[ $missed = 0 ] && echo "as claimed" || { echo "missed"; exit 1; }
