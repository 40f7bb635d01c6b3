"""The document that a model sees: with data.attend=document, the tokens after the last separator."""

from collections.abc import Sequence

from mpitrain.config import Data


def separator_of(data: Data) -> int:
    """Return the token that ends a document for a model's attention; -1 if there is none."""
    return data.separator if data.attend == "document" else -1


def last_document(tokens: Sequence[int], separator: int) -> list[int]:
    """Return the tokens of the last document; its separator is its last token.

    tokens     at least one
    separator  from `separator_of`
    """
    begin = len(tokens) - 1
    while begin and (separator < 0 or tokens[begin - 1] != separator):
        begin -= 1
    return [*tokens[begin:]]
