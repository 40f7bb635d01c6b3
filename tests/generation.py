"""Text by the plainest loop: every token from a forward over its whole window. An independent truth."""

import numpy as np

from mpitrain.data.rows import without_ends
from mpitrain.data.source import DOCUMENT_END
from mpitrain.run.generate import Sampling, draw, texts
from mpitrain.run.inference import infer


def tokens(trainer, prompt, temperature, top_k, seed, stop_requested=lambda: False):
    """Generate tokens after one prompt until a stop is requested; collective, as `texts`."""
    sampling = Sampling(temperature, top_k)
    drawn = texts(trainer, [prompt], sampling, seed, stop_requested=stop_requested)
    return (token for ((_, token),) in drawn)


def whole_windows(trainer, prompt, count, sampling, seed=0, stops=False):
    """The tokens after a prompt, on one rank. A full window is cut to its newest half; with `stops` it ends the text."""
    context, generator = trainer.config.model.context, np.random.default_rng(seed)
    window, found = [*prompt][-context:], []
    for _ in range(count):
        logits = trainer.logits(np.array([window], np.int64))
        found.append(draw(np.float64(logits[0, -1]), sampling, generator))
        window.append(found[-1])
        if stops and len(window) == context:
            break
        if len(window) > context:
            window = window[-max(1, context // 2) :]
    return found


def whole_rows(trainer, prompt, count, sampling, seed=0):
    """The same with documents in one row, as training sees them; all tokens are in the context."""
    row, generator = [*prompt], np.random.default_rng(seed)
    for _ in range(count):
        ends = np.where(np.array([row]) == trainer.config.data.separator, DOCUMENT_END, 0)
        logits = infer(trainer, np.array([row], np.int64), without_ends(ends)[1])
        row.append(draw(np.float64(logits[0, -1]), sampling, generator))
    return row[len(prompt) :]


def every_text(drawn, prompts):
    """The tokens of each prompt, from the rounds of `texts`."""
    found = [[] for _ in range(prompts)]
    for together in drawn:
        for index, token in together:
            found[index].append(token)
    return found
