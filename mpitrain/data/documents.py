"""Documents of input files (text, or records with a text or a conversation), read in chunks from any position on."""

import hashlib
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from mpitrain.data.conversations import Recognised
from mpitrain.data.instructions import written
from mpitrain.data.records import (
    CHUNK,
    DataRecord,
    Position,
    blocks,
    mark_length,
    parquet_reader,
    separated,
)
from mpitrain.data.rendering import Rendered
from mpitrain.errors import DataError
from mpitrain.files import reading, reading_of

LINE = 1 << 16
"""A document is cut at the end of a line; if no line ends in this many bytes, after a character."""


class DocumentPiece(NamedTuple):
    """A document or, if it is long, a piece of one.

    held_out  whether it belongs to the validation set
    ends      whether the document ends with this piece
    row       of a conversation, with the same text; None: it is none
    """

    text: str
    held_out: bool = False
    ends: bool = True
    row: Rendered | None = None


class Chunk(NamedTuple):
    """Pieces of documents in their order, and the position after them in the file."""

    pieces: list[DocumentPiece]
    end: Position


class Form(NamedTuple):
    """How documents are found in input files, and which of them are held out.

    fraction  held-out fraction of the documents, or of a text file that is one document
    seed      of the draws of held-out documents
    field     the key of a record with the text
    mark      the text between two documents of a text file; empty: the file is one document
    template  of conversations, each in a record; empty: the files have documents
    """

    fraction: float
    seed: int
    field: str
    mark: str
    template: str = ""

    def holds_out(self, number: int, document: int) -> bool:
        """Return whether a document is held out: a draw that depends on these numbers and the seed.

        number    of the input file
        document  number of the document in that file
        """
        word = struct.pack("<3q", self.seed, number, document)
        drawn = int.from_bytes(hashlib.blake2b(word, digest_size=7).digest(), "little")
        return drawn < self.fraction * (1 << 56)


class Input(NamedTuple):
    """An input file, its number among the paths of the command line, and its size."""

    path: Path
    number: int
    nbytes: int


def opened(path: Path) -> IO[bytes]:
    with reading_of(f"The input {path}", "Name files with text.", DataError):
        return reading(path)


def inputs(paths: Iterable[Path]) -> list[Input]:
    """Return the input files with their sizes; DataError if one cannot be read."""
    files = []
    for number, path in enumerate(paths):
        if path.suffix.lower() == ".parquet":
            parquet_reader(path)
        with opened(path) as file:
            files.append(Input(path, number, os.fstat(file.fileno()).st_size))
    return files


def chunks(
    source: Input,
    form: Form,
    start: Position = Position(),  # noqa: B008
    recognised: Recognised | None = None,
) -> Iterator[Chunk]:
    """Yield the chunks of an input file from `start` on, which may be the `end` of any chunk.

    recognised  notes what the conversations are
    """
    with opened(source.path) as file:
        if form.template:
            recognised = recognised or Recognised(form.template)
            yield from _conversations(file, source, form, start, recognised)
            return
        suffix, read = source.path.suffix.lower(), _marked if form.mark else _text
        if suffix == JSON:
            first = first_record(source.path)
            is_read = isinstance(first, dict) and form.field in first
        else:
            is_read = suffix in RECORDS
        yield from (_documents if is_read else read)(file, source, form, start)


def texts(paths: Iterable[Path], form: Form) -> Iterator[str]:
    for source in inputs(paths):
        for chunk in chunks(source, form):
            yield from (piece.text for piece in chunk.pieces)


def _text(file: IO[bytes], source: Input, form: Form, start: Position) -> Iterator[Chunk]:
    """Read a file that is one document. Its last fraction is held out, from the start of a line on."""
    cut, begin = source.nbytes, mark_length(file)
    if form.fraction:
        wanted = begin + int((source.nbytes - begin) * (1 - form.fraction))
        cut = _line_end(file, wanted, source.nbytes)
        if cut == source.nbytes:  # The last line is longer than the fraction.
            cut = _character(file, wanted)
    at = start.offset or begin
    while at < source.nbytes:
        stop = cut if at < cut else source.nbytes
        end = _line_end(file, min(at + CHUNK, stop), stop)
        text = _decoded(os.pread(file.fileno(), end - at, at), source, at)
        yield Chunk([DocumentPiece(text, at >= cut, end == stop)], Position(end, 0))
        at = end


def _line_end(file: IO[bytes], at: int, stop: int) -> int:
    """Return the end of the line that contains byte `at`, or, if that is more than LINE bytes away,
    the next end of a character.
    """
    data = os.pread(file.fileno(), min(LINE, stop - at), at)
    end = data.find(b"\n")
    return _character(file, at) if end < 0 else at + end + 1


def _character(file: IO[bytes], at: int) -> int:
    """Return the position of the first byte, from `at` on, that begins a character of UTF-8."""
    data = os.pread(file.fileno(), 4, at)
    return at + next((n for n, byte in enumerate(data) if byte & 0xC0 != 0x80), 0)


def _marked(file: IO[bytes], source: Input, form: Form, start: Position) -> Iterator[Chunk]:
    """Read documents of text with marks between them; line ends around the marks are removed."""
    for items, end in separated(file, form.mark.encode(), start):
        offset, pieces = start.offset, []
        for number, item in enumerate(items, start.documents):
            text = _decoded(item, source, offset).strip("\r\n")
            offset += len(item) + len(form.mark.encode())
            pieces.append(DocumentPiece(text, form.holds_out(source.number, number)))
        yield Chunk([piece for piece in pieces if piece.text], end)
        start = end


def _documents(file: IO[bytes], source: Input, form: Form, start: Position) -> Iterator[Chunk]:
    """Read records, each an object with a text."""
    for records, end in blocks(file, source.path, start, [form.field]):
        pieces = []
        for record in records:
            try:
                text = _field(record.value(), form.field)
            except ValueError as error:
                raise DataError(
                    f"{record.place} of {source.path} must be an object with a text, but {error}.",
                    f'Write {{"{form.field}": TEXT}} on each line, or set --field.',
                ) from None
            pieces.append(DocumentPiece(text, form.holds_out(source.number, record.number)))
        yield Chunk([piece for piece in pieces if piece.text], end)


def _conversations(
    file: IO[bytes], source: Input, form: Form, start: Position, recognised: Recognised
) -> Iterator[Chunk]:
    """Read records, each a conversation."""
    ends, pieces = deque[tuple[int, Position]](), list[DocumentPiece]()

    def read() -> Iterator[DataRecord]:
        for records, end in blocks(file, source.path, start):
            if records:
                ends.append((records[-1].number, end))
            yield from records

    for record, rows in written(read(), recognised, source.path):
        held_out = form.holds_out(source.number, record.number)
        pieces += [DocumentPiece(row.text, held_out, row=row) for row in rows]
        last, end = ends[0]
        if record.number == last:
            ends.popleft()
            yield Chunk(pieces, end)
            pieces = []


def first_record(path: Path) -> Any:
    """Return the value of the first record of a file of records; None if it has none, or no JSON."""
    if path.suffix.lower() not in RECORDS:
        return None
    with opened(path) as file, suppress(ValueError, DataError):
        for records, _ in blocks(file, path):
            for record in records:
                return record.value()
    return None


def _field(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"it is {type(record).__name__}")
    if field not in record:
        raise ValueError(f"its keys are {', '.join(map(ascii, record)) or 'none'}")
    if record[field] is None:
        return ""
    if not isinstance(record[field], str):
        raise ValueError(f"{field!a} is {type(record[field]).__name__}")
    return str(record[field])


def _decoded(data: bytes, source: Input, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source.path} must be UTF-8, but byte {offset + error.start} is not.",
            "Convert the file, for example with iconv.",
        ) from None


JSON = ".json"
RECORDS = (".jsonl", ".ndjson", ".parquet", JSON)
"""How the names of files of records end; of JSON only if the first record has a text or a conversation."""
