"""Generated text: with the key-value cache the tokens equal those without it, in every layout."""

import threading
from collections import Counter
from functools import cache, partialmethod
from itertools import islice

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.data.tokenizer import ByteTokenizer
from mpitrain.errors import ConfigError, TrainingError
from mpitrain.layers.plain import Attention, Plain
from mpitrain.models.gpt import gpt
from mpitrain.run import inference
from mpitrain.run.build import build
from mpitrain.run.generate import PromptRequest, Sampling, continued, texts
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.generation import every_text, tokens, whole_rows, whole_windows

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "batch.size=4"]
EXACT = [*TINY[1:], "model.layers=2", "precision.compute=float64"]
PROMPTS = [[3, 5, 7], [11], [*range(20)], [2] * 15, [40, 1]]
COUNT = 40  # goes past the context of 16 several times
LLAMA = ["model.kind=llama", "model.heads=4", "model.kv_heads=2", "model.qkv_bias=true"]
LLAMA += ["model.rope_scaling=[4, 1, 4, 8]", "model.qk_norm=true", "model.head_dim=6"]
LAYOUTS = {
    "one rank": (1, []),
    "tp 2": (2, ["layout.tp=2"]),
    "tp 2, sequence parallel": (2, ["layout.tp=2", "layout.sequence_parallel=true"]),
    "pp 2": (2, ["layout.pp=2"]),
    "pp 2, two chunks": (2, ["layout.pp=2", "pipeline.schedule=interleaved"]),
    "tp 2, pp 2": (4, ["layout.tp=2", "layout.pp=2", "layout.sequence_parallel=true"]),
    "ring of 2": (2, ["layout.cp=2", "layout.cp_mode=ring"]),
    "cp 2, pp 2": (4, ["layout.cp=2", "layout.pp=2"]),
    "dp 3": (3, []),
    "dp 2, tied, tp 2": (4, ["layout.tp=2", "model.tied=true"]),
    "zero 3, dp 2, pp 2": (
        4,
        ["layout.pp=2", "replication.zero=3", "pipeline.schedule=gpipe", "model.tied=true"],
    ),
    "recomputed": (1, ["memory.recompute=attention", "memory.logit_chunks=2"]),
    "recomputed units, a server": (3, ["memory.recompute=2", "replication.mode=server"]),
    "async": (2, ["layout.pp=2", "pipeline.schedule=async"]),
    "simulated kernels, tp 2": (2, ["device.kind=cuda-sim", "layout.tp=2"]),
    "llama": (1, LLAMA),
    "llama, tp 2, pp 2": (4, [*LLAMA, "layout.tp=2", "layout.pp=2"]),
    "llama on simulated kernels": (1, [*LLAMA, "device.kind=cuda-sim"]),
    "a window": (1, ["model.window=5"]),
    "a window of one token, tp 2": (2, ["model.window=1", "layout.tp=2"]),
    "llama with a window of some layers, tp 2, pp 2": (
        4,
        [*LLAMA, "model.window=3", "model.window_from=1", "layout.tp=2", "layout.pp=2"],
    ),
    "a window, ring of 2": (2, ["model.window=3", "layout.cp=2", "layout.cp_mode=ring"]),
    "llama with a window on simulated kernels": (
        1,
        [*LLAMA, "model.window=6", "device.kind=cuda-sim"],
    ),
    "a context of 1": (1, ["model.context=1"]),
    "an odd context": (1, ["model.context=5"]),
}


def trainer_of(transport, *settings):
    return build(transport, parse(with_settings({}, [*TINY, *settings]))).trainer


def exact(transport, settings):
    return build(transport, parse(with_settings({}, [*EXACT, *settings]))).trainer


def written(transport, settings, caches=True):
    """The text of each prompt on this rank, and how many leases are left."""
    trainer = exact(transport, settings)
    drawn = texts(trainer, PROMPTS, Sampling(0.9, 30, 0.95), 7, COUNT)
    found = every_text(drawn, len(PROMPTS))
    if not trainer.grid.is_server:
        assert inference.reader(trainer, 1, 4).caches == caches
    return found, trainer.arena.live


@cache
def alone(*model):
    """The same texts, one by one, without a cache of keys and values, of a model on one rank."""

    def one_by_one(transport):
        trainer = exact(transport, model)
        return [
            whole_windows(trainer, prompt, COUNT, Sampling(0.9, 30, 0.95), 7 + index)
            for index, prompt in enumerate(PROMPTS)
        ]

    return run_ranks(1, one_by_one)[0]


PARTS = "tp 2", "pp 2", "llama", "a window", "llama on simulated kernels"
"""Layouts and models of which others have more."""


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in PARTS])
def test_cached_batches_write_the_texts_of_whole_windows(layout):
    ranks, settings = LAYOUTS[layout]
    truth = alone(*(s for s in settings if s.startswith("model")))
    assert all(len(text) == COUNT for text in truth)
    for found, live in run_ranks(ranks, written, settings):
        assert found == truth and live == 0


@pytest.mark.parametrize("layout", ["one rank", "tp 2", "tp 2, sequence parallel", "ring of 2"])
def test_text_is_written_with_the_trained_adapters(layout):
    """Layouts whose rows are divided generate with layers of their own, which need the adapters, too."""
    ranks, settings = LAYOUTS[layout]
    lora = ["lora.rank=2", "optimizer.lr=0.3", "optimizer.warmup=0"]

    def tuned(transport, more):
        trainer, source, _ = build(transport, parse(with_settings({}, [*EXACT, *lora, *more])))
        for step in range(3):
            trainer.step(step, *trainer.replica.batch(source, step))
        return trainer

    def truth(transport, more):
        trainer = tuned(transport, more)
        return [whole_windows(trainer, prompt, COUNT, Sampling(0.0)) for prompt in PROMPTS]

    def write(transport, more):
        drawn = texts(tuned(transport, more), PROMPTS, Sampling(0.0), 0, COUNT)
        return every_text(drawn, len(PROMPTS))

    (whole,) = run_ranks(1, truth, [])
    assert all(text == whole for text in run_ranks(ranks, write, settings))
    assert whole != run_ranks(1, alone_greedy)[0], "the adapters must change the text"


def alone_greedy(transport):
    trainer = exact(transport, [])
    return [whole_windows(trainer, prompt, COUNT, Sampling(0.0)) for prompt in PROMPTS]


def of_documents(transport, settings, separator):
    """Texts by the cache, and on one rank as training sees them; and the text after a separator."""
    own = ["data.attend=document", f"data.separator={separator}", "model.context=64", *settings]
    trainer, sampling = exact(transport, own), Sampling(0.9, 3)
    prompts = [[3, separator, 5, 7], [11], [separator], [1, 2, separator, separator, 9]]
    found = every_text(texts(trainer, prompts, sampling, 7, COUNT), len(prompts))
    second = [[5, 7], [11], [separator], [9]]
    same = every_text(texts(trainer, second, sampling, 7, COUNT), len(prompts))
    rows = transport.size == 1 and [
        whole_rows(trainer, prompt, COUNT, sampling, 7 + index)
        for index, prompt in enumerate(prompts)
    ]
    return found, same, rows


@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "dp 3", "simulated kernels, tp 2"])
def test_a_document_after_a_separator_is_written_as_if_alone(layout):
    drawn = run_ranks(1, written, [])[0][0]
    separator = Counter(token for text in drawn for token in text).most_common(1)[0][0]
    ((found, same, rows),) = run_ranks(1, of_documents, [], separator)
    assert found == same == rows and any(separator in text[:-1] for text in found)
    ranks, settings = LAYOUTS[layout]
    for other, alike, _ in run_ranks(ranks, of_documents, settings, separator):
        assert other == found and alike == found


def test_a_document_fills_the_context_and_not_its_row():
    def write(transport):
        own = ["data.attend=document", "data.separator=7"]
        trainer = exact(transport, own)
        request = PromptRequest(Sampling(0), 0, COUNT, cuts=False)
        prompts = [[*range(20, 30), 7, 3], [*range(20, 30), 8, 3]]
        pieces = [*continued(trainer, None, prompts, 2, request)]
        ends = {piece.prompt: piece for piece in pieces if piece.ended}
        return [(ends[p].ended, len(ends[p].tokens)) for p in (0, 1)]

    ((first, second),) = run_ranks(1, write)
    assert first[0] in ("tokens", "context") and first[1] >= 15 and second == ("context", 4)


def test_a_model_without_a_cache_writes_the_same(monkeypatch):
    monkeypatch.setattr("mpitrain.pipeline.decoder.can_decode", lambda chunks: False)
    truth = alone()
    for ranks, settings in ((1, []), (2, ["layout.pp=2"]), (2, ["layout.tp=2"])):
        for found, _ in run_ranks(ranks, written, settings, False):
            assert found == truth


def test_texts_end_where_they_are_told_and_the_others_go_on():
    def write(transport):
        trainer = exact(transport, [])
        whole = every_text(texts(trainer, PROMPTS, Sampling(), 0, COUNT), 5)
        ends = [text[4 + 3 * index] for index, text in enumerate(whole)]
        some = texts(trainer, PROMPTS, Sampling(), 0, COUNT, lambda i, token: token == ends[i])
        return whole, ends, every_text(some, 5)

    for ranks in (1, 2):
        for whole, ends, some in run_ranks(ranks, write):
            assert some == [
                text[: text.index(end) + 1] for text, end in zip(whole, ends, strict=True)
            ]


def test_after_the_first_token_nothing_is_allocated():
    def write(transport):
        trainer = exact(transport, ["model.context=64"])
        drawn = texts(trainer, PROMPTS, Sampling(), 0, 30)
        next(drawn)
        before = trainer.arena.allocations
        found = len(list(drawn))
        return found, trainer.arena.allocations - before

    assert run_ranks(1, write) == [(29, 0)]
    assert run_ranks(2, write) == [(29, 0)] * 2


@pytest.mark.parametrize("count, stop_after, many", [(20, 99, 20), (20, 5, 5), (0, 99, 0)])
def test_every_rank_gets_the_text_that_one_replica_computes(count, stop_after, many, monkeypatch):
    reads_of, read = threading.local(), inference.Reader.read

    def counted(reader, *given):
        reads_of.rank.append(given)
        return read(reader, *given)

    monkeypatch.setattr(inference.Reader, "read", counted)

    def write(transport):
        trainer = trainer_of(transport)
        reads = reads_of.rank = []
        drawn = tokens(
            trainer,
            [10, 20],
            0.8,
            40,
            seed=3,
            stop_requested=lambda: len(reads) >= stop_after + transport.rank,
        )
        return list(islice(drawn, count)), len(reads)

    (one,) = run_ranks(1, write)
    assert len(one[0]) == one[1] == many
    replicas = run_ranks(3, write)
    assert [text for text, _ in replicas] == [one[0]] * 3
    assert sorted(reads for _, reads in replicas) == [0, 0, many]


def test_a_diverged_model_is_the_same_error_on_every_rank():
    def write(transport):
        trainer = trainer_of(transport)
        trainer.parameters[:] = np.inf
        with np.errstate(all="ignore"), pytest.raises(TrainingError, match="not finite") as found:
            next(tokens(trainer, [1], 1.0, 0, 0))
        return found.value.agreed

    assert run_ranks(3, write) == [True] * 3


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError):
        run_ranks(1, lambda transport: next(texts(trainer_of(transport), [[1], []], Sampling(), 0)))


class Shifted(Attention):
    """A user's attention with another forward, which the cache of its base class would not fit."""

    def forward(self, w, x, now, arena):
        return super().forward(w, x * 2, now, arena)


def test_a_layer_with_its_own_forward_inherits_no_cache():
    def write(transport, changes):
        config = parse(with_settings({}, EXACT))

        def units(layers):
            found = gpt(layers, vocab=256, context=16, width=16, heads=2, depth=1)
            attention = found[1].layer.inner.children
            if changes:
                attention["attention"] = Shifted(layers.ops, 2)
            return found

        trainer = Trainer(transport, units, config)
        drawn = every_text(texts(trainer, [[3, 1]], Sampling(), 0, 30), 1)
        return inference.reader(trainer, 1, 4).caches, drawn[0] == whole_windows(
            trainer, [3, 1], 30, Sampling(), 0
        )

    for changes in (False, True):
        assert run_ranks(1, write, changes) == [(not changes, True)]


def test_a_model_that_sees_later_tokens_writes_and_chooses_nothing(monkeypatch):
    monkeypatch.setattr(Plain, "attention", partialmethod(Plain.attention, causal=False))

    def asked(transport, ask):
        ask(exact(transport, []))

    tokens = np.ones((1, 4), np.int64)
    for ask in (
        lambda trainer: every_text(texts(trainer, [[3, 1]], Sampling(), 0, 30), 1),
        lambda trainer: inference.row_losses(trainer, tokens, tokens),
    ):
        with pytest.raises(ConfigError, match="no causal mask"):
            run_ranks(2, asked, ask)


@pytest.mark.parametrize("ranks, batch", [(1, 2), (1, 9), (3, 1)])
def test_groups_of_prompts_write_what_each_writes_alone(ranks, batch):
    request = PromptRequest(Sampling(), 7, COUNT, ["q", "\x07"])

    def write(transport, prompts, size, seed):
        trainer, found = exact(transport, []), {}
        for piece in continued(
            trainer, ByteTokenizer(), prompts, size, request._replace(seed=seed)
        ):
            text, _, _ = found.get(piece.prompt, (b"", "", []))
            found[piece.prompt] = text + piece.text, piece.ended, piece.tokens
        return [found[index] for index in range(len(prompts))]

    truth = [run_ranks(1, write, [prompt], 1, 7 + i)[0][0] for i, prompt in enumerate(PROMPTS)]
    assert {ended for _, ended, _ in truth} == {"stop", "tokens"}
    assert all(text == bytes(t)[: len(text)] and b"q" not in text for text, _, t in truth)
    assert run_ranks(ranks, write, PROMPTS, batch, 7) == [truth] * ranks


def test_a_text_ends_at_the_context_if_asked_to():
    prompts = [PROMPTS[0], PROMPTS[3], PROMPTS[4]]

    def write(transport):
        trainer = exact(transport, [])
        found = every_text(texts(trainer, prompts, Sampling(), 0, COUNT, cuts=False), 3)
        truth = [
            whole_windows(trainer, prompt, COUNT, Sampling(), index, stops=True)
            for index, prompt in enumerate(prompts)
        ]
        return found, truth

    ((found, truth),) = run_ranks(1, write)
    assert found == truth and list(map(len, found)) == [13, 1, 14]
