"""Time and activation memory of one job with each key of [memory], measured in turns."""

from collections.abc import Callable, Sequence
from functools import partial

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.tools.bench.training.steps import Ours, Result, against
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

CHUNKS = 4
"""Slices of the logits."""
WAYS = {
    "none": [],
    "attention": ["memory.recompute=attention"],
    "unit": ["memory.recompute=unit"],
    "2": ["memory.recompute=2"],
    f"{CHUNKS} chunks": [f"memory.logit_chunks={CHUNKS}"],
    f"unit, {CHUNKS} chunks": ["memory.recompute=unit", f"memory.logit_chunks={CHUNKS}"],
    "release": ["memory.release_every=1"],
}
"""{row: settings}; all others are compared with the first."""


def built(
    transport: Transport, configured: Callable[[Sequence[str]], Config]
) -> tuple[list[Ours], list[str]]:
    """Build the job with each key; return the sides, and a note for each key that it refuses.

    Collective.

    configured  (further settings) -> the configuration
    raises      ConfigError if the job is refused without a key
    """
    sides, notes = list[Ours](), list[str]()
    for name, settings in WAYS.items():
        try:
            config = on_all_ranks(transport, partial(configured, settings))
            source = sides[0].job.source if sides else None
            sides.append(Ours(build(transport, config, source=source), name))
        except ConfigError as error:
            if not sides or not error.agreed:
                raise
            notes.append(f"{name}: not measured. {error.law}")
    return sides, notes


def peaks(transport: Transport, sides: Sequence[Ours]) -> list[int]:
    """Return the peak bytes of activations of each side on its fullest rank; collective."""
    nbytes = [side.job.trainer.pipe.peak_bytes for side in sides]
    return [max(each) for each in zip(*transport.gather_text(nbytes), strict=True)]


def memory_table(results: Sequence[Result], nbytes: Sequence[int]) -> list[str]:
    """Format time and memory as lines, and compare each with the first one.

    Times are those of the fastest block, since other work only ever slows a block down.

    nbytes  peak bytes of activations of each side
    """
    plain, first = results[0], max(1, nbytes[0])
    lines = [
        f"{'memory':<16} {'step s':>9} {'x none':>7}  {'x none, blocks':>16} {'activations MB':>15} "
        f"{'saved %':>8} {'last loss':>10}"
    ]
    for result, peak in zip(results, nbytes, strict=True):
        slower = [1 / ratio for ratio in against(result, plain)]
        spread = f"{min(slower):.3f} .. {max(slower):.3f}"
        fastest, saved = min(result.blocks), 100 * (1 - peak / first)
        mark = "~" if result.is_spoilt or plain.is_spoilt else " "
        lines.append(
            f"{result.name:<16} {fastest:9.4f} {fastest / min(plain.blocks):7.3f}{mark} {spread:>16} "
            f"{peak / 1e6:>15.1f} {saved:>8.1f} {result.losses[-1]:>10.5f}"
        )
    return lines
