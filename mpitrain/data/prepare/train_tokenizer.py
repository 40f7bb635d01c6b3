"""`train_tokenizer`: a byte-level BPE tokenizer (Radford et al. 2019) from text."""

from collections.abc import Iterable
from pathlib import Path

from mpitrain.data.tokenizer import ENDS, Tokenizer, check_tokenizers, open_tokenizer
from mpitrain.errors import DataError
from mpitrain.files import whole

LEAST = 257
"""Fewest tokens: one for each byte, and the end of a document."""


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, out: Path, shows_progress: bool = False
) -> Tokenizer:
    """Train a tokenizer and write its file, atomically; any text decodes to itself again.

    vocabulary  largest number of tokens; a short text gives fewer
    raises      ConfigError without the package `tokenizers`; DataError without any text
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
