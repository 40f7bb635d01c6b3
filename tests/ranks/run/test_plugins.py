"""Rows of a plugin pass the laws of their kinds."""

from pathlib import Path

import numpy as np
import pytest

from mpitrain.data import SOURCES, Prefetched, SourceKind
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit
from mpitrain.machine.backend import HostBackend
from mpitrain.models.table import MODELS
from mpitrain.ops.device import host_ops
from mpitrain.parallel import modes
from mpitrain.parallel.modes import MODES
from mpitrain.parallel.replica import Replica
from mpitrain.pipeline import schedules as pipeline_schedules
from mpitrain.run import choices
from mpitrain.run.build import build
from mpitrain.run.choices import keys as described_keys
from mpitrain.tools.bench.comparison.modes import settings_by_mode
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import CollectiveLaws
from tests.laws.operations import OperationLaws
from tests.laws.transport import laws_of
from tests.rows import added_rows
from tests.runs import go
from tests.training import TINY, configured, curve, curves, near
from tests.unit.machine.test_memory import check_held
from tests.unit.pipeline import test_schedules as schedules

TOYS = Path(__file__).parents[2] / "toys.py"


@pytest.fixture(autouse=True)
def toys():
    with added_rows():
        choices.parse({"run": {"plugins": [str(TOYS)]}})
        yield


class ToyLaws(CollectiveLaws):
    algorithms = ("toy-ring",)


def test_an_algorithm_reduces():
    for n in (1, 2, 3, 4):
        run_ranks(n, ToyLaws().law_all_reduce_is_exact_on_every_rank)
        run_ranks(n, ToyLaws().law_several_reductions_are_polled_in_any_order)


def test_a_schedule_ends_and_takes_each_micro_batch_everywhere():
    schedules.test_every_plan_is_complete_and_cannot_deadlock("toy-gpipe")
    schedules.test_sends_pair_with_receives_in_order_and_none_goes_to_its_own_stage("toy-gpipe")


@pytest.mark.parametrize(
    "settings",
    [
        ["replication.mode=toy"],
        ["replication.algorithm=toy-ring"],
        ["layout.pp=3", "pipeline.schedule=toy-gpipe", "batch.micro_batches=4"],
    ],
    ids=" ".join,
)
def test_training_has_the_curve_of_one_rank(settings):
    small = [*TINY, "precision.compute=float64"]
    alone = curves(1, *small)[:2]  # losses and norms: a stage has tensors of its own
    for found in run_ranks(3, curve, configured(*small, *settings)):
        assert near(alone, found[:2])


def test_a_model_learns_from_a_source():
    names = ["data.source=toy", "model.kind=toy-bigrams", "optimizer.lr=0.03"]
    losses, *_ = curves(2, *TINY, *names)
    assert losses[-1] < 0.5 * losses[0]


def test_an_operation_is_the_base_of_an_optimizer():
    """Its step at twice the learning rate is that of gradient descent without decay."""
    for law in laws_of(OperationLaws):
        getattr(OperationLaws(), law)(host_ops(), HostBackend())
    small = [*TINY, "precision.compute=float64", "optimizer.lr=0.01"]
    others = ["optimizer.name=sgd", "optimizer.weight_decay=0", "optimizer.lr=0.005"]
    halved = curves(2, *small, "optimizer.name=toy-sgd", "replication.zero=1")
    assert near(curves(1, *small, *others), halved)


def test_a_mode_holds_what_its_row_says_and_is_compared():
    check_held(3, {"replication": {"mode": "toy"}})
    assert {"toy", "toy-ring"} <= settings_by_mode().keys()


class Counting(Replica):
    """A mode that counts its calls of `open`."""

    opened = 0

    def open(self, unit, micro):
        self.opened += 1
        return super().open(unit, micro)

    def finish(self, *arguments):
        result = super().finish(*arguments)
        return result._replace(extras={"opened": self.opened})


def test_a_mode_runs_with_its_overrides():
    MODES["counting"] = Counting
    one, other = (
        run_ranks(2, stepped, configured(*TINY, f"replication.mode={mode}"))
        for mode in ("all-reduce", "counting")
    )
    assert [result._replace(extras={}) for result in other] == one
    assert all(result.extras["opened"] > 0 for result in other)


def stepped(transport, config):
    job = build(transport, config)
    result = job.trainer.step(0, *job.trainer.replica.batch(job.data, 0))
    return result._replace(comm_s=0.0)


def test_help_lists_rows_of_plugins():
    keys = {key.name: key for key in described_keys()}
    assert keys["replication.mode"].range.endswith(" | toy")
    phrase = "toy: each rank updates from the sum of all gradients, as a toy"
    assert keys["replication.mode"].help.endswith(f". {phrase}")
    assert "toy-ring | auto" in keys["replication.algorithm"].range
    assert ", toy-gpipe, or a" in keys["pipeline.schedule"].help


@pytest.mark.parametrize(
    "table", (pipeline_schedules.STREAMS, modes.STREAMS), ids=("order", "mode")
)
def test_an_asynchronous_schedule_with_one_row_of_two_is_refused_in_words(table):
    table["half-there"] = table["async-2bw"]
    with pytest.raises(ConfigError, match="half-there"):
        configured(*TINY, "pipeline.schedule=half-there")


WRONG = '''
from mpitrain.collectives.plans import exchanges, ring
from mpitrain.collectives.plans.steps import Plan, relabel
from mpitrain.collectives.selection.algorithm import of_plan
from mpitrain.collectives.selection.table import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mpitrain.data import SOURCES, SourceKind
from mpitrain.models.table import MODELS, Model
from mpitrain.pipeline.schedules import Backward, BackwardInput, BackwardWeight, Forward
from mpitrain.pipeline.schedules import SCHEDULES, looped, of_chunks

def schedule(name, *orders):
    """Add a schedule; each order is (kind, sign): the micro-batches forwards or backwards."""
    def compute(stage, stages, micro_batches):
        return [kind(stage, m) for kind, sign in orders for m in range(micro_batches)[::sign]]
    SCHEDULES[name] = of_chunks(compute, 1, looped)

F, B, W, BW = Forward, BackwardInput, BackwardWeight, Backward
schedule("no-weights", (F, 1), (B, 1))
schedule("crossing", (F, 1), (BW, -1))
schedule("backward-first", (BW, 1), (F, 1))
def one_less(s, p, m):
    return [kind(s, k) for kind in (F, BW) for k in range(m - 1)]

SCHEDULES["one-less"] = of_chunks(one_less, 1, looped)
SCHEDULES["nothing"] = of_chunks(lambda s, p, m: None, 1, looped)
SCHEDULES["words"] = of_chunks(lambda s, p, m: ["F0"], 1, looped)
SCHEDULES["raising"] = of_chunks(lambda s, p, m: [][s], 1, looped)

def in_flight(rank, n, count):
    return ring.all_reduce(rank, n, count)._replace(depth=2)

ALL_REDUCE["copies"] = of_plan(lambda rank, n, count: exchanges.tree_broadcast(rank, n, count, 0))
ALL_REDUCE["copies-itself"] = ALL_REDUCE["copies"]._replace(plans=None)
RING = ALL_REDUCE["ring"]
ALL_REDUCE["binds-another"] = RING._replace(bind=ALL_REDUCE["copies"].bind)
ALL_REDUCE["binds-nothing"] = RING._replace(bind=lambda *given: None)
ALL_REDUCE["binds-words"] = RING._replace(bind=lambda *given: "words")
def bind_in_part(transport, *rest):
    return None if transport.rank == 1 else RING.bind(transport, *rest)

ALL_REDUCE["binds-in-part"] = RING._replace(bind=bind_in_part)
ALL_REDUCE["in-flight"] = of_plan(in_flight)
def standing(rank, n, count):
    return ring.all_reduce(rank, n, count)._replace(depth=0)

ALL_REDUCE["standing"] = of_plan(standing)
def bare(rank, n, count):
    return Plan(tuple(map(tuple, ring.all_reduce(rank, n, count).steps)))

ALL_REDUCE["bare"] = of_plan(bare)
ALL_REDUCE["stuck"] = of_plan(lambda rank, n, count: Plan(ring.all_reduce(rank, n, count).steps[::-1 if rank else 1]))
ALL_REDUCE["half"] = of_plan(ring.reduce_scatter)
ALL_REDUCE["nothing"] = of_plan(lambda rank, n, count: None)
ALL_REDUCE["scatters-elsewhere"] = ALL_REDUCE["gathers-nothing"] = of_plan(ring.all_reduce)
def turned(rank, n, count):
    """Rank r ends with the chunk of rank r + 1."""
    return relabel(ring.reduce_scatter((rank + 1) % n, n, count), [(r - 1) % n for r in range(n)])

REDUCE_SCATTER["scatters-elsewhere"] = of_plan(turned)
ALL_GATHER["gathers-nothing"] = of_plan(ring.reduce_scatter)
SOURCES["nothing"] = SourceKind(lambda request: None, "tokens")
MODELS["nothing"] = Model(lambda layers, keys, source: None, "tokens", "for tokens", split="width")
MODELS["empty"] = MODELS["nothing"]._replace(build=lambda *given: [])
MODELS["words"] = MODELS["nothing"]._replace(build=lambda *given: ["units"])
'''
STAGES = ("layout.pp=3", "batch.micro_batches=4")
BOUND = ("binds-another", "binds-nothing", "binds-words", "binds-in-part")
PLANNED = ("copies", "copies-itself", "in-flight", "standing", "bare", "stuck", "half", "nothing")
ORDERS = ("no-weights", "crossing", "backward-first", "one-less", "nothing", "words", "raising")


@pytest.mark.parametrize(
    "settings",
    [
        *((f"pipeline.schedule={name}", *STAGES) for name in ORDERS),
        *((f"replication.algorithm={name}",) for name in PLANNED + BOUND),
        ("replication.algorithm=scatters-elsewhere", "replication.zero=1"),
        ("replication.algorithm=gathers-nothing", "replication.zero=1"),
        ("data.source=nothing",),
        ("model.kind=nothing",),
        ("model.kind=empty",),
        ("model.kind=words",),
    ],
    ids=" ".join,
)
def test_a_wrong_row_is_one_error_before_the_first_step(settings, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    config = configured(*TINY, f'run.plugins=["{tmp_path / "wrong.py"}"]', *settings)

    def refused(transport):
        with pytest.raises(ConfigError) as error:
            build(transport, config)
        return error.value

    row = settings[0].partition("=")[2]
    for error in run_ranks(3, refused):
        assert error.agreed and f"{row} of the plugin {tmp_path / 'wrong.py'}" in error.law


def test_a_mode_that_is_no_replica_is_refused():
    with pytest.raises(ConfigError, match="a subclass of Replica, but that of 'nothing' is"):
        MODES["nothing"] = lambda: None


class Spoilt:
    """A toy source whose rows come out changed."""

    def __init__(self, request, spoil):
        self._inner, self._spoil = SOURCES["toy"].open(request), spoil

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def batch(self, *given):
        return self._spoil(*self._inner.batch(*given))

    def held_out_rows(self, rows):
        return self._spoil(*self._inner.held_out_rows(rows))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, y: None,
        lambda x, y: x,
        lambda x, y: (x.tolist(), y.tolist()),
        lambda x, y: (x[:-1], y[:-1]),
        lambda x, y: (x, y[:-1]),
        lambda x, y: (x[:, 1:], y[:, 1:]),
        lambda x, y: {}["absent"],
    ],
)
def test_rows_that_a_source_may_not_give_name_the_source(spoil, prefetch):
    SOURCES["spoilt"] = SourceKind(lambda request: Spoilt(request, spoil), "tokens")
    names = ["data.source=spoilt", "model.kind=toy-bigrams"]

    def refused(transport):
        job = build(transport, configured(*TINY, *names))
        source = Prefetched(job.data, prefetch, 9) if prefetch else job.data
        for read in (
            lambda: job.trainer.replica.batch(source, 0),
            lambda: job.trainer.evaluate(source),
        ):
            with pytest.raises(ConfigError, match="data source spoilt must return two arrays"):
                read()

    run_ranks(2, refused)


@pytest.mark.parametrize(
    "part, value", [("shape", 16), ("classes", np.int64(7)), ("held_out", None)]
)
def test_a_source_whose_sizes_are_no_numbers_is_refused(part, value):
    def spoilt(request):
        source = SOURCES["toy"].open(request)
        setattr(source, part, value)
        return source

    SOURCES["spoilt"] = SourceKind(spoilt, "tokens")
    with pytest.raises(ConfigError, match="data source spoilt"):
        run_ranks(2, build, configured(*TINY, "data.source=spoilt", "model.kind=toy-bigrams"))


class Lying:
    """The head, with another output than it states."""

    def __init__(self, linear, lie):
        self._linear, self._lie = linear, lie

    def __getattr__(self, name):
        return getattr(self._linear, name)

    def forward(self, w, x, now, arena):
        y, saved = self._linear.forward(w, x, now, arena)
        return self._lie(y), saved


@pytest.mark.counted
@pytest.mark.parametrize(
    "lie, value",
    [
        (lambda y: y[..., :1], "(4, 16, 1)"),
        (lambda y: y.astype("float64"), "float64"),
        (lambda y: None, "None"),
    ],
)
def test_a_layer_that_returns_another_output_than_it_states_is_refused_before_the_first_step(
    lie, value
):
    def lying(layers, keys, source):
        embedding, head = MODELS["toy-bigrams"].build(layers, keys, source)
        return [Unit("embedding", embedding.layer), Unit("head", Lying(head.layer, lie))]

    MODELS["lying"] = MODELS["toy-bigrams"]._replace(build=lying)
    config = configured(*TINY, "data.source=toy", "model.kind=lying")

    def refused(transport):
        with pytest.raises(ConfigError) as error:
            build(transport, config)
        return error.value

    for error in run_ranks(3, refused):
        assert error.agreed and "unit head" in error.law and value in error.law


def test_watchers_are_named_without_a_program(book, tmp_path):
    """By a file and a class in it, and by the row of a plugin; only rank 0 makes them."""
    (tmp_path / "mine.py").write_text(
        "import mpitrain\nfrom mpitrain.run.watcher import WATCHERS\n\n"
        "class Notes(mpitrain.Watcher):\n    def on_end(self, record):\n"
        f"        with open({str(tmp_path / 'notes')!r}, 'a') as file:\n"
        "            file.write(record['event'])\n\nWATCHERS['notes'] = Notes\n"
    )
    named = [f"{tmp_path}/mine.py:Notes", "notes"]
    go(2, [*book, f"run.plugins=['{tmp_path}/mine.py']", f"run.watchers={named}"])
    assert (tmp_path / "notes").read_text() == "endend"
    for wrong in (f"{tmp_path}/mine.py:mpitrain", f"{tmp_path}/none.py:Notes", "none"):
        with pytest.raises(ConfigError, match="none"):
            go(2, [*book, f"run.watchers=['{wrong}']", f"run.out={tmp_path}/other"])
