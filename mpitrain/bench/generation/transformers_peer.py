"""The peer of text generation: the same GPT-2 in transformers, with its key-value cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mpitrain.config import Model
from mpitrain.machine.process import blas_threads

BLOCK = {
    "attention.norm.gain": "ln_1.weight",
    "attention.norm.bias": "ln_1.bias",
    "attention.qkv.weight": "attn.c_attn.weight",
    "attention.qkv.bias": "attn.c_attn.bias",
    "attention.out.weight": "attn.c_proj.weight",
    "attention.out.bias": "attn.c_proj.bias",
    "mlp.norm.gain": "ln_2.weight",
    "mlp.norm.bias": "ln_2.bias",
    "mlp.up.weight": "mlp.c_fc.weight",
    "mlp.up.bias": "mlp.c_fc.bias",
    "mlp.down.weight": "mlp.c_proj.weight",
    "mlp.down.bias": "mlp.c_proj.bias",
}
"""Names of a block's tensors there; its matrices are transposed (Conv1D)."""


class Transformers:
    """Text generation by `GPT2LMHeadModel.generate`, greedy, in inference mode."""

    name = "transformers"

    def __init__(self, model: Model, vocabulary: int, tensors: Mapping[str, np.ndarray]):
        """Copy a model.

        tensors  ours by full name, whole
        """
        torch.set_num_threads(blas_threads())
        settings = GPT2Config(
            vocab_size=vocabulary,
            n_positions=model.context,
            n_embd=model.width,
            n_layer=model.layers,
            n_head=model.heads,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=model.tied,
        )
        self.model: Any = GPT2LMHeadModel(settings).eval()
        dtype = next(iter(tensors.values())).dtype
        self.model.to(getattr(torch, dtype.name))
        own = self.model.state_dict()
        for name, array in renamed(tensors).items():
            own[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the tokens after prompts of one length."""
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            found = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        return found[:, tokens.shape[1] :].tolist()


def renamed(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors under the names, and in the shapes, of transformers."""
    fixed = {
        "embedding.tokens": "transformer.wte.weight",
        "embedding.positions": "transformer.wpe.weight",
        "head.norm.gain": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.logits.weight": "lm_head.weight",
    }
    found = {}
    for name, array in tensors.items():
        if name in fixed:
            found[fixed[name]] = array
            continue
        _, block, rest = name.split(".", 2)
        found[f"transformer.h.{block}.{BLOCK[rest]}"] = array.T if array.ndim == 2 else array
    return found
