"""Writer of a folder of another project; the folder gets its name when it is complete."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mpitrain.data.tokenizer import BYTES_FILE, ENDS, MASK, TOKENIZER, Tokenizer
from mpitrain.data.tokens import BYTES
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.files import cannot_write, rename, sync_folder
from mpitrain.formats.folder import FolderContents, json_text
from mpitrain.formats.safetensors_files import Writing, WritingTensors
from mpitrain.formats.tensors import AnyTensor, read_whole

SETTINGS = "tokenizer_config.json"
CLASS = "PreTrainedTokenizerFast"
"""The class of the library transformers that reads a tokenizer from tokenizer.json alone."""
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}
"""The dtypes in which parameters can be written."""
METADATA = {"format": "pt"}
"""transformers refuses a safetensors file without these metadata."""


def check_new(folder: Path) -> None:
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists already.", "Choose another --out, or remove it.")
    if not folder.parent.is_dir():
        raise ConfigError(
            f"{folder} needs a folder to be in, but there is no {folder.parent}.",
            "Make it, or choose another --out.",
        )


def write_folder(
    folder: Path, weights: str, written: FolderContents, dtype: str, shard_bytes: int
) -> list[str]:
    """Write the contents of a new folder.

    weights      name of the safetensors file without its suffix
    dtype        name of the dtype in the files, one of DTYPES
    shard_bytes  the largest sum of tensors in a file; a larger tensor has a file of its own
    memory       one tensor
    returns      the names of the files
    raises       ConfigError if the folder cannot be written or a value is beyond the dtype;
                 CheckpointError if a tensor cannot be read
    """
    check_new(folder)
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            files = _write(partial, weights, written, DTYPES[dtype], shard_bytes)
            _put_in_place(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise cannot_write(folder, error, "Choose another --out.") from None
    return files


def _write(
    partial: Path, weights: str, written: FolderContents, dtype: np.dtype, shard_bytes: int
) -> list[str]:
    shards = _shards(written.tensors, dtype.itemsize, shard_bytes)
    names, files = [f"{weights}.safetensors"], dict(written.files)
    if len(shards) > 1:
        names = [
            f"{weights}-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        total = sum(math.prod(tensor.shape) for tensor in written.tensors.values()) * dtype.itemsize
        places = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": places}
        files[f"{weights}.safetensors.index.json"] = json_text(index)
    for name, shard in zip(names, shards, strict=True):
        own = {key: written.tensors[key] for key in shard}
        shapes = {key: (dtype, tensor.shape) for key, tensor in own.items()}
        file: Writing = WritingTensors(partial / name, shapes, METADATA)
        for key, tensor in own.items():
            values = _converted(key, tensor, dtype)
            file.write(values.view(np.uint16) if dtype.itemsize == 2 else values)
        file.close()
    for name, content in files.items():
        (partial / name).parent.mkdir(exist_ok=True)
        file = Writing(partial / name)
        file.write(content)
        file.close()
    return sorted([*names, *files])


def _shards(tensors: Mapping[str, AnyTensor], width: int, shard_bytes: int) -> list[list[str]]:
    """Divide the names of tensors into files, in order.    width: bytes of an element"""
    shards: list[list[str]] = [[]]
    nbytes = 0
    for name, tensor in tensors.items():
        own = math.prod(tensor.shape) * width
        if shards[-1] and nbytes + own > shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += own
    return shards


def _converted(name: str, tensor: AnyTensor, dtype: np.dtype) -> np.ndarray:
    """Read a tensor and round it to a dtype; ConfigError if a rounded value is not finite."""
    try:
        values = read_whole(tensor)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or name} cannot be read: {error.strerror or error}.",
            "Export again: a run in progress may have replaced its checkpoint.",
        ) from None
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.ascontiguousarray(values).astype(dtype)
    if not np.isfinite(rounded.astype(np.float64) if dtype.itemsize == 2 else rounded).all():
        largest = np.abs(values).max()
        raise ConfigError(
            f"Parameters must be finite numbers of {dtype.name}, but {name} has {largest:g}.",
            "Train again with a lower optimizer.lr."
            if not math.isfinite(largest)
            else "Choose --dtype float32.",
        )
    return rounded


def _put_in_place(partial: Path, folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    partial.chmod(0o777 & ~mask)
    sync_folder(partial)
    check_new(folder)
    rename(partial, folder)


def tokenizer_files(
    tokenizer: Tokenizer, context: int, entries: int = 0, eos: str = ""
) -> dict[str, bytes]:
    """Return {name: content} of the files that a tokenizer needs.

    eos      name of the token that ends an answer; empty: it is that of a document
    context  longest sequence of the model, in tokens
    entries  tokens of a bert, which may have a mask token behind those of the tokenizer; 0: the model
             is no bert, and rows have no token types
    """
    data = byte_level() if tokenizer.data == BYTES_FILE else tokenizer.data
    settings: dict[str, Any] = {"tokenizer_class": CLASS, "model_max_length": context}
    for name in ("mask", "cls", "sep", "pad", "unk"):
        if tokenizer.named(f"[{name.upper()}]") is not None:
            settings[f"{name}_token"] = f"[{name.upper()}]"
    if entries == tokenizer.vocabulary + 1 and tokenizer.named(MASK) is None:
        data, settings["mask_token"] = with_mask(data, entries - 1), MASK
    if entries:
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        data = with_marks(data, tokenizer)
    if tokenizer.separator >= 0:
        ends = [name for name in ENDS if tokenizer.named(name) == tokenizer.separator]
        settings["eos_token"] = settings["bos_token"] = ends[0]
    if eos:
        settings["eos_token"] = eos
    return {TOKENIZER: data, SETTINGS: json_text(settings)}


def is_of_bytes(data: bytes) -> bool:
    """Return whether a tokenizer.json is one that an export of a run on bytes has."""
    return data in (byte_level(), with_mask(byte_level(), BYTES))


def with_mask(data: bytes, number: int) -> bytes:
    """Return a tokenizer.json with the token [MASK] of this number behind all others."""
    content = json.loads(data)
    exact = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": number, "content": MASK, **exact, "special": True})
    return json_text(content)


def with_marks(data: bytes, tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer.json that writes [CLS] text [SEP] text_pair [SEP], as `data/labelled.py` does.

    One that has a step of its own behind its model, or not both names, stays as it is.
    """
    content = json.loads(data)
    numbers = {name: tokenizer.named(name) for name in ("[CLS]", "[SEP]")}
    if content.get("post_processor") or None in numbers.values():
        return data

    def step(kind: str, name: str, number: int = 0) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": number}}

    first = [step("SpecialToken", "[CLS]"), step("Sequence", "A"), step("SpecialToken", "[SEP]")]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, step("Sequence", "B", 1), step("SpecialToken", "[SEP]", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in numbers.items()
        },
    }
    return json_text(content)


def byte_level() -> bytes:
    """Return a tokenizer.json with one token for each byte; the token's number is the byte's value.

    The format writes each byte as a printable character, as GPT-2 does.
    """
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(_characters())},
        "merges": [],
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": step,
        "post_processor": None,
        "decoder": step,
        "model": model,
    }
    return (json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n").encode()


def _characters() -> list[str]:
    """Return the character for each byte: the same number if printable, else one from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), 256),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
