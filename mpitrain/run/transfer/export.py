"""Exports the newest checkpoint of a run to a folder of another project, in one process."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import ConfigError
from mpitrain.formats.folder import Trained
from mpitrain.formats.table import FORMATS
from mpitrain.formats.tensors import AnyTensor
from mpitrain.formats.writing import check_new, tokenizer_files, write_folder
from mpitrain.run.checkpoint.directories import newest
from mpitrain.run.checkpoint.load import parameters
from mpitrain.run.checkpoint.manifest import read_manifest, verify
from mpitrain.run.generate import tokenizer_of_run
from mpitrain.run.open_run import check_has_adapters, trained_configuration
from mpitrain.run.run_dir import CHECKPOINTS
from mpitrain.run.transfer.merge import with_adapters


class Exported(NamedTuple):
    """The result of an export.

    step       the step of the checkpoint
    files      names of the files in the folder
    tokenizer  whether the run knows its tokenizer, so that the folder has it
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
) -> Exported:
    """Write the newest checkpoint of a run to a new folder.

    name         of the format, a row of FORMATS
    dtype        name of the dtype of the parameters in the folder
    shard_bytes  the largest sum of tensors in a file
    plugins      settings of run.plugins, for a run that needs them
    merge        whether to add adapters to the model under them
    base         the folder of that model, if it has moved
    raises       ConfigError if the run has another kind of model or the folder cannot be written;
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
    saved = newest(run / CHECKPOINTS)
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
        files = tokenizer_files(tokenizer, config.model.context)
        written = written._replace(files={**written.files, **files})
    verify(saved, manifest, 0, 1)
    names = write_folder(folder, row.weights, written, dtype, shard_bytes)
    return Exported(manifest.done.step, names, tokenizer is not None)


def _check_adapters(run: Path, config: Config, name: str, merge: bool) -> None:
    rank = config.lora.rank
    if merge and (not rank or name == "peft"):
        raise ConfigError(
            f"A merge adds adapters to the model under them, but lora.rank is {rank} and the format is {name}.",
            "Leave out --merge." if not rank else "Leave out --merge, or export --to gpt2.",
        )
    if rank and not merge and name != "peft":
        raise ConfigError(
            f"{run} has adapters of rank {rank}, which a folder of kind {name} cannot have.",
            "Export them --to peft, or add --merge to have them in the parameters.",
        )
