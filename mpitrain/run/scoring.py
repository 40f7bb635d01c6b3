"""Accuracy on multiple-choice tasks, as acc and acc_norm of lm-evaluation-harness."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from mpitrain.data import IGNORED
from mpitrain.data.tasks import Task
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import DataError
from mpitrain.regions import share
from mpitrain.run.inference import diverged, row_losses
from mpitrain.run.trainer import Trainer
from mpitrain.transport.agreement import on_all_ranks


class ChoiceTokens(NamedTuple):
    """The tokens of a context and a choice after it.

    tokens  the last ones, at most one more than model.context
    scored  how many of them, at the end, are the choice
    """

    tokens: np.ndarray
    scored: int


class Accuracy(NamedTuple):
    """A fraction of tasks answered right.

    stderr  standard error of `mean`, the sample deviation / sqrt(tasks); None for one task
    """

    mean: float
    stderr: float | None


class Scores(NamedTuple):
    """The result of a file of tasks.

    acc              if the model answers the choice with the largest log-likelihood
    acc_norm         if that is first divided by the UTF-8 bytes of the choice
    log_likelihoods  of each choice of each task, in nats
    """

    acc: Accuracy
    acc_norm: Accuracy
    log_likelihoods: list[list[float]]


def score(trainer: Trainer, tasks: Sequence[Task], tokenizer: Tokenizer, vocabulary: int) -> Scores:
    """Compute the accuracy of a model on tasks; collective, with the same result on all ranks."""
    context = trainer.config.model.context
    requests = on_all_ranks(
        trainer.transport, lambda: requests_of(tasks, tokenizer, context, vocabulary)
    )
    likelihoods = log_likelihoods(trainer, requests)
    if not np.isfinite(likelihoods).all():
        raise diverged()
    ends = [0, *accumulate(len(task.choices) for task in tasks)]
    return scores(tasks, [likelihoods[start:stop].tolist() for start, stop in pairwise(ends)])


def scores(tasks: Sequence[Task], log_likelihoods: list[list[float]]) -> Scores:
    """Return the accuracies of log-likelihoods; of equal choices the model answers the first."""
    plain, normed = [], []
    for task, values in zip(tasks, log_likelihoods, strict=True):
        nbytes = [len(choice.encode()) for choice in task.choices]
        plain.append(float(np.argmax(values) == task.answer))
        normed.append(float(np.argmax(np.divide(values, nbytes)) == task.answer))
    return Scores(_accuracy(plain), _accuracy(normed), log_likelihoods)


def log_likelihoods(trainer: Trainer, requests: Sequence[ChoiceTokens]) -> np.ndarray:
    """Return the log-likelihood of each choice, (len(requests),) float64, on all ranks; collective."""
    trainer.sync_parameters()
    context, batches = trainer.config.model.context, trainer.config.batch
    replicas, dp = trainer.grid.axes.dp, trainer.grid.coords.dp
    together = replicas * max(1, batches.size // (replicas * batches.micro_batches))
    # Rows of one batch have similar lengths, so that little of it is padding.
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    likelihoods = np.zeros(len(requests))
    for start in range(0, len(order), together):
        numbers = order[start : start + together]
        own = [numbers[row] for row in share(len(numbers), dp, replicas)]
        # All ranks compute the same number of batches.
        rows = batch([requests[n] for n in own or numbers[:1]], context)
        losses = row_losses(trainer, *rows)
        if own and trainer.grid.reports_loss:
            likelihoods[own] = -losses
    trainer.grid.world.all_reduce(likelihoods)
    return likelihoods


def _accuracy(right: Sequence[float]) -> Accuracy:
    count = len(right)
    stderr = float(np.std(right, ddof=1) / count**0.5) if count > 1 else None
    return Accuracy(float(np.mean(right)), stderr)


def encoded_pair(tokenizer: Tokenizer, context: str, choice: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a context and of the choice after it, as lm-evaluation-harness does.

    The whole text is encoded together; spaces at the end of the context belong to the choice. An
    empty context is the token that ends a document, or a line break.
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

    context  number of tokens that the model reads; a longer text loses its beginning
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
    """Return inputs and targets, (rows, T) int64, one row for each request; only choices count.

    The causal mask hides the padding on the right. Powers of two need few buffers.
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
