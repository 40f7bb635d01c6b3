"""The grid of ranks: which place each rank has on the dp, pp and tp axes."""

from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError


class Topology(NamedTuple):
    """Sizes of the axes. tp varies fastest from rank to rank, so that the chattiest neighbours share a host; then pp."""

    dp: int
    pp: int
    tp: int

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(dp, pp, tp) of a rank."""
        rest, tp = divmod(rank, self.tp)
        dp, pp = divmod(rest, self.pp)
        return dp, pp, tp


def topology(config: Config, ranks: int) -> Topology:
    """The grid for `ranks` ranks, with dp filled in; ConfigError if dp x pp x tp is not `ranks`, or rows are too few."""
    layout = config.layout
    dp = layout.dp or max(1, ranks // (layout.tp * layout.pp))
    needed = dp * layout.tp * layout.pp
    if needed != ranks:
        raise ConfigError(
            f"dp {dp} x tp {layout.tp} x pp {layout.pp} needs {needed} ranks, but {ranks} were started.",
            f"Start with `mpitrain launch -n {needed} -- train`, or change --dp (0 takes all ranks).",
        )
    shares, size = dp * config.batch.micro_batches, config.batch.size
    if shares > size:
        raise ConfigError(
            f"Each of dp {dp} x micro-batches {config.batch.micro_batches} = {shares} shares needs a sequence, "
            f"but batch.size is {size}.",
            f"Set batch.size to at least {shares}, or start fewer ranks.",
        )
    return Topology(dp, layout.pp, layout.tp)


def share(rows: int, part: int, parts: int) -> range:
    """The part-th of `parts` nearly equal runs of rows: any parts <= rows leaves none empty."""
    return range(part * rows // parts, (part + 1) * rows // parts)
