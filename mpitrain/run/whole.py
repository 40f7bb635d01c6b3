"""A run as one object: `train` makes it, `load` opens it."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.config import Config
from mpitrain.data import Unopened, bits_per_byte, perplexity
from mpitrain.errors import ConfigError
from mpitrain.formats.table import has_model
from mpitrain.run import loop
from mpitrain.run.build import configured, open_run
from mpitrain.run.choices import parse
from mpitrain.run.generate import PromptRequest, Sampling, continued, end_of_turn, prompted
from mpitrain.run.inference import evaluated_rows
from mpitrain.run.job import Job
from mpitrain.run.metrics import METRICS, is_number, joined, read_metrics
from mpitrain.run.predictions import errors
from mpitrain.run.run_dir import is_run, metrics_of
from mpitrain.run.watcher import Watcher
from mpitrain.transport.base import Transport
from mpitrain.transport.mpi import connect


@cache
def _all_ranks() -> Transport:
    """Return a transport over all ranks of this job, the same at each call."""
    return connect()


def train(
    settings: Mapping[str, Any] | Config,
    *,
    resume: str = "no",
    watchers: Sequence[Watcher] | None = None,
    stop_requested: Callable[[], bool] | None = None,
    transport: Transport | None = None,
) -> SavedRun:
    """Train a model in a run directory, as `mpitrain train`; collective.

    Alone, also in a notebook, it is one rank. A program that `mpitrain launch -n N -- python FILE`
    starts has N of them.

    Parameters
    ----------
    settings : mapping or Config
        Values by section and key, as `parse` takes them, the same on every rank.
    resume : {"no", "yes", "auto"}
        As `--resume`.
    watchers : sequence of Watcher, optional
        Called in this order, on rank 0. None: one that prints the losses.
    stop_requested : callable, optional
        Called once a step, and for each batch of an evaluation. If it returns True on a rank, the
        run saves a checkpoint and ends. A resume makes the evaluation that is due.
    transport : Transport, optional
        The ranks that train. None: all ranks of the job.

    Returns
    -------
    SavedRun

    Raises
    ------
    MpitrainError
        On every rank: settings are wrong, the directory holds a run, or the loss is not finite.

    Examples
    --------
    >>> run = mpitrain.train({"data.source": "text:book.txt", "run.steps": 200, "run.out": "runs/a"})
    >>> run.generate("Once")
    """
    if not isinstance(settings, Mapping | Config):
        raise ConfigError(
            f"mpitrain.train takes settings by section and key, but got a {type(settings).__name__}.",
            'For example: mpitrain.train({"run.steps": 100})',
        ).on_every_rank()
    transport = transport or _all_ranks()
    finished = loop.train(
        transport,
        lambda: settings if isinstance(settings, Config) else parse(settings),
        resume,
        stop_requested,
        watchers,
    )
    finished.job.close()
    return SavedRun(finished.folder, False, transport)


def load(folder: str | Path, *, best: bool = False, transport: Transport | None = None) -> SavedRun:
    """Open a run directory, or a folder of transformers, on any number of ranks.

    The layout of the training run does not matter: one rank opens what eight have trained. Of a run
    in progress it is the newest checkpoint.

    Parameters
    ----------
    folder : str or Path
        The run directory.
    best : bool
        Whether to take the checkpoint with the best validation loss, instead of the newest one.
    transport : Transport, optional
        The ranks that open it. None: all ranks of the job.

    Raises
    ------
    ConfigError
        The folder is missing, or holds neither a run nor a model.

    Examples
    --------
    >>> run = mpitrain.load("runs/a")
    >>> run.evaluate()["loss"]
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}.", "Name the directory of a run.")
    if not is_run(folder) and not has_model(folder):
        raise ConfigError(
            f"{folder} holds neither a run nor a model.",
            "Name the directory of a run, which `mpitrain train --out` or mpitrain.train wrote.",
        )
    return SavedRun(folder, best, transport)


class SavedRun:
    """A run in its directory. The first `generate` or `evaluate` loads a checkpoint.

    Attributes
    ----------
    folder : Path
        The run directory.
    """

    def __init__(self, folder: Path, best: bool = False, transport: Transport | None = None):
        self.folder, self._best, self._transport = folder, best, transport
        self._job: Job | None = None

    def __repr__(self) -> str:
        records = read_metrics(self.folder / METRICS)
        facts = [f"{r['parameters']:,} parameters" for r in records if "parameters" in r][-1:]
        facts += ["stopped" for r in records[-1:] if r.get("event") == "stopped"]
        losses = {
            name: f"{name} {record[key]:.4f} after step {record['step']}"
            for record in records
            for name, key in (("loss", "loss"), ("validation loss", "val_loss"))
            if is_number(record.get(key))
        }
        return f"{self.folder}: {'; '.join([', '.join(facts), *losses.values()])}"

    def generate(
        self,
        prompt: str = "\n",
        *,
        tokens: int = 400,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = False,
    ) -> str:
        """Return the text after a prompt, as `mpitrain generate` writes it; collective.

        Parameters
        ----------
        prompt : str
            Text to continue; token numbers if the run knows no tokenizer.
        tokens : int
            Most tokens of the text.
        temperature : float
            0 takes the likeliest token.
        top_k, top_p : int, float
            Draw among this many likeliest tokens, 0: all; among the fewest with this probability.
        seed : int
            Of the draws.
        chat : bool
            Whether the prompt is what a user says, in the run's template of conversations.
        """
        job = self._opened(needs_data=False)
        tokenizer, prompts, ends = prompted(
            job.trainer, job.source.inputs, self.folder, lambda: [prompt], is_chat=chat
        )
        stops = end_of_turn(job.config.data) if chat else []
        request = PromptRequest(
            Sampling(temperature, top_k, top_p), seed, tokens, stops, True, ends
        )
        pieces = continued(job.trainer, tokenizer, [prompts[0][1]], 1, request)
        return b"".join(piece.text for piece in pieces).decode(errors="backslashreplace")

    def evaluate(self) -> dict[str, float]:
        """Return the loss on the held-out rows, and the accuracy or errors, as `mpitrain eval`; collective."""
        return evaluated(self._opened(needs_data=True))

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The logged series by name: `step`, `loss`, `val_loss`, and so on.

        All arrays have a value for each logged step, NaN where a series has none, as
        `pandas.DataFrame(run.metrics)` takes them.
        """
        rows = joined("", metrics_of(self.folder))
        names = ["step", *dict.fromkeys(n for row in rows for n in row if n not in ("run", "step"))]
        return {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}

    def _opened(self, needs_data: bool) -> Job:
        """Return the job of a checkpoint; one that has no data writes text, but is not evaluated; collective."""
        if self._job and not (needs_data and isinstance(self._job.source, Unopened)):
            return self._job
        if self._job:
            self._job.close()
            self._job = None  # also if the next one does not open
        self._transport = self._transport or _all_ranks()
        self._job = open_run(
            self._transport,
            self.folder,
            partial(configured, self.folder, []),
            needs_data,
            self._best,
        )
        return self._job


def evaluated(job: Job) -> dict[str, Any]:
    """Return what `mpitrain eval` measures of a job with data, by name; collective.

    loss is in nats per prediction; then accuracy, or the errors of numbers.
    """
    trainer, rows = job.trainer, evaluated_rows(job.trainer.config.run, job.data)
    evaluation = trainer.evaluate(job.data)
    assert evaluation is not None  # `evaluate` returns None only after a stop request
    loss, accuracy = evaluation
    scores = {"accuracy": accuracy}
    if math.isnan(accuracy):
        scores = errors(job, [row * job.data.held_out // rows for row in range(rows)])
    numbers: dict[str, Any] = {"loss": loss}
    if job.data.form == "tokens":
        numbers["perplexity"] = perplexity(loss)
    numbers |= {"bits_per_byte": bits_per_byte(job.data, loss), **scores}
    return numbers | {"rows": rows, "held_out_rows": job.data.held_out}
