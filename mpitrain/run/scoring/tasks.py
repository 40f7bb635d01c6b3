"""Accuracy on multiple-choice tasks, as acc and acc_norm of lm-evaluation-harness."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from mpitrain.data.tasks import Task
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.parallel.grid import share
from mpitrain.run.scoring.requests import ChoiceTokens, batch, requests_of
from mpitrain.run.trainer import Trainer, diverged
from mpitrain.transport.agreement import on_all_ranks


class Accuracy(NamedTuple):
    """A mean over tasks, and its standard error: sample deviation / sqrt(tasks); None for one."""

    mean: float
    stderr: float | None


class Scores(NamedTuple):
    """The result of a file of tasks.

    acc              by the log-likelihood of each choice
    acc_norm         by the log-likelihood divided by the bytes of the choice, as UTF-8
    log_likelihoods  of each choice of each task, in nats
    """

    acc: Accuracy
    acc_norm: Accuracy
    log_likelihoods: list[list[float]]


def score(trainer: Trainer, tasks: Sequence[Task], tokenizer: Tokenizer, vocabulary: int) -> Scores:
    """Compute the accuracy of a model on tasks; collective, with the same result on all ranks.

    vocabulary  of the model
    raises      DataError on every rank for a choice that the model cannot read; TrainingError on
                every rank if the model's output is not finite
    """
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
    """Return the accuracies of log-likelihoods; of equal choices the first is the model's."""
    plain, normed = [], []
    for task, values in zip(tasks, log_likelihoods, strict=True):
        nbytes = [len(choice.encode()) for choice in task.choices]
        plain.append(float(np.argmax(values) == task.answer))
        normed.append(float(np.argmax(np.divide(values, nbytes)) == task.answer))
    return Scores(_accuracy(plain), _accuracy(normed), log_likelihoods)


def log_likelihoods(trainer: Trainer, requests: Sequence[ChoiceTokens]) -> np.ndarray:
    """Return the log-likelihood of each choice, (len(requests),) float64, on all ranks; collective.

    Each replica computes its share of every batch. A batch has as many rows as an evaluation's.
    """
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
        losses = trainer.row_losses(*batch([requests[n] for n in own or numbers[:1]], context))
        if own and trainer.grid.reports_loss:
            likelihoods[own] = -losses
    trainer.grid.world.all_reduce(likelihoods)
    return likelihoods


def _accuracy(right: Sequence[float]) -> Accuracy:
    count = len(right)
    stderr = float(np.std(right, ddof=1) / count**0.5) if count > 1 else None
    return Accuracy(float(np.mean(right)), stderr)
