"""A model of HuggingFace's transformers with our weights: a peer in training and in generation."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mpitrain.config import Model
from mpitrain.formats.peft import ARCHITECTURES
from mpitrain.tools.bench.training.torch_gpt import mean_loss

NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


def copied(keys: Model, vocabulary: int, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a model of transformers with the values of ours.

    arrays  our parameters, whole, by their full names; the model gets their dtype
    """
    architecture = ARCHITECTURES[keys.kind]
    settings = AutoConfig.for_model(**architecture.facts(keys, vocabulary, NO_ENDS))
    model = AutoModelForCausalLM.from_config(settings)
    model.to(getattr(torch, next(iter(arrays.values())).dtype.name))
    own = model.state_dict()
    for ours, parts in architecture.counterparts(keys, vocabulary):
        for part in parts:
            array = arrays[ours][part.rows] - architecture.added(keys, ours)
            array = array.T if part.is_transposed else array
            own[part.name].copy_(torch.from_numpy(np.ascontiguousarray(array)))
    return model


class WithLoss(nn.Module):
    """A Llama of transformers as a function of inputs and targets, (B, T) each, to the mean loss."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.blocks = model, model.model.layers

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_loss(self.model(inputs, use_cache=False).logits, targets)
