"""Requests: the token windows whose log-likelihoods answer multiple-choice tasks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.data import IGNORED
from mpitrain.data.tasks import Task
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import DataError


class ChoiceTokens(NamedTuple):
    """The tokens of a context and of one choice.

    tokens  the last tokens of both, one more than the model reads
    scored  the tokens of the choice, at the end
    """

    tokens: np.ndarray
    scored: int


def encoded_pair(tokenizer: Tokenizer, context: str, choice: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a context and of the choice after it, as lm-evaluation-harness does.

    Spaces at the end of the context count as a part of the choice. The whole text is encoded
    together, and the tokens after those of the context belong to the choice. An empty context is
    the token that ends a document, or a line break.
    """
    stripped = context.rstrip()
    context, choice = stripped, context[len(stripped) :] + choice
    if not context:
        first = tokenizer.separator
        start = np.array([first]) if first >= 0 else tokenizer.encode("\n")[:1]
        return start, tokenizer.encode(choice)
    before, whole = tokenizer.encode(context), tokenizer.encode(context + choice)
    return before, whole[len(before) :]


def requests_of(
    tasks: Sequence[Task], tokenizer: Tokenizer, context: int, vocabulary: int
) -> list[ChoiceTokens]:
    """Return a request for each choice of each task, in order.

    context     the tokens that the model reads; a longer text loses its beginning
    vocabulary  of the model
    raises      DataError for a choice that is no token or does not fit in the context, or for a
                token that the model does not know
    """
    requests = []
    for task in tasks:
        for index, choice in enumerate(task.choices):
            before, after = encoded_pair(tokenizer, task.context, choice)
            where = f"choice {index} of line {task.line} of the tasks"
            if not 0 < len(after) <= context or not len(before):
                raise DataError(
                    f"A choice must have 1 to {context} tokens, but {where} has {len(after)}.",
                    "Shorten it, or evaluate a model with a longer context.",
                )
            tokens = np.concatenate([before, after])
            if tokens.max() >= vocabulary:
                raise DataError(
                    f"All tokens must be below {vocabulary}, the vocabulary of the model, but {where} has {tokens.max()}.",
                    "Evaluate a run with this tokenizer.",
                )
            requests.append(ChoiceTokens(tokens[-context - 1 :], len(after)))
    return requests


def batch(requests: Sequence[ChoiceTokens], context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of some requests, (rows, T) int64; only choices count.

    The causal mask hides the padding on the right. T is a power of two, or the whole context: few
    shapes need few buffers.
    """
    longest = max(len(request.tokens) for request in requests) - 1
    width = min(context, max(16, 1 << (longest - 1).bit_length()))
    inputs = np.zeros((len(requests), width), np.int64)
    targets = np.full((len(requests), width), IGNORED, np.int64)
    for row, (tokens, scored) in enumerate(requests):
        stop = len(tokens) - 1
        inputs[row, :stop] = tokens[:-1]
        targets[row, stop - scored : stop] = tokens[-scored:]
    return inputs, targets
