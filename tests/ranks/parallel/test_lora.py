"""Adapters: their gradients, every layout against one rank, and the bytes that travel."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.models.targets import is_adapter
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel.test_frozen import EXACT, LAYOUTS, steps, trained
from tests.training import configured, held, stepped

ALL = "c_attn,c_fc,c_proj,lm_head"
SLICES = "q,v_proj,blocks.1.mlp.down,h.0.attn.c_proj"


def lora(targets, rank=3):
    return [f"lora.rank={rank}", f"lora.targets={targets}", "lora.alpha=12.0"]


def worst(alone, results):
    """The largest difference of losses, norms and tensors from those of one rank."""
    curve, tensors = alone
    found = [np.abs(own - curve).max() for own, _ in results]
    for _, own in results:
        for name, (region, value) in own.items():
            found.append(np.abs(region.part_of(tensors[name][1]) - value).max())
    return max(found)


def test_gradients_are_those_of_the_merged_weight_times_the_factors():
    def run(transport):
        chosen = lora("q,v,c_fc,c_proj,lm_head")
        own, source, _ = build(transport, configured(*EXACT, *chosen, "optimizer.lr=0.1"))
        for index in range(3):
            before = own.tensors()
            own.step(index, *own.replica.batch(source, index))
        full, _, _ = build(transport, configured(*EXACT))
        scale = 12 / 3
        pairs = {name.rpartition(".")[0] for name in before if is_adapter(name)}
        rows = {"q": slice(0, 16), "v": slice(32, 48)}
        layers = {}
        for pair in pairs:
            layer, _, last = pair.rpartition(".")
            layers[pair] = (layer, rows[last]) if last in rows else (pair, slice(None))
        merged = {name: value.copy() for name, value in before.items() if not is_adapter(name)}
        for pair, (layer, some) in layers.items():
            a, b = before[f"{pair}.lora_A"], before[f"{pair}.lora_B"]
            assert np.any(b)
            merged[f"{layer}.weight"][some] += scale * b @ a
        for entry in full.storage.entries:
            entry.view(full.parameters)[...] = merged[entry.name]
        full.step(2, *full.replica.batch(source, 2))
        dw = {e.name: e.view(full.gradients).copy() for e in full.storage.entries}
        found = {e.name: e.view(own.gradients) for e in own.storage.entries}
        assert len(found) == 2 * len(pairs) == 2 * (2 * (2 + 1 + 2) + 1)
        for pair, (layer, some) in layers.items():
            a, b = before[f"{pair}.lora_A"], before[f"{pair}.lora_B"]
            here = dw[f"{layer}.weight"][some]
            assert np.allclose(found[f"{pair}.lora_A"], scale * b.T @ here, rtol=0, atol=1e-12)
            assert np.allclose(found[f"{pair}.lora_B"], scale * here @ a.T, rtol=0, atol=1e-12)

    run_ranks(1, run)


@pytest.mark.parametrize("targets, tied", [(ALL, True), (SLICES, False)])
def test_every_layout_trains_adapters_as_one_rank_does(targets, tied):
    chosen = [*lora(targets), "optimizer.lr=0.05", f"model.tied={str(tied).lower()}"]
    chosen += [] if tied else ["lora.dropout=0.2", "model.dropout=0.1"]
    (alone,) = run_ranks(1, trained, chosen)
    first = {name: value for name, (_, value) in run_ranks(1, drawn, chosen)[0].items()}
    changed = {name for name, (_, value) in alone[1].items() if np.any(value != first[name])}
    assert changed == {name for name in first if is_adapter(name)}
    for name, (ranks, settings) in [*LAYOUTS.items()][tied::2]:
        results = run_ranks(ranks, trained, [*settings.split(), *chosen])
        assert worst(alone, results) <= 1e-9, name


def drawn(transport, settings):
    return held(build(transport, configured(*EXACT, *settings)).trainer)


def losses(transport, settings):
    """Losses and norms of each step; replicas may differ."""
    trainer, source, _ = build(transport, configured(*EXACT, *settings))
    return np.array(
        [(each.loss, each.grad_norm) for each in stepped(trainer, source, range(3))]
    ), {}


@pytest.mark.parametrize("schedule", ("1f1b", "gpipe", "zero-bubble", "interleaved", "async"))
@pytest.mark.parametrize("target", ("h.0.attn.c_attn", "lm_head"))
def test_a_stage_without_an_adapter_works_under_every_schedule(schedule, target):
    chosen = [*lora(target), "optimizer.lr=0.05", "batch.micro_batches=2", "optimizer.clip=0.0"]
    pipe = ["layout.pp=2", f"pipeline.schedule={schedule}"]
    alike = pipe[1:] if schedule == "async" else []
    results = run_ranks(2, steps, [*EXACT, *chosen, *pipe], 0, 3)
    (alone,) = run_ranks(1, steps, [*EXACT, *chosen, *alike], 0, 3)
    found = {name: value for own in results for name, (_, value) in own.items()}
    adapters = [name for name in found if is_adapter(name)]
    assert len(found) == len(alone) and len(adapters) == 2
    # With async only the first stage's gradients are late.
    compared = found if schedule != "async" or target == "lm_head" else found.keys() - {*adapters}
    for name in compared:
        assert np.abs(found[name] - alone[name][1]).max() <= 1e-9, name


@pytest.mark.compile
def test_the_kernels_of_the_simulator_train_adapters_as_the_host_does():
    chosen = [*lora("q,v,c_fc,mlp.c_proj,lm_head"), "model.layers=1", "optimizer.lr=0.05"]
    chosen += ["lora.dropout=0.2"]
    alone = run_ranks(1, trained, chosen)[0]
    simulated = run_ranks(1, trained, [*chosen, "device.kind=cuda-sim"])
    assert worst(alone, simulated) <= 1e-9


@pytest.mark.parametrize("compute", ("bfloat16", "float16"))
def test_in_half_precision_the_base_has_no_masters(compute):
    def run(transport, settings):
        trainer, source, _ = build(
            transport, configured(*EXACT, *settings, *lora(ALL), f"precision.compute={compute}")
        )
        replica = trainer.replica
        result = stepped(trainer, source, range(3))[-1]
        masters = [k for k in replica.state() if k.name == "parameters" and not k.entries]
        assert sum(k.array.size for k in masters) <= trainer.storage.length
        return result.loss

    (alone,) = run_ranks(1, run, [])
    for ranks, layout in ((2, "layout.tp=2"), (2, "replication.zero=3"), (2, "layout.pp=2")):
        for loss in run_ranks(ranks, run, [layout]):
            assert abs(loss / alone - 1) <= 0.01


@pytest.mark.parametrize("recompute", ("unit", "2"))
def test_recomputation_changes_no_bit(recompute):
    chosen = [*lora(SLICES), "optimizer.lr=0.05", "lora.dropout=0.2"]
    for layout in ([], ["layout.tp=2", "layout.sequence_parallel=true"]):
        ranks = 2 if layout else 1
        whole = run_ranks(ranks, losses, [*chosen, *layout])
        again = run_ranks(ranks, losses, [*chosen, *layout, f"memory.recompute={recompute}"])
        for one, other in zip(whole, again, strict=True):
            assert np.array_equal(one[0], other[0])


@pytest.mark.parametrize(
    "settings, words",
    [
        (["lora.targets=c_atn"], ("'c_atn'", "c_attn", "blocks.0.attention.qkv")),
        (["lora.targets=c_attn,q"], ("blocks.0.attention.qkv", "its q")),
        (["lora.targets="], ("''",)),
        (["lora.targets=[]"], ("lora.targets", "''")),
        (["lora.targets=lm_head", "memory.logit_chunks=2"], ("memory.logit_chunks", "2")),
        (["lora.targets=c_fc", "model.freeze=['*']"], ("model.freeze",)),
    ],
)
def test_wrong_targets_are_refused_on_every_rank(settings, words):
    for layout in ([], ["layout.pp=2"]):
        with pytest.raises(ConfigError) as raised:
            run_ranks(2, build, configured(*EXACT, "lora.rank=2", *settings, *layout))
        assert raised.value.agreed and raised.value.exit_code == 2
        assert all(word in str(raised.value) for word in words)
