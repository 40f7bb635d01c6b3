"""The configuration of a run: `sections` defines the keys, `whole` the Config, and parses it.

CONFIG        the name of the file in a run directory with all keys of the run
KEPT_ON_HOST  the compression formats with error-feedback residuals in host memory
PATHS         the (section, key) of all paths
"""

# ruff: noqa: F401  these names are the face of the room
from mpitrain.config.presets import PRESETS, merged, preset
from mpitrain.config.sections import (
    ALL_LINEAR,
    EPOCH,
    KEPT_ON_HOST,
    Batch,
    Checkpoint,
    Data,
    Device,
    Epochs,
    Layout,
    Lora,
    Memory,
    Model,
    Optimizer,
    ParameterGroup,
    Pipeline,
    Precision,
    Replication,
    Run,
)
from mpitrain.config.whole import (
    CONFIG,
    PATHS,
    Config,
    ConfigKey,
    check_choice,
    check_text,
    keys,
    parse,
    read_toml,
    refusal,
    with_settings,
)
