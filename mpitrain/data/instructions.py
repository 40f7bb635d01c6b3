"""Instruction data: conversations, in JSON lines or prepared. Only the answers are trained on.

A line is {"prompt": TEXT, "answer": TEXT}, or {"messages": [{"role": ROLE, "content": TEXT}, ...]}.
A prompt is a message of the role user, an answer is a message of the role assistant. data.template
writes the messages as one text. The tokens of an answer, and of the template's text after it, count
as targets. All other targets are IGNORED.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.data.rows import Shuffled, first_fit
from mpitrain.data.source import DOCUMENT_END, IGNORED, Form, Reading, Request
from mpitrain.data.templates import ASSISTANT, PLAIN, USER, Rendered, Turn, open_template, rendered
from mpitrain.data.token_files import (
    ArrayTokens,
    FlatTokens,
    marks_of,
    template_of,
    token_paths,
    tokens_of,
)
from mpitrain.data.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import contents, reading_of
from mpitrain.strict_json import parsed

if TYPE_CHECKING:
    from mpitrain.data.samples import SampleSource

SHOWN = 10
"""The largest number of keys that the error about a wrong line lists."""
COUNTS, BEGINS = 1, 2
"""Bits of a mark: the token counts as a target; a conversation begins with the token."""


class Conversations:
    """Conversations one after the other: their tokens, and a mark for each token.

    lengths   (N,) int64, the number of tokens of each conversation
    answered  (N,) bool, whether a token of the conversation counts
    """

    def __init__(self, tokens: FlatTokens, marks: np.ndarray):
        """marks: (tokens,) uint8"""
        self._tokens, self._marks = tokens, marks
        self._starts = np.append(np.flatnonzero(marks & BEGINS), len(marks))
        self.lengths = np.diff(self._starts)
        self.answered = self.count_within(int(self.lengths.max(initial=0))) > 0

    def __len__(self) -> int:
        return len(self.lengths)

    def count_within(self, tokens: int) -> np.ndarray:
        """Return the targets that count in the first `tokens` + 1 tokens of each, (N,) int64."""
        before = np.append(0, np.cumsum(self._marks & COUNTS, dtype=np.int64))
        firsts = self._starts[:-1]
        lasts = np.minimum(self._starts[1:], firsts + tokens + 1)
        return before[lasts] - before[np.minimum(firsts + 1, lasts)]

    def read(self, number: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `most` tokens of a conversation, and whether each counts as a target."""
        start = int(self._starts[number])
        tokens = np.empty(min(most, int(self.lengths[number])), self._tokens.dtype)
        self._tokens.read(start, tokens)
        return tokens, self._marks[start : start + len(tokens)] & COUNTS != 0

    def region(self, start: int, stop: int) -> "Conversations":
        """Return the conversations start .. stop - 1, without a copy."""
        first, last = int(self._starts[start]), int(self._starts[stop])
        return Conversations(self._tokens.region(first, last), self._marks[first:last])


Row = Sequence[int]
"""The numbers of the conversations of one row: one, or with packing several."""


class InstructionSource(Shuffled):
    """A data source of conversations.

    inputs and targets are (B, T) int64. A row has one conversation, which is cut after T + 1
    tokens. A shorter one is padded with token 0 and IGNORED targets. With packing, a row to train
    on has as many conversations as fit, one after the other, and each has the same targets as
    alone. Attention crosses the borders of conversations, unless data.attend is document.

    test             the held-out conversations; None: the last tenth of `conversations`
    samples          number of rows to train on
    template         data.template, with which these conversations were written
    bytes_per_token  1 if tokens are bytes, else 0: unknown
    """

    form: Form = "tokens"

    def __init__(
        self,
        conversations: Conversations,
        vocabulary: int,
        request: Request,
        template: str,
        test: Conversations | None = None,
        bytes_per_token: float = 0.0,
    ):
        reading, context = request.reading, request.context
        self.inputs = self.classes = vocabulary
        self.shape: tuple[int, ...] = (context,)
        self.template, self.bytes_per_token, self.scan = template, bytes_per_token, request.scan
        self._marks_ends = reading.attend == "document"
        count = len(conversations)
        cut = count - (0 if test else max(1, count // 10))
        self._train = conversations.region(0, cut)
        self._test = test or conversations.region(cut, count)
        self.conversations, self.held_out = len(self._train), len(self._test)
        self.cut = int((self._train.lengths > context + 1).sum())
        self._packed: Sequence[Row] = [[number] for number in range(cut)]
        if reading.packing:
            self._packed = first_fit(self._train.lengths.tolist(), context + 1)
        self.samples = len(self._packed)
        silent = np.flatnonzero(~self._train.answered)
        self.amounts = {
            "conversations": self.conversations,
            "held_out_conversations": self.held_out,
            "cut_conversations": self.cut,
            **({"packed_rows": self.samples} if reading.packing else {}),
            **(
                {"without_answer": len(silent), "first_without_answer": int(silent[0]) + 1}
                if len(silent)
                else {}
            ),
        }
        super().__init__(self.samples)
        for some, noun, path in (
            (self._train, "training", request.place),
            (self._test, "held-out", request.other or request.place),
        ):
            if not some.count_within(context).any():
                raise DataError(
                    f"A {noun} conversation of {path} must have an answer in its first {context + 1} tokens, but none has.",
                    "Raise model.context, or shorten the prompts.",
                )

    def _rows(self, part: int, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if part:
            return self._filled(self._test, [[number] for number in chosen])
        return self._filled(self._train, [self._packed[number] for number in chosen])

    def _filled(
        self, conversations: Conversations, rows: Sequence[Row]
    ) -> tuple[np.ndarray, np.ndarray]:
        (context,) = self.shape
        inputs = np.zeros((len(rows), context), np.int64)
        targets = np.full((len(rows), context), IGNORED, np.int64)
        for x, y, row in zip(inputs, targets, rows, strict=True):
            at = 0
            for number in row:
                tokens, counts = conversations.read(number, context + 1 - at)
                x[at : at + len(tokens)] = tokens[: context - at]
                following, counted = tokens[1:], counts[1:]
                y[at : at + len(following)][counted] = following[counted]
                at += len(tokens)
                if self._marks_ends and at <= context:
                    y[at - 1] = DOCUMENT_END
        return inputs, targets


def open_jsonl(request: Request) -> "InstructionSource | SampleSource":
    """Open a file of conversations or labelled texts in JSON lines, and that of the held-out ones."""
    if request.form == "texts":
        from mpitrain.data.labelled import open_texts

        return open_texts(request)
    reading, given = request.reading, request.vocabulary
    tokenizer: Tokenizer = ByteTokenizer()
    if reading.tokenizer:
        tokenizer = read_tokenizer(reading.tokenizer)
    if 0 < given < tokenizer.vocabulary:
        raise DataError(
            f"The tokenizer {reading.tokenizer} has {tokenizer.vocabulary} tokens, but data.vocabulary or the model of "
            f"run.init_from has {given}.",
            "Name the tokenizer of that model with data.tokenizer.",
        )
    held_out = request.other
    template = reading.template or PLAIN
    read = (Path(request.place), template, tokenizer)
    return InstructionSource(
        _conversations(*read, 1 if held_out else 2),
        given or tokenizer.vocabulary,
        request,
        template,
        _conversations(Path(held_out), *read[1:], 1) if held_out else None,
        0.0 if reading.tokenizer else 1.0,
    )


def open_prepared(request: Request, vocabulary: int, template: str) -> InstructionSource:
    """Open conversations that `data prepare` wrote, whose files have been scanned."""
    reading = request.reading
    for key in ("order", "separator"):
        if getattr(reading, key) != Reading._field_defaults[key]:
            raise ConfigError(
                f"Rows of conversations are conversations, but data.{key} is {getattr(reading, key)!r}.",
                f"Leave out data.{key}.",
            )
    if reading.template not in ("", template):
        raise ConfigError(
            f"The conversations of {request.place} are written by another template than data.template "
            f"{reading.template!r}.",
            "Leave out data.template, or prepare them again.",
        )
    held_out = request.other
    if held_out and template_of(held_out) != template:
        raise DataError(
            f"Held-out conversations must have the template of {request.place}, but {held_out} has another.",
            "Prepare them together, or set data.validation=tenth.",
        )
    return InstructionSource(
        _of_files(request.place, reading.dtype),
        vocabulary,
        request,
        template,
        _of_files(held_out, reading.dtype) if held_out else None,
    )


def _of_files(place: str, dtype: str) -> Conversations:
    return Conversations(tokens_of(place, dtype), marks_of(token_paths(place)))


def encoded(tokenizer: Tokenizer, conversation: Rendered) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a conversation, (N,) int64, and their marks, (N,) uint8.

    Answers are encoded apart from the text before them, as they are generated after it.
    """
    pieces = tokenizer.encode_marked(conversation.pieces)
    marks = [np.full(len(piece), COUNTS * (at % 2), np.uint8) for at, piece in enumerate(pieces)]
    tokens, mark = np.concatenate(pieces), np.concatenate(marks)
    mark[:1] |= BEGINS
    return tokens, mark


def _conversations(path: Path, template: str, tokenizer: Tokenizer, least: int) -> Conversations:
    """Read a file of conversations; DataError if a line is none, or if there are fewer than `least`."""
    write = open_template(template)
    with reading_of(f"The data file {path}", "Check data.source and data.validation.", DataError):
        lines = contents(path).split(b"\n")
    dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
    tokens, marks = [np.empty(0, dtype)], [np.empty(0, np.uint8)]
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                conversation = rendered(write, turns_of(parsed(line)))
            except ValueError as error:
                raise not_one(number, path, error) from None
            own, mark = encoded(tokenizer, conversation)
            tokens.append(own.astype(dtype))
            marks.append(mark)
    found = Conversations(ArrayTokens(np.concatenate(tokens)), np.concatenate(marks))
    if len(found) < least:
        raise DataError(
            f"{path} must have at least {least} conversation(s), but has {len(found)}.",
            "One of them is held out; add more." if least > 1 else "Add conversations.",
        )
    return found


def not_one(number: int, path: Path, error: ValueError) -> DataError:
    """Return the error for a line that is no conversation."""
    return DataError(
        f"Line {number} of {path} must be a conversation, but {error}.",
        'Write {"prompt": TEXT, "answer": TEXT} or {"messages": [...]} on each line.',
    )


def is_conversation(record: Any) -> bool:
    """Return whether a line of JSON has the keys of a conversation."""
    return isinstance(record, Mapping) and set(record) in ({"prompt", "answer"}, {"messages"})


def turns_of(record: Any) -> list[Turn]:
    """Return the messages of a line; if it has none, ValueError with the end of an error's sentence."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {type(record).__name__}")
    if not is_conversation(record):
        more = ["..."] if len(record) > SHOWN else []
        keys = ", ".join([*map(ascii, islice(record, SHOWN)), *more]) or "none"
        raise ValueError(f"its keys are {keys}")
    if "messages" not in record:
        messages: Any = [
            {"role": USER, "content": record["prompt"]},
            {"role": ASSISTANT, "content": record["answer"]},
        ]
    elif not isinstance(messages := record["messages"], list) or not messages:
        raise ValueError("its messages are no list, or an empty one")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError("a message has other keys than role and content")
        if not all(isinstance(text, str) for text in message.values()):
            raise ValueError("a role or a content is no text")
        "".join(message.values()).encode()  # A lone surrogate is a ValueError, too.
    return [(message["role"], message["content"]) for message in messages]
