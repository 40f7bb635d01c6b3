"""Bits that each rank computes without the others: a digest of seeded training steps of a small GPT."""

import hashlib
from collections.abc import Mapping

import numpy as np
from threadpoolctl import threadpool_limits

from mpitrain.config import Config, parse
from mpitrain.data import Unopened
from mpitrain.run.build import build
from mpitrain.transport.base import Transport

STEPS, ROWS, TOKENS, CLASSES = 2, 4, 32, 96


def small_config(**sections: dict[str, object]) -> Config:
    """Return the configuration of the small GPT, with these sections on top."""
    tables: dict[str, dict[str, object]] = {
        "model": {"layers": 2, "width": 64, "heads": 2, "context": TOKENS},
        "batch": {"size": ROWS},
        "optimizer": {"schedule": "constant", "warmup": 0},
        "device": {"kind": "cpu"},
        "run": {"seed": 11},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return parse(tables)


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the first 16 digits of the SHA-256 of all tensors, in the order of their names."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(name.encode())
        sha256.update(np.ascontiguousarray(tensors[name]).tobytes())
    return sha256.hexdigest()[:16]


def step_digests(transport: Transport, repeats: int = 2) -> list[tuple[str, ...]]:
    """Train alone on each rank, several times; return the digests of all ranks. Collective.

    BLAS uses one thread, so the number of cores of a rank does not change the bits.
    """
    own = transport.split(transport.rank)
    assert own is not None
    with threadpool_limits(1, user_api="blas"):
        digests = [_trained(own) for _ in range(repeats)]
    everyone = transport.gather_text(digests)
    own.close()
    return [tuple(digests) for digests in everyone]


def _trained(alone: Transport) -> str:
    """Return the digest of the parameters after STEPS steps on random tokens."""
    config = small_config()
    source = Unopened("tokens", (TOKENS,), CLASSES, CLASSES)
    job = build(alone, config, source=source)
    draw = np.random.default_rng(11)
    for step in range(STEPS):
        tokens = draw.integers(0, CLASSES, (ROWS, TOKENS + 1))
        job.trainer.step(step, tokens[:, :-1], tokens[:, 1:])
    bits = digest(job.trainer.tensors())
    job.close()
    return bits
