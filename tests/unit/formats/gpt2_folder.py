"""A small GPT-2 folder, written without the package: its configuration and its safetensors files."""

import json

import ml_dtypes
import numpy as np

CONFIGURATION = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 12,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
DTYPES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "bfloat16": "BF16", "<i4": "I32", "|u1": "U8"}


def shapes(width=8, hidden=32, layers=2, vocabulary=256, positions=12):
    """{name: shape} of all tensors of a tied GPT2LMHeadModel."""
    found = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    for block in range(layers):
        for name, shape in {
            "ln_1": None,
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "ln_2": None,
            "mlp.c_fc": (width, hidden),
            "mlp.c_proj": (hidden, width),
        }.items():
            found[f"h.{block}.{name}.weight"] = shape or (width,)
            found[f"h.{block}.{name}.bias"] = (shape or (width,))[-1:]
    found |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {f"transformer.{name}": shape for name, shape in found.items()}


def tensors(seed=0, dtype="<f4"):
    """Random tensors by name; in each, every element differs."""
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes().items()}


def safetensors(arrays, metadata=None):
    """The bytes of a safetensors file."""
    header, stop = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, array in arrays.items():
        start, stop = stop, stop + array.nbytes
        code = "BF16" if array.dtype == ml_dtypes.bfloat16 else DTYPES[array.dtype.str]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values())


def written(folder, arrays=None, **changes):
    """Write a folder with one safetensors file; return the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIGURATION, **changes}))
    (folder / "model.safetensors").write_bytes(safetensors(arrays or tensors()))
    return folder


def sharded(folder, arrays=None, files=3):
    """Write a folder with several safetensors files and their index; return the folder."""
    arrays = arrays or tensors()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    listed = {
        name: f"model-{n % files + 1:05d}-of-{files:05d}.safetensors"
        for n, name in enumerate(arrays)
    }
    for file in set(listed.values()):
        own = {name: array for name, array in arrays.items() if listed[name] == file}
        (folder / file).write_bytes(safetensors(own, {"format": "pt"}))
    index = {"metadata": {"total_size": 1}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
