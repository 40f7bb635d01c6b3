"""Small models of transformers, and what they compute."""

import numpy as np

SHAPE = {"vocab_size": 256, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
ENDS = {"bos_token_id": None, "eos_token_id": None}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Conv1D weights, (inputs, outputs)."""
OURS = (
    ("transformer.", ""),
    ("h.", "blocks."),
    ("attn.c_attn", "attention.qkv"),
    ("attn.c_proj", "attention.out"),
    ("mlp.c_fc", "mlp.up"),
    ("mlp.c_proj", "mlp.down"),
    ("ln_1.weight", "attention.norm.gain"),
    ("ln_1.bias", "attention.norm.bias"),
    ("ln_2.weight", "mlp.norm.gain"),
    ("ln_2.bias", "mlp.norm.bias"),
    ("ln_f.weight", "head.norm.gain"),
    ("ln_f.bias", "head.norm.bias"),
    ("lm_head", "head.logits"),
    ("wte.weight", "embedding.tokens"),
    ("wpe.weight", "embedding.positions"),
)


def made(dtype="float32", seed=0, **changes):
    """Return a GPT2LMHeadModel with random values in all parameters, gains and biases included."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(**SHAPE, **ENDS) if not changes else GPT2Config(**{**SHAPE, **ENDS, **changes})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(getattr(torch, dtype)).eval()


def llama(kind="LlamaForCausalLM", **changes):
    """Return a model like a Llama, whose parameters differ from 0 and from each other."""
    import torch
    import transformers

    shape = {
        "vocab_size": 256,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        **ENDS,
    }
    torch.manual_seed(0)
    own = getattr(transformers, kind)
    model = own(own.config_class(**{**shape, **changes}))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(2).add_(0.01 * torch.randn_like(tensor))
    return model.eval()


def loaded(folder, dtype="float32"):
    """The model that transformers loads from a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def logits(model, tokens):
    """Return the logits (B, T, vocabulary) of tokens (B, T)."""
    import torch

    with torch.inference_mode():
        return model(torch.from_numpy(tokens)).logits.numpy()


def loss_and_gradients(model, inputs, targets):
    """The mean loss, and the gradients under our names and in our shapes."""
    import torch

    found = model(torch.from_numpy(inputs)).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(targets).flatten())
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        array = parameter.grad.numpy()
        gradients[ours(name)] = array.T if name.endswith(TRANSPOSED) else array
    return loss.item(), gradients


def ours(name):
    """Our name of a parameter of transformers."""
    for theirs, own in OURS:
        name = name.replace(theirs, own)
    return name


def rows(count, seed=0, length=16):
    """Random inputs and targets, (count, length) each."""
    found = np.random.default_rng(seed).integers(256, size=(count, length + 1))
    return found[:, :-1].copy(), found[:, 1:].copy()
