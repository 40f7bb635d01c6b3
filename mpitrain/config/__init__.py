"""The configuration of a run: `sections` has every key, `whole` joins them, `reading` makes a Config from files and settings.

ASYNCHRONOUS  schedules whose stages update by themselves
KEPT_ON_HOST  wire formats whose residuals lie in host memory
"""

from mpitrain.config.reading import check_choice, nearest, parse, read_toml, with_settings
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
from mpitrain.config.whole import Config, keys

__all__ = [
    "ASYNCHRONOUS",
    "KEPT_ON_HOST",
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "Device",
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
    "with_settings",
]
