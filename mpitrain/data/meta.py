"""meta.json of a directory of tokens: the dtype, and all facts that `data prepare` knows."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field

from mpitrain.data.tokenizer import TOKENIZER, digest
from mpitrain.errors import DataError
from mpitrain.files import contents
from mpitrain.strict_json import parsed, validated

META = "meta.json"
"""A file in the folder of token files; its key "dtype" names their dtype."""
FORMAT = "mpitrain tokens 1"
"""The value of the key "format" of a meta.json that `data prepare` wrote."""
Count = Annotated[int, Field(ge=0, lt=1 << 62, strict=True)]


class Counts(BaseModel):
    """The size of a file of tokens.

    bytes  of the text in UTF-8; separators are tokens without text
    """

    documents: Count = 0
    tokens: Count = 0
    bytes: Count = 0

    def added(self, documents: int, tokens: int, nbytes: int) -> "Counts":
        return Counts(
            documents=self.documents + documents,
            tokens=self.tokens + tokens,
            bytes=self.bytes + nbytes,
        )


class Prepared(BaseModel):
    """The content of meta.json of a directory that `data prepare` wrote.

    separator      the token that ends a document; -1: there is none
    tokenizer      SHA-256 of tokenizer.json in the same directory
    files          {name: size} of train.bin and val.bin
    configuration  SHA-256 of inputs and options
    """

    format: Literal["mpitrain tokens 1"] = FORMAT  # type: ignore[assignment]
    dtype: Literal["uint16", "uint32"]
    vocabulary: Annotated[int, Field(ge=1, le=1 << 32, strict=True)]
    separator: Annotated[int, Field(ge=-1, lt=1 << 32, strict=True)]
    tokenizer: str
    files: dict[str, Counts]
    configuration: str


def noted_dtype(path: Path) -> str:
    """Return the dtype that meta.json in the folder of a bare token file names, else uint16."""
    content = _content(path.with_name(META))
    name = content.get("dtype", "uint16") if isinstance(content, dict) else None
    if name not in ("uint16", "uint32"):
        raise DataError(
            f"The dtype in {path.with_name(META)} must be uint16 or uint32, but is {name!r}.",
            "Write it again, or set data.dtype.",
        )
    return str(name)


def prepared(path: Path) -> Prepared | None:
    """Return meta.json in the folder of a token file, if `data prepare` wrote both; else None.

    raises  DataError if a meta.json of this format is damaged
    """
    meta, content = path.with_name(META), None
    with suppress(DataError):  # With data.dtype, a meta.json of other programs is not read.
        content = _content(meta)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    try:
        facts = validated(Prepared, contents(meta))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{meta} must be as mpitrain data prepare writes it, but {error}.", "Prepare it again."
        ) from None
    return facts if path.name in facts.files else None


def bytes_per_token(paths: Iterable[Path]) -> float:
    """Return the bytes of text per token of some files; 0 if meta.json does not know all."""
    tokens = nbytes = 0
    for path in paths:
        facts = prepared(path)
        counts = facts.files[path.name] if facts else Counts()
        if facts is None or path.stat().st_size != counts.tokens * np.dtype(facts.dtype).itemsize:
            return 0.0
        tokens, nbytes = tokens + counts.tokens, nbytes + counts.bytes
    return nbytes / tokens if tokens else 0.0


def tokenizer_beside(path: Path) -> bytes | None:
    """Return the content of tokenizer.json in the folder of a token file, if `data prepare` wrote them.

    raises  DataError if the file is missing, or another one than meta.json notes
    """
    facts = prepared(path)
    if facts is None:
        return None
    name = path.with_name(TOKENIZER)
    try:
        data = contents(name)
    except OSError as error:
        raise DataError(
            f"The tokenizer {name} cannot be read: {error.strerror}.", f"Copy it beside {path}."
        ) from None
    if digest(data) != facts.tokenizer:
        raise DataError(
            f"{name} must be the tokenizer that made {path}, but its digest differs.",
            "Copy it again, or prepare the data again.",
        )
    return data


def _content(meta: Path) -> object:
    """Return the content of a meta.json; {} if there is no such file."""
    if not meta.is_file():
        return {}
    try:
        return parsed(contents(meta))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{meta} must be JSON, but {error}.", "Write it again, or set data.dtype."
        ) from None
