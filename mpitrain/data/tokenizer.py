"""Tokenizers: text to tokens and back, by a tokenizer.json of HuggingFace or as plain bytes."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpitrain.errors import ConfigError, DataError
from mpitrain.files import reading_of, text_of, whole
from mpitrain.strict_json import parsed

TOKENIZER = "tokenizer.json"
"""The name of a tokenizer's file in a directory of tokens and in a run directory."""
BYTES_NAME = "bytes"
BYTES_FILE = b'{"type": "bytes"}\n'
"""The content of the file of the tokenizer whose tokens are bytes."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Usual names of the token that ends a document."""
MASK = "[MASK]"
"""The name of the token that hides another from a bert."""
LEAST = 257
"""The smallest vocabulary of a trained tokenizer: 256 bytes, and the end of a document."""
WINDOW, PENDING = 16, 8
"""Limits of `FileTokenizer.stream`: earlier tokens that are decoded again as context, and tokens
that wait for a character to become complete.
"""


class TokensOfText(Protocol):
    """The tokens of a text, and where they are in it: part of the Encoding of `tokenizers`."""

    ids: Sequence[int]

    def char_to_token(self, char: int) -> int | None:
        """Return the number of the first token with this character of the text; None if none has it."""


class Tokenizer(Protocol):
    """A tokenizer.

    data        content of the tokenizer's file, from which `open_tokenizer` makes the same tokenizer
    vocabulary  largest token + 1
    separator   the token that ends a document; -1: there is none
    """

    data: bytes
    vocabulary: int
    separator: int

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, (N,) int64; names of special tokens are ordinary text.

        raises  DataError if the text has a lone surrogate, which has no bytes
        """

    def encode_marked(self, text: str, adds: bool = False) -> TokensOfText:
        """Return the tokens of a text in which names of special tokens are these tokens.

        adds    whether the tokenizer adds the special tokens of a text, such as <s>, as in transformers
        raises  as `encode`
        """

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens as bytes, which may be invalid UTF-8.

        Special tokens appear as their names. Tokens outside of the vocabulary have no text.
        """

    def stream(self, tokens: Iterable[int], prompt: Sequence[int]) -> Iterator[bytes]:
        """Decode tokens one by one, each as soon as its last character is complete.

        prompt  the tokens before these; their text is not returned
        yields  for each token the next bytes of the text, perhaps none; perhaps more bytes at the
                end
        """

    @property
    def begins(self) -> str:
        """The names of the special tokens that the tokenizer puts before a text, such as <s>."""

    def named(self, name: str) -> int | None:
        """Return the token with a name such as <|endoftext|>; None if no token has this name."""


class _Bytes(TokensOfText):
    def __init__(self, text: str, data: bytes):
        self.ids = list(data)
        self._bytes = np.arange(len(text) + 1)
        if len(text) < len(data):
            self._bytes[1:] = np.cumsum([len(char.encode()) for char in text])

    def char_to_token(self, char: int) -> int | None:
        return int(self._bytes[char]) if 0 <= char < len(self._bytes) - 1 else None


class _Behind(TokensOfText):
    """The tokens of a text that other tokens and their names stand before."""

    def __init__(self, tokens: Sequence[int], chars: int, text: TokensOfText):
        self.ids = [*tokens, *text.ids]
        self._tokens, self._chars, self._text = len(tokens), chars, text

    def char_to_token(self, char: int) -> int | None:
        token = self._text.char_to_token(char - self._chars) if char >= self._chars else None
        return None if token is None else self._tokens + token


def tokens_of_text(tokenizer: Tokenizer, text: str, is_whole: bool) -> TokensOfText:
    """Return the tokens of a text in which names of special tokens are these tokens.

    is_whole  whether what follows the tokens that begin a text is a text of its own, as transformers
              adds these tokens: some tokenizers put a blank before it. False for a chat template
    """
    begin = tokenizer.begins
    if not is_whole or not begin or not text.startswith(begin):
        return tokenizer.encode_marked(text)
    rest = tokenizer.encode_marked(text[len(begin) :])
    return _Behind(tokenizer.encode_marked(begin).ids, len(begin), rest)


class ByteTokenizer(Tokenizer):
    data, vocabulary, separator, begins = BYTES_FILE, 256, -1, ""

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int64)

    def encode_marked(self, text: str, adds: bool = False) -> TokensOfText:
        return _Bytes(text, _utf8(text))

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(token for token in tokens if token < 256)

    def stream(self, tokens: Iterable[int], prompt: Sequence[int]) -> Iterator[bytes]:
        return (self.decode([token]) for token in tokens)

    def named(self, name: str) -> int | None:
        return None


class FileTokenizer(Tokenizer):
    """A tokenizer of HuggingFace's package `tokenizers`, from its tokenizer.json."""

    def __init__(self, data: bytes, name: str):
        check_tokenizers(name)
        from tokenizers import Tokenizer as HuggingFace

        try:
            self._inner: Any = HuggingFace.from_str(data.decode())
            # Its settings for classifiers would cut long documents.
            self._inner.no_truncation()
            self._inner.no_padding()
            self._inner.encode_special_tokens = True
            tokens = self._inner.get_vocab(True).values()
        except Exception as error:  # The package raises only this type.
            raise DataError(
                f"{name} must be a tokenizer.json of HuggingFace, but {str(error)[:100] or 'is empty'}.",
                "Write one with mpitrain data train-tokenizer, or name another file.",
            ) from None
        if not tokens:
            raise DataError(f"{name} has no tokens.", "Name another tokenizer.")
        self.data, self.vocabulary = data, max(tokens) + 1
        ends = (self.named(end) for end in ENDS)
        self.separator = next((token for token in ends if token is not None), -1)

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int64)

    def encode_marked(self, text: str, adds: bool = False) -> TokensOfText:
        _utf8(text)
        self._inner.encode_special_tokens = False
        try:
            encoding: TokensOfText = self._inner.encode(text, add_special_tokens=adds)
        finally:
            self._inner.encode_special_tokens = True
        return encoding

    def decode(self, tokens: Sequence[int]) -> bytes:
        return self._text(tokens).encode()

    def stream(self, tokens: Iterable[int], prompt: Sequence[int]) -> Iterator[bytes]:
        recent, waiting = list(prompt)[-WINDOW:], 0
        shown = self._text(recent)
        for token in tokens:
            recent, waiting = [*recent, token], waiting + 1
            text = self._text(recent)
            if text.endswith("\ufffd") and waiting < PENDING:
                yield b""
                continue
            yield text[len(shown) :].encode()
            recent, waiting = recent[-WINDOW:], 0
            shown = self._text(recent)
        yield self._text(recent)[len(shown) :].encode()

    @property
    def begins(self) -> str:
        encoding = self._inner.encode("a")
        marked = zip(encoding.tokens, encoding.special_tokens_mask, strict=True)
        return "".join(name for name, _ in takewhile(lambda one: one[1], marked))

    def named(self, name: str) -> int | None:
        return self._inner.token_to_id(name)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(
            [token for token in tokens if token < self.vocabulary], skip_special_tokens=False
        )


def check_tokenizers(name: str) -> None:
    """Raise ConfigError unless the package `tokenizers` is installed.

    name  of the file or the command that needs it
    """
    if find_spec("tokenizers") is None:
        raise ConfigError(
            f"{name} needs the package tokenizers, which is not installed.",
            "pip install 'mpitrain[text]'",
        )


def open_tokenizer(data: bytes, name: str) -> Tokenizer:
    """Make a tokenizer from the content of its file.

    name    of the file, for messages
    raises  DataError if it is no tokenizer; ConfigError if it needs a missing package
    """
    return ByteTokenizer() if data == BYTES_FILE else FileTokenizer(data, name)


def read_tokenizer(name: str) -> Tokenizer:
    """Make the tokenizer `bytes`, or the tokenizer of a file."""
    if name == BYTES_NAME:
        return ByteTokenizer()
    with reading_of(f"The tokenizer {name}", f"Name a {TOKENIZER}, or {BYTES_NAME}.", DataError):
        data = text_of(Path(name))
    return open_tokenizer(data, name)


def ends_of_text(name: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the names of the tokens that begin and end a text in transformers, each empty if there is none.

    name  of the tokenizer's file; eos_token of tokenizer_config.json beside it ends a text, else the separator
    """
    end, settings = None, Path(name).with_name("tokenizer_config.json") if name else None
    if settings and settings.is_file():
        with reading_of(str(settings), "Copy it again.", DataError):
            content = text_of(settings)
        with suppress(ValueError, AttributeError):
            end = parsed(content).get("eos_token")
            end = end.get("content") if isinstance(end, dict) else end
    if not isinstance(end, str):
        end = tokenizer.decode([tokenizer.separator]).decode() if tokenizer.separator >= 0 else ""
    return tokenizer.begins, end


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"A text must be valid Unicode, but character {error.start} is {json.dumps(text[error.start])}.",
            "Replace it.",
        ) from None


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, out: Path, shows_progress: bool = False
) -> Tokenizer:
    """Train a tokenizer (byte-level BPE), and write its file atomically.

    The tokens of any text decode to the same text.

    vocabulary  largest number of tokens; a short text gives fewer
    raises      ConfigError without the package `tokenizers`; DataError if no pair of bytes occurs
                often in the text
    """
    check_tokenizers("mpitrain data train-tokenizer")
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = HuggingFace(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[ENDS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=shows_progress,
    )
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() <= LEAST:
        raise DataError(
            f"A tokenizer needs pairs of bytes that occur often, but of the {vocabulary - LEAST} wanted the text has none.",
            "Name more text, or a larger --vocab.",
        )
    data = inner.to_str(pretty=True).encode()
    with whole(out) as file:
        file.write(data)
    return open_tokenizer(data, str(out))
