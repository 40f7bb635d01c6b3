"""Small models of transformers, and what they compute."""

from functools import partial

import numpy as np

from mpitrain.data import without_padding

SHAPE = {"vocab_size": 256, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
ENDS = {"bos_token_id": None, "eos_token_id": None}


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


def exact(model):
    """Return a model like a Llama in float64: transformers' norms, angles and softmax are float32 in it."""
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def normal(norm, x):
        epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
        gain = norm.weight + type(norm).__name__.startswith("Gemma")
        return gain * (x * torch.rsqrt((x * x).mean(-1, True) + epsilon))

    def attention(module, q, k, v, mask, scaling=None, softcap=None, **_):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * scaling
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        return ((scores + mask).softmax(-1) @ v).transpose(1, 2).contiguous(), None

    model = model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(normal, module)
    ALL_ATTENTION_FUNCTIONS.register("exact", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("exact", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    config = model.config
    config._attn_implementation = "exact"
    each = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(each // 2, dtype=torch.float64) / (each // 2)

    def turned(x, position_ids, layer_type=None):
        rope = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        powers = (1 / rope["rope_theta"] ** exponents).to(torch.float32) / rope.get("factor", 1)
        angles = (position_ids[..., None].to(torch.float32) * powers).double().repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = turned
    return model


def loaded(folder, dtype="float32"):
    """The model that transformers loads from a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def logits(model, tokens):
    """Return the logits (B, T, vocabulary) of tokens (B, T)."""
    return output(model, tokens).detach().numpy()


def output(model, inputs):
    """The logits of a model of transformers, for inputs as our sources have them."""
    import torch

    tokens, starts, types = map(torch.from_numpy, without_padding(inputs))
    is_of_texts = model.config.model_type == "bert"
    more = {"token_type_ids": types, "attention_mask": starts == 0} if is_of_texts else {}
    return model(tokens, **more).logits


def loss_of(logits, targets):
    """The mean loss of the targets that count."""
    import torch

    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), torch.from_numpy(targets).flatten()
    )


def named(tensors, own, keys):
    """Tensors of an architecture `own` under our names and in our shapes, as arrays."""
    return {
        name: np.concatenate(
            [tensors[p.name].T if p.is_transposed else tensors[p.name] for p in parts]
        )
        for name, parts in own.counterparts(keys, 0, 0, lambda row: row.theirs in tensors)
    }


def loss_and_gradients(model, inputs, targets, own, keys):
    """The mean loss, and the gradients under our names and in our shapes."""
    loss = loss_of(output(model, inputs), targets)
    model.zero_grad()
    loss.backward()
    parameters = model.named_parameters(remove_duplicate=False)
    gradients = {name: p.grad.numpy() for name, p in parameters if p.grad is not None}
    return loss.item(), named(gradients, own, keys)


def rows(count, seed=0, length=16):
    """Random inputs and targets, (count, length) each."""
    found = np.random.default_rng(seed).integers(256, size=(count, length + 1))
    return found[:, :-1].copy(), found[:, 1:].copy()
