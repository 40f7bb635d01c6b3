"""Exports the newest checkpoint of a run to a folder of another project, in one process."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import ConfigError
from mpitrain.formats.chat import template_files
from mpitrain.formats.folder import Trained, refusing, sha256
from mpitrain.formats.peft import by_layer
from mpitrain.formats.table import FORMATS
from mpitrain.formats.tensors import AnyTensor, StoredTensor, as_ours, merged
from mpitrain.formats.writing import check_new, tokenizer_files, write_folder
from mpitrain.models.table import MODELS
from mpitrain.models.targets import is_adapter
from mpitrain.run.build import check_has_adapters, trained_configuration
from mpitrain.run.checkpoint.loading import parameters
from mpitrain.run.checkpoint.manifest import MANIFEST, read_manifest, verify
from mpitrain.run.generate import tokenizer_of_run
from mpitrain.run.initial import check_base, open_base
from mpitrain.run.run_dir import checkpoint_of


class Exported(NamedTuple):
    """The result of an export.

    step       the step of the checkpoint
    files      names of the files in the folder
    tokenizer  whether the folder has the tokenizer; False if the run does not know it
    """

    step: int
    files: list[str]
    tokenizer: bool


def export(
    run: Path,
    name: str,
    folder: Path,
    dtype: str,
    shard_bytes: int,
    plugins: list[str],
    merge: bool = False,
    base: str = "",
    best: bool = False,
) -> Exported:
    """Write the newest checkpoint of a run to a new folder.

    name         of the format, a row of FORMATS
    dtype        name of the dtype of the parameters in the folder
    shard_bytes  the largest sum of the bytes of tensors in one file
    plugins      settings of run.plugins, for a run that needs them
    merge        whether to add adapters to the model under them
    base         the folder of that model, if it has moved
    best         whether to take the checkpoint with the best validation loss
    raises       ConfigError if the format has no such model or the folder cannot be written;
                 CheckpointError if the checkpoint is damaged
    """
    if name not in FORMATS:
        raise ConfigError(
            f"The format of an export is {' or '.join(FORMATS)}, but got {name!r}.",
            "For example: --to gpt2",
        )
    config = trained_configuration(run, plugins)
    check_has_adapters(config, base)
    check_new(folder)
    saved = checkpoint_of(run, best)
    manifest = read_manifest(saved)
    stored = parameters(saved)
    tensors: Mapping[str, AnyTensor] = stored
    if base:
        moved = config.run.model_copy(update={"init_from": os.path.abspath(base)})
        config = config.model_copy(update={"run": moved})
    _check_adapters(run, config, name, merge)
    if merge:
        config, tensors = with_adapters(config, manifest.base, stored)
    tokenizer: Tokenizer | None = tokenizer_of_run(run, config.data)
    separator = tokenizer.separator if tokenizer else -1
    row = FORMATS[name]
    written = row.write(Trained(config, tensors, separator, dtype, manifest.base))
    if tokenizer:
        hides = MODELS[config.model.kind].hides
        entries = (config.data.vocabulary or tokenizer.vocabulary + 1) if hides else 0
        files = tokenizer_files(tokenizer, config.model.context, entries)
        if config.data.template:
            files |= template_files(config.data.template)
        written = written._replace(files={**written.files, **files})
    verify(saved, manifest, 0, 1)
    names = write_folder(folder, row.weights, written, dtype, shard_bytes)
    return Exported(manifest.done.step, names, tokenizer is not None)


def _check_adapters(run: Path, config: Config, name: str, merge: bool) -> None:
    rank = config.lora.rank
    if merge and (not rank or name == "peft"):
        raise ConfigError(
            f"A merge adds adapters to the model under them, but lora.rank is {rank} and the format is {name}.",
            "Leave out --merge."
            if not rank
            else "Leave out --merge, or export --to gpt2, llama or bert.",
        )
    if rank and not merge and name != "peft":
        raise ConfigError(
            f"{run} has adapters of rank {rank}, which a folder of kind {name} cannot have.",
            "Export them --to peft, or add --merge to have them in the parameters.",
        )


def with_adapters(
    config: Config, record: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[Config, dict[str, AnyTensor]]:
    """Return the configuration and the tensors of the merged model.

    Adapters are added to the weights in the folder of run.init_from, which are never of 8 bits.

    record   of the base, as the manifest has it; empty: the checkpoint has all parameters
    tensors  of the checkpoint
    raises   CheckpointError if the base is missing or has changed
    """
    weights: dict[str, AnyTensor] = {
        name: as_ours(tensor) for name, tensor in tensors.items() if not is_adapter(name)
    }
    if record:
        base = open_base(config, record, config.data.vocabulary)
        with refusing(base.folder):
            digests = {name: sha256(base.folder / name) for name in base.files}
        check_base(record, {"folder": str(base.folder), "sha256": digests})
        if MANIFEST in base.files:
            verify(base.folder, read_manifest(base.folder), 0, 1)
        weights = {name: as_ours(tensor) for name, tensor in base.tensors.items()}
        keys = {key.partition(".")[2]: value for key, value in base.keys.items() if "model." in key}
        config = config.model_copy(update={"model": config.model.model_copy(update=keys)})
    scale = config.lora.alpha / config.lora.rank
    for layer, pairs in by_layer(tensors, config.model).items():
        name = f"{layer}.weight"
        if name not in weights:  # The adapters of a tied head are not those of the embedding.
            weights[name] = weights["embedding.tokens"]
            untied = config.model.model_copy(update={"tied": False})
            config = config.model_copy(update={"model": untied})
        weights[name] = merged(weights[name], pairs, scale)
    return config, weights
