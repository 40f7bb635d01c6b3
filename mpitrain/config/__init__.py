"""The configuration of a run: `sections` defines the keys and the class Config, `load` makes one.

CONFIG        the name of the file in a run directory with all keys of the run
KEPT_ON_HOST  the compression formats with error-feedback residuals in host memory
PATHS         the (section, key) of all paths
"""

# ruff: noqa: F401  these names are the face of the room
from mpitrain.config.load import (
    CONFIG,
    PATHS,
    check_choice,
    check_text,
    parse,
    read_toml,
    refusal,
    tables_of,
    with_settings,
)
from mpitrain.config.presets import PRESETS, merged, preset
from mpitrain.config.sections import (
    ALL_LINEAR,
    EPOCH,
    KEPT_ON_HOST,
    Batch,
    Checkpoint,
    Config,
    ConfigKey,
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
    keys,
)
