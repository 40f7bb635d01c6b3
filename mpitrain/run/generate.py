"""Autoregressive text generation with a trained model, for one prompt or several."""

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.group import bind
from mpitrain.config import Config, Data
from mpitrain.data import writes_text
from mpitrain.data.conversations import is_of_texts
from mpitrain.data.rendering import Message
from mpitrain.data.templates import USER, Conversation, end_of_answer, message, open_template
from mpitrain.data.tokenizer import (
    TOKENIZER,
    ByteTokenizer,
    Tokenizer,
    open_tokenizer,
    tokens_of_text,
)
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import contents, reading_of, text_of
from mpitrain.formats import companions
from mpitrain.formats.folder import refusing
from mpitrain.models.table import MODELS, kinds
from mpitrain.run import inference
from mpitrain.run.inference import Reader, diverged
from mpitrain.run.run_dir import is_run
from mpitrain.run.trainer import Trainer
from mpitrain.strict_json import parsed
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks

JSON_LINES = ".jsonl"
SAMPLE_SECONDS = 10
"""Longest time, in seconds, to generate samples: all ranks wait for it."""


NOT_FINITE = -1
"""The value in place of a token if the logits are not finite."""


RECURSIVE = "recursive-doubling"
"""The all-reduce that spreads the tokens of a round: few numbers want few steps."""


class Sampling(NamedTuple):
    """How to draw a token from logits.

    temperature  divides the logits; 0 takes the most likely token
    top_k        number of the most likely tokens to draw from; 0: all
    top_p        draw from the fewest tokens with at least this probability together (nucleus
                 sampling, Holtzman et al. 2020); 1: all
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0


class PromptRequest(NamedTuple):
    """How to continue prompts.

    tokens  the most tokens after a prompt
    stops   texts before which a continuation ends
    cuts    as in `texts`
    ends    tokens at which a continuation ends, such as the end of a text
    """

    sampling: Sampling
    seed: int
    tokens: int
    stops: Sequence[str] = ()
    cuts: bool = True
    ends: Sequence[int] = ()


class TextPiece(NamedTuple):
    """The next text of a prompt.

    ended   empty if there is more text, else the reason of the end: "end" of the text, "stop",
            "tokens" or "context"; "asked" after a stop request
    tokens  all tokens of the prompt's continuation so far
    """

    prompt: int
    text: bytes
    ended: str
    tokens: list[int]


def tokenizer_of_run(folder: Path, data: Data) -> Tokenizer | None:
    """Return the tokenizer of a run or of another folder; None if that knows only numbers of tokens."""
    if writes_text(data.source, data.mixture, data.tokenizer):
        return ByteTokenizer()
    path, way_out = _home(folder, data) / TOKENIZER, "Copy it from the data of the run."
    if not os.path.lexists(path):
        return None
    with reading_of(f"The tokenizer {path}", way_out, DataError):
        return open_tokenizer(contents(path), str(path))


def _home(folder: Path, data: Data) -> Path:
    """Return the folder with the tokenizer: of adapters of another project, it is that of their base."""
    return folder if is_run(folder) or not data.tokenizer else Path(data.tokenizer).parent


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

    Replica r of n takes prompt r and every n-th after it. Its stage with the last layer draws the
    tokens, and an all-reduce of all ranks spreads them. Every rank passes the same arguments, and
    takes the same number of rounds from the iterator.

    The model reads a window of at most model.context tokens. Before a full window gets the next
    token, it is cut to its newest half, which is read again at positions from 0. If the model was
    trained with data.attend=document, a window also begins anew after each separator.

    prompts         at least one token each; only the last model.context of them count
    seed            prompt i draws with seed + i
    count           tokens after each prompt; None: no limit
    ends            (prompt, token) -> whether this token is the last one of its prompt; called on
                    all ranks, with the same result
    stop_requested  called only on rank 0, in every round; after True this round is the last
    cuts            False: a text ends when its window is full, and prompts must be shorter
    yields          (prompt, token) of each prompt that has not ended, in order
    raises          TrainingError on every rank if the logits are not finite
    """
    context, grid = trainer.config.model.context, trainer.grid
    separator = separator_of(trainer.config.data)
    if not all(map(len, prompts)):
        raise ConfigError("A prompt needs at least one token.", "Give --prompt some text.")
    windows = [last_document(prompt, separator)[-context:] for prompt in prompts]
    # With layout.ep the forwards of all replicas exchange tokens, so each computes all prompts.
    first, replicas = (0, 1) if grid.ep else (grid.coords.dp, grid.axes.dp)
    share = () if grid.is_server else range(first, len(windows), replicas)
    longest = max(map(len, windows))
    room = context if count is None else min(context, longest + count)
    generators = [np.random.default_rng(seed + index) for index in range(len(windows))]
    decision = np.zeros(1 + len(windows), np.int64)  # whether a stop is requested, and the tokens
    broadcast = bind(trainer.transport, decision, algorithm=RECURSIVE)
    reader = None if grid.is_server else inference.reader(trainer, len(share), room)
    active = list(range(len(windows)))
    for _ in islice(count_from(), count):
        decision.fill(0)
        if reader and not set(share).isdisjoint(active):
            drawn = _drawn(trainer, reader, windows, share, active, sampling, generators)
            if grid.coords.dp == first:
                decision[1:] = drawn
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


def continued(
    trainer: Trainer,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    batch: int,
    request: PromptRequest,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[TextPiece]:
    """Continue prompts, in groups of `batch` for each replica, and yield their text; collective.

    stop_requested  as in `texts`
    """
    size, sampling, stops = batch * trainer.grid.axes.dp, request.sampling, request.stops
    for first in range(0, len(prompts), size):
        group = prompts[first : first + size]
        continuations = [Continuation(tokenizer, prompt, stops) for prompt in group]
        fresh = [b""] * len(group)

        def ends(
            index: int, token: int, continuations: Any = continuations, fresh: Any = fresh
        ) -> bool:
            is_end = token in request.ends
            fresh[index] = b"" if is_end else continuations[index].add(token)
            return is_end or continuations[index].stopped

        seed, cuts = request.seed + first, request.cuts
        for together in texts(
            trainer, group, sampling, seed, request.tokens, ends, stop_requested, cuts
        ):
            for index, token in together:
                continuation, ended = continuations[index], ""
                if token in request.ends:
                    ended = "end"
                elif continuation.stopped:
                    ended = "stop"
                elif len(continuation.tokens) == request.tokens:
                    ended = "tokens"
                elif not cuts and _fills([*group[index], *continuation.tokens], trainer.config):
                    ended = "context"
                text = fresh[index] + (continuation.rest() if ended else b"")
                yield TextPiece(first + index, text, ended, continuation.tokens)


def ends_of(tokenizer: Tokenizer | None, data: Data, folder: Path) -> list[int]:
    """Return the tokens that end a text.

    They are data.separator, the tokenizer's end of text, that of an answer, and those of the folder that
    the model began from.

    folder  of the run
    """
    ends = {data.separator, tokenizer.separator if tokenizer else -1}
    ends |= {end[1]} if (end := end_token(tokenizer, data)) else set()
    with refusing(folder):
        files = companions.of_folder(_home(folder, data), companions.OF_MODEL)
        ends |= {*companions.ends(files)}
    return sorted(token for token in ends if token >= 0)


def end_token(tokenizer: Tokenizer | None, data: Data) -> tuple[str, int] | None:
    """Return the name and the number of the token that ends an answer; None: no token does."""
    end = "".join(end_of_turn(data))
    token = tokenizer.named(end) if tokenizer and end else None
    return None if token is None else (end, token)


def end_of_turn(data: Data) -> list[str]:
    """Return the text after an answer, in a list; empty if the run has no conversations."""
    return [end] if data.template and (end := end_of_answer(data.template)) else []


def asked(tokenizer: Tokenizer | None, data: Data, turns: Sequence[Message]) -> list[int]:
    """Return the tokens after which the assistant answers; ConfigError if the template refuses the turns."""
    try:
        with open_template(data.template) as template:
            text = template.write(Conversation(turns), True)
    except ValueError as error:
        raise ConfigError(
            f"A conversation must be one for data.template, but {error}.", "Say something else."
        ) from None
    if tokenizer is None:
        raise ConfigError(
            "Conversations are text, but the run has no tokenizer.", f"Copy its {TOKENIZER} there."
        )
    return [*tokens_of_text(tokenizer, text, is_of_texts(data.template)).ids]


def asked_alone(
    tokenizer: Tokenizer | None, data: Data, texts: Sequence[str], run: Path
) -> list[tuple[str, list[int]]]:
    """Return each text of a user with the tokens after which the assistant answers; ConfigError without a template."""
    if not data.template:
        raise ConfigError(
            f"--chat needs the template of conversations, but {run} has none.", "Leave out --chat."
        )
    if not texts:
        raise ConfigError("--chat needs what a user says.", "Give --prompt or --prompts.")
    return [(text, asked(tokenizer, data, [message(USER, text)])) for text in texts]


def prompted(
    trainer: Trainer,
    vocabulary: int,
    run: Path,
    read: Callable[[], Sequence[str]],
    stops: Sequence[str] = (),
    cuts: bool = True,
    ignores_end: bool = False,
    is_chat: bool = False,
) -> tuple[Tokenizer | None, list[tuple[str, list[int]]], list[int]]:
    """Return the tokenizer of a run, each prompt with its tokens, and the tokens that end a text; collective.

    read         returns the prompts, on rank 0; none: a line break
    stops, cuts  as in `PromptRequest`
    ignores_end  whether no token ends a text
    is_chat      whether a prompt is what a user says
    """
    config, transport = trainer.config, trainer.transport

    def opened() -> tuple[Tokenizer | None, list[int]]:
        tokenizer = tokenizer_of_run(run, config.data)
        return tokenizer, [] if ignores_end else ends_of(tokenizer, config.data, run)

    tokenizer, ends = on_all_ranks(transport, opened)

    def encode() -> list[tuple[str, list[int]]]:
        check_writes(config.model.kind)
        for stop in stops:
            stop_bytes(stop, tokenizer)
        if transport.rank:
            return []  # A file may differ on another host.
        texts = read()
        if is_chat:
            prompts = asked_alone(tokenizer, config.data, texts, run)
        else:
            reading = tokenizer, vocabulary, config.data.template, is_run(run)
            prompts = [(text, encoded(text, *reading)) for text in texts or ["\n"]]
        if not cuts:
            separator = separator_of(config.data)
            documents = [last_document(tokens, separator) for _, tokens in prompts]
            check_room(documents, config.model.context)
        return prompts

    return tokenizer, from_all_ranks(transport, encode)[0], ends


def samples(
    trainer: Trainer,
    folder: Path,
    vocabulary: int,
    prompts: Sequence[str],
    stop_requested: Callable[[], bool],
) -> list[str]:
    """Continue each prompt by at most run.sample tokens, for SAMPLE_SECONDS in all; collective.

    folder   of the run
    prompts  of conversations, what the user says; an empty one begins with the end of a text
    """
    data, until = trainer.config.data, time.monotonic() + SAMPLE_SECONDS

    def read() -> tuple[Tokenizer | None, list[int], list[list[int]]]:
        tokenizer = tokenizer_of_run(folder, data)
        return (
            tokenizer,
            ends_of(tokenizer, data, folder),
            [
                first_tokens(tokenizer)
                if not prompt
                else asked(tokenizer, data, [message(USER, prompt)])
                if data.template
                else encoded(prompt, tokenizer, vocabulary)
                for prompt in prompts
            ],
        )

    tokenizer, ends, begun = on_all_ranks(trainer.transport, read)
    request = PromptRequest(Sampling(), 0, trainer.config.run.sample, end_of_turn(data), True, ends)
    texts = [b""] * len(prompts)
    for piece in continued(
        trainer,
        tokenizer,
        begun,
        len(prompts),
        request,
        lambda: time.monotonic() > until or stop_requested(),
    ):
        texts[piece.prompt] += piece.text
    return [text.decode(errors="backslashreplace") for text in texts]


def first_tokens(tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens before a text without a prompt: the end of the text before, or a line break."""
    if tokenizer is None:
        return [0]
    return (
        [tokenizer.separator]
        if tokenizer.separator >= 0
        else tokenizer.encode("\n").tolist()[:1] or [0]
    )


def _fills(tokens: Sequence[int], config: Config) -> bool:
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
    """Return a token for each prompt; 0 if the prompt has ended, or another rank draws for it."""
    drawn = [0] * len(windows)
    logits = reader.read([windows[index] for index in share], trainer.config.model.context)
    if logits is not None and trainer.grid.reports_loss and not trainer.grid.coords.cp:
        for index, row in zip(share, logits, strict=True):
            if index in active:
                drawn[index] = draw(row, sampling, generators[index])
    return drawn


def draw(logits: np.ndarray, sampling: Sampling, generator: np.random.Generator) -> int:
    """Draw a token from the logits, (V,) float64; NOT_FINITE if these are not finite."""
    if not np.isfinite(logits).all():
        return NOT_FINITE
    if sampling.temperature == 0:
        return int(logits.argmax())
    # These lines equal `generator.choice`, without its checks.
    sums = probabilities(logits, sampling).cumsum()
    sums /= sums[-1]
    return int(sums.searchsorted(generator.random(), side="right"))


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probability of each token, (V,), in the order of transformers' warpers."""
    temperature, top_k, top_p = sampling
    if 0 < top_k < len(logits):
        least = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits < least, -np.inf, logits)
    with np.errstate(over="ignore"):  # Near temperature 0 most weights underflow to exp(-inf).
        weights = np.exp((logits - logits.max()) / temperature)
    weights /= weights.sum()
    if top_p < 1:
        order = weights.argsort(kind="stable")[::-1]
        before = weights[order].cumsum() - weights[order]
        weights[order[before >= top_p]] = 0
        weights /= weights.sum()
    return weights


def separator_of(data: Data) -> int:
    """Return the token at which attention begins a new document; -1 if it never does."""
    return data.separator if data.attend == "document" else -1


def last_document(tokens: Sequence[int], separator: int) -> list[int]:
    """Return the tokens of the last document; the separator at its end, if there, belongs to it."""
    begin = len(tokens) - 1
    while begin and (separator < 0 or tokens[begin - 1] != separator):
        begin -= 1
    return [*tokens[begin:]]


class Continuation:
    """The text after one prompt, token by token.

    Without a tokenizer, text is a space and the number of each token.

    tokens   all tokens so far
    stopped  whether a stop text has been found; the text ends before it
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str]):
        self.tokens, self.stopped = list[int](), False
        self._waiting, self._next = b"", list[int]()
        encoded = [stop_bytes(stop, tokenizer) for stop in stops]
        boundary = b"" if tokenizer else rb"\b"
        self._pattern = re.compile(b"|".join(re.escape(stop) + boundary for stop in encoded))
        # The first characters of a stop text, or its first numbers.
        self._heads = [
            stop[:length]
            for stop in encoded
            for length in range(1, len(stop))
            if tokenizer or stop[length : length + 1] == b" "
        ]
        self._cuts = bool(encoded)
        self._pieces = (
            tokenizer.stream(self._fed(), prompt)
            if tokenizer
            else (b" %d" % token for token in self._fed())
        )

    def add(self, token: int) -> bytes:
        """Add a token, and return the text that no stop text can cut off any more."""
        self.tokens.append(token)
        self._next.append(token)
        self._waiting += next(self._pieces)
        return self._free()

    def rest(self) -> bytes:
        """Return the text that `add` has kept back; no token may follow."""
        if self.stopped:
            return b""
        self._waiting += b"".join(self._pieces)
        text, rest = self._free(), b"" if self.stopped else self._waiting
        return text + rest

    def _fed(self) -> Iterator[int]:
        """Yield tokens to the tokenizer's stream, each when `add` has received it."""
        while self._next:
            yield self._next.pop()

    def _free(self) -> bytes:
        """Return and forget the text before a stop text, or before what may become one."""
        if self._cuts and (match := self._pattern.search(self._waiting)):
            self.stopped = True
            return self._waiting[: match.start()]
        longest = max(
            (len(head) for head in self._heads if self._waiting.endswith(head)), default=0
        )
        cut = len(self._waiting) - longest
        text, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return text


def stop_bytes(stop: str, tokenizer: Tokenizer | None) -> bytes:
    """Return the bytes of a stop text; ConfigError if it is empty, or no numbers without a tokenizer."""
    if not stop:
        raise ConfigError(
            "A stop text has at least one character, but --stop is empty.", "Name a text."
        )
    if tokenizer:
        return os.fsencode(stop)
    if not re.fullmatch(r"\s*\d+(\s+\d+)*\s*", stop, re.ASCII):
        raise ConfigError(
            f"A model of token numbers takes numbers as a stop, but got {stop!r}.",
            'For example: --stop "17 4"',
        )
    return b"".join(b" %d" % int(word) for word in stop.split())


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or {"prompt": TEXT} a line if it ends in .jsonl.

    Empty lines are no prompts.
    """
    try:
        text = text_of(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"A file of prompts is UTF-8, but byte {error.start} of {path} is not.",
            "Convert the file, for example with iconv.",
        ) from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == JSON_LINES:
        prompts = [_prompt_of(line, f"line {number} of {path}") for number, line in lines]
    else:
        prompts = [line.removesuffix("\r") for _, line in lines]
    if not prompts:
        raise DataError(f"A file of prompts has a prompt, but {path} has none.", "Add a line.")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        value = parsed(line.encode())
    except ValueError as error:
        raise DataError(
            f"Each line of a {JSON_LINES} file is JSON, but {where} is not: {error}.",
            'Write {"prompt": "..."} on each line.',
        ) from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise DataError(
            f'Each line of prompts is an object with a text "prompt", but {where} is not.',
            'Write {"prompt": "..."} on each line.',
        )
    return value["prompt"]


def check_writes(kind: str) -> None:
    if not MODELS[kind].writes:
        raise ConfigError(
            f"Only a {' or '.join(kinds(lambda row: row.writes))} writes text, but this model is a {kind}.",
            "Name another model.",
        )


def encoded(
    prompt: str,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    template: str = "",
    of_run: bool = True,
) -> list[int]:
    """Return the tokens of a prompt; without a tokenizer it is the numbers of its tokens.

    A run was trained on text without the tokens that its tokenizer adds, unless the template has them.

    template  data.template; if the run has one, names of special tokens are these tokens
    of_run    False for a folder of another project: the tokens are those of transformers
    """
    if not prompt:
        raise ConfigError(
            "A prompt needs at least one token.", "Leave out --prompt to begin with a line break."
        )
    if tokenizer is None:
        return _numbers(prompt, vocabulary)
    if isinstance(tokenizer, ByteTokenizer):
        return list(os.fsencode(prompt))  # The bytes need not be valid UTF-8.
    if not of_run:
        tokens = [*tokenizer.encode_marked(prompt, adds=True).ids]
    elif template:
        begin = tokenizer.begins if (is_text := is_of_texts(template)) else ""
        tokens = [*tokens_of_text(tokenizer, begin + prompt, is_text).ids]
    else:
        tokens = tokenizer.encode(prompt).tolist()
    if not tokens or max(tokens) >= vocabulary:
        raise ConfigError(
            f"A prompt needs at least one token, and all below {vocabulary}, but {prompt!r} has {tokens[:8]}.",
            "Give --prompt another text.",
        )
    return tokens


def _numbers(prompt: str, vocabulary: int) -> list[int]:
    try:
        numbers = [int(word) for word in prompt.split()] or [0]
    except ValueError:
        raise ConfigError(
            f"A model of token numbers takes numbers as its prompt, but got {prompt!r}.",
            'For example: --prompt "17 4 120"',
        ) from None
    if not all(0 <= number < vocabulary for number in numbers):
        raise ConfigError(
            f"Tokens must lie in 0..{vocabulary - 1}, but the prompt is {prompt!r}.",
            "Use known tokens.",
        )
    return numbers


def check_room(prompts: Sequence[Sequence[Any]], context: int) -> None:
    longest = max(map(len, prompts))
    if longest >= context:
        raise ConfigError(
            f"With --past-context stop a prompt is shorter than model.context {context}, but one has {longest} tokens.",
            "Shorten it, or leave out --past-context.",
        )
