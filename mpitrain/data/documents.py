"""Documents of input files (text, lines of JSON, Parquet), read in chunks from any position on."""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from mpitrain.data.instructions import is_conversation, written
from mpitrain.data.rendering import Rendered
from mpitrain.data.templates import open_template
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import reading, reading_of
from mpitrain.strict_json import parsed

CHUNK = 1 << 20
"""Bytes of text in a chunk, which a process encodes at once. Longer documents are cut into pieces."""
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


class Position(NamedTuple):
    """A position in an input file.

    offset     bytes before the position; in Parquet, bytes of the file in proportion to the rows
               before it
    documents  documents, lines or rows before the position
    """

    offset: int = 0
    documents: int = 0


class Chunk(NamedTuple):
    """Pieces of documents in their order, and the position after them in the file."""

    pieces: list[DocumentPiece]
    end: Position


class Form(NamedTuple):
    """How documents are found in input files, and which of them are held out.

    fraction  held-out fraction of the documents, or of a text file that is one document
    seed      of the draws of held-out documents
    field     the key of a line of JSON, or the column of Parquet, with the text
    mark      the text between two documents of a text file; empty: the file is one document
    template  of conversations, each on a line of JSON; empty: the files have documents
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
            _parquet(path)
        with opened(path) as file:
            files.append(Input(path, number, os.fstat(file.fileno()).st_size))
    return files


def chunks(source: Input, form: Form, start: Position = Position()) -> Iterator[Chunk]:  # noqa: B008
    """Yield the chunks of an input file from `start` on, which may be the `end` of any chunk."""
    read = READERS.get(source.path.suffix.lower(), _marked if form.mark else _text)
    if form.template:
        read = _conversations
    with opened(source.path) as file:
        yield from read(file, source, form, start)


def texts(paths: Iterable[Path], form: Form) -> Iterator[str]:
    for source in inputs(paths):
        for chunk in chunks(source, form):
            yield from (piece.text for piece in chunk.pieces)


def _text(file: IO[bytes], source: Input, form: Form, start: Position) -> Iterator[Chunk]:
    """Read a file that is one document. Its last fraction is held out, from the start of a line on."""
    cut = source.nbytes
    if form.fraction:
        wanted = int(source.nbytes * (1 - form.fraction))
        cut = _line_end(file, wanted, source.nbytes)
        if cut == source.nbytes:  # The last line is longer than the fraction.
            cut = _character(file, wanted)
    at = start.offset
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
    for items, end in _items(file, form.mark.encode(), start):
        offset, pieces = start.offset, []
        for number, item in enumerate(items, start.documents):
            text = _decoded(item, source, offset).strip("\r\n")
            offset += len(item) + len(form.mark.encode())
            pieces.append(DocumentPiece(text, form.holds_out(source.number, number)))
        yield Chunk([piece for piece in pieces if piece.text], end)
        start = end


def _lines(file: IO[bytes], source: Input, form: Form, start: Position) -> Iterator[Chunk]:
    """Read lines of JSON, each an object with a text."""
    for items, end in _items(file, b"\n", start):
        pieces = []
        for number, line in enumerate(items, start.documents):
            if line.strip():
                try:
                    text = _field(parsed(line), form.field)
                except ValueError as error:
                    raise DataError(
                        f"Line {number + 1} of {source.path} must be an object with a text, but {error}.",
                        f'Write {{"{form.field}": TEXT}} on each line, or set --field.',
                    ) from None
                pieces.append(DocumentPiece(text, form.holds_out(source.number, number)))
        yield Chunk([piece for piece in pieces if piece.text], end)
        start = end


def _conversations(file: IO[bytes], source: Input, form: Form, start: Position) -> Iterator[Chunk]:
    """Read lines of JSON, each a conversation."""
    with open_template(form.template) as template:
        for items, end in _items(file, b"\n", start):
            lines = enumerate(items, start.documents + 1)
            pieces = [
                DocumentPiece(row.text, form.holds_out(source.number, number - 1), row=row)
                for number, rows in written(lines, template, source.path)
                for row in rows
            ]
            yield Chunk(pieces, end)
            start = end


def has_conversations(path: Path) -> bool:
    """Return whether the first line of a file of JSON lines is a conversation."""
    if READERS.get(path.suffix.lower()) is not _lines:
        return False
    with opened(path) as file:
        first = next(filter(bytes.strip, file), b"")
    with suppress(ValueError):
        return is_conversation(parsed(first))
    return False


def _field(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"it is {type(record).__name__}")
    if field not in record:
        raise ValueError(f"its keys are {', '.join(map(ascii, record)) or 'none'}")
    if not isinstance(record[field], str):
        raise ValueError(f"{field!a} is {type(record[field]).__name__}")
    return str(record[field])


def _items(file: IO[bytes], mark: bytes, start: Position) -> Iterator[tuple[list[bytes], Position]]:
    """Yield the strings between marks, about CHUNK bytes at once, and the position after them."""
    at, number, rest = start.offset, start.documents, b""
    while True:
        # A document without a mark doubles the read, so that no byte is searched often.
        size = max(CHUNK, len(rest))
        block = os.pread(file.fileno(), size, at + len(rest))
        rest += block
        if not block:
            if rest:
                yield [rest], Position(at + len(rest), number + 1)
            return
        *items, tail = rest.split(mark)
        if items:
            at, number, rest = at + len(rest) - len(tail), number + len(items), tail
            yield items, Position(at, number)


def _decoded(data: bytes, source: Input, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source.path} must be UTF-8, but byte {offset + error.start} is not.",
            "Convert the file, for example with iconv.",
        ) from None


def _rows(file: IO[bytes], source: Input, form: Form, start: Position) -> Iterator[Chunk]:
    parquet = _parquet(source.path)
    try:
        with closing(parquet.ParquetFile(file)) as table:
            if form.field not in table.schema_arrow.names:
                raise ValueError(
                    f"its columns are {', '.join(map(ascii, table.schema_arrow.names))}"
                )
            first, total = 0, max(1, table.metadata.num_rows)
            for group in range(table.num_row_groups):
                count = table.metadata.row_group(group).num_rows
                skipped, first = max(0, start.documents - first), first + count
                if skipped >= count:
                    continue
                rows = table.read_row_group(group, columns=[form.field])[form.field].to_pylist()
                pieces, size = [], 0
                for number, text in enumerate(rows[skipped:], first - count + skipped):
                    if not isinstance(text, str | None):
                        raise ValueError(f"{form.field!a} has {type(text).__name__}")
                    if text:
                        pieces.append(DocumentPiece(text, form.holds_out(source.number, number)))
                        size += len(text)
                    if size >= CHUNK or number + 1 == first:
                        done = source.nbytes * (number + 1) // total
                        yield Chunk(pieces, Position(done, number + 1))
                        pieces, size = [], 0
    except (ValueError, OSError, NotImplementedError) as error:
        raise DataError(
            f"{source.path} must be a Parquet file with a text in column {form.field!a}, "
            f"but {str(error).splitlines()[0][:120]}.",
            "Name another file, or set --field.",
        ) from None


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed.", "pip install pyarrow"
        ) from None
    return parquet


READERS: dict[str, Callable[[IO[bytes], Input, Form, Position], Iterator[Chunk]]] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".parquet": _rows,
}
"""The readers of input files by the suffix of their names; any other file is text."""
