#!/usr/bin/env python3
"""Claim: with experts, 20 steps in float64 equal those of one rank to 1e-9 in every layout, whatever the router chooses.

Losses, gradient norms, the tokens of each expert and all parameters are compared, and the bytes of tokens with the formula of
the counted loads. Ranks are threads. A line for each layout and choice; 2 minutes on two free cores.

    python jobs/prove/experts.py [PART OF A CHOICE OR LAYOUT]...
"""

import sys
from collections import Counter
from unittest.mock import patch

import numpy as np

import mpitrain
from mpitrain.collectives.routes import Routes, route_bytes
from mpitrain.config import with_settings
from mpitrain.ops.host import experts as host
from mpitrain.ops.reference.experts import choose
from mpitrain.run.build import build

STEPS, WITHIN = 20, 1e-9
COMMON = """model.layers=2 model.width=16 model.heads=2 model.context=16 model.experts=4 model.balance=0.1 model.z=0.01
    batch.size=12 run.steps=20 optimizer.warmup=3 optimizer.lr=0.01 replication.bucket_mb=0.004 precision.compute=float64
    data.source=text:LICENSE device.kind=cpu"""
LAYOUTS = {
    "dp 3, 2 micro-batches": (3, "batch.micro_batches=2"),
    "tp 2": (2, "layout.tp=2"),
    "ep 2": (2, "layout.ep=2"),
    "ep 2 of dp 4, 3 micro-batches": (4, "layout.ep=2 batch.micro_batches=3"),
    "ep 4, recomputation": (4, "layout.ep=4 memory.recompute=unit"),
    "ep 2, ZeRO 1": (2, "layout.ep=2 replication.zero=1"),
    "ep 2 of dp 4, ZeRO 2": (4, "layout.ep=2 replication.zero=2 batch.micro_batches=2"),
    "ep 2 of dp 4, ZeRO 3": (4, "layout.ep=2 replication.zero=3"),
    "ep 4, ZeRO 3, recomputed attention": (
        4,
        "layout.ep=4 replication.zero=3 memory.recompute=attention",
    ),
    "ep 2 x tp 2, recomputation": (4, "layout.ep=2 layout.tp=2 memory.recompute=unit"),
    "ep 2 x tp 2, sequence parallel": (4, "layout.ep=2 layout.tp=2 layout.sequence_parallel=true"),
    "ep 2 x pp 2": (4, "layout.ep=2 layout.pp=2 batch.micro_batches=2"),
    "ep 2 x pp 2, zero-bubble": (4, "layout.ep=2 layout.pp=2 pipeline.schedule=zero-bubble"),
    "ep 2 x cp 2": (4, "layout.ep=2 layout.cp=2 batch.micro_batches=2"),
    "ep 2 x cp 2, ring": (4, "layout.ep=2 layout.cp=2 layout.cp_mode=ring"),
}
"""{name: (ranks, settings)}."""


def unlike(logits, k, before, arena):
    """Let all tokens choose expert 2 first, and none expert 1."""
    logits += np.array([0, -9, 9, 0])
    return choose(logits, k, before, arena)


CHOICES = {
    "as the router says": (choose, "model.kind=llama"),
    "capacity drops": (choose, "model.capacity=0.6 model.router=before model.shared=8"),
    "all choose one": (unlike, "model.top_k=2"),
}
"""{name: (the choice, settings)}."""


def trained(transport, config):
    """Return what this rank is told of each step, {tensor: (description, values)}, and Counter of bytes."""
    trainer, source, _ = build(transport, config)
    replica, told = trainer.replica, []
    moved = Counter[str]()
    counts_of[transport.rank] = moved
    for index in range(STEPS):
        own = trainer.step(index, *replica.batch(source, index))
        found = replica.outcome(index, own)
        dropped = found.extras["dropped"]
        told.append([found.loss, found.grad_norm, *found.extras["expert_tokens"], dropped])
    described = {entry.name: entry.parameter for entry in trainer.storage.tensors}
    tensors = {name: (described[name], array) for name, array in trainer.tensors().items()}
    return np.array(told), tensors, moved


counts_of: dict[int, Counter[str]] = {}
"""{rank: its Counter of bytes of tokens, "sent" and by the "formula"}."""


def counting(bind):
    """Return Routes.bind with an account of the bytes that leave at the start of each run."""

    def bound(routes, outgoing, incoming, is_return=False):
        reduction, transport = bind(routes, outgoing, incoming, is_return), routes._transport
        rows, begin = routes.counts.sum(axis=2), reduction._start
        row_bytes = int(np.prod(outgoing.shape[1:])) * outgoing.itemsize
        facts = transport.rank, transport.hosts, rows.T if is_return else rows, row_bytes
        moved = counts_of[transport.members[transport.rank]]

        def start():
            before = transport.traffic.nbytes
            begin()
            moved["sent"] += transport.traffic.nbytes - before
            moved["formula"] += route_bytes(*facts, reduction.algorithm)

        reduction._start = start
        return reduction

    return bound


def furthest(one, other):
    """Return the largest difference of two arrays, relative where they exceed 1; NaN if there is one."""
    return float(np.max(np.abs(one - other) / np.maximum(1, np.abs(one)), initial=0))


def compare(choice, parts):
    """Print a line for each layout with this choice; return whether all are equal."""
    chosen, settings = CHOICES[choice]
    words, is_right = [*COMMON.split(), *settings.split()], True

    def run(ranks, layout):
        config = mpitrain.parse(with_settings({}, [*words, *layout.split()]))
        return mpitrain.run_ranks(ranks, trained, config)

    names = [n for n in LAYOUTS if not parts or any(p in f"{choice}: {n}" for p in parts)]
    if not names:
        return True
    with patch.object(host, "choose", chosen, create=True):
        ((alone, whole, _),) = run(1, "")
        tokens = alone[:, 2:-1].sum(axis=0) / alone[:, 2:-1].sum()
        shares = ", ".join(f"{share:.0%}" for share in tokens)
        print(f"{choice}: experts get {shares}; {alone[:, -1].mean():.1%} dropped")
        for name in names:
            far, moved = [0.0], Counter[str]()
            for told, tensors, own in run(*LAYOUTS[name]):
                moved += own
                far.append(furthest(alone, told))
                far += [furthest(p.part_of(whole[at][1]), v) for at, (p, v) in tensors.items()]
            is_near = not [each for each in far if not each <= WITHIN]
            is_right &= is_near and moved["sent"] == moved["formula"]
            print(
                f"  {name:38}{'equal' if is_near else 'DIFFERS':8} {np.max(far):.0e}   tokens "
                f"{moved['sent']:>10,} bytes, formula {moved['formula']:,}",
                flush=True,
            )
    return is_right


def main(*parts):
    with patch.object(Routes, "bind", counting(Routes.bind)):
        results = [compare(choice, parts) for choice in CHOICES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
