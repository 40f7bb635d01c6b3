"""Instruction data: conversations, in files of records or prepared. Only the answers are trained on.

KINDS of `conversations` says which records are conversations. data.template writes their messages as
one text. The tokens of an answer, and of the template's text after it, count
as targets, or those of what the template's tag `generation` marks. All other targets are IGNORED.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.data.conversations import WAY_OUT, Recognised, is_of_texts
from mpitrain.data.records import DataRecord, read_records
from mpitrain.data.rendering import Rendered
from mpitrain.data.rows import Shuffled, first_fit
from mpitrain.data.source import DOCUMENT_END, IGNORED, Form, Reading, Request
from mpitrain.data.templates import Conversation, open_template, without_day
from mpitrain.data.token_files import (
    BEGINS,
    COUNTS,
    FOLLOWS,
    ArrayTokens,
    FlatTokens,
    marks_of,
    template_of,
    token_paths,
    tokens_of,
)
from mpitrain.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    ends_of_text,
    read_tokenizer,
    tokens_of_text,
)
from mpitrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mpitrain.data.samples import SampleSource


class Conversations:
    """Conversations one after the other: their tokens, and a mark for each token.

    If a template rewrites earlier answers, each answer has a row of its own, and counts as a
    conversation.

    lengths    (N,) int64, the number of tokens of each conversation
    rewritten  number of the conversations whose answers have rows of their own
    """

    def __init__(self, tokens: FlatTokens, marks: np.ndarray):
        """marks: (tokens,) uint8"""
        self._tokens, self._marks = tokens, marks
        self._starts = np.append(np.flatnonzero(marks & BEGINS), len(marks))
        self.lengths = np.diff(self._starts)
        follows = np.append(0, marks[self._starts[:-1]] & FOLLOWS)
        self.rewritten = int((np.diff(follows) > 0).sum())

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
    alone; a conversation without a target is in no row. Attention crosses the borders of
    conversations, unless data.attend is document.

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
        has_target = self._train.count_within(context) > 0
        self._packed: Sequence[Row] = [[number] for number in range(cut)]
        if reading.packing:
            numbers = np.flatnonzero(has_target)
            packed = first_fit(self._train.lengths[numbers].tolist(), context + 1)
            self._packed = [numbers[row].tolist() for row in packed]
        self.samples = len(self._packed)
        idle = np.flatnonzero(~has_target)
        self.amounts: dict[str, Any] = {
            "conversations": self.conversations,
            "held_out_conversations": self.held_out,
            "cut_conversations": self.cut,
            **({"packed_rows": self.samples} if reading.packing else {}),
            **(
                {"without_answer": len(idle), "first_without_answer": int(idle[0]) + 1}
                if len(idle)
                else {}
            ),
            **({"rewritten_conversations": n} if (n := self._train.rewritten) else {}),
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
    reading, vocabulary = request.reading, request.vocabulary
    tokenizer: Tokenizer = ByteTokenizer()
    if reading.tokenizer:
        tokenizer = read_tokenizer(reading.tokenizer)
    if 0 < vocabulary < tokenizer.vocabulary:
        raise DataError(
            f"The tokenizer {reading.tokenizer} has {tokenizer.vocabulary} tokens, but data.vocabulary or the model of "
            f"run.init_from has {vocabulary}.",
            "Name the tokenizer of that model with data.tokenizer.",
        )
    held_out = request.other
    recognised = Recognised(reading.template, ends_of_text(reading.tokenizer, tokenizer))
    read = (recognised, tokenizer)
    source = InstructionSource(
        _conversations(Path(request.place), *read, 1 if held_out else 2),
        vocabulary or tokenizer.vocabulary,
        request,
        recognised.template,
        _conversations(Path(held_out), *read, 1) if held_out else None,
        0.0 if reading.tokenizer else 1.0,
    )
    source.amounts |= recognised.facts
    return source


def open_prepared(request: Request, vocabulary: int, template: str) -> InstructionSource:
    """Open conversations that `data prepare` wrote, whose files have been scanned."""
    reading = request.reading
    for key in ("order", "separator"):
        if getattr(reading, key) != Reading._field_defaults[key]:
            raise ConfigError(
                f"Rows of conversations are conversations, but data.{key} is {getattr(reading, key)!r}.",
                f"Leave out data.{key}.",
            )
    if reading.template and without_day(reading.template) != without_day(template):
        raise ConfigError(
            f"The conversations of {request.place} are written by another template than data.template "
            f"{reading.template!r}.",
            "Leave out data.template, or prepare them again.",
        )
    held_out = request.other
    if held_out and without_day(template_of(held_out)) != without_day(template):
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
    """Return the tokens of a row's text, (N,) int64, and their marks, (N,) uint8.

    As in transformers, the tokens of an answer are those from the first token with its first character
    to the first token with its last one. If no token has this character, the nearest one in the answer
    counts; with the tag `generation` transformers goes to the end of the row, and so does this function.
    """
    text, spans, is_tagged, follows, is_text = conversation
    encoding = tokens_of_text(tokenizer, text, is_text)
    marks = np.zeros(len(encoding.ids), np.uint8)
    for start, stop in spans:
        chars = range(start, stop)
        ways = (chars[:1], chars[-1:]) if is_tagged else (chars, chars[::-1])
        first, last = (
            next((at for char in way if (at := encoding.char_to_token(char)) is not None), None)
            for way in ways
        )
        last = None if stop > len(text) else last
        if first is not None:
            marks[first : len(marks) if last is None else last + 1] = COUNTS
        elif is_tagged and chars:
            break
    marks[:1] |= BEGINS | FOLLOWS * follows
    return np.array(encoding.ids, np.int64), marks


def _conversations(
    path: Path, recognised: Recognised, tokenizer: Tokenizer, least: int
) -> Conversations:
    """Read a file of conversations; DataError if a record is none, or if there are fewer than `least`."""
    records = read_records(path, "Check data.source and data.validation.")
    dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
    tokens, marks = [np.empty(0, dtype)], [np.empty(0, np.uint8)]
    for _, rows in written(records, recognised, path):
        for row in rows:
            own, mark = encoded(tokenizer, row)
            tokens.append(own.astype(dtype))
            marks.append(mark)
    conversations = Conversations(ArrayTokens(np.concatenate(tokens)), np.concatenate(marks))
    if len(conversations) < least:
        raise DataError(
            f"{path} must have at least {least} conversation(s), but has {len(conversations)}.",
            "One of them is held out; add more." if least > 1 else "Add conversations.",
        )
    return conversations


def written(
    records: Iterable[DataRecord], recognised: Recognised, path: Path
) -> Iterator[tuple[DataRecord, list[Rendered]]]:
    """Yield each record of the file `path` with the rows of its conversation; DataError if it has none."""
    records = iter(records)
    if (first := next(records, None)) is None:
        return
    waiting = deque[DataRecord]()

    def conversations() -> Iterator[Conversation]:
        for record in chain([first], records):
            try:
                conversation = recognised.conversation(record.value())
            except ValueError as error:
                raise _not_one(record, path, error) from None
            waiting.append(record)
            yield conversation

    try:
        if not recognised.begin(first.value()):
            recognised.conversation(first.value())  # It is none, and this says why.
    except ValueError as error:
        raise _not_one(first, path, error) from None
    with open_template(recognised.template) as template:
        following = template.rows(conversations())
        while True:
            try:
                rows = next(following, None)
            except ValueError as error:
                raise _not_one(waiting[0], path, error) from None
            if rows is None:
                return
            is_text = is_of_texts(recognised.template)
            yield waiting.popleft(), [row._replace(is_text=is_text) for row in rows]


def _not_one(record: DataRecord, path: Path, error: ValueError) -> DataError:
    """Return the error for a record that is no conversation."""
    return DataError(f"{record.place} of {path} must be a conversation, but {error}.", WAY_OUT)
