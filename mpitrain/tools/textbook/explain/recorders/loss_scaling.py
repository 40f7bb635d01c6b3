"""The topic of loss scaling: small gradients in float16, and the dynamic scale."""

import numpy as np

from mpitrain.parallel.replication.records import DynamicLossScale, StepResult
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Text,
    sentence,
)
from mpitrain.tools.textbook.explain.topic import TopicSetting

GRADIENTS = (3e-9, 4e-8, 2e-6, 5e-3, 6.0)
"""Elements of a gradient, from too small for float16 to large."""
MOST = float(np.finfo(np.float16).max)


def record(name: str, setting: TopicSetting) -> Explanation:
    """Record steps until the scale fits, with the package's own scale."""
    scale, frames, skipped = DynamicLossScale(), list[Frame](), 0
    first = scale.value
    plain = _frame(sentence("without a scale"), 1.0, "")
    while True:
        value = scale.value
        scaled = _scaled(value)
        is_finite = bool(np.isfinite(scaled).all())
        step = len(frames) + 1
        result = StepResult(1.0, 1.0, int((~np.isfinite(scaled)).sum()), 0.1, is_finite, False)
        scale.after(result)
        title = (
            sentence("step {k}: the update", k=step)
            if is_finite
            else sentence("step {k}: an overflow, no update, half the scale", k=step)
        )
        frames.append(_frame(title, value, f"{value:g}"))
        if is_finite:
            break
        skipped += 1
    largest = max(GRADIENTS)
    return Explanation(
        name,
        TITLE,
        [
            sentence(
                "float16 has no number between 0 and {least:.2g}: small gradients become 0.",
                least=2.0**-24,
            ),
            sentence("The loss is multiplied by a scale, and so are all gradients."),
            sentence("In float32 the update divides by the scale: the small gradients are there."),
            sentence(
                "Above {most:.0f} a gradient is infinite: the step is skipped, the scale halves.",
                most=MOST,
            ),
            sentence("After {good} steps without overflow the scale doubles.", good=scale.GOOD),
        ],
        sentence(
            "float16: the gradient as the backward computes it; divided: as the update reads it."
        ),
        [sentence("gradient {g:g}", g=g) for g in GRADIENTS],
        [
            Columns(sentence("without a scale"), ("float16",)),
            Columns(sentence("with the scale"), ("scale", "float16", "divided")),
        ],
        [plain, *frames],
        [
            CountedFormula(
                sentence("skipped steps"),
                skipped,
                "ceil(lg(largest scale / 65504))",
                float(max(0, np.ceil(np.log2(largest * first / MOST)))),
            ),
            CountedFormula(
                sentence("gradients that are 0 without the scale"),
                float((np.array(GRADIENTS, np.float16) == 0).sum()),
                "g <= 2^-25",
                float(sum(g <= 2.0**-25 for g in GRADIENTS)),
            ),
        ],
        [SourceLines.of(DynamicLossScale)],
        "mpitrain train --set precision.compute=float16",
        ("tests/unit/parallel",),
    )


def _scaled(scale: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (np.array(GRADIENTS) * scale).astype(np.float16)


def _frame(title: Text, scale: float, shown: str) -> Frame:
    """Return the gradients without a scale and with this one; no `shown`: without it alone."""
    rows = zip(_scaled(1.0), _scaled(scale), strict=True)
    return Frame(
        title,
        tuple(
            (
                f"{bare:.3g}",
                *((shown, f"{half:.3g}", f"{float(half) / scale:.3g}") if shown else ("",) * 3),
            )
            for bare, half in rows
        ),
    )


TITLE: Text = sentence("Loss scaling: small gradients survive float16")
