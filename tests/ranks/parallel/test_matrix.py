"""Law 5 and 6: a job has the curve and the tensors of one rank in every layout, in every precision, and in every mode with
such a curve.

CELLS has every mode in every layout that it serves, each in every precision, of one small job. It compares with one rank in
float64. MATRIX has what else meets in a layout, in float64: a row is a job with its cells, the ranks and the settings of the
mode, layout and all-reduce. One rank trains each model once.

Workers that train apart have curves of their own (test_averaging.py, test_async_servers.py, test_async_pipeline.py). In CELLS
nothing is late, and they have that of one rank, too. A mode of replication whose curve is never that of one rank, such as the
majority of signs, has no row in either: OWN_CURVES (tests/training.py) names the file that proves its curve.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import count, cycle, product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

from mpitrain.collectives.selection.table import choices
from mpitrain.config import Replication
from mpitrain.errors import ConfigError
from mpitrain.parallel.modes import MODES, STREAMS, ZERO, is_synchronous, mode_of
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.transport.threads import ThreadTransport, run_ranks
from tests.cases.own_layers import units
from tests.processes import skip_without
from tests.ranks.parallel.test_llama import GEMMA, LLAMA, QWEN3
from tests.ranks.parallel.test_own_layers import BASE, MODEL, Tokens
from tests.ranks.parallel.test_tensor import ONE, source_of
from tests.ranks.pipeline.test_pipelines import ROWS, SMALL, STEPS, UNITS, layout
from tests.training import EXACT, MLP, OWN_CURVES, TINY, assert_alike, configured, same, trained

pytestmark = pytest.mark.slow


class Job(NamedTuple):
    """What is trained.

    cells   {name: (number of ranks or their hosts, settings)}
    source  (configuration) -> source of batches; None: that of the configuration
    units   a user's model
    """

    settings: Sequence[str]
    steps: int
    cells: dict[str, tuple[int | str, Sequence[str]]]
    source: Callable[[Any], Any] = lambda config: None
    units: Any = None


TIED, RING = "model.tied=true", "replication.algorithm=ring"
TWO, THREE = "batch.micro_batches=2", "batch.micro_batches=3"
UNIT, OWN_ROWS = "memory.recompute=unit", "layout.sequence_parallel=true"
KEPT, PARTED = "layout.keep_gathered=true", "replication.overlap=false"
MASTER, SERVER = "replication.mode=master", "replication.mode=server"


def zero(stage):
    return f"replication.zero={stage}"


def by_host(stage):
    return [zero(stage), "replication.shard=host"]


ALGORITHMS = (
    *((ranks, "ring") for ranks in (2, 5)),
    *((3, "star"), (4, "native"), (3, "halving-doubling"), (4, "tree")),
    *((3, "recursive-doubling"), (3, "hierarchical"), (3, "shared"), (2, "auto")),
)
REPLICAS = {
    **{f"{name} of {n}": (n, [f"replication.algorithm={name}"]) for n, name in ALGORITHMS},
    "micro-batches": (2, [THREE]),
    "in turn": (2, [PARTED]),
    "tied": (2, [TIED, TWO]),
    "one bucket": (2, ["replication.bucket_mb=100.0"]),
    **{
        f"zero {stage}, {name}": (hosts, [zero(stage), *more])
        for stage in ZERO
        for name, hosts, *more in (
            ("tied, ring, micro-batches", "aaaaa", TIED, RING, TWO),
            ("in turn", "aaa", TWO, PARTED, *([TIED] if stage == 3 else [])),
        )
    },
    "zero 3, one rank": ("a", [zero(3)]),
    **{
        f"zero {stage}, one bucket": ("aaa", [zero(stage), TWO, "replication.bucket_mb=100.0"])
        for stage in (1, 2)
    },
    "zero 3, some kept": ("aaa", [zero(3), TWO, "replication.zero_keep=1000"]),
    "zero 3, all kept": ("aaa", [zero(3), TWO, "replication.zero_keep=100000", TIED]),
    "zero 1, shards of abba": ("abba", [*by_host(1), TIED]),
    "zero 1, shards of abc": ("abc", [*by_host(1), RING, PARTED]),
    "zero 2, shards of aabb": ("aabb", [*by_host(2), RING, THREE]),
    "zero 2, shards of aa": ("aa", by_host(2)),
    "zero 3, shards of ab": ("ab", [*by_host(3), RING]),
    "zero 3, shards of ababab": ("ababab", [*by_host(3), RING, TWO, TIED]),
    "zero 3, shards of abba": ("abba", [*by_host(3), PARTED]),
}
RULES = {
    "adamw": (5, [RING]),
    "sgd": (3, ["optimizer.name=sgd", "replication.algorithm=halving-doubling"]),
    "momentum": (3, ["optimizer.name=momentum", "replication.algorithm=shared"]),
}
ROOTS = {
    **{name: (3, [MASTER, f"optimizer.name={name}"]) for name in EXACT},
    "one rank": (1, [MASTER, PARTED]),
    "in turn": (2, [MASTER, PARTED]),
    "uneven rows, micro-batches, tied": (5, [MASTER, THREE, TIED]),
    **{
        f"{workers} workers, {servers} servers": (
            workers + servers,
            [SERVER, f"replication.servers={servers}", *more],
        )
        for workers, servers, *more in (
            (3, 2, "optimizer.name=sgd", TWO),
            (2, 1, "optimizer.name=momentum", "optimizer.clip=0"),
            (2, 2, "optimizer.name=momentum", TIED, TWO),
            (3, 1, "optimizer.clip=0", TIED, TWO),
            (1, 2, "optimizer.clip=0.3"),
            (2, 6, "optimizer.clip=0.3", TIED, TWO),
        )
    },
}


def axes(dp, tp, pp=1, cp=1):
    return dp * cp * tp * pp, [f"layout.tp={tp}", f"layout.pp={pp}", f"layout.cp={cp}"]


def shared(settings, *layouts):
    """Cells of ranks that share layers: axes, and more settings of each."""
    cells = {}
    for own, *more in layouts:
        ranks, layout = axes(*own)
        name = " ".join([*map(str, own), *settings[:1], *more])
        cells[name] = ranks, [*settings, *layout, *more]
    return cells


WIDE = ["model.width=64", "model.heads=8"]
TENSORS = {
    **shared([TWO, "model.layers=2"], [(2, 3)]),
    **shared([THREE, TIED], [(1, 6)], [(4, 2)], [(1, 2, 3)]),
    **shared([*WIDE, TIED], [(1, 8)]),
    **shared([TWO, TIED], [(3, 2), zero(2)]),
    **shared([TWO], [(2, 2), zero(3)]),
    **shared(["model.kind=mlp", "model.layers=2"], [(2, 3)]),
    **shared(["model.kind=mlp", "model.layers=3", zero(1)], [(2, 2)], [(1, 8)]),
    **{
        f"own rows, {name}": cell
        for cells in (
            shared(["model.context=9", TWO, TIED, OWN_ROWS], [(2, 3)], [(1, 6)], [(1, 2, 2)]),
            shared([*WIDE, KEPT, zero(1), OWN_ROWS], [(2, 4)]),
            shared(["model.context=10", "batch.size=5", OWN_ROWS], [(2, 2)]),
            shared([*WIDE, "model.context=10", "batch.size=2", KEPT, OWN_ROWS], [(1, 4)]),
        )
        for name, cell in cells.items()
    },
}
NARROW = ["model.width=24", "batch.size=6", "run.steps=8"]
DROPS = ["model.heads=2", "model.dropout=0.2", TWO, "layout.cp_mode=ring"]
CONTEXTS = {
    **shared([TWO], [(1, 1, 2, 2)], [(2, 1, 1, 3), zero(3)]),
    **shared([TIED], [(1, 3, 1, 2), UNIT]),
    **shared(
        DROPS,
        [(1, 2, 1, 2), OWN_ROWS],
        [(2, 1, 1, 3), zero(3), "memory.recompute=attention"],
        [(1, 1, 2, 4), UNIT],
    ),
}

BERT = [
    *("model.kind=bert", "precision.compute=float64", "batch.size=12", "run.eval_rows=20"),
    *("optimizer.lr=0.01", "optimizer.warmup=2", "model.layers=2", "model.width=32"),
    *("model.heads=4", "model.context=12"),
]
DROPPED = ["model.dropout=0.1", "model.attention_dropout=0.2"]
TEXTS = ["data.source=jsonl:texts.jsonl", *DROPPED]
BERTS = {
    "dp 5": (5, []),
    "zero 1": (2, [zero(1), *DROPPED]),
    "zero 2": (2, [zero(2), TWO, *DROPPED]),
    "tp 2": (2, ["layout.tp=2", "device.passes=numpy", *DROPPED]),
    "tp 2, own rows": (2, ["layout.tp=2", OWN_ROWS, TIED]),
    "5 stages": (5, ["layout.pp=5", "batch.micro_batches=6", "memory.logit_chunks=2", *DROPPED]),
    "tied, pp 2": (2, ["layout.pp=2", THREE, TIED]),
    "dp 2, tp 2, pp 2": (8, ["layout.pp=2", "layout.tp=2", THREE, *DROPPED]),
    "cp 2, zero 3": (4, ["layout.cp=2", zero(3), TWO, *DROPPED]),
    "cp 2, tp 2": (4, ["layout.cp=2", "layout.tp=2", UNIT, *DROPPED]),
    "recomputed, tiled": (1, ["memory.recompute=2", "memory.attention=tiled", *DROPPED]),
    "master": (3, [MASTER, "memory.recompute=attention", *DROPPED]),
    "servers": (3, [SERVER, *DROPPED]),
    "texts, tp 2, pp 2": (4, ["layout.tp=2", "layout.pp=2", THREE, *TEXTS]),
    "texts, zero 3": (5, [zero(3), UNIT, *TEXTS]),
    "adapters": (2, ["layout.tp=2", "lora.rank=2", "lora.targets=query,dense"]),
}

LLAMA3 = ["model.qkv_bias=true", "model.rope_scaling=[4, 1, 4, 8]"]
LLAMAS = {
    "dp 3": (3, []),
    "zero 3": (2, [zero(3), TWO]),
    "tp 2": (2, ["layout.tp=2", *LLAMA3]),
    "tp 2, own rows": (2, ["layout.tp=2", OWN_ROWS]),
    "pp 2": (2, ["layout.pp=2", THREE, TIED]),
    "recomputed": (2, ["layout.tp=2", UNIT, "memory.logit_chunks=2"]),
    "one kv head, dp 2, pp 2": (
        4,
        [*LLAMA3, "model.kv_heads=1", "layout.pp=2", TWO, "memory.recompute=attention"],
    ),
    "normed heads of 6 channels, tp 2": (2, [*QWEN3, "layout.tp=2", OWN_ROWS, UNIT]),
    "normed heads, zero 3": (2, [*QWEN3, zero(3), TWO]),
    "gemma, tp 2": (2, [*GEMMA, "layout.tp=2", OWN_ROWS]),
    "gemma, pp 2": (2, [*GEMMA, "layout.pp=2", THREE]),
    "ring of 3": (3, ["layout.cp=3", "layout.cp_mode=ring", TWO]),
    "cp 2, zero 3": (4, ["layout.cp=2", zero(3), TWO]),
    "4 kv heads, cp 2, tp 2": (4, ["layout.cp=2", "layout.tp=2", "model.kv_heads=4"]),
    "q alone": (2, ["layout.tp=2", "lora.rank=2", "lora.targets=q,gate"]),
    "window, dp 2": (2, ["model.window=5", TWO]),
    "window, tp 2, own rows": (2, ["model.window=3", "layout.tp=2", OWN_ROWS]),
    "window of some layers, pp 2": (
        2,
        ["model.window=4", "model.window_from=1", "layout.pp=2", THREE],
    ),
    "window, cp 2, recomputed": (
        2,
        ["model.window=5", "layout.cp=2", "memory.recompute=attention"],
    ),
    **{
        f"window of {window}, ring of {ranks}": (
            ranks,
            [f"model.window={window}", f"layout.cp={ranks}", "layout.cp_mode=ring", *more],
        )
        for window, ranks, more in (
            (1, 2, []),
            (2, 3, ["model.context=24"]),
            (3, 6, [UNIT]),
            (5, 6, ["model.window_from=1"]),
            (4, 3, [TWO, "model.qkv_bias=true"]),
        )
    },
}

OWN_LAYERS = {
    "micro-batches": (1, [THREE]),
    "dp 2": (2, [TWO]),
    "tp 3": (3, ["layout.tp=3", TWO]),
    "rows divided": (3, ["layout.tp=3", OWN_ROWS]),
    "pp 2": (2, ["layout.pp=2", THREE]),
    "interleaved halves": (2, ["layout.pp=2", THREE, "pipeline.schedule=zero-bubble"]),
    "zero 3": (2, [zero(3)]),
}


def pipelines():
    """(dp, tp, pp) of 1, 2, 3, 4 and 8 ranks, each with a schedule, tied or not, and an all-reduce: all in turns."""
    turn, ties, algorithms = count(), cycle(("true", "false")), cycle(choices("allreduce"))
    for n in (1, 2, 3, 4, 8):
        for dp, tp in product(range(1, n + 1), repeat=2):
            if n % (dp * tp) == 0:
                pp = n // dp // tp
                served = [
                    name
                    for name, schedule in SCHEDULES.items()
                    if schedule.chunks == 1 or 2 * pp <= UNITS
                ]
                yield (
                    (dp, tp, pp),
                    served[next(turn) % len(served)],
                    next(ties),
                    next(algorithms) if dp > 1 else "auto",
                )


GRIDS = [*pipelines()]
PARTS = {
    "zero 1": [zero(1)],
    "in turn": [PARTED],
    "parts of 1, 6, 1": ["replication.algorithm=halving-doubling", "pipeline.partition=1,6,1"],
    "parts of 3, 2, 3": ["replication.bucket_mb=0.0001", "pipeline.partition=3,2,3"],
    "parts by time": ["pipeline.partition=time"],
}
PIPELINES = {
    **{
        f"dp {dp}, tp {tp}, pp {pp}, {name}, tied {tied}, {algorithm}": (
            dp * tp * pp,
            [
                *layout(dp, pp, name, max(1, min(2 * pp, ROWS // dp // pp * pp))),
                *(f"layout.tp={tp}", f"model.tied={tied}"),
                f"replication.algorithm={algorithm}",
            ],
        )
        for (dp, tp, pp), name, tied, algorithm in GRIDS
    },
    **{
        f"{name}, dp {dp}, pp {pp}": (dp * pp, layout(dp, pp, name, 6, TIED))
        for name, (dp, pp) in zip(SCHEDULES, cycle(((1, 3), (2, 2))))
    },
    **{name: (6, layout(2, 3, "zero-bubble", 5, TIED, *more)) for name, more in PARTS.items()},
}
FLOAT64 = [*TINY, "precision.compute=float64"]
MATRIX = {
    "replicas": Job(FLOAT64, 4, REPLICAS),
    "rules": Job(FLOAT64, 6, RULES),
    "digits": Job([*MLP, "precision.compute=float64"], 6, {"adamw": (5, [RING])}),
    "root": Job([*FLOAT64, "run.steps=6", "model.layers=1", "batch.size=32"], 4, ROOTS),
    "tensors": Job(ONE, 4, TENSORS, source_of),
    "contexts": Job([*ONE, *NARROW], 4, CONTEXTS, source_of),
    "pipelines": Job(SMALL, STEPS, PIPELINES),
    "bert": Job(BERT, 3, BERTS),
    "llama": Job(LLAMA, 3, LLAMAS),
    "own layers": Job(
        BASE, 3, OWN_LAYERS, lambda config: Tokens(), partial(units, drops=True, **MODEL)
    ),
}
APART = {
    name for name in MODES if not is_synchronous(Replication.model_validate({"mode": name}), "1f1b")
}
"""Modes of replication whose workers train apart, but have the curve of one rank while nothing is late."""
COMPUTED = ("model.", "lora.", "data.", "optimizer.", "batch.size")
"""Keys whose values change what one rank computes."""


def train(transport, job, settings):
    config = configured(*job.settings, *settings)
    return trained(transport, config, job.steps, job.source(config), job.units)


@cache
def alone(name, settings):
    return run_ranks(1, train, MATRIX[name], settings)[0]


@pytest.mark.parametrize(
    "name, cell", [(name, cell) for name, job in MATRIX.items() for cell in job.cells]
)
def test_each_cell_trains_as_one_rank_does(name, cell, tmp_path, monkeypatch):
    if name == "digits":
        skip_without("sklearn")
    monkeypatch.chdir(tmp_path)
    texts = ({"text": "abc"[n % 3] * (1 + n % 7) + "d", "label": n % 3} for n in range(40))
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    job = MATRIX[name]
    ranks, settings = job.cells[cell]
    hosts = None if isinstance(ranks, int) else ranks
    truth = alone(name, tuple(each for each in settings if each.startswith(COMPUTED)))
    found = run_ranks(ranks if hosts is None else len(hosts), train, job, settings, hosts=hosts)
    assert_alike(truth, found)
    assert all(same([found[0].told], [each.told]) for each in found), "ranks are told alike"
    assert set().union(*(each.tensors for each in found)) == {*truth.tensors}


TRUSTED = {
    **{hosts: (hosts, []) for hosts in ("aaab", "aaaab", "aabbc")},
    "zero 3": ("aaaab", [zero(3)]),
    "tied": ("aa", ["layout.pp=2", TIED, TWO]),
    "tp": ("aaa", ["layout.tp=3", "model.heads=6", TIED]),
}


@pytest.mark.parametrize("cell", TRUSTED)
def test_ranks_that_compare_no_bindings_train_as_one_rank_does(cell, monkeypatch):
    """As over MPI. The arrays have sizes for which "auto" chooses by the memory of all ranks."""
    monkeypatch.setattr(ThreadTransport, "is_strict", False)
    hosts, settings = TRUSTED[cell]
    small = [
        "batch.size=6",
        "model.context=8",
        "model.layers=1",
        "model.width=96",
        "run.eval_rows=6",
    ]
    job = Job(["precision.compute=float64", *small], 2, {})
    wide = [each for each in settings if each.startswith(COMPUTED)]
    truth = run_ranks(1, train, job, wide)[0]
    assert_alike(truth, run_ranks(len(hosts), train, job, settings, hosts=hosts))


def test_every_algorithm_of_an_all_reduce_is_in_the_matrix():
    assert set(choices("allreduce")) == {name for _, name in ALGORITHMS}
    assert set(choices("allreduce")) == {name for (dp, *_), *_, name in GRIDS if dp > 1}


def test_every_mode_with_the_curve_of_one_rank_is_in_the_matrix():
    modes = {
        configured(*job.settings, *settings).replication.mode
        for job in MATRIX.values()
        for _, settings in job.cells.values()
    }
    assert modes == {*MODES} - {*OWN_CURVES}
    assert {*OWN_CURVES} >= APART
    for name, file in OWN_CURVES.items():
        assert name in (Path(__file__).parents[3] / file).read_text(), name


def test_every_schedule_is_in_the_matrix():
    assert len(GRIDS) == len({axes for axes, *_ in GRIDS}) == 23
    assert {name for _, name, *_ in GRIDS} == set(SCHEDULES)


JOB = [
    *("model.layers=1", "model.width=16", "model.heads=2", "model.context=8", "batch.size=8"),
    *("run.eval_rows=12", "optimizer.name=sgd", "optimizer.lr=0.3", "optimizer.clip=0"),
    *("optimizer.warmup=0", "optimizer.weight_decay=0", "replication.bucket_mb=0.002"),
]
"""Plain gradient descent: what a step rounds is not amplified."""
TENSOR, PIPELINE = "layout.tp=2", ("layout.pp=2", TWO)
LAYOUTS = {
    "one rank": (1, []),
    "2 replicas": (2, []),
    "3 replicas": (3, [TWO]),
    "tp": (2, [TENSOR]),
    "own rows": (2, [TENSOR, OWN_ROWS]),
    "cp": (2, ["layout.cp=2"]),
    "ring": (2, ["layout.cp=2", "layout.cp_mode=ring"]),
    "1f1b": (2, [*PIPELINE]),
    "gpipe": (2, [*PIPELINE, "pipeline.schedule=gpipe"]),
    "zero-bubble": (2, [*PIPELINE, "pipeline.schedule=zero-bubble"]),
    "dp x tp x pp": (8, [*PIPELINE, TENSOR, "pipeline.schedule=gpipe"]),
}
"""{layout: (ranks, settings)}"""


class Mode(NamedTuple):
    """A mode of training, in which nothing is late.

    layouts   those that it serves, with as many replicas that nothing is late
    refused   {any other layout: the key that the law of its refusal names, and the value}
    servers   ranks beside those of the layout
    is_apart  whether its workers update by themselves: they have no loss scale in common, which float16 needs
    """

    settings: Sequence[str]
    layouts: Sequence[str] = (*LAYOUTS,)
    refused: Mapping[str, str] = {}
    servers: int = 0
    is_apart: bool = False


ALONE = ("one rank",)
REPLICATED = (*ALONE, "2 replicas", "3 replicas")
UNRINGED = dict.fromkeys(("cp", "ring"), "layout.cp 1")
UNSHARED = {
    **UNRINGED,
    **dict.fromkeys(("tp", "own rows", "dp x tp x pp"), "layout.tp 1"),
    **dict.fromkeys(("1f1b", "gpipe", "zero-bubble"), "layout.pp 1"),
}
"""What modes refuse whose ranks share no sequence, and those whose ranks share no layers either."""
EACH_STEP = ["replication.period=1", "checkpoint.every=1"]
EVERY = {
    "all-reduce": Mode([]),
    "zero 1": Mode([zero(1)]),
    **{
        f"zero {n}": Mode(
            [zero(n)],
            [each for each in LAYOUTS if each not in ("1f1b", "zero-bubble")],
            dict.fromkeys(("1f1b", "zero-bubble"), f"replication.zero {n}"),
        )
        for n in (2, 3)
    },
    "master": Mode([MASTER], REPLICATED, UNSHARED),
    "servers": Mode([SERVER, "replication.servers=2"], REPLICATED, UNSHARED, 2),
    "async servers": Mode([SERVER, "replication.update=async"], ALONE, UNSHARED, 1, True),
    "bounded servers": Mode([SERVER, "replication.update=bounded"], ALONE, UNSHARED, 1, True),
    "local": Mode(["replication.mode=local", *EACH_STEP], REPLICATED, UNSHARED, 0, True),
    # Of two workers, each has the mean of both.
    "gossip": Mode(
        ["replication.mode=gossip", *EACH_STEP], (*ALONE, "2 replicas"), UNSHARED, 0, True
    ),
    # The pipe runs empty after every step; of `async`, each micro-batch is an update.
    "async": Mode(
        ["pipeline.schedule=async", *EACH_STEP, "batch.micro_batches=1"],
        (*REPLICATED, "tp", "own rows"),
        {**UNRINGED, "1f1b": "micro-batches"},
        is_apart=True,
    ),
    "async-2bw": Mode(
        ["pipeline.schedule=async-2bw", *EACH_STEP],
        (*REPLICATED, "tp", "own rows", "1f1b", "dp x tp x pp"),
        UNRINGED,
        is_apart=True,
    ),
}
ROUNDOFF = {"float64": 2.0**-50, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""What a number loses when it is rounded, in parts of it; of float64 the last bits of a sum."""
CELLS = [
    (mode, layout, precision)
    for mode, row in EVERY.items()
    for layout in row.layouts
    for precision in ROUNDOFF
    if not (precision == "float16" and row.is_apart)
]


def of_cell(mode, layout, precision):
    """The number of ranks, and what `train` takes."""
    own, (ranks, settings) = EVERY[mode], LAYOUTS[layout]
    chosen = [*settings, *own.settings, f"precision.compute={precision}"]
    return ranks + own.servers, Job(JOB, 4, {}), chosen


@cache
def exact():
    return run_ranks(1, train, *of_cell("all-reduce", "one rank", "float64")[1:])[0]


@pytest.mark.pairs
@pytest.mark.parametrize("mode, layout, precision", CELLS)
def test_every_mode_in_every_layout_rounds_as_its_precision_says(mode, layout, precision):
    """Losses within half a rounding of one rank in float64, norms within 4 and tensors within 16, and not nearer than one:
    what is computed in more bits than it should be goes red as well.
    """
    ranks, *job = of_cell(mode, layout, precision)
    truth, found, unit = exact(), run_ranks(ranks, train, *job), ROUNDOFF[precision]
    assert np.ptp(truth.told[:, 0]) > 1, "the loss must move, or equality says nothing"
    (losses, norms), evaluated = truth.told[:-1].T, truth.told[-1, 0]
    for own in found:
        assert np.all(np.abs(own.told[:-1, 0] - losses) <= unit / 2 * losses)
        assert abs(own.told[-1, 0] - evaluated) <= unit / 2 * evaluated
        # Of workers that average parameters, it is the mean of their own.
        if mode not in ("local", "gossip") or ranks == 1:
            assert np.all(np.abs(own.told[:-1, 1] - norms) <= 4 * unit * norms)
    apart = {}
    for own in found:
        for name, (parameter, values) in own.tensors.items():
            whole = truth.tensors[name][1]
            off = np.abs(values - parameter.part_of(whole)).max() / np.abs(whole).max()
            apart[name] = max(apart.get(name, 0), off)
    assert apart.keys() == truth.tensors.keys()
    assert max(apart.values()) <= 16 * unit
    assert precision == "float64" or max(apart.values()) >= unit


REFUSED = [
    *(
        (mode, name, "float64", law)
        for mode, row in EVERY.items()
        for name, law in row.refused.items()
    ),
    *((mode, "one rank", "float16", "float16") for mode, row in EVERY.items() if row.is_apart),
]


def test_what_is_not_in_the_matrix_is_refused_by_a_law_that_names_its_key():
    for mode, name, precision, law in REFUSED:
        ranks, *job = of_cell(mode, name, precision)
        with pytest.raises(ConfigError) as refused:
            run_ranks(ranks, train, *job)
        assert law in refused.value.law, (mode, name, precision)


@pytest.mark.parametrize("mode", EVERY)
def test_a_mode_serves_or_refuses_every_layout(mode):
    """More workers of an asynchronous server, and three that gossip, have curves of their own; a pipeline has one schedule."""
    row = EVERY[mode]
    elsewhere = {*REPLICATED} if row.is_apart else set()
    if mode in STREAMS:
        elsewhere |= {name for name in LAYOUTS if "pipeline.schedule" in str(LAYOUTS[name])}
    assert {*row.layouts, *row.refused} | elsewhere == {*LAYOUTS}
    assert not {*row.layouts} & {*row.refused}


def test_every_mode_and_precision_is_in_the_matrix():
    rows = [configured(*JOB, *row.settings) for row in EVERY.values()]
    met = {mode_of(config.replication, config.pipeline.schedule) for config in rows}
    every = {*MODES.values(), *ZERO.values(), *STREAMS.values()}
    assert met <= every and every - met <= {MODES[name] for name in {*OWN_CURVES} - APART}
    assert {*ROUNDOFF} == {*get_args(type(rows[0].precision).model_fields["compute"].annotation)}
