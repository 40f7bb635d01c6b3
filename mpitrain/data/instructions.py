"""Instruction data: conversations in JSON lines. Only the answers are trained on.

A line is {"prompt": TEXT, "answer": TEXT}, or {"messages": [{"role": ROLE, "content": TEXT}, ...]}.
A prompt is a message of the role user, an answer is a message of the role assistant. Each message
is written by data.template. Tokens are bytes. In a message of the assistant, the content and the
template's text after it count as targets. All other targets are IGNORED.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.rows import EpochOrder, first_fit, positions
from mpitrain.data.source import DOCUMENT_END, IGNORED, Form, Request
from mpitrain.data.tokens import BYTES
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import check_regular, contents
from mpitrain.strict_json import parsed

USER, ASSISTANT = "user", "assistant"
SHOWN = 10
"""The largest number of keys that the error about a wrong line lists."""
Conversation = tuple[np.ndarray, np.ndarray]
"""The N tokens of a conversation, (N,) uint8, and whether each counts as a target, (N,) bool."""
Row = Sequence[Conversation]
"""The conversations of one row: one, or with packing several."""
Turn = tuple[str, str]
"""The role and the content of a message."""


class InstructionSource:
    """A data source of conversations; its rows are shuffled anew in each epoch by (seed, epoch).

    inputs and targets are (B, T) int64. A row has one conversation, which is cut after T + 1
    tokens. A shorter one is padded with token 0 and IGNORED targets. With packing, a row to train
    on has as many conversations as fit, one after the other, and each has the same targets as
    alone. Attention crosses the borders of conversations, unless `marks_ends` makes each of them a
    document.

    test     the held-out conversations; empty: the last tenth of `conversations`
    samples  number of rows to train on
    """

    form: Form = "tokens"
    inputs = classes = BYTES
    bytes_per_token = 1.0

    def __init__(
        self,
        conversations: Sequence[Conversation],
        context: int,
        is_packed: bool = False,
        marks_ends: bool = False,
        test: Sequence[Conversation] = (),
    ):
        self.shape: tuple[int, ...] = (context,)
        self.is_packed, self._marks_ends = is_packed, marks_ends
        cut = len(conversations) - (0 if test else max(1, len(conversations) // 10))
        train, test = conversations[:cut], test or conversations[cut:]
        self.conversations, self.held_out = len(train), len(test)
        self.cut = sum(len(tokens) > context + 1 for tokens, _ in train)
        self._train: Sequence[Row] = [[conversation] for conversation in train]
        self._test: Sequence[Row] = [[conversation] for conversation in test]
        if is_packed:
            packed = first_fit([len(tokens) for tokens, _ in train], context + 1)
            self._train = [[train[number] for number in row] for row in packed]
        self.samples = len(self._train)
        self.amounts = {
            "conversations": self.conversations,
            "held_out_conversations": self.held_out,
            "cut_conversations": self.cut,
            **({"packed_rows": self.samples} if is_packed else {}),
        }
        self._order = EpochOrder(self.samples)

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        chosen = self._order.chosen(seed, positions(step, size, rows, before))
        return self._filled([self._train[number] for number in chosen])

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return self._filled([self._test[number] for number in rows])

    def _filled(self, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        (context,) = self.shape
        inputs = np.zeros((len(rows), context), np.int64)
        targets = np.full((len(rows), context), IGNORED, np.int64)
        for x, y, row in zip(inputs, targets, rows, strict=True):
            at = 0
            for whole, counts in row:
                tokens = whole[: context + 1 - at]
                x[at : at + len(tokens)] = tokens[: context - at]
                following, counted = tokens[1:], counts[1 : len(tokens)]
                y[at : at + len(following)][counted] = following[counted]
                at += len(tokens)
                if self._marks_ends and at <= context:
                    y[at - 1] = DOCUMENT_END
        return inputs, targets


def open_jsonl(request: Request) -> InstructionSource:
    """Open a file of conversations, and the file of the held-out ones."""
    template = request.reading.template
    if template.count("{content}") != 1 or "{role}" in template.partition("{content}")[2]:
        raise ConfigError(
            f"data.template must have one {{content}}, and {{role}} only before it, but is {template!r}.",
            "For example: {role}: {content}\\n\\n",
        )
    place, held_out = request.place, request.other
    conversations = _conversations(Path(place), template, 1 if held_out else 2)
    test = _conversations(Path(held_out), template, 1) if held_out else []
    marks_ends = request.reading.attend == "document"
    source = InstructionSource(
        conversations, request.context, request.reading.packing, marks_ends, test
    )
    source.inputs = source.classes = max(BYTES, request.vocabulary)
    for some, noun, path in (
        (conversations[: source.conversations], "training", place),
        (test or conversations[source.conversations :], "held-out", held_out or place),
    ):
        if not any(counts[1 : request.context + 1].any() for _, counts in some):
            raise DataError(
                f"A {noun} conversation of {path} must have an answer in its first {request.context + 1} tokens, but none has.",
                "Raise model.context, or shorten the prompts.",
            )
    return source


def _conversations(path: Path, template: str, least: int) -> list[Conversation]:
    """Read a file of conversations; DataError if a line is none, or if there are fewer than `least`."""
    try:
        check_regular(path)
        lines = contents(path).split(b"\n")
    except OSError as error:
        raise DataError(
            f"The data file {path} cannot be read: {error.strerror}.",
            "Check data.source and data.validation.",
        ) from None
    conversations = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                conversations.append(_tokens(_turns(parsed(line)), template))
            except ValueError as error:
                raise DataError(
                    f"Line {number} of {path} must be a conversation, but {error}.",
                    'Write {"prompt": TEXT, "answer": TEXT} or {"messages": [...]} on each line.',
                ) from None
    if len(conversations) < least:
        raise DataError(
            f"{path} must have at least {least} conversation(s), but has {len(conversations)}.",
            "One of them is held out; add more." if least > 1 else "Add conversations.",
        )
    return conversations


def _turns(record: Any) -> list[Turn]:
    """Return the messages of a line; if it has none, ValueError with the end of an error's sentence."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {type(record).__name__}")
    if set(record) == {"prompt", "answer"}:
        messages = [
            {"role": USER, "content": record["prompt"]},
            {"role": ASSISTANT, "content": record["answer"]},
        ]
    elif set(record) == {"messages"} and isinstance(record["messages"], list):
        messages = record["messages"]
    else:
        more = ["..."] if len(record) > SHOWN else []
        keys = ", ".join([*map(ascii, islice(record, SHOWN)), *more]) or "none"
        raise ValueError(f"its keys are {keys}")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError("a message has other keys than role and content")
        if not all(isinstance(text, str) for text in message.values()):
            raise ValueError("a role or a content is no text")
    return [(message["role"], message["content"]) for message in messages]


def _tokens(turns: Sequence[Turn], template: str) -> Conversation:
    """Return the bytes of a conversation, (N,) uint8, and whether each counts as a target."""
    head, _, tail = template.partition("{content}")
    pieces, counts = [], []
    for role, content in turns:
        for text, does_count in (
            (head.replace("{role}", role), False),
            (content + tail, role == ASSISTANT),
        ):
            pieces.append(text.encode())
            counts.append(np.full(len(pieces[-1]), does_count))
    tokens = np.frombuffer(b"".join(pieces), np.uint8)
    return tokens, np.concatenate(counts) if counts else np.empty(0, bool)
