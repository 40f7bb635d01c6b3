"""Labelled texts: rows of tokens with one class each, of records.

A record has "text" and "label", a number or a name, and perhaps "text_pair", a second text. Records
without a label are for predictions alone. Other keys are ignored. A tokenizer with these names writes
[CLS] text [SEP] text_pair [SEP].
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from mpitrain.data.conversations import Ignored
from mpitrain.data.records import read_records
from mpitrain.data.samples import SampleSource
from mpitrain.data.source import IGNORED, PADDING, SECOND, Request
from mpitrain.data.tokenizer import MASK, ByteTokenizer, Tokenizer, read_tokenizer
from mpitrain.errors import DataError
from mpitrain.strict_json import checked

Label = int | str | None


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    text: str
    text_pair: str = ""
    label: Label = None


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
    predicts = request.validation == request.name
    files = [request.place, *([request.other] if request.other and not predicts else [])]
    ignored = Ignored()
    texts = [_read(path, tokenizer, request.context, ignored) for path in files]
    named = {label for _, labels in texts for label in labels if isinstance(label, str)}
    # Classes of a model without names have none.
    names = [*reading.labels] or ([] if reading.classes else sorted(named))
    parts = []
    for path, (inputs, labels) in zip(files, texts, strict=True):
        targets = _classes(path, labels, names)
        has = predicts | (targets != IGNORED)
        if not has.any():
            raise DataError(f"{path} must have a text with a label, but has none.", "Add labels.")
        parts.append((inputs[has], targets[has]))
    train, test = parts[0], parts[-1]
    if not (predicts or request.other):
        held = np.arange(len(train[1])) % 10 == 9
        held[-1:] |= not held.any()
        train, test = ((train[0][rows], train[1][rows]) for rows in (~held, held))
    if not len(train[1]):
        raise DataError(
            f"{request.place} must have at least 2 texts, but has {len(test[1])}.", "Add texts."
        )
    largest = max(int(part[1].max()) for part in (train, test))
    if 0 < (classes := reading.classes or len(names)) <= largest:
        raise DataError(
            f"{request.name} has a text of class {largest}, but data.classes or the model of run.init_from has "
            f"{classes}.",
            "Number the classes from 0 on, or start from a model without classes.",
        )
    if not predicts and max(classes, largest + 1) < 2:
        raise DataError(
            f"{request.name} must have texts of at least 2 classes, but all have one label.",
            "Add texts of another class, or set data.classes.",
        )
    source = SampleSource(train, test, "texts", entries, classes, names)
    source.amounts |= ignored.facts
    return source


def _read(
    path: str, tokenizer: Tokenizer, context: int, ignored: Ignored
) -> tuple[np.ndarray, list[Label]]:
    """Return the rows of a file, (N, T) int64, and their labels."""
    inputs, labels = list[np.ndarray](), list[Label]()
    for record in read_records(Path(path), "Check data.source and data.validation."):
        try:
            value = record.value()
            if isinstance(value, dict):
                value = {key: one for key, one in value.items() if one is not None}
                ignored.note(value.keys() - _Line.model_fields.keys())
            found = checked(_Line, value)
            if isinstance(found.label, int) and not 0 <= found.label < 1 << 31:
                raise ValueError(f"its label is {found.label}")
        except ValueError as error:
            raise DataError(
                f"{record.place} of {path} must be a labelled text, but {error}.",
                'Write {"text": TEXT, "label": 0} on each line, with classes from 0 on or names.',
            ) from None
        inputs.append(row_of(tokenizer, found.text, found.text_pair, context))
        labels.append(found.label)
    if not labels:
        raise DataError(f"{path} must have a text, but has none.", "Add texts.")
    return np.stack(inputs), labels


def _classes(path: str, labels: Sequence[Label], names: Sequence[str]) -> np.ndarray:
    """Return the class of each label, (N,) int64; IGNORED without one."""
    numbers: dict[Label, Label] = {None: IGNORED, **{n: k for k, n in enumerate(names)}}
    are_names = any(isinstance(one, str) for one in labels)
    if are_names and (strange := [one for one in labels if one not in numbers]):
        raise DataError(
            f"{path} has the label {strange[0]}, but the names of classes are {', '.join(names) or 'not known'}.",
            "Use these names on all lines, or set data.labels.",
        )
    return np.array([numbers.get(one, one) for one in labels], np.int64)


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
