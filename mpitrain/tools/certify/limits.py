"""The limits of a certificate: from a TOML file, or relative to the median of the nodes."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mpitrain.config.whole import read_toml
from mpitrain.errors import ConfigError
from mpitrain.strict_json import complaint


class Limits(BaseModel):
    """The limits of a node. A limit of 0 is not applied.

    nodes        names of the nodes that must answer
    gemm_GFLOPs  lowest accepted rate of a matrix product on each rank, 1e9 operations per second
    memory_GBs   lowest accepted bandwidth of main memory of each rank
    link_GBs     lowest accepted bandwidth between two nodes, one way
    link_us      highest accepted latency between two nodes, one way
    ratio        lowest accepted rate of a rank, relative to the median of the nodes with the same processor
    shm_MB       least accepted free space in /dev/shm
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    nodes: list[str] = []
    gemm_GFLOPs: float = Field(0.0, ge=0, allow_inf_nan=False)
    memory_GBs: float = Field(0.0, ge=0, allow_inf_nan=False)
    link_GBs: float = Field(0.0, ge=0, allow_inf_nan=False)
    link_us: float = Field(0.0, ge=0, allow_inf_nan=False)
    ratio: float = Field(0.5, ge=0, le=1)
    shm_MB: float = Field(64.0, ge=0, allow_inf_nan=False)


def read_limits(path: Path) -> Limits:
    """Read limits from a TOML file.

    raises  ConfigError that names the file and the key
    """
    try:
        return Limits.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(
            f"{path} is no file of limits: {complaint(error)}.",
            f"Its keys are {', '.join(Limits.model_fields)}.",
        ) from None
