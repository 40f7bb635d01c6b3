"""The peer of text generation: the same GPT-2 in transformers, with its key-value cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mpitrain.config import Model
from mpitrain.formats.gpt2 import counterparts, described
from mpitrain.machine.process import blas_threads


class Transformers:
    """Text generation by `GPT2LMHeadModel.generate`, greedy, in inference mode."""

    name = "transformers"

    def __init__(self, model: Model, vocabulary: int, tensors: Mapping[str, np.ndarray]):
        """Copy a model.

        tensors  mpitrain's parameters by full name, unsharded
        """
        torch.set_num_threads(blas_threads())
        settings = GPT2Config(**described(model, vocabulary, None))
        self.model: Any = GPT2LMHeadModel(settings).eval()
        dtype = next(iter(tensors.values())).dtype
        self.model.to(getattr(torch, dtype.name))
        own = self.model.state_dict()
        for ours, theirs in counterparts(model.layers, model.tied):
            array = tensors[ours].T if theirs.is_transposed else tensors[ours]
            own[theirs.full_name].copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the tokens after prompts of one length."""
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            sequences = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        return sequences[:, tokens.shape[1] :].tolist()
