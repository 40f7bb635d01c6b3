"""The configuration of a run: `sections` defines the keys, `whole` the Config, `reading` parses it.

ASYNCHRONOUS  the schedules without a pipeline flush, in which each stage updates by itself
KEPT_ON_HOST  the compression formats with error-feedback residuals in host memory
"""

from mpitrain.config.reading import check_choice, nearest, parse, read_toml, refusal, with_settings
from mpitrain.config.sections import (
    ASYNCHRONOUS,
    KEPT_ON_HOST,
    Batch,
    Checkpoint,
    Data,
    Device,
    Layout,
    Model,
    Optimizer,
    Pipeline,
    Precision,
    Replication,
    Run,
)
from mpitrain.config.whole import Config, Key, keys

__all__ = [
    "ASYNCHRONOUS",
    "KEPT_ON_HOST",
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "Device",
    "Key",
    "Layout",
    "Model",
    "Optimizer",
    "Pipeline",
    "Precision",
    "Replication",
    "Run",
    "check_choice",
    "keys",
    "nearest",
    "parse",
    "read_toml",
    "refusal",
    "with_settings",
]
