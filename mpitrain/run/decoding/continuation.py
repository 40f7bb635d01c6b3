"""The continuation of a prompt: text of its tokens so far, cut at the first stop text."""

import os
import re
from collections.abc import Iterator, Sequence

from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import ConfigError


class Continuation:
    """The text after one prompt, token by token.

    Without a tokenizer, text is a space and the number of each token.

    tokens   all tokens so far
    stopped  whether a stop text has been found; the text ends before it
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str]):
        """stops: texts, or token numbers with spaces between them; none is empty."""
        self.tokens, self.stopped = list[int](), False
        self._waiting, self._next = b"", list[int]()
        encoded = [stop_bytes(stop, tokenizer) for stop in stops]
        boundary = b"" if tokenizer else rb"\b"
        self._pattern = re.compile(b"|".join(re.escape(stop) + boundary for stop in encoded))
        # The first characters of a stop text, or its first numbers.
        self._heads = [
            stop[:length]
            for stop in encoded
            for length in range(1, len(stop))
            if tokenizer or stop[length : length + 1] == b" "
        ]
        self._cuts = bool(encoded)
        self._pieces = (
            tokenizer.stream(self._fed(), prompt)
            if tokenizer
            else (b" %d" % token for token in self._fed())
        )

    def add(self, token: int) -> bytes:
        """Add a token, and return the text that no stop text can cut off any more."""
        self.tokens.append(token)
        self._next.append(token)
        self._waiting += next(self._pieces)
        return self._free()

    def rest(self) -> bytes:
        """Return the rest of the text, at the end."""
        if self.stopped:
            return b""
        self._waiting += b"".join(self._pieces)
        text, rest = self._free(), b"" if self.stopped else self._waiting
        return text + rest

    def _fed(self) -> Iterator[int]:
        """Yield each new token when the decoder of text reads it."""
        while self._next:
            yield self._next.pop()

    def _free(self) -> bytes:
        """Take the text before a stop text, or before its possible beginning."""
        if self._cuts and (match := self._pattern.search(self._waiting)):
            self.stopped = True
            return self._waiting[: match.start()]
        longest = max(
            (len(head) for head in self._heads if self._waiting.endswith(head)), default=0
        )
        cut = len(self._waiting) - longest
        text, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return text


def stop_bytes(stop: str, tokenizer: Tokenizer | None) -> bytes:
    """Return the bytes of a stop text; ConfigError if it is empty, or no numbers without a tokenizer."""
    if not stop:
        raise ConfigError(
            "A stop text has at least one character, but --stop is empty.", "Name a text."
        )
    if tokenizer:
        return os.fsencode(stop)
    if not re.fullmatch(r"\s*\d+(\s+\d+)*\s*", stop, re.ASCII):
        raise ConfigError(
            f"A model of token numbers takes numbers as a stop, but got {stop!r}.",
            'For example: --stop "17 4"',
        )
    return b"".join(b" %d" % int(word) for word in stop.split())
