"""Files of tokens that are damaged."""

import random
from pathlib import Path

import numpy as np

from mpitrain.data import open_source
from mpitrain.data.token_files import LLM_C_MAGIC
from tests.unit.readers.fuzz_readers import INVALID, Damaged, in_the_way

CONTEXT, VOCABULARY = 8, 300


class Tokens:
    """A file of tokens: flat, or with the header of llm.c."""

    KINDS = (
        "truncation",
        "one byte",
        "range",
        "version",
        "count",
        "magic",
        "header alone",
        "too short",
        "more behind",
        "in the way",
        "swap",
        "byte order",
        "empty",
        "header cut",
    )

    def __init__(self, folder: Path):
        self.tokens = np.random.default_rng(0).integers(VOCABULARY, size=500).astype("<u2")
        self.tokens[:2] = 5, 7

    @staticmethod
    def read(path):
        source = open_source(f"tokens:{path}", CONTEXT, "float32", VOCABULARY)
        return source.held_out, [
            array.tobytes()
            for array in (*source.batch(1, 2, 4, range(4)), *source.held_out_rows([0]))
        ]

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path, has_header, tokens = folder / "tokens.bin", rng.random() < 0.5, self.tokens.copy()
        header, kind, is_valid = np.zeros(256, "<i4"), rng.choice(self.KINDS), True
        header[:3] = LLM_C_MAGIC, 1, len(tokens)
        says = len(tokens)
        if kind == "truncation":
            tokens = tokens[: rng.randrange(1, len(tokens))]
            is_valid = not has_header and len(tokens) >= 10 * (CONTEXT + 1)
        elif kind == "more behind":
            tokens, is_valid = (
                np.concatenate([tokens, tokens[: rng.randrange(1, 9)]]),
                not has_header,
            )
        elif kind == "range":
            tokens[rng.randrange(len(tokens))] = rng.choice([VOCABULARY, 65535, VOCABULARY - 1])
            is_valid = tokens.max() < VOCABULARY
        elif kind in ("version", "count"):
            has_header, is_valid = True, False
            header[1 if kind == "version" else 2] = rng.choice(
                [0, 2, 7, -1, 2**31 - 1, says + 1, says - 1]
            )
        elif kind == "magic":
            has_header = is_valid = False
            header[0] ^= 1  # and so these are tokens, of which this one is too large
            tokens = np.concatenate([header.view("<u2"), tokens])
        elif kind == "header alone":
            has_header, tokens, is_valid = True, tokens[:0], False
            header[2] = rng.choice([0, says])
        elif kind == "too short":
            tokens, is_valid = tokens[: rng.randrange(1, 10 * CONTEXT)], False
            header[2] = len(tokens)
        elif kind == "swap":
            i, j = rng.sample(range(len(tokens)), 2)
            tokens[[i, j]] = tokens[[j, i]]
        elif kind == "byte order":
            tokens = tokens.byteswap()
            is_valid = tokens.max() < VOCABULARY
        data = (header.tobytes() if has_header else b"") + tokens.tobytes()
        if kind == "one byte":
            data, is_valid = rng.choice([data + b"\0", data[:-1]]), False
        elif kind == "empty":
            data, is_valid = b"", False
        elif kind == "header cut":
            data, is_valid = header.tobytes()[: rng.randrange(4, 1024)], False
        path.write_bytes(data)
        if kind == "in the way":
            is_valid = in_the_way(rng, path)
        return Damaged(kind, path, str(path), self.meant(tokens) if is_valid else INVALID)

    def meant(self, tokens):
        """Return the rows, computed from the definition in plain Python."""
        cut = len(tokens) - len(tokens) // 10
        train, test = tokens[:cut].astype(np.int64), tokens[cut:].astype(np.int64)
        starts = np.random.default_rng([1, 2]).integers(cut - CONTEXT, size=4)
        rows = [
            np.stack([train[start + shift : start + shift + CONTEXT] for start in starts])
            for shift in (0, 1)
        ]
        held = [test[None, shift : CONTEXT + shift] for shift in (0, 1)]
        return (len(test) - 1) // CONTEXT, [array.tobytes() for array in (*rows, *held)]
