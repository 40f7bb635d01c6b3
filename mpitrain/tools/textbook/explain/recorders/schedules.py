"""The pipeline schedules that are topics: sentences and formulas of each."""

from mpitrain.parallel.data.weight_stashing import pipedream
from mpitrain.pipeline import schedules
from mpitrain.tools.textbook.explain.explanation import Text, sentence
from mpitrain.tools.textbook.explain.recorders.pipelines import Shown

SCHEDULES: dict[str, tuple[Text, Shown]] = {
    "gpipe": (
        sentence("GPipe: all forwards, then all backwards"),
        Shown(
            "gpipe",
            (
                sentence("The model is cut into {p} stages, the batch into {m} micro-batches."),
                sentence(
                    "A stage sends activations to the next stage, and gradients to the one before."
                ),
                sentence("All micro-batches go forward before the first one goes back."),
                sentence("So a stage saves the activations of all {m} micro-batches."),
                sentence("Stages wait at both ends of a step: this is the bubble."),
            ),
            schedules.gpipe,
            ("m", lambda p, m: m),
            1,
            "(p-1) / (m+p-1)",
            lambda p, m: (p - 1) / (m + p - 1),
        ),
    ),
    "1f1b": (
        sentence("1F1B: one forward, one backward"),
        Shown(
            "1f1b",
            (
                sentence(
                    "A stage runs a backward as soon as one is ready, before the next forward."
                ),
                sentence("So it saves at most p micro-batches, however many a step has."),
                sentence(
                    "With whole backwards the bubble equals GPipe's. Here a backward has two halves, B and W."
                ),
                sentence(
                    "B comes first, since another stage waits for its result. This shortens the bubble."
                ),
            ),
            schedules.one_f_one_b,
            ("min(p, m)", min),
            1,
            "2 (p-1) / (3m + 2 (p-1))",
            lambda p, m: 2 * (p - 1) / (3 * m + 2 * (p - 1)),
        ),
    ),
    "zero-bubble": (
        sentence("Zero bubble (ZB-H1): weight halves fill the bubble"),
        Shown(
            "zero-bubble",
            (
                sentence("No other stage waits for a weight half W, so W can come later."),
                sentence("ZB-H1 delays W of 1F1B to slots that would be idle at the end."),
                sentence("A stage saves no more micro-batches than p."),
            ),
            schedules.zero_bubble,
            ("min(p, m)", min),
            1,
            "i / (3m+i), i = max(p-1, 2p-1-m)",
            lambda p, m: max(p - 1, 2 * p - 1 - m) / (3 * m + max(p - 1, 2 * p - 1 - m)),
        ),
    ),
    "async": (
        sentence("Asynchronous pipeline (PipeDream): no bubble between steps"),
        Shown(
            "async",
            (
                sentence(
                    "A stage updates after every micro-batch, and never waits for a step to end."
                ),
                sentence(
                    "A backward must use the weights of its forward: older versions are saved."
                ),
                sentence("Stage 0 has p versions, and its gradients are up to p-1 updates late."),
                sentence("Idle slots are only at the start and at the end of training."),
            ),
            pipedream,
            ("min(p, m)", min),
            2,
            "2 (p-1) / (6m + 2 (p-1))",
            lambda p, m: 2 * (p - 1) / (6 * m + 2 * (p - 1)),
        ),
    ),
}
