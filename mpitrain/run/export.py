"""Exports the newest checkpoint of a run to a folder of another project, in one process."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.data.templates import without_day
from mpitrain.data.tokenizer import TOKENIZER
from mpitrain.data.tokens import BYTES
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.formats.chat import FURTHER, SETTINGS, chat_template, template_files
from mpitrain.formats.companions import (
    GENERATION,
    INIT_FROM,
    OF_TOKENIZER,
    ends,
    of_folder,
    special_tokens,
    with_context,
    with_end,
)
from mpitrain.formats.folder import CONFIGURATION, Trained, json_text, refusing, sha256
from mpitrain.formats.peft import by_layer
from mpitrain.formats.table import FORMATS, format_of
from mpitrain.formats.tensors import AnyTensor, StoredTensor, as_ours, merged
from mpitrain.formats.writing import check_new, tokenizer_files, with_marks, write_folder
from mpitrain.models.table import MODELS
from mpitrain.models.targets import is_adapter
from mpitrain.run.build import check_has_adapters, trained_configuration
from mpitrain.run.checkpoint.loading import parameters
from mpitrain.run.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    read_chosen,
    read_manifest,
    steps,
    verify,
)
from mpitrain.run.generate import end_token, tokenizer_of_run
from mpitrain.run.initial import check_base, open_base
from mpitrain.run.model_keys import determined
from mpitrain.run.run_dir import check_meaning, checkpoint_of


class Exported(NamedTuple):
    """The result of an export.

    folder     that was written
    step       the step of the checkpoint
    files      names of the files in the folder
    tokenizer  whether the folder has the tokenizer; False if the run does not know it
    """

    folder: Path
    step: int
    files: list[str]
    tokenizer: bool


def export(
    run: Path,
    name: str,
    folder: Path | None,
    dtype: str,
    shard_bytes: int,
    plugins: list[str],
    merge: bool = False,
    base: str = "",
    best: bool = False,
) -> Exported:
    """Write the newest checkpoint of a run to a new folder.

    name         of the format, a row of FORMATS; empty: that of the run's kind, or peft for adapters
    folder       the new folder; None: it is in the run, and has the name of the format
    dtype        name of the dtype of the parameters in the folder
    shard_bytes  the largest sum of the bytes of tensors in one file
    plugins      settings of run.plugins, for a run that needs them
    merge        whether to add adapters to the model under them
    base         the folder of that model, if it has moved
    best         whether to take the checkpoint with the best validation loss
    raises       ConfigError if the format has no such model or the folder cannot be written;
                 CheckpointError if the checkpoint is damaged
    """
    config = trained_configuration(run, plugins)
    of_model = _format_of(config)
    fitting = "peft" if config.lora.rank and not merge else of_model
    if (name := name or fitting) not in FORMATS:
        raise ConfigError(
            f"The format of an export is {' or '.join(FORMATS)}, but got {name!r}.",
            f"For this run: --to {fitting}",
        )
    check_has_adapters(config, base)
    folder = folder or run / name
    check_new(folder)
    if base:
        moved = config.run.model_copy(update={"init_from": os.path.abspath(base)})
        config = config.model_copy(update={"run": moved})
    _check_adapters(run, config, name, merge, of_model)
    while True:
        saved, manifest = read_chosen(lambda: checkpoint_of(run, best))
        check_meaning(config.flat(), saved, manifest)
        try:
            return _export(run, config, saved, manifest, name, folder, dtype, shard_bytes, merge)
        except MpitrainError:
            if saved in steps(saved.parent):  # Else an active run has removed it meanwhile.
                raise


def _export(
    run: Path,
    config: Config,
    saved: Path,
    manifest: Manifest,
    name: str,
    folder: Path,
    dtype: str,
    shard_bytes: int,
    merge: bool,
) -> Exported:
    """Write one checkpoint; arguments and errors as of `export`."""
    stored = parameters(saved)
    tensors: Mapping[str, AnyTensor] = stored
    if merge:
        config, tensors = with_adapters(config, manifest.base, stored)
    row = FORMATS[name]
    is_model = bool(row.models) and MODELS[config.model.kind].writes
    special, files = _companions(run, config, is_model)
    written = row.write(
        Trained(
            config.model,
            config.data.labels,
            config.lora,
            config.run.init_from,
            tensors,
            special,
            dtype,
            manifest.base,
        )
    )
    written = written._replace(files={**files, **written.files})
    verify(saved, manifest, 0, 1)
    names = write_folder(folder, row.weights, written, dtype, shard_bytes)
    return Exported(folder, manifest.done.step, names, not files.keys().isdisjoint(OF_TOKENIZER))


def _companions(
    run: Path, config: Config, generates: bool
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the special tokens for config.json, and {name: content} of the files beside the tensors.

    They are those of the folder that the run began from, if it has its tokenizer, and else made here.
    A template of the run, and the token that ends its answers, come to them.
    """
    with refusing(run):
        kept = of_folder(run)
        tokenizer = tokenizer_of_run(run, config.data)
        end = end_token(tokenizer, config.data)
        if end and kept and end[1] not in ends(kept):
            kept = with_end(kept, end[1])
        if kept and config.model.context < determined(run / INIT_FROM)["model.context"]:
            kept = with_context(kept, config.model.context)
        files = {name: content for name, content in kept.items() if name != CONFIGURATION}
        if tokenizer and SETTINGS not in kept:
            hides = MODELS[config.model.kind].hides
            entries = (config.data.vocabulary or tokenizer.vocabulary + 1) if hides else 0
            files |= tokenizer_files(
                tokenizer, config.model.context, entries, end[0] if end else ""
            )
        elif tokenizer and TOKENIZER in kept and MODELS[config.model.kind].hides:
            files[TOKENIZER] = with_marks(kept[TOKENIZER], tokenizer)
        template = without_day(config.data.template)
        if template and not (kept and template == chat_template(run / INIT_FROM)):
            files = {name: data for name, data in files.items() if not name.startswith(FURTHER)}
            files |= template_files(template)
    if kept:
        return special_tokens(kept), files
    separator = tokenizer.separator if tokenizer else -1
    between = separator if 0 <= separator < (config.data.vocabulary or BYTES) else None
    special = {"bos_token_id": between, "eos_token_id": end[1] if end else between}
    if generates:
        files[GENERATION] = json_text({"_from_model_config": True, **special})
    return special, files


def _format_of(config: Config) -> str:
    """Return the name of the format that has models of a run's kind."""
    kind = config.model.kind
    # Of several formats of a kind, the first.
    names = {row.kind: name for name, row in reversed(FORMATS.items()) if row.kind}
    if kind not in names:
        raise ConfigError(
            f"Other programs load a {' or '.join(names)}, but this run trained a {kind}.",
            "`mpitrain predict` writes what it predicts.",
        )
    return names[kind]


def _check_adapters(run: Path, config: Config, name: str, merge: bool, of_model: str) -> None:
    rank = config.lora.rank
    if merge and (not rank or name == "peft"):
        raise ConfigError(
            f"A merge adds adapters to the model under them, but lora.rank is {rank} and the format is {name}.",
            "Leave out --merge." if not rank else f"Leave out --merge, or export --to {of_model}.",
        )
    if rank and not merge and name != "peft":
        raise ConfigError(
            f"{run} has adapters of rank {rank}, which a folder of kind {name} cannot have.",
            "Export them --to peft, or add --merge to have them in the parameters.",
        )
    base = run / INIT_FROM
    if name == "peft" and base.is_dir() and format_of(base) is FORMATS["phi3"]:
        raise ConfigError(
            f"Adapters of {run} belong to separate layers of queries, keys, values and gates, but its base, a Phi-3, "
            "joins these layers.",
            "Add --merge, and --to llama or phi3.",
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
