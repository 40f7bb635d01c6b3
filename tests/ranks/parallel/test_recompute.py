"""Recomputation: the bits of the plain run in every layout, without further messages, for less memory."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers import plain as layers_module
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import measured
from tests.ranks.parallel.test_tensor import GPT, curve, source_of
from tests.training import configured, stepped

OWN_ROWS = ["layout.tp=2", "layout.sequence_parallel=true"]
FOUR = ["layout.pp=2", "batch.micro_batches=4", "model.layers=3"]
LAYOUTS = {
    "one rank": (1, []),
    "bfloat16": (1, ["precision.compute=bfloat16"]),
    "float16": (1, ["precision.compute=float16", "model.tied=true"]),
    "replicas": (2, ["batch.micro_batches=2", "replication.zero=1"]),
    "zero 3": (2, ["replication.zero=3", "batch.micro_batches=2"]),
    "tp": (2, ["layout.tp=2"]),
    "own rows": (2, OWN_ROWS),
    "own rows, kept": (2, [*OWN_ROWS, "layout.keep_gathered=true"]),
    "1f1b, tied": (2, [*FOUR, "model.tied=true"]),
    "zero-bubble": (2, [*FOUR, "pipeline.schedule=zero-bubble"]),
    "chunks, zero 3": (2, [*FOUR, "pipeline.schedule=breadth-first", "replication.zero=3"]),
    "async": (2, [*FOUR, "pipeline.schedule=async", "run.steps=2"]),
    "tp and pp": (4, [*FOUR, "layout.tp=2", "pipeline.schedule=gpipe"]),
    "llama": (2, ["model.kind=llama", "layout.tp=2"]),
    "mlp": (2, ["model.kind=mlp", "model.layers=4", "layout.tp=2"]),
}


def refused(layout, mode):
    """Whether a mode has nothing to compute again there, or would gather once more."""
    return (layout, mode) in {("mlp", "attention"), ("zero 3", "2"), ("zero 3", "3")}


def assert_same_bits(ranks, base, modes, *more):
    """Two steps of each mode, and what all ranks hold then, are those of a run that computes nothing again."""
    plain = run_ranks(ranks, curve, configured(*base), 2)
    for mode in modes:
        again = run_ranks(ranks, curve, configured(*base, *more, f"memory.recompute={mode}"), 2)
        for (told, tensors, _), (others, found, _) in zip(plain, again, strict=True):
            assert np.array_equal(told, others, equal_nan=True), mode
            for name, (_, values) in tensors.items():
                assert np.array_equal(values, found[name][1]), (mode, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation_repeats_the_plain_run_bitwise(layout):
    """Units in every layout, and of the other modes each in a third of them."""
    ranks, settings = LAYOUTS[layout]
    modes = ["unit", ("attention", "2", "3")[[*LAYOUTS].index(layout) % 3]]
    modes = [mode for mode in modes if not refused(layout, mode)]
    assert_same_bits(ranks, [*GPT, *settings], modes)


@pytest.mark.compile
@pytest.mark.parametrize(
    "layout, modes",
    [("one rank", ("attention",)), ("bfloat16", ("unit", "2")), ("own rows", ("unit", "2"))],
)
def test_kernels_have_the_bits_of_the_plain_run_too(layout, modes, capsys):
    ranks, settings = LAYOUTS[layout]
    small = ["precision.compute=float32", "model.width=16", "model.heads=2", "model.context=8"]
    base = [*GPT, *small, "data.vocabulary=37", "model.layers=1", "device.kind=cuda-sim"]
    assert_same_bits(ranks, [*base, *settings], modes, "memory.release_every=1")
    assert ("changes nothing" in capsys.readouterr().err) == (modes == ("attention",))


def sent(transport, config):
    """The bytes that a rank sends in its second step."""
    trainer, source, _ = build(transport, config, source=source_of(config))
    stepped(trainer, source, [0])
    return measured(transport, lambda: stepped(trainer, source, [1]))[1]


def test_all_reduces_stay_4_l_and_2_and_are_6_l_and_2_without_the_offer(monkeypatch):
    n, layers, rows, width = 2, 2, 12 * 24, 48
    base = [*GPT, f"layout.tp={n}", "layout.algorithm=ring", "replication.algorithm=ring"]

    def all_reduces(mode):
        found = sum(run_ranks(n, sent, configured(*base, f"memory.recompute={mode}")))
        return (found / (2 * (n - 1) * 8) - 3 * rows - 5) / (rows * width)

    for mode in ("none", "attention", "unit"):
        assert all_reduces(mode) == 4 * layers + 2, mode
    # The second of two units takes the sum of the first one as its input.
    assert all_reduces("2") == 5 * layers + 2
    monkeypatch.setattr(layers_module, "saved_again", lambda layer, *rest: layer.forward(*rest)[1])
    assert all_reduces("unit") == 6 * layers + 2


@pytest.mark.parametrize("layout", ["own rows", "zero 3", "chunks, zero 3"])
def test_no_row_and_no_parameter_is_gathered_once_more(layout):
    ranks, settings = LAYOUTS[layout]
    base = [*GPT, *settings, "layout.algorithm=ring", "replication.algorithm=ring"]
    plain = run_ranks(ranks, sent, configured(*base))
    for mode in ("unit", "2"):
        if not refused(layout, mode) and (layout, mode) != ("own rows", "2"):
            config = configured(*base, f"memory.recompute={mode}")
            assert run_ranks(ranks, sent, config) == plain, mode


def live_at_the_loss(transport, config):
    """The bytes that a rank holds when its first loss begins."""
    trainer, source, _ = build(transport, config, source=source_of(config))
    loss, found = trainer.replica.loss, []

    def counted(*arguments):
        found.append(trainer.arena.live)
        return loss(*arguments)

    trainer.replica.loss = counted
    stepped(trainer, source, [0])
    return found[0]


def test_a_unit_saves_its_input_and_two_save_one_input():
    """In numbers, when the loss begins; the embedding's output is the first input."""
    rows, width, vocabulary, layers = 12 * 24, 48, 251, 2
    head = 2 * rows * width + rows + rows * vocabulary
    for mode, inputs in (("unit", 2 * layers), ("2", layers)):
        config = configured(*GPT, f"memory.recompute={mode}")
        # The head does not use its input in its backward.
        assert run_ranks(1, live_at_the_loss, config) == [8 * (inputs * rows * width + head)], mode


def test_a_segment_that_zero_3_would_gather_again_is_refused_on_all_ranks():
    config = configured(*GPT, "replication.zero=3", "memory.recompute=2")

    def built(transport):
        with pytest.raises(ConfigError, match="a third time"):
            build(transport, config, source=source_of(config))
        return True

    assert all(run_ranks(2, built))


@pytest.mark.parametrize(
    "setting, layer",
    [("memory.recompute=attention", "attention"), ("memory.logit_chunks=2", "head")],
)
def test_a_key_without_its_layer_is_refused(setting, layer):
    config = configured(*GPT, "model.kind=mlp", setting)

    def built(transport):
        with pytest.raises(ConfigError, match=f"{setting} needs the layer factory's {layer}"):
            build(transport, config, source=source_of(config))

    run_ranks(1, built)
