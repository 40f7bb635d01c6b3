"""The grid of ranks, and tensors that several ranks of a replica hold: who is whose neighbour, what counts, what is equal."""

import numpy as np
import pytest

from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.initial import zeros
from mpitrain.layers.plain import Plain
from mpitrain.machine.arena import Arena
from mpitrain.ops.device import device_for
from mpitrain.parallel.grid import Axes, Grid, axes
from mpitrain.parallel.modes import replication_for, servers_of
from mpitrain.parallel.replication.protocol import ReplicationContext, StepInput
from mpitrain.pipeline.partition import assign_units
from mpitrain.run.build import build
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


class Described:
    """A layer that is nothing but its description."""

    def __init__(self, *parameters):
        self._parameters = parameters

    def parameters(self):
        return list(self._parameters)


def normal(generator, shape):
    return generator.standard_normal(shape)


CUT = (0, 3, 10)  # of ten columns, by tp rank: the layouts of what is cut differ


def units(tp):
    cut = (slice(0, 6), slice(CUT[tp], CUT[tp + 1]))
    return [
        Unit(
            "first",
            Described(
                Parameter("weight", (6, 10), normal, True, (cut,)),
                Parameter("gain", (37,), normal, False, holders="tp"),
            ),
        ),
        Unit(
            "second",
            Described(
                Parameter("bias", (5,), normal, False, holders="tp"),
                Parameter("weight", (6, 10), normal, True, (cut,)),
            ),
        ),
    ]


def gradient(name, shape, dp):
    """One replica's gradient of a whole tensor: of such sizes that a sum in another order has other bits."""
    return (
        np.random.default_rng([len(name), ord(name[0]), dp])
        .standard_normal(shape)
        .astype(np.float32)
        * 10.0**dp
    )


@pytest.mark.parametrize("zero", (0, 1))
@pytest.mark.parametrize("wire", ("none", "int8"))
@pytest.mark.parametrize("dp", (1, 2, 3))
def test_replicated_tensors_count_once_and_stay_equal(dp, wire, zero):
    settings = {
        "replication": {"zero": zero, "wire": wire, "bucket_mb": 0.0001},
        "optimizer": {"clip": 0.0, "warmup": 0},
    }

    def run(transport):
        config, axes, device = parse(settings), Axes(tp=2, dp=dp), device_for("cpu")
        grid = Grid(transport, axes, "ring", DEFAULT)
        storage = Storage(units(grid.coords.tp), "float32", dp)
        replication = replication_for(
            ReplicationContext(
                config,
                grid,
                storage,
                parse_wire(wire),
                device,
                device.arena(),
                Plain(device.ops).loss(),
            )
        )
        replication.step_end.begin(0)
        for entry in storage.entries:
            entry.view(replication.reducer.buffer)[...] = entry.parameter.part_of(
                gradient(entry.name, entry.parameter.shape, grid.coords.dp)
            )
        for unit in (1, 0):
            for leaf in replication.reducer.gradients(unit).values():
                leaf.claim()
            replication.reducer.ready(unit, is_last=True)
        outcome = replication.step_end.finish(StepInput(0, [], 0.01))
        replication.step_end.sync()
        shared = {
            e.name: e.view(replication.store.parameters).copy()
            for e in storage.entries
            if e.parameter.holders
        }
        return outcome, shared

    wholes = {
        p: [gradient(p, shape, rank).astype(float) for rank in range(dp)]
        for p, shape in {
            "first.weight": (6, 10),
            "first.gain": (37,),
            "second.bias": (5,),
            "second.weight": (6, 10),
        }.items()
    }
    norm = np.sqrt(sum((sum(parts) ** 2).sum() for parts in wholes.values()))
    every = run_ranks(2 * dp, run)
    for outcome, shared in every:
        assert outcome.updated and abs(outcome.grad_norm / norm - 1) < (
            1e-6 if wire == "none" else 1e-2
        )
        assert shared.keys() == {"first.gain", "second.bias"}
        for name, values in shared.items():
            assert np.array_equal(values, every[0][1][name]), name


def tied_units(tp):
    """An embedding, a layer whose gain is whole on every rank of tp but its gradient is not, and a head tied to the embedding."""
    rows = (slice(CUT[tp], CUT[tp + 1]), slice(0, 6))
    return [
        Unit("embedding", Described(Parameter("tokens", (10, 6), normal, True, (rows,)))),
        Unit(
            "middle",
            Described(
                Parameter("gain", (37,), normal, False, holders="tp", partial=True),
                Parameter("bias", (5,), normal, False, holders="tp"),
                Parameter("weight", (6, 10), normal, True, ((slice(0, 6), rows[0]),)),
            ),
        ),
        Unit("norm", Described(Parameter("gain", (7,), normal, False, holders="tp", partial=True))),
        Unit(
            "head",
            Described(Parameter("weight", (10, 6), zeros, False, (rows,))),
            {"weight": "embedding.tokens"},
        ),
    ]


@pytest.mark.parametrize("settings", [{}, {"zero": 1}, {"overlap": False}])
@pytest.mark.parametrize("dp", (1, 2, 3))
def test_a_tied_tensor_has_one_start_one_gradient_and_one_owner(dp, settings):
    shapes = {
        "embedding.tokens": (10, 6),
        "middle.gain": (37,),
        "middle.bias": (5,),
        "middle.weight": (6, 10),
        "norm.gain": (7,),
    }

    def brought(name, tp, pp, replica):
        """What a rank's layers write of a whole tensor: the same on ranks that have all of it, whole numbers."""
        place = {"embedding.tokens": (0, pp), "middle.gain": (tp, 0), "norm.gain": (tp, 0)}.get(
            name, (0, 0)
        )
        return (
            np.random.default_rng([len(name), *place, replica])
            .integers(-9, 10, shapes[name])
            .astype(np.float64)
        )

    def run(transport):
        config, axes, device = (
            parse({"replication": settings}),
            Axes(tp=2, dp=dp, pp=2),
            device_for("cpu"),
        )
        here = axes.coords(transport.rank)
        stages, tied = assign_units(tied_units(here.tp), (2, 2), (0, 1))
        assert tied == {"embedding.tokens": [0, 1]}
        grid = Grid(transport, axes, "ring")
        grid.place_model((0, 1), tied)
        storage = Storage(stages[here.pp], "float64", dp)
        replication = replication_for(
            ReplicationContext(
                config,
                grid,
                storage,
                parse_wire(config.replication.wire),
                device,
                device.arena(),
                Plain(device.ops).loss(),
            )
        )
        starts = {
            entry.name: entry.view(replication.store.parameters).copy() for entry in storage.entries
        }
        replication.step_end.begin(0)
        for entry in storage.entries:
            entry.view(replication.reducer.buffer)[...] = entry.parameter.part_of(
                brought(entry.name, *here[::2], here.dp)
            )
        for unit in reversed(range(len(storage.units))):
            for leaf in replication.reducer.gradients(unit).values():
                leaf.claim()
            replication.reducer.ready(unit, is_last=True)
            replication.reducer.poll()
        outcome = replication.step_end.finish(StepInput(0, [], 0.01))
        replication.step_end.sync()
        every = [
            {entry.name: (entry.parameter, entry.view(flat).copy()) for entry in storage.entries}
            for flat in (replication.reducer.buffer, replication.store.parameters)
        ]
        return here, starts, outcome.grad_norm, storage.parameter_count, *every

    found = run_ranks(4 * dp, run)
    wholes = {
        name: sum(
            brought(name, tp, pp, replica)
            for replica in range(dp)
            for tp in range(2 if "gain" in name else 1)
            for pp in range(2 if "tokens" in name else 1)
        )
        for name in shapes
    }
    norm = np.sqrt(sum((whole**2).sum() for whole in wholes.values()))
    assert {place.pp: count for place, _, _, count, _, _ in found} == {0: 60 + 37 + 5 + 60, 1: 7}
    for place, starts, grad_norm, _, gradients, parameters in found:
        assert abs(grad_norm / norm - 1) <= 1e-12
        for other, their_starts, _, _, _, theirs in found:
            for name in starts.keys() & their_starts.keys():
                if other.tp == place.tp or parameters[name][0].holders == "tp":
                    assert np.array_equal(starts[name], their_starts[name]), name
                    assert np.array_equal(parameters[name][1], theirs[name][1]), name
                    assert not np.array_equal(starts[name], parameters[name][1]), name
        for name, (parameter, gradient) in gradients.items():
            if not settings.get("zero"):
                assert np.array_equal(gradient, parameter.part_of(wholes[name])), name


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
        axes(config := parse(with_settings({}, settings)), ranks, servers_of(config))
    assert str(raised.value).endswith(way_out)
