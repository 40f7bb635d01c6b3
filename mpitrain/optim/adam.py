"""Adam's hyper-parameters, for all rules with Adam's two moments."""

from collections.abc import Mapping
from typing import Any

from mpitrain import config
from mpitrain.optim.rule import Update

ADAM = ("weight_decay", "beta1", "beta1_delayed", "beta2", "epsilon")
"""The hyper-parameters of Adam and its variants."""


def of_adam(update: Update) -> Mapping[str, float]:
    """Return the arguments of a step of Adam or of a variant."""
    settings = update.settings
    return {
        "beta1": settings.beta1_delayed if update.delayed else settings.beta1,
        "beta2": settings.beta2,
        "eps": settings.epsilon,
        "step": update.number,
    }


def torch_adam(settings: config.Optimizer) -> Mapping[str, Any]:
    """Return the arguments of torch.optim.Adam and AdamW."""
    return {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
