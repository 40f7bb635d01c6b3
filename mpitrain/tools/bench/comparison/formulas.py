"""The bytes that the busiest rank of a job sends per step, by formula.

Legend: B rows of a step, T tokens, C channels, L layers; t, d ranks along tp, dp.
"""

import re
from collections.abc import Sequence

from mpitrain.config import Config, with_settings
from mpitrain.optim import RULES
from mpitrain.optim.rule import TensorWise
from mpitrain.parallel.mode import LETTERS, Formula, Sample
from mpitrain.parallel.modes import mode_of
from mpitrain.run.build import Job
from mpitrain.run.choices import parse
from mpitrain.tools.bench.comparison.grammar import settings_of
from mpitrain.tools.bench.comparison.layout_formulas import has_formula, of_layout
from mpitrain.tools.bench.comparison.wire_formulas import WORDS as CODED
from mpitrain.transport.base import Transport

OF_TENSORS = "2 (t-1)/t of 4 L + 2 times B T C, and of 3 B T numbers"
OF_SEQUENCES = "(t-1)/t of 2 L + 1 times B T C, and 2 (t-1)/t of the norms' gradients"
OF_STAGES = "B T C, and B T C back, to each neighbour"
OF_REPLICAS = "2 (d-1)/d S"
LAYOUT_LETTERS = {
    "B": "rows of a replica's step",
    "T": "tokens of a row",
    "C": "model.width",
    "L": "layers",
    "d": "replicas",
    "t": "ranks of a tensor-parallel group",
    **LETTERS,
}
"""{letter of a formula in words: its meaning}."""


def formula_of(mode: str) -> Formula | None:
    """Return the formula of a mode of --modes without layouts, or None."""
    config = parse(with_settings({}, [*settings_of(mode)]))
    if _is_divided(config):
        return None
    return mode_of(config).traffic(config.replication)


def words_of(config: Config, workers: int) -> str:
    """Return the formula of a job in words; empty without a formula.

    workers  ranks that compute rows
    """
    tp, pp, wire = config.layout.tp, config.layout.pp, config.replication.wire
    formula = mode_of(config).traffic(config.replication)
    if not _is_divided(config) and wire == "none":
        return formula.words if formula else ""
    has_replicas, zero = workers > tp * pp, config.replication.zero
    sharded = re.sub(r"\bn\b", "d", formula.words) if formula and zero else ""
    words = {
        OF_TENSORS: tp > 1,
        OF_SEQUENCES: config.layout.sequence_parallel,
        OF_STAGES: pp > 1,
        OF_REPLICAS: has_replicas and not zero and wire == "none",
        CODED[wire.partition(":")[0]] if wire != "none" else "": has_replicas and wire != "none",
        "(d-1)/d S": has_replicas and zero and wire != "none",
        sharded: has_replicas and zero and wire == "none",
    }
    return "; ".join(text for text, is_sent in words.items() if is_sent)


def predicted(transport: Transport, job: Job) -> float | None:
    """Return the bytes that the busiest rank of a job sends per step by formula, or None.

    Collective: the ranks of a layout send different numbers.
    """
    trainer, data = job.trainer, job.data
    config = trainer.config
    # Other formulas than those of all-reduces assume rings.
    is_all_reduce = (config.replication.mode, config.replication.zero) == ("all-reduce", 0)
    is_coded = config.replication.wire != "none"
    if config.replication.algorithm != "ring" and (is_coded or not is_all_reduce):
        return None
    # No formula counts the sums over divided tensors, nor the matrices of Muon.
    if config.replication.zero and isinstance(RULES[config.optimizer.name].step, TensorWise):
        return None
    if _is_divided(config) or is_coded:
        own = of_layout(job) if has_formula(config) or not _is_divided(config) else None
        everyone = transport.gather_text(own)
        return None if None in everyone else max(everyone)
    formula = mode_of(config).traffic(config.replication)
    if formula is None:
        return None
    inputs, targets = data.batch(config.run.seed, 0, config.batch.size, range(1))
    sample = Sample(inputs.nbytes, targets.nbytes, targets.size * data.classes)
    return formula.of(trainer.replication.replica, sample)


def _is_divided(config: Config) -> bool:
    return config.layout.tp > 1 or config.layout.pp > 1


def letters_in(words: Sequence[str]) -> dict[str, str]:
    """Return {letter: meaning} of the letters in these formulas."""
    used = set(re.findall(r"n'|\b(?:lg|[A-Zdhmnst])\b(?!')", " ".join(words)))
    return {letter: meaning for letter, meaning in LAYOUT_LETTERS.items() if letter in used}
