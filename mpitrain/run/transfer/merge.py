"""Merges the adapters of a run into the model under them: W + alpha / r B A."""

from collections.abc import Mapping
from typing import Any

from mpitrain.config import Config
from mpitrain.formats.folder import refusing, sha256
from mpitrain.formats.peft import by_layer
from mpitrain.formats.tensors import AnyTensor, StoredTensor, as_ours, merged
from mpitrain.models.targets import is_adapter
from mpitrain.run.checkpoint.manifest import MANIFEST, read_manifest, verify
from mpitrain.run.transfer.adapters import check_base, open_base


def with_adapters(
    config: Config, record: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[Config, dict[str, AnyTensor]]:
    """Return the configuration and the tensors of the merged model.

    The weights are those of the base in run.init_from, which are never of 8 bits.

    record   of the base, in the checkpoint; empty: the checkpoint has all parameters
    tensors  of the checkpoint
    raises   CheckpointError if the base is missing or has changed
    """
    weights: dict[str, AnyTensor] = {
        name: as_ours(tensor) for name, tensor in tensors.items() if not is_adapter(name)
    }
    if record:
        base = open_base(config, record, config.data.vocabulary or 256)
        with refusing(base.folder):
            digests = {name: sha256(base.folder / name) for name in base.files}
        check_base(record, {"folder": str(base.folder), "sha256": digests})
        if MANIFEST in base.files:
            verify(base.folder, read_manifest(base.folder), 0, 1)
        weights = {name: as_ours(tensor) for name, tensor in base.tensors.items()}
        keys = {key.partition(".")[2]: value for key, value in base.keys.items() if "model." in key}
        config = config.model_copy(update={"model": config.model.model_copy(update=keys)})
    scale = config.lora.alpha / config.lora.rank
    for layer, pairs in by_layer(tensors, config.model.width).items():
        name = f"{layer}.weight"
        if name not in weights:  # The adapters of a tied head are not those of the embedding.
            weights[name] = weights["embedding.tokens"]
            untied = config.model.model_copy(update={"tied": False})
            config = config.model_copy(update={"model": untied})
        weights[name] = merged(weights[name], pairs, scale)
    return config, weights
