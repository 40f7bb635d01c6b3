#!/usr/bin/env bash
# Claim: every deterministic mode of replication trains as one rank does, with every optimizer: losses, gradient norms, an
# evaluation and all parameters of 20 steps in float64 within 1e-9. all-reduce, ZeRO 1, 2, 3 and master on 1 to 5 ranks, synchronous
# servers with 1 to 3 workers and 1 or 2 servers; of a GPT, untied and tied, in one micro-batch and in 3, shares uneven (32 rows
# over 3 ranks). 372 runs of a second or two; ranks are threads. OPTIMIZERS and MODES choose some of them.
#     bash jobs/prove/modes.sh [PYTHON] ["OPTIMIZERS ..."] ["MODES ..."]
set -euo pipefail
cd "$(dirname "$0")/../.."
"${1:-python3}" - "${2:-sgd momentum adamw}" "${3:-all-reduce zero1 zero2 zero3 master server}" <<'PY'
import sys
import time

import numpy as np

from mpitrain.config import parse, with_settings
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks

STEPS = 20
GPT = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "batch.size=32", f"run.steps={STEPS}",
       "optimizer.warmup=3", "optimizer.lr=0.01", "replication.bucket_mb=0.004", "precision.compute=float64", "run.eval_rows=7"]
MODES = {"all-reduce": [], "master": ["replication.mode=master"], "server": ["replication.mode=server"],
         **{f"zero{stage}": [f"replication.zero={stage}"] for stage in (1, 2, 3)}}


def curve(transport, config):
    """What a rank is told of training and evaluation, and what it can say of the parameters."""
    trainer, source, _ = build(transport, config)
    told = []
    for step in range(STEPS):
        outcome = trainer.step(step, *trainer.replication.rows.batch(source, step))
        told.append((outcome.loss, outcome.grad_norm))
    evaluated = trainer.evaluate(source)
    assert replicas_equal(trainer)
    tensors = {} if trainer.grid.is_server else trainer.tensors()
    return np.array([*told, evaluated]), tensors


def is_near(one, other):
    return np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one))


optimizers, modes = sys.argv[1].split(), sys.argv[2].split()
began, done = time.perf_counter(), 0
for optimizer in optimizers:
    for tied in ("false", "true"):
        settings = [*GPT, f"optimizer.name={optimizer}", f"model.tied={tied}"]
        (truth, whole), = run_ranks(1, curve, parse(with_settings({}, settings)))
        assert np.ptp(truth[:-1, 0]) > 0.05, "the loss must move, or equality says nothing"
        for mode in modes:
            shapes = [(workers, servers) for workers in (1, 2, 3) for servers in (1, 2)] if mode == "server" else \
                [(ranks, 0) for ranks in range(1, 6)]
            for workers, servers in shapes:
                for micro_batches in (1, 3):
                    more = [*MODES[mode], f"batch.micro_batches={micro_batches}"]
                    more += [f"replication.servers={servers}"] if servers else []
                    found = run_ranks(workers + servers, curve, parse(with_settings({}, [*settings, *more])))
                    for rank, (told, tensors) in enumerate(found):
                        what = f"{mode}, {optimizer}, tied {tied}, {workers} + {servers} ranks, {micro_batches} micro-batches"
                        assert is_near(truth, told), f"{what}: rank {rank} was told something else"
                        assert all(is_near(whole[name], values) for name, values in tensors.items()), f"{what}: parameters"
                        assert rank >= workers or tensors.keys() == whole.keys(), what
                    done += 1
            print(f"{mode}, {optimizer}, tied {tied}: equal on {', '.join(f'{w} + {s}' if s else str(w) for w, s in shapes)} "
                  "ranks", flush=True)
print(f"{done} runs are equal to one rank ({time.perf_counter() - began:.0f} s)")
PY
