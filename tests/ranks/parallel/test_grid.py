"""The grid of ranks, and tensors that several ranks of a replica hold: who is whose neighbour, what counts, what is equal."""

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Arena
from mpitrain.parallel.grid import Axes, Grid
from mpitrain.run.build import build
from mpitrain.run.job import axes
from mpitrain.transport.threads import run_ranks


@pytest.mark.parametrize(
    "axes",
    [
        Axes(),
        Axes(dp=3),
        Axes(tp=2, dp=2, pp=2),
        Axes(tp=3, dp=1, pp=2, servers=2),
        Axes(dp=2, servers=1),
        Axes(tp=2, dp=2, pp=2, cp=3),
    ],
)
@pytest.mark.parametrize("is_vee", [False, True])
def test_tp_varies_fastest_then_cp_then_dp_then_pp_and_servers_come_last(axes, is_vee):
    def groups(transport):
        grid = Grid(transport, axes)
        grid.place_model(
            (*range(axes.pp), *reversed(range(axes.pp))) if is_vee else range(axes.pp),
            {"embedding": (0, axes.pp - 1)},
        )
        found = {
            name: getattr(grid, name).transport.members for name in ("world", "tp", "copies", "pp")
        }
        found |= {
            "servers": grid.servers.transport.members if grid.servers else None,
            "reports_loss": grid.reports_loss,
        }
        found |= {
            "tied": grid.holders["embedding"].transport.members
            if "embedding" in grid.holders
            else None
        }
        grid.close()
        return found, len(transport.windows.parts)

    workers = np.arange(axes.ranks - axes.servers).reshape(axes.pp, axes.copies, axes.tp)
    every = run_ranks(axes.ranks, groups)
    assert sum(found["reports_loss"] for found, _ in every) == axes.copies
    for rank, (found, parts) in enumerate(every):
        assert parts == 0 and found["world"] == tuple(range(axes.ranks))
        if rank >= workers.size:
            assert (
                found["servers"] == tuple(range(workers.size, axes.ranks)) and found["tied"] is None
            )
            assert found["tp"] == found["copies"] == found["pp"] == (rank,)
            continue
        pp, copy, tp = (int(place[0]) for place in np.nonzero(workers == rank))
        assert found["servers"] is None
        assert axes.coords(rank) == (tp, copy // axes.cp, pp, copy % axes.cp)
        assert found["tp"] == tuple(workers[pp, copy])
        assert found["copies"] == tuple(workers[pp, :, tp])
        assert found["pp"] == tuple(workers[:, copy, tp])
        holds = pp in (0, axes.pp - 1)
        assert found["reports_loss"] == (tp == 0 and pp == (0 if is_vee else axes.pp - 1))
        assert found["tied"] == (
            tuple(dict.fromkeys(map(int, workers[[0, -1], copy, tp]))) if holds else None
        )


@pytest.mark.parametrize("hosts, ranks", [("aaab", "2 (a), 3 (b)"), ("abbb", "0 (a), 1 (b)")])
def test_an_algorithm_unfit_for_one_group_is_refused_on_every_rank(hosts, ranks):
    def refused(transport):
        settings = [f"model.{name}" for name in ("layers=1", "width=8", "heads=2", "context=8")]
        with pytest.raises(ConfigError, match="are on 2") as refusal:
            build(
                transport,
                parse(with_settings({}, [*settings, "layout.tp=2", "layout.algorithm=shared"])),
            )
        assert refusal.value.agreed and not transport.windows.parts
        return str(refusal.value)

    assert all(f"On rank {ranks}" in said for said in run_ranks(4, refused, hosts=hosts))


def test_leases_of_a_grids_groups_count_and_leave_no_window():
    def run(transport):
        arena = Arena()
        grid = Grid(transport, Axes(tp=2, dp=2), "auto", arena=arena)
        leases = [
            group.exchange((1000,), "float64") for group in (grid.world, grid.tp, grid.copies)
        ]
        for lease in leases:
            lease.array[:] = transport.rank + 1
            lease.bound_all_reduce().run()
        found = [float(lease.array[0]) for lease in leases], arena.live, arena.allocations
        leases[0].bound_all_reduce().start()
        del lease, leases
        live = arena.live
        windows = len(transport.windows)
        grid.close()
        left = len(transport.windows)
        transport.close()
        return found, live, windows, left, len(transport.windows)

    for rank, (found, *counts) in enumerate(run_ranks(4, run)):
        tp, dp = 2 * (rank // 2), rank % 2
        assert found == ([10, 2 * tp + 3, 2 * dp + 4], 3 * 8000, 3)
        assert counts == [0, 3, 1, 0], (
            "the world's is closed with the transport, which somebody else has made"
        )


SERVERS = "replication.mode=server"


@pytest.mark.parametrize(
    "ranks, settings, way_out",
    [
        (
            2,
            [SERVERS, "replication.servers=2"],
            "Start with `mpitrain launch -n 3 -- train`, or change replication.servers.",
        ),
        (1, [SERVERS], "Start with `mpitrain launch -n 2 -- train`, or change replication.mode."),
        (
            4,
            ["layout.dp=2"],
            "Start with `mpitrain launch -n 2 -- train`, or change --dp (0 takes all ranks).",
        ),
        (5, ["layout.cp=2", "layout.tp=2"], "change --cp or --tp."),
        (3, ["layout.tp=2"], "Start with `mpitrain launch -n 2 -- train`, or change --tp."),
        (1, ["layout.dp=2", "layout.pp=2"], "or change --dp (0 takes all ranks) or --pp."),
        (
            1,
            ["batch.size=2", "batch.micro_batches=4"],
            "Set batch.size to at least 4, or lower batch.micro_batches.",
        ),
        (3, ["batch.size=2"], "Set batch.size to at least 3, or start fewer ranks."),
        (
            2,
            ["batch.size=3", "batch.micro_batches=2"],
            "or lower batch.micro_batches or start fewer ranks.",
        ),
    ],
)
def test_a_refusal_of_a_layout_names_only_what_can_help(ranks, settings, way_out):
    with pytest.raises(ConfigError) as raised:
        axes(parse(with_settings({}, settings)), ranks)
    assert str(raised.value).endswith(way_out)
