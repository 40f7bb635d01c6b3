"""A layer of experts is the block of Mixtral, in outputs and gradients."""

import numpy as np
import pytest

from tests.unit.layers.test_experts import forward_and_back, layer_of


def test_the_layer_is_the_block_of_mixtral(monkeypatch):
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    from transformers import MixtralConfig

    layer = layer_of(balance=0.0)
    x, dy = np.random.default_rng(2).standard_normal((2, 2, 7, 6))
    y, dx, gradients, arrays = forward_and_back(layer, x, dy)
    config = MixtralConfig(
        hidden_size=6, intermediate_size=5, num_local_experts=4, num_experts_per_tok=2
    )
    theirs = mixtral.MixtralSparseMoeBlock(config).double()
    names = {"gate.weight": "router", "experts.gate_up_proj": "up", "experts.down_proj": "down"}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[f"layer.{names[name]}.weight"]))
    # Its router computes in float32 otherwise.
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    inputs = torch.from_numpy(x).requires_grad_()
    found = theirs(inputs)
    found = found[0] if isinstance(found, tuple) else found
    found.backward(torch.from_numpy(dy))
    assert np.abs(found.detach().numpy() - y).max() < 1e-12
    assert np.abs(inputs.grad.numpy() - dx).max() < 1e-12
    for name, parameter in theirs.named_parameters():
        own = gradients[f"layer.{names[name]}.weight"]
        assert np.abs(parameter.grad.numpy() - own).max() < 1e-12, name
