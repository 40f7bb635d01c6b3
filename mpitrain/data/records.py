"""Records of files: lines of JSON, the elements of one JSON array, or the rows of Parquet.

The content says which of these a file is. Records are read in blocks, from any position on.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

from mpitrain.errors import ConfigError, DataError
from mpitrain.files import BYTE_ORDER_MARK, reading, reading_of, without_byte_order_mark
from mpitrain.strict_json import Json, elements, parsed

CHUNK = 1 << 20
"""Bytes of a file that are read at once, or characters of records."""
PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""


class Position(NamedTuple):
    """A position in an input file.

    offset     bytes before the position; in Parquet, bytes of the file in proportion to the rows
               before it; in an array, characters
    documents  documents, lines, elements or rows before the position
    """

    offset: int = 0
    documents: int = 0


class DataRecord(NamedTuple):
    """A record of a file.

    place   where it is: "Line 3"
    number  of records before it in the file; blank lines count
    data    the bytes of a line, or the value of any other record
    """

    place: str
    number: int
    data: Any

    def value(self) -> Json:
        """Return the value; ValueError with the end of an error's sentence for a line that is no JSON."""
        return parsed(self.data) if isinstance(self.data, bytes) else self.data


Block = tuple[list[DataRecord], Position]
"""Records, and the position behind them."""


def read_records(path: Path, way_out: str) -> Iterator[DataRecord]:
    """Yield all records of a file; DataError if it cannot be read."""
    with reading_of(f"The data file {path}", way_out, DataError):
        file = reading(path)
    with file:
        for records, _ in blocks(file, path):
            yield from records


def blocks(
    file: IO[bytes],
    path: Path,
    start: Position = Position(),  # noqa: B008
    columns: Sequence[str] | None = None,
) -> Iterator[Block]:
    """Yield the records of an open file from `start` on, which may be behind any block.

    columns  of Parquet; None: all of them
    raises   DataError if it is a damaged array or Parquet file; ConfigError without pyarrow
    """
    head = os.pread(file.fileno(), CHUNK, 0)
    if head.startswith(PARQUET) or path.suffix.lower() == ".parquet":
        return _rows(file, path, start, columns)
    if without_byte_order_mark(head).lstrip().startswith(b"["):
        return _elements(file, path, start)
    return _lines(file, start)


def _lines(file: IO[bytes], start: Position) -> Iterator[Block]:
    for lines, end in separated(file, b"\n", start):
        numbered = enumerate(lines, start.documents)
        yield [DataRecord(f"Line {n + 1}", n, line) for n, line in numbered if line.strip()], end
        start = end


def separated(
    file: IO[bytes], mark: bytes, start: Position
) -> Iterator[tuple[list[bytes], Position]]:
    """Yield the strings between marks, about CHUNK bytes at once, and the position after them."""
    at, number, rest = start.offset, start.documents, b""
    at = at or mark_length(file)
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


def mark_length(file: IO[bytes]) -> int:
    """Return the number of bytes of the byte-order mark at the start of a file."""
    head = os.pread(file.fileno(), len(BYTE_ORDER_MARK), 0)
    return len(head) - len(without_byte_order_mark(head))


def _elements(file: IO[bytes], path: Path, start: Position) -> Iterator[Block]:
    file.seek(0)
    records, first, number = list[DataRecord](), start.offset, 0
    try:
        for number, (value, at) in enumerate(elements(without_byte_order_mark(file.read())), 1):
            if number <= start.documents:
                continue
            records.append(DataRecord(f"Element {number}", number - 1, value))
            if at - first >= CHUNK:
                yield records, Position(at, number)
                records, first = [], at
    except ValueError as error:
        raise DataError(
            f"{path} begins with [, so it must be one JSON array, but {error}.",
            "Correct it, or write an object on each line.",
        ) from None
    if records:
        yield records, Position(os.fstat(file.fileno()).st_size, number)


def _rows(
    file: IO[bytes], path: Path, start: Position, columns: Sequence[str] | None
) -> Iterator[Block]:
    parquet = parquet_reader(path)
    nbytes = os.fstat(file.fileno()).st_size
    try:
        with closing(parquet.ParquetFile(file)) as table:
            first, total = 0, max(1, table.metadata.num_rows)
            for group in range(table.num_row_groups):
                count = table.metadata.row_group(group).num_rows
                skipped, first = max(0, start.documents - first), first + count
                if skipped >= count:
                    continue
                names = table.schema_arrow.names
                known = [name for name in names if columns is None or name in columns]
                if not known:
                    raise ValueError(f"its columns are {', '.join(map(ascii, names)) or 'none'}")
                rows = table.read_row_group(group, columns=known)
                size = max(1, CHUNK * count // max(1, rows.nbytes))
                for at in range(skipped, count, size):
                    begins = first - count + at
                    records = [
                        DataRecord(f"Row {number + 1}", number, _row(row))
                        for number, row in enumerate(rows.slice(at, size).to_pylist(), begins)
                    ]
                    end = begins + len(records)
                    yield records, Position(nbytes * end // total, end)
    except (ValueError, OSError, NotImplementedError) as error:
        law = f"{path} must be a Parquet file" + (
            f" with a column {columns[0]!a}" if columns else ""
        )
        reason = str(error).splitlines()[0][:120].rstrip(".")
        raise DataError(f"{law}, but {reason}.", "Name another file, or another column.") from None


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Return a value of Parquet without the fields that its row lacks: all rows have the fields of any."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def parquet_reader(path: Path) -> Any:
    """Return the module of pyarrow; ConfigError without the package."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"{path} is a Parquet file, which needs the package pyarrow, but that is not installed.",
            "pip install 'mpitrain[parquet]', or write the rows as lines of JSON.",
        ) from None
    return parquet
