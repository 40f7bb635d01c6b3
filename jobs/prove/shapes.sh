#!/usr/bin/env bash
# Claim: a step is no slower than PyTorch's, in many shapes and layouts on 2 ranks: each line of the table of tools/bench/README.md.
# One `bench train --floor` for each shape, in turns with DDP and with DDP under torch.compile where that can train the shape.
#     bash jobs/prove/shapes.sh [BLOCKS] [STEPS]
set -euo pipefail
cd "$(dirname "$0")/../.."
wide="model.width=768 model.heads=12 batch.size=16"
while IFS=: read -r name settings; do
  echo "## $name"
  peers=(--peer torch)
  [[ $settings =~ layout|zero ]] || peers+=(--peer torch-compiled)
  mapfile -t words < <(for setting in $settings; do printf '%s\n' --set "$setting"; done)
  python3 -m mpitrain launch -n 2 -- bench train --floor --blocks "${1:-5}" --steps "${2:-10}" "${peers[@]}" "${words[@]}" </dev/null
done <<TABLE
context-128:batch.size=32
context-512:model.context=512 model.width=512 model.heads=8 model.layers=6 batch.size=8
context-1024:model.context=1024 batch.size=8
context-2048:model.context=2048 batch.size=4
context-4096:model.context=4096 batch.size=2
vocabulary-50257:data.vocabulary=50257 model.context=256 batch.size=8
width-768:$wide
tp-2:layout.tp=2 batch.size=16
tp-2-context-1024:layout.tp=2 model.context=1024 batch.size=4
zero-3:replication.zero=3 $wide
pp-2-1f1b-4:layout.pp=2 pipeline.schedule=1f1b batch.micro_batches=4 batch.size=16
pp-2-1f1b-8:layout.pp=2 pipeline.schedule=1f1b batch.micro_batches=8 batch.size=16
pp-2-gpipe-4:layout.pp=2 pipeline.schedule=gpipe batch.micro_batches=4 batch.size=16
TABLE
