"""Labelled texts: rows of tokens with one class each, of lines of JSON.

A line is {"text": TEXT, "label": NUMBER}, or also has a "text_pair", a second text. Lines without a
label are for predictions alone. A tokenizer with these names writes [CLS] text [SEP] text_pair [SEP].
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mpitrain.data.samples import SampleSource
from mpitrain.data.source import IGNORED, PADDING, SECOND, Request
from mpitrain.data.tokenizer import MASK, ByteTokenizer, Tokenizer, read_tokenizer
from mpitrain.errors import DataError
from mpitrain.files import check_regular, contents
from mpitrain.strict_json import validated

Rows = tuple[np.ndarray, np.ndarray]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    text: str
    text_pair: str = ""
    label: int = Field(IGNORED, ge=0, lt=1 << 31)


def open_texts(request: Request) -> SampleSource:
    """Open a file of labelled texts, and the file of held-out ones; else every tenth is held out."""
    reading, given = request.reading, request.vocabulary
    tokenizer: Tokenizer = ByteTokenizer()
    if reading.tokenizer:
        tokenizer = read_tokenizer(reading.tokenizer)
    # A bert of masked tokens may have one more: `MaskedSource` adds the mask token.
    entries = given or tokenizer.vocabulary + (tokenizer.named(MASK) is None)
    if entries < tokenizer.vocabulary:
        raise DataError(
            f"The tokenizer {reading.tokenizer or 'of bytes'} has {tokenizer.vocabulary} tokens, but data.vocabulary "
            f"or the model of run.init_from has {given}.",
            "Name the tokenizer of that model with data.tokenizer.",
        )
    read = partial(_read, tokenizer=tokenizer, context=request.context)
    if request.validation == request.name:
        train = test = read(request.place)
    elif request.other:
        train, test = _labelled(request.place, read), _labelled(request.other, read)
    else:
        train = _labelled(request.place, read)
        held = np.arange(len(train[1])) % 10 == 9
        held[-1:] |= not held.any()
        train, test = (train[0][~held], train[1][~held]), (train[0][held], train[1][held])
    if not len(train[1]):
        raise DataError(
            f"{request.place} must have at least 2 texts, but has {len(test[1])}.", "Add texts."
        )
    largest = max(int(part[1].max()) for part in (train, test))
    if 0 < reading.classes <= largest:
        raise DataError(
            f"{request.name} has a text of class {largest}, but data.classes or the model of run.init_from has "
            f"{reading.classes}.",
            "Number the classes from 0 on, or start from a model without classes.",
        )
    if request.validation != request.name and max(reading.classes, largest + 1) < 2:
        raise DataError(
            f"{request.name} must have texts of at least 2 classes, but all have label 0.",
            "Add texts of another class, or set data.classes.",
        )
    return SampleSource(train, test, "texts", entries, reading.classes)


def _labelled(path: str, read: Callable[[str], Rows]) -> Rows:
    inputs, labels = read(path)
    if not (has := labels != IGNORED).any():
        raise DataError(f"{path} must have a text with a label, but has none.", "Add labels.")
    return inputs[has], labels[has]


def _read(path: str, tokenizer: Tokenizer, context: int) -> Rows:
    """Return the rows of a file, (N, T) int64, and their classes, (N,) int64."""
    try:
        check_regular(Path(path))
        lines = contents(Path(path)).split(b"\n")
    except OSError as error:
        raise DataError(
            f"The data file {path} cannot be read: {error.strerror}.",
            "Check data.source and data.validation.",
        ) from None
    inputs, labels = list[np.ndarray](), list[int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = validated(_Line, line)
        except ValueError as error:
            raise DataError(
                f"Line {number} of {path} must be a labelled text, but {error}.",
                'Write {"text": TEXT, "label": 0} on each line, with classes from 0 on.',
            ) from None
        inputs.append(row_of(tokenizer, found.text, found.text_pair, context))
        labels.append(found.label)
    if not labels:
        raise DataError(f"{path} must have a text, but has none.", "Add texts.")
    return np.stack(inputs), np.array(labels, np.int64)


def row_of(tokenizer: Tokenizer, text: str, pair: str, context: int) -> np.ndarray:
    """Return a row of `context` tokens; of texts that are too long, the longer one is cut."""
    begin, end = ([] if (t := tokenizer.named(n)) is None else [t] for n in ("[CLS]", "[SEP]"))
    texts = [tokenizer.encode(one) for one in (text, pair)]
    room = max(0, context - len(begin) - len(end) * (1 + bool(pair)))
    lengths = [len(one) for one in texts]
    if sum(lengths) > room:
        short = min(min(lengths), room // 2)
        lengths = [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]
    first, second = (one[:length].tolist() for one, length in zip(texts, lengths, strict=True))
    after = [token + SECOND for token in [*second, *end]] if pair else []
    row = [*begin, *first, *end, *after][:context]
    return np.array(row + [PADDING] * (context - len(row)), np.int64)
