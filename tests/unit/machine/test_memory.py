"""A model that does not fit is refused before it is built: on a host, in a container, on a GPU."""

import builtins
import io
import sys
from dataclasses import replace

import pytest

from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.config import with_settings
from mpitrain.data import Unopened
from mpitrain.errors import ConfigError, gigabytes
from mpitrain.layers.flat import Storage
from mpitrain.machine import process
from mpitrain.models.table import MODELS
from mpitrain.ops.device import device_for
from mpitrain.optim import RULES
from mpitrain.optim.coded import BlockWise
from mpitrain.optim.tensors import TensorWise
from mpitrain.parallel.modes import MODES, STREAMS, ZERO, is_synchronous, mode_of, servers_of
from mpitrain.pipeline.schedules import plan_of
from mpitrain.run import build
from mpitrain.run.checkpoint.held import NeighbourCopies, units_of_all
from mpitrain.run.checkpoint.snapshot import KEPT, arrays_of
from mpitrain.run.choices import parse
from mpitrain.run.job import Job, agree_on, axes
from mpitrain.tools.plan import memory
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy
from tests.rows import replaced

SIZES = {
    "tokens": Unopened("tokens", (8,), 50, 50),
    "samples": Unopened("samples", (20,), 20, 10),
    "images": Unopened("images", (2, 5, 4), 40, 10),
}
SOURCES = {kind: SIZES[row.takes.split()[-1]] for kind, row in MODELS.items()}


def config_of(kind="gpt", layers=3, **more):
    model = {"kind": kind, "layers": layers, "width": 24, "heads": 2, "context": 8}
    usual = {"model": model, "device": {"kind": "cpu"}, "batch": {"size": 4}}
    return parse({**usual, **more})


def resolved(config, ranks=1):
    placed, plan = (axes(config, ranks), plan_of("1f1b", 1, 1))
    return Job(config, placed, ("",) * placed.ranks, plan, DEFAULT, [], device_for("cpu"))


def check(transport, found, source=None):
    found = replace(found, source=source or SOURCES["gpt"])
    return build.check_memory(transport, found, found.described().model)


def sizes_of(found, shards):
    """Return the sizes of a job's model, and its layout."""
    found = replace(found, source=SOURCES["gpt"])
    storage = Storage(found.described().model, found.config.precision.stored, found.axes.copies)
    return build.sizes(found, storage, shards), storage


@pytest.mark.parametrize("ranks, hosts, sharing", [(1, "a", 1), (3, "aaa", 3), (3, "aba", 2)])
@pytest.mark.parametrize("optimizer", RULES)
def test_a_model_larger_than_free_memory_is_refused_with_the_numbers(
    ranks, hosts, sharing, optimizer, monkeypatch
):
    config = config_of(layers=20, optimizer={"name": optimizer})
    found, storage = sizes_of(resolved(config, ranks), 1)
    rule = RULES[optimizer]
    if not isinstance(rule.step, BlockWise | TensorWise):
        assert found.state == rule.nbytes(4)
    needed = sharing * found.replica

    def run(transport):
        if transport.hosts[transport.rank] == "a":
            check(transport, resolved(config, ranks))

    monkeypatch.setattr(process, "free_memory", lambda kind: needed)
    run_ranks(ranks, run, hosts=hosts)
    monkeypatch.setattr(process, "free_memory", lambda kind: needed - 1)
    law = (
        rf"{storage.parameter_count:,} parameters .* of {sharing} rank\(s\) need .* GB on this host"
    )
    with pytest.raises(ConfigError, match=law):
        run_ranks(ranks, run, hosts=hosts)


@pytest.mark.parametrize(
    "zero, shard, hosts",
    [*((zero, "all", "aa") for zero in range(4)), (1, "host", "abab"), (3, "host", "aabb")],
)
def test_memory_of_sharded_state_counts_a_shard_and_one_unit(zero, shard, hosts, monkeypatch):
    config, n = config_of(layers=20, replication={"zero": zero, "shard": shard}), len(hosts)
    length = sizes_of(resolved(config, n), n)[0].length
    # The mlp half of a block: its two matrices and biases, and its norm. Norm and biases, of 24
    # each, end before a multiple of 32: 24, 24, 24 and 96 in front of the matrices.
    largest = 8 * 24**2 + 7 * 24 + 8 + 8
    grain = n * 32
    on_its_way = -(-largest // grain) * grain * max(0, zero - 1)
    halves = {0: 8, 1: 6, 2: 5, 3: 4}[zero]  # of a flat buffer: parameters, gradients, two moments
    needed = 2 * 4 * (length * halves // 2 + on_its_way)
    monkeypatch.setattr(process, "free_memory", lambda kind: needed)
    run_ranks(n, lambda transport: check(transport, resolved(config, n)), hosts=hosts)
    monkeypatch.setattr(process, "free_memory", lambda kind: needed - 1)
    with pytest.raises(ConfigError, match="parameters with gradients"):
        run_ranks(n, lambda transport: check(transport, resolved(config, n)), hosts=hosts)


def layouts():
    """{row of each mode, with its variants: the sections that choose it}."""
    found = {}
    for name, mode in MODES.items():
        for stage in (0, *(ZERO if name == "all-reduce" else ())):
            for setting in mode.variants.values() or [f"replication.zero={stage}"]:
                sections = with_settings({"replication": {"mode": name}}, [setting])
                found[f"{name} {setting}"] = sections
    for name in STREAMS:
        found[name] = {"pipeline": {"schedule": name}}
    return found


def check_held(ranks, sections, rounding=1e-12):
    """The formula of the mode gives the bytes that all ranks hold together, without scratch.

    Two buffers take turns in the stages of ZeRO that have any; the formula counts the larger one.
    """

    def held(transport):
        trainer = build.build(transport, config, source=SOURCES["gpt"]).trainer
        trainer.sync_parameters()
        sizes, _ = sizes_of(trainer.job, trainer.grid.axes.dp)
        row = mode_of(trainer.config.replication, trainer.config.pipeline.schedule)
        whole = row.memory(sizes._replace(largest=0, slot=0))
        in_turns = row.memory(sizes) - whole
        kept = sum(array.nbytes for array in arrays_of(trainer))
        unlike = [kept - mode_of(config.replication, config.pipeline.schedule).kept(sizes)]
        if trainer.grid.axes.copies > 1 and is_synchronous(
            config.replication, config.pipeline.schedule
        ):
            copies = NeighbourCopies(trainer, "", units_of_all(trainer), [("", "")] * ranks, [])
            unlike.append(copies.nbytes / KEPT - memory.copied_bytes(config, sizes))
        held = sum(trainer.replica.held_by_kind().values())
        return held - trainer.grid.scratch_bytes - whole, whole, in_turns, unlike

    units = {"replication": {**sections.get("replication", {}), "bucket_mb": 1e-6}}  # are buckets
    config = config_of(**{**sections, **units})
    more, (whole, *_), (in_turns, *_), unlike = zip(*run_ranks(ranks, held), strict=True)
    more, rounding = sum(more) / ranks, rounding * whole
    for each in zip(*unlike, strict=True):
        assert abs(sum(each)) / ranks <= rounding or not is_synchronous(
            config.replication, config.pipeline.schedule
        )
    assert in_turns - rounding <= more <= 2 * in_turns + rounding


@pytest.mark.parametrize(
    "name, ranks, compute",
    [
        (name, ranks, ("bfloat16", "float32")[ranks % 2])
        for name, sections in layouts().items()
        for ranks in (1, 2, 3, 4)
        if ranks
        > servers_of(
            (own := config_of(**sections)).replication, own.pipeline.schedule
        )  # servers need a worker
    ],
)
@pytest.mark.slow
def test_the_memory_that_is_asked_for_is_what_the_ranks_hold_then(name, ranks, compute):
    sections = {**layouts()[name], "precision": {"compute": compute}}
    check_held(ranks, sections)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", layouts())
def test_frozen_parameters_count_without_gradient_state_and_master(name, compute):
    model = {"kind": "gpt", "layers": 3, "width": 24, "heads": 2, "context": 8}
    model["freeze"] = ["embedding.*", "blocks.1.*", "*.norm.*"]
    check_held(3, {**layouts()[name], "precision": {"compute": compute}, "model": model})


@pytest.mark.slow
def test_frozen_layers_need_room_for_their_values_alone(monkeypatch):
    model = {"kind": "gpt", "width": 24, "heads": 2, "context": 8, "freeze": ["blocks.*"]}
    monkeypatch.setattr(process, "free_memory", lambda kind: 1 << 24)
    with pytest.raises(ConfigError, match="parameters"):
        most = resolved(config_of(model={**model, "layers": 600}))
        run_ranks(1, lambda transport: check(transport, most))
    fits = resolved(config_of(model={**model, "layers": 300}))
    run_ranks(1, lambda transport: check(transport, fits))
    with pytest.raises(ConfigError, match="parameters"):
        trains = resolved(config_of(model={**model, "layers": 300, "freeze": ["head.*"]}))
        run_ranks(1, lambda transport: check(transport, trains))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.slow
def test_the_memory_of_stages_is_a_mean_as_if_they_were_equal(name):
    """The first stage of `async` stores the most versions of its own parameters."""
    for ranks in (2, 3, 4):
        batch = {"size": 4, "micro_batches": ranks}
        sections = {"pipeline": {"schedule": name}, "layout": {"pp": ranks}, "batch": batch}
        check_held(ranks, sections, rounding=0.05)


@pytest.mark.parametrize("zero", (0, 1, 3))
def test_coded_moments_count_as_codes_and_scales_and_embeddings_as_numbers(zero):
    wide = {"kind": "gpt", "layers": 3, "width": 64, "heads": 2, "context": 8}
    optimizer, replication = {"name": "adamw8bit"}, {"zero": zero}
    sections = {"model": wide, "optimizer": optimizer, "replication": replication}
    found = sizes_of(resolved(parse({**config_of().model_dump(), **sections})), 1)[0]
    assert 2.03 < found.state < 3
    # A shard that begins within a block has a scale more.
    check_held(2, sections, rounding=0.005)


@pytest.mark.parametrize("outer", [{"outer_momentum": 0.9}, {"outer_lr": 0.7}])
def test_an_outer_optimizer_counts(outer):
    check_held(2, {"replication": {"mode": "local", **outer}})


def test_a_model_that_does_not_fit_is_refused_when_it_is_described(monkeypatch):
    monkeypatch.setattr(process, "free_memory", lambda kind: 1 << 24)
    row, built = MODELS["gpt"], []

    def counted(layers, keys, source):
        built.append(keys.layers)
        return row.build(layers, keys, source)

    noted, most = replaced(MODELS, "gpt", row._replace(build=counted)), config_of(layers=200)
    with noted, pytest.raises(ConfigError, match="parameters") as raised:
        run_ranks(2, lambda transport: build.build(transport, most, source=SOURCES["gpt"]))
    assert raised.value.exit_code == 2 and raised.value.agreed and built == [200, 200]


@pytest.mark.parametrize(
    "seen, hosts, gpus, sharing",
    [
        (1, "aaaa", "0123", 1),  # each rank sees its own GPU alone
        (4, "aaaa", "0123", 1),
        (4, "aaaa", "0012", 2),  # two ranks use one GPU although there are others
        (2, "aaa", "010", 2),
        (1, "aaab", "0000", 3),
        (1, "abab", "0000", 2),
    ],
)
@pytest.mark.parametrize("is_mig", [False, True])  # instances of one GPU share its address
def test_the_memory_of_a_gpu_is_counted_for_the_ranks_that_use_it(
    seen, hosts, gpus, sharing, is_mig, monkeypatch
):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy.devices, "count", seen)
    large = {"kind": "gpt", "layers": 48, "width": 1600, "heads": 25, "context": 1024}
    config = config_of(device={"kind": "cuda"}, model=large)
    tokens = Unopened("tokens", (1024,), 50257, 50257)

    def needs(free):
        def run(transport):
            gpu = gpus[transport.rank]
            address, uuid = ("0", gpu.encode() * 16) if is_mig else (gpu, b"")
            cupy.see(f"0000:0{address}:00.0", uuid=uuid, memory=(free[transport.rank], 80 << 30))
            found = agree_on(transport, lambda: config)
            room = on_all_ranks(transport, lambda: check(transport, found, tokens))
            return len(room.ranks), room.free, round(room.needed / 1e9, 1)

        return run_ranks(len(hosts), run, hosts=hosts)

    plenty = needs([160 * 10**9 - rank for rank in range(len(hosts))])
    assert max(plenty)[0] == sharing and max(plenty)[2] == round(sharing * 26.208, 1)
    places = [*zip(hosts, gpus, strict=True)]
    users = [[rank for rank, place in enumerate(places) if place == own] for own in places]
    # The last of the ranks of a GPU to look sees what the others have taken already.
    right = [(len(ranks), 160 * 10**9 - max(ranks)) for ranks in users]
    assert [room[:2] for room in plenty] == right
    law = f"{sharing} rank.* need {int(sharing * 26.208)}"
    with pytest.raises(ConfigError, match=law) as raised:
        needs([int((sharing - 0.5) * 26.2e9)] * len(hosts))
    assert raised.value.agreed and "on this GPU" in str(raised.value)


@pytest.mark.parametrize(
    "limits, free",
    [
        ({}, 2_048_000),
        ({"memory.max": "1000000\n"}, 1_000_000),
        ({"memory.max": "max\n"}, 2_048_000),
        ({"memory/memory.limit_in_bytes": f"{1 << 63}\n"}, 2_048_000),
    ],
)
def test_a_containers_limit_is_a_smaller_host(limits, free, monkeypatch):
    files = {f"/sys/fs/cgroup/{name}": text for name, text in limits.items()}
    files["/proc/meminfo"] = "MemTotal:  9000 kB\nMemAvailable:    2000 kB\n"

    def opened(path, *rest, **named):
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", opened)
        found = process.free_memory("cpu")
    assert found == free


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("width", (10**9, 2 * 10**9, 4 * 10**9, 2**62))
def test_no_width_is_so_large_that_its_number_of_parameters_looks_small(kind, width):
    model = {"kind": kind, "layers": 3, "width": width, "heads": 1, "context": 8}
    config = parse({"model": model, "device": {"kind": "cpu"}})
    assert gigabytes(2e8 + 1e4, 2e8, 3e9) == ["0.20001 GB", "0.20000 GB", "3.00000 GB"]
    assert gigabytes(2e8, 2e8, 0) == ["0.20 GB", "0.20 GB", "0.00 GB"]
    assert gigabytes(1e6) == ["0.001 GB"]
    with pytest.raises(ConfigError, match=r"parameters with gradients .* are free"):
        run_ranks(1, lambda transport: check(transport, resolved(config), SOURCES[kind]))
