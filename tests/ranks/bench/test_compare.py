"""What `mpitrain compare` measures of modes, on threads."""

import gc
import inspect
import tracemalloc

import numpy as np
import pytest

from mpitrain.cli.compare import ALONE, TrainingJob
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.machine import backend
from mpitrain.run.build import build
from mpitrain.tools.bench.comparison.compare import compare
from mpitrain.tools.bench.comparison.formulas import words_of
from mpitrain.tools.bench.comparison.modes import (
    check_resolved,
    jobs,
    settings_by_mode,
    settings_of,
)
from mpitrain.tools.plan.memory import count
from mpitrain.transport.threads import run_ranks
from tests.training import OWN_CURVES, SERVERLESS, TINY

OWN = (*OWN_CURVES, "server-async", "server-bounded")
"""Modes that have a curve of their own."""


def measured(words, hosts, *settings):
    found = jobs(words, [*TINY, "run.eval_rows=4", "precision.compute=float64", *settings], hosts)
    return run_ranks(
        len(hosts),
        lambda transport: [*compare(transport, found, lambda mode, loss: None)],
        hosts=hosts,
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("hosts, parts", [("aa", 1), ("abc", 2), ("abab", 1), ("aaaaa", 1)])
def test_modes_train_alike_and_the_busiest_rank_sends_what_the_formula_says(hosts, parts):
    words = [
        word
        for word in settings_by_mode()
        if words_of(parse(with_settings({}, settings_of(word))), 2) and word not in ("shared", *OWN)
    ]
    rows = measured(words, hosts, "run.steps=2", f"batch.micro_batches={parts}")
    for each in rows:
        assert each.formula_bytes is not None, f"{each.side} has no formula for its bytes"
        assert max(each.sent_bytes) == each.formula_bytes, f"{each.side}: bytes, and its formula"
        losses, first = ([*row.losses, row.val_loss] for row in (each, rows[0]))
        assert losses == pytest.approx(first, rel=0, abs=1e-9), (
            f"{each.side} has other losses than {rows[0].side}; modes with curves of their own are in OWN"
        )


LAYOUTS = {
    2: [
        *("ring", "tp2+accumulate3", "tp2+sequence", "pp2:gpipe", "pp2:interleaved", "pp2:zb-v"),
        "ulysses2+accumulate3",
    ],
    3: ["ring", "tp3", "tp3+sequence", "pp3:1f1b", "pp3:v-half", "ulysses3+recompute", "ring3"],
    4: [
        *("ring", "pp2:zero-bubble", "tp2+pp2+sequence", "tp4+sequence", "tp2+dp2+accumulate2"),
        *("ulysses2+tp2+sequence", "ulysses2+pp2:gpipe", "ring2+tp2+sequence"),
        *("ring2+pp2:gpipe+recompute", "ring4+recompute"),
    ],
}


LLAMA = ["model.kind=llama", "model.kv_heads=4", "model.width=24"]


BERT = ["model.kind=bert"]
WINDOW = ["model.window=3", "model.window_from=1"]


@pytest.mark.parametrize(
    ("ranks", "kind"), [*((ranks, []) for ranks in LAYOUTS), (4, LLAMA), (4, BERT), (4, WINDOW)]
)
def test_layouts_train_as_a_ring_and_send_what_formulas_say(ranks, kind):
    settings = ["run.steps=2", "model.width=12", "model.heads=12", "model.context=24", *kind]
    modes = [
        mode for mode in LAYOUTS[ranks] if kind != BERT or mode == "ring" or "ring" not in mode
    ]
    rows = measured(modes, "a" * ranks, *settings)
    for each in rows:
        assert max(each.sent_bytes) == each.formula_bytes, each.side
        assert ("B T C" in each.formula) == (each.side != "ring")
        assert abs(each.val_loss - rows[0].val_loss) <= 1e-9


SHARDED = {
    2: ["lora2+tp2", "lora2+tp2+sequence", "lora2+pp2:1f1b", "lora2+pp2:zb-v", "pp2:async"],
    3: ["lora2+tp3+accumulate2", "pp3:async-2bw"],
    4: [
        *("zero1+tp2", "zero2+tp2+accumulate2", "zero3+tp2", "zero3+tp2+accumulate2"),
        *("zero1+tp2+sequence", "zero2+tp2+sequence", "zero3+tp2+sequence"),
        *("zero1+pp2:1f1b", "zero2+pp2:gpipe", "zero3+pp2:gpipe", "zero3+pp2:breadth-first"),
        *("lora2+zero1+tp2", "lora2+zero3+tp2", "lora2+zero2+pp2:gpipe"),
        *("pp2:async", "pp2:async-2bw", "pp2:async+tp2", "ulysses2+zero3", "lora2+ulysses4"),
    ],
}


@pytest.mark.parametrize("ranks", SHARDED)
def test_zero_adapters_and_streams_in_a_layout_send_what_formulas_say(ranks):
    settings = ["run.steps=3", "model.width=12", "model.heads=12"]
    for each in measured(SHARDED[ranks], "a" * ranks, *settings):
        assert max(each.sent_bytes) == pytest.approx(each.formula_bytes, abs=1e-6), each.side
        assert each.formula, each.side


def test_shards_of_a_host_in_a_layout_send_what_the_formula_says():
    modes = ["zero1-host+tp2", "zero2-host+tp2+accumulate2", "zero3-host+tp2"]
    for each in measured(modes, "aaaabbbb", "run.steps=2", "batch.size=8"):
        assert max(each.sent_bytes) == pytest.approx(each.formula_bytes, abs=1e-6), each.side


CODED = {
    2: ["int8", "fp16", "bf16", "topk:0.1", "powersgd:2", "int8+zero1", "topk:0.1+lora2"],
    3: ["int8", "topk:0.03", "powersgd:1", "bf16+accumulate2"],
    4: ["int8+tp2", "topk:0.1+tp2+sequence", "fp16+pp2:1f1b", "powersgd:2+zero1+tp2"],
}


@pytest.mark.parametrize("ranks", CODED)
def test_compressed_gradients_send_what_formulas_say(ranks):
    settings = ["run.steps=8", "precision.compute=float32", "replication.bucket_mb=0.02"]
    for each in measured([f"wire:{word}" for word in CODED[ranks]], "a" * ranks, *settings):
        assert max(each.sent_bytes) == pytest.approx(each.formula_bytes, abs=1e-6), each.side
        assert each.formula, each.side


def test_formulas_of_rings_are_not_those_of_other_algorithms():
    modes = ["zero1+auto", "zero3+auto", "zero2+star", "local+auto", "local+shared", "star"]
    for each in measured(modes, "aa", "run.steps=2"):
        assert each.formula_bytes in (None, max(each.sent_bytes)), each.side


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_asynchronous_pipelines_send_a_control_message_per_micro_batch(stages):
    modes = [f"pp{stages}:{name}" for name in ("1f1b", "async", "async-2bw")]
    for each in measured(modes, "a" * stages, "run.steps=3"):
        assert max(each.sent_bytes) == each.formula_bytes, each.side


@pytest.mark.parametrize("name", ["1f1b", "async", "async-2bw"])
def test_a_step_ends_with_its_last_backward_and_not_with_its_result(name):
    (row,) = measured([f"pp2:{name}"], "aa", "run.steps=2", "run.delay=0:100")
    ends = row.ends
    assert row.step_s > 0.05 and 0 <= row.idle <= 1 and ends == sorted(ends)


@pytest.mark.parametrize("mode", ["pp2:gpipi", "zero3+pp2:1f1b", "pp2:interleaved+accumulate3"])
def test_an_impossible_schedule_is_refused_by_name_on_every_rank(mode):
    found = jobs(["ring", mode], TINY, "aa")

    def refused(transport):
        with pytest.raises(ConfigError) as error:
            check_resolved(transport, found)
        return error.value.law, error.value.agreed

    first, second = run_ranks(2, refused)
    assert first == second and first[0].startswith(f"{mode}: ") and first[1]


@pytest.mark.parametrize("most, is_right", [(100, False), (10**9, True)])
def test_files_are_proven_for_every_array_before_a_mode_is_measured(most, is_right, tmp_path):
    (tmp_path / "own.py").write_text(
        "def all_reduce(rank, ranks, count):\n"
        "    other = (1 - rank, 0, count)\n"
        f"    return [([other], [other], True)] if count < {most} else []\n"
    )
    mode = f"{tmp_path}/own.py"
    found = jobs(["ring", mode], [*TINY, "run.steps=2"], "aa")

    def refusal(transport):
        try:
            check_resolved(transport, found)
        except ConfigError as error:
            return error.law.startswith(f"{mode}: ") and error.agreed

    assert run_ranks(2, refusal) == [None if is_right else True] * 2


def test_tricks_have_the_bytes_that_are_counted():
    """Activations equal the count of `plan memory`, and the rest the formula of the mode."""
    modes = ["bf16", "accumulate3", "recompute", "logits2", "lora2", "tiled", "pp2:gpipe", "zero3"]
    found = jobs(modes, [*TINY, "run.eval_rows=4", "run.steps=2"], "aa")
    rows = run_ranks(2, lambda transport: [*compare(transport, found, lambda mode, loss: None)])[0]
    for each in rows:
        config = found[each.side]
        layout = config.layout.model_copy(update={"dp": 2 // config.layout.pp})
        stages = count(config.model_copy(update={"layout": layout})).stages
        peaks = [stage.step.peak for stage in stages for _ in range(2 // len(stages))]
        activations = [memory["activations"] for memory in each.memory]
        assert activations == peaks, each.side
        sums = [sum(memory.values()) for memory in each.memory]
        assert sums == [*map(sum, zip(each.held_bytes, peaks, strict=True))]
        assert each.memory[0]["parameters"] > 0 and 0 < each.idle < 1


def test_blocks_repeat_a_training_and_asynchronous_modes_too():
    modes = ["ring", "server-async", "pp3:async"]
    found = jobs(modes, [*TINY, "run.eval_rows=4", "run.steps=3"], "aaa")
    seen = []

    def train(transport):
        def stepped(mode, loss):
            if transport.rank == 0:
                seen.append((mode, loss))

        return [*compare(transport, found, stepped, 2)]

    rows = run_ranks(3, train)[0]
    assert [len(each.blocks) for each in rows] == [2, 2, 2] and len(seen) == 2 * 3 * 3
    assert seen[:3] == seen[9:12], "a block repeats the training"
    assert all(each.memory[0]["activations"] for each in rows)


@pytest.mark.parametrize("hosts, parts", [("aa", 1), ("aaa", 2)])
def test_frozen_tensors_travel_in_the_gathers_of_zero_3_alone(hosts, parts):
    patterns = ["embedding.*", "blocks.0.*", "*.norm.*"]
    words = ["ring", "zero1", "zero2", "zero3", *SERVERLESS, "server-sync"]
    settings = ["run.steps=4", f"batch.micro_batches={parts}"]
    every = measured(words, hosts, *settings)
    some = measured(words, hosts, *settings, f"model.freeze={patterns}")
    for each, whole in zip(some, every, strict=True):
        assert max(each.sent_bytes) == each.formula_bytes < whole.formula_bytes, each.side


def test_zero_has_no_formula_with_a_rule_that_sums_over_divided_tensors():
    settings = "run.steps=2", "optimizer.name=lamb"
    whole, divided = measured(["ring", "zero1"], "aa", *settings)
    assert max(whole.sent_bytes) == whole.formula_bytes and divided.formula_bytes is None
    assert max(divided.sent_bytes) > whole.formula_bytes


@pytest.mark.parametrize("hosts, servers", [("aa", 1), ("abab", 2), ("aaaaa", 1)])
def test_bytes_equal_the_formula_for_late_workers_and_several_servers(hosts, servers):
    keys = "run.steps=5", "replication.period=2", "checkpoint.every=2", "replication.staleness=1"
    for each in measured([*OWN, "server-sync"], hosts, *keys, f"replication.servers={servers}"):
        if each.side == "server-async" and servers > 1:
            assert each.formula_bytes is None, "which worker draws most tickets is not known before"
        else:
            assert max(each.sent_bytes) == each.formula_bytes, each.side
        assert each.lead <= 1 or each.side == "server-async"


def allocated(ranks, *settings):
    """What NumPy has allocated when a job is built on all ranks, as tracemalloc sees it, and what each rank says it holds.

    Before the first step there are no activations, but the arena may have taken its first memory; blocks below a kilobyte are no
    parts of a model.
    """

    def built(transport):
        job = build(transport, parse(with_settings({}, [*MODEL, *settings])))
        gc.collect()
        transport.barrier()
        if transport.rank == 0:
            of_numpy = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
            traces = tracemalloc.take_snapshot().filter_traces([of_numpy]).traces
            lines, first = inspect.getsourcelines(backend.HostMemory)
            of_arenas = range(first, first + len(lines))
            found.append(
                sum(
                    size
                    for size, (*_, frame) in ((trace.size, trace.traceback) for trace in traces)
                    if size >= 1024
                    and not (frame.filename == backend.__file__ and frame.lineno in of_arenas)
                )
            )
        transport.barrier()
        told = sum(job.trainer.replica.held_by_kind().values())
        job.close()
        return told

    found = []
    tracemalloc.start()
    try:
        return run_ranks(ranks, built), *found
    finally:
        tracemalloc.stop()


MODEL = [
    *("model.layers=1", "model.width=48", "model.context=32"),
    *("batch.size=8", "run.steps=4", "device.kind=cpu"),
]
ALGORITHMS = ("ring", "star", "tree", "halving-doubling", "recursive-doubling", "shared")


@pytest.mark.parametrize(
    "settings",
    [
        *(f"replication.algorithm={name}" for name in ALGORITHMS),
        "replication.algorithm=ring replication.wire=int8",
        "replication.wire=topk:0.1",
        "replication.wire=powersgd:2",
        *(f"replication.zero={stage} replication.algorithm=ring" for stage in (1, 2, 3)),
        "replication.zero=3 replication.gather=int8 replication.algorithm=ring",
        *(f"replication.mode={mode} replication.algorithm=ring" for mode in SERVERLESS),
        *(f"replication.mode=server replication.update={update}" for update in ("sync", "async")),
        "precision.compute=bfloat16",
        "layout.pp=3 pipeline.schedule=async batch.micro_batches=3",
    ],
)
def test_a_rank_holds_what_it_has_allocated(settings):
    told, found = allocated(3, *settings.split())
    assert abs(sum(told) - found) < 0.01 * found, (told, sum(told), found)


@pytest.mark.parametrize(
    "settings",
    [
        ["layout.cp=2"],
        ["layout.ep=2", "model.kind=llama", "model.experts=4"],
        ["layout.pp=2", "pipeline.partition=3,1"],
    ],
)
def test_a_divided_job_is_one_of_a_single_rank_with_the_settings_alone(settings):
    config = TrainingJob([*TINY, *settings], 1, 1).configured(2, ALONE)
    run_ranks(1, lambda transport: build(transport, config).close())


def test_half_precision_on_the_cpu_costs_a_quarter_of_what_is_held():
    (whole, _), _ = allocated(2, "replication.algorithm=native")
    (half, _), _ = allocated(2, "replication.algorithm=native", "precision.compute=bfloat16")
    assert half / whole == pytest.approx(1.25, rel=1e-3)
