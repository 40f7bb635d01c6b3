"""Autoregressive text generation with a trained model, for one prompt or several."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.group import bind
from mpitrain.config import Config, Data
from mpitrain.data import writes_text
from mpitrain.data.tokenizer import TOKENIZER, ByteTokenizer, Tokenizer, open_tokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import contents
from mpitrain.run.decoding.continuation import Continuation
from mpitrain.run.decoding.document import last_document, separator_of
from mpitrain.run.decoding.reader import Reader
from mpitrain.run.decoding.sampling import NOT_FINITE, Sampling, draw
from mpitrain.run.trainer import Trainer, diverged

RECURSIVE = "recursive-doubling"
"""The all-reduce of the tokens of a round: a few numbers, in the fewest steps."""


def tokenizer_of_run(folder: Path, data: Data) -> Tokenizer | None:
    """Return the tokenizer of a run directory; None if the run knows the numbers of tokens only.

    raises  DataError if its file is damaged; ConfigError if it needs a missing package
    """
    if writes_text(data.source, data.mixture):
        return ByteTokenizer()
    try:
        content = contents(folder / TOKENIZER, inner=1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(
            f"The tokenizer {folder / TOKENIZER} cannot be read: {error.strerror}.",
            "Copy it from the data of the run.",
        ) from None
    return open_tokenizer(content, str(folder / TOKENIZER))


def tokens(
    trainer: Trainer,
    prompt: Sequence[int],
    temperature: float,
    top_k: int,
    seed: int,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Generate tokens after one prompt until a stop is requested; collective, as `texts`."""
    drawn = texts(
        trainer, [prompt], Sampling(temperature, top_k), seed, stop_requested=stop_requested
    )
    return (token for ((_, token),) in drawn)


def texts(
    trainer: Trainer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int,
    count: int | None = None,
    ends: Callable[[int, int], bool] = lambda prompt, token: False,
    stop_requested: Callable[[], bool] = lambda: False,
    cuts: bool = True,
) -> Iterator[list[tuple[int, int]]]:
    """Generate tokens after some prompts; collective.

    Replica r of n takes the prompts r, r + n, r + 2 n and so on. Its stage with the last layer
    draws the tokens, and an all-reduce of all ranks spreads them. Every rank passes the same
    arguments, and takes the same number of rounds from the iterator.

    A full window of model.context tokens is cut to its newest half, with the next token. This half
    is then read again, at positions from 0. If the model was trained with data.attend=document, a
    window also begins anew after each separator.

    prompts         at least one token each; only the last model.context of them count
    seed            prompt i draws with seed + i
    count           tokens after each prompt; None: no limit
    ends            (prompt, token) -> whether this token is the last one of its prompt; called on
                    all ranks, with the same result
    stop_requested  called only on rank 0, in every round; after True this round is the last
    cuts            False: a text ends when its window is full; prompts are shorter than that
    yields          (prompt, token) of each prompt that has not ended, in order
    raises          TrainingError on every rank if the logits are not finite
    """
    context, grid = trainer.config.model.context, trainer.grid
    separator = separator_of(trainer.config.data)
    if not all(map(len, prompts)):
        raise ConfigError("A prompt needs at least one token.", "Give --prompt some text.")
    windows = [last_document(prompt, separator)[-context:] for prompt in prompts]
    share = () if grid.is_server else range(grid.coords.dp, len(windows), grid.axes.dp)
    longest = max(map(len, windows))
    room = context if count is None else min(context, longest + count)
    generators = [np.random.default_rng(seed + index) for index in range(len(windows))]
    decision = np.zeros(1 + len(windows), np.int64)  # whether a stop is requested, and the tokens
    broadcast = bind(trainer.transport, decision, algorithm=RECURSIVE)
    reader = None if grid.is_server else trainer.reader(len(share), room)
    active = list(range(len(windows)))
    for _ in islice(count_from(), count):
        decision.fill(0)
        if reader and not set(share).isdisjoint(active):
            decision[1:] = _drawn(trainer, reader, windows, share, active, sampling, generators)
        if trainer.transport.rank == 0:
            decision[0] = stop_requested()
        broadcast.run()
        stop, *drawn = decision.tolist()
        if NOT_FINITE in drawn:
            raise diverged()
        pairs, active = [(index, drawn[index]) for index in active], []
        for index, token in pairs:
            window = windows[index]
            if window[-1] == separator:
                window.clear()
            window.append(token)
            if len(window) > context:
                del window[: -max(1, context // 2)]
            if not ends(index, token) and (cuts or len(window) < context):
                active.append(index)
        yield pairs
        if stop or not active:
            return


class PromptRequest(NamedTuple):
    """How to continue prompts: arguments of `texts`, with `tokens` as its count, and stop texts."""

    sampling: Sampling
    seed: int
    tokens: int
    stops: Sequence[str] = ()
    cuts: bool = True


class TextPiece(NamedTuple):
    """The next text of a prompt.

    ended   empty if there is more text, else the reason of the end: "stop", "tokens" or "context"
    tokens  all tokens of the prompt's continuation so far
    """

    prompt: int
    text: bytes
    ended: str
    tokens: list[int]


def continued(
    trainer: Trainer,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    batch: int,
    request: PromptRequest,
) -> Iterator[TextPiece]:
    """Continue prompts, in groups of `batch` for each replica, and yield their text; collective.

    raises  as `texts`
    """
    size, sampling, stops = batch * trainer.grid.axes.dp, request.sampling, request.stops
    for first in range(0, len(prompts), size):
        group = prompts[first : first + size]
        continuations = [Continuation(tokenizer, prompt, stops) for prompt in group]
        fresh = [b""] * len(group)

        def ends(
            index: int, token: int, continuations: Any = continuations, fresh: Any = fresh
        ) -> bool:
            fresh[index] = continuations[index].add(token)
            return continuations[index].stopped

        seed, cuts = request.seed + first, request.cuts
        for together in texts(trainer, group, sampling, seed, request.tokens, ends, cuts=cuts):
            for index, _ in together:
                continuation, ended = continuations[index], ""
                if continuation.stopped:
                    ended = "stop"
                elif len(continuation.tokens) == request.tokens:
                    ended = "tokens"
                elif not cuts and _fills([*group[index], *continuation.tokens], trainer.config):
                    ended = "context"
                text = fresh[index] + (continuation.rest() if ended else b"")
                yield TextPiece(first + index, text, ended, continuation.tokens)


def _fills(tokens: Sequence[int], config: Config) -> bool:
    """Return whether the document of the last token fills a window."""
    return len(last_document(tokens, separator_of(config.data))) >= config.model.context


def _drawn(
    trainer: Trainer,
    reader: Reader,
    windows: Sequence[Sequence[int]],
    share: Sequence[int],
    active: Collection[int],
    sampling: Sampling,
    generators: Sequence[np.random.Generator],
) -> list[int]:
    """Return a token for each prompt; 0 if the prompt is not active, or if another rank draws it.

    share  the numbers of the prompts of this replica
    """
    drawn = [0] * len(windows)
    logits = reader.read([windows[index] for index in share], trainer.config.model.context)
    if logits is not None and trainer.grid.reports_loss:
        for index, row in zip(share, logits, strict=True):
            if index in active:
                drawn[index] = draw(row, sampling, generators[index])
    return drawn
