"""A model of HuggingFace's transformers with our weights: a peer in training and in generation."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mpitrain.config import Model
from mpitrain.formats.architecture import is_stack
from mpitrain.formats.peft import ARCHITECTURES
from mpitrain.tools.bench.training.torch_gpt import mean_loss

NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


OF_ALL = {"up": "gate_up_proj", "down": "down_proj"}
"""{kind of our tensor: the tensor of all experts in transformers, whose folders have one for each}."""


def copied(keys: Model, vocabulary: int, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a model of transformers with the values of ours.

    arrays  our parameters, whole, by their full names; the model gets their dtype
    """
    architecture = ARCHITECTURES[keys.kind]
    settings = AutoConfig.for_model(**architecture.facts(keys, vocabulary, NO_ENDS))
    model = AutoModelForCausalLM.from_config(settings)
    model.to(getattr(torch, next(iter(arrays.values())).dtype.name))
    if keys.experts and model.dtype == torch.float64:
        model.config._experts_implementation = "eager"  # PyTorch's grouped product has no float64
    own = model.state_dict()
    for ours, parts in architecture.counterparts(keys, vocabulary):
        if is_stack(ours):
            layer, kind = re.findall(r"\d+|(?<=experts\.)\w+", ours)
            whole = own[f"model.layers.{layer}.mlp.experts.{OF_ALL[kind]}"]
            whole.copy_(torch.from_numpy(arrays[ours]))
            continue
        for part in parts:
            array = arrays[ours][part.rows] - architecture.added(keys, ours)
            array = array.T if part.is_transposed else array
            own[part.name.replace("block_sparse_moe", "mlp")].copy_(
                torch.from_numpy(np.ascontiguousarray(array))
            )
    return model


class WithLoss(nn.Module):
    """A Llama of transformers as a function of inputs and targets, (B, T) each, to the mean loss."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.blocks = model, model.model.layers

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_loss(self.model(inputs, use_cache=False).logits, targets)
