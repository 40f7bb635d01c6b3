"""What it costs that ranks share layers: bytes sent, activations held, time stood still; and what the first step alone costs.

B batch, T tokens, R = B T rows, C channels, H heads, V vocabulary, L blocks, n ranks.
"""

import pytest

from mpitrain.regions import share
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.laws.exchange import Counted
from tests.ranks.parallel.test_recompute import live_at_the_loss, sent
from tests.ranks.parallel.test_tensor import GPT, source_of
from tests.training import configured

WAYS = {
    "whole rows": [],
    "own rows": ["layout.sequence_parallel=true"],
    "own rows, kept": ["layout.sequence_parallel=true", "layout.keep_gathered=true"],
}


def built(transport, config):
    """A trainer, and a function that makes its step of this number."""
    trainer, source, _ = build(transport, config, source=source_of(config))
    return trainer, lambda number: trainer.step(number, *trainer.replica.batch(source, number))


def test_a_step_sends_the_bytes_of_its_formula():
    """In sum over the ranks, by rings: 2 (n - 1) S for each all-reduce of S bytes."""

    n, layers, rows, width = 3, 2, 12 * 24, 48
    # gain and bias of a norm, of 48 elements, begin at multiples of 32
    norms, again = (2 * layers + 1) * (64 + 64), (2 * layers + 1) * rows * width
    base = [
        *GPT,
        f"layout.tp={n}",
        "batch.micro_batches=2",
        "layout.algorithm=ring",
        "replication.algorithm=ring",
    ]
    found = run_ranks(n, sent, configured(*base))
    maximum_and_two_sums, control = 3 * rows, 5
    whole = 2 * (n - 1) * 8 * ((4 * layers + 2) * rows * width + maximum_and_two_sums + control)
    assert sum(found) == whole
    for kept in (True, False):
        by_rows = ["layout.sequence_parallel=true", f"layout.keep_gathered={str(kept).lower()}"]
        found = run_ranks(n, sent, configured(*base, *by_rows))
        assert sum(found) == whole + (n - 1) * 8 * (2 * norms + (0 if kept else again))


@pytest.mark.parametrize("way", WAYS)
def test_activations_kept_for_the_backward_are_those_of_the_formula(way):
    """In a micro-batch, when the loss begins, in numbers: what lies between layers whole or n-th, what is within them n-th."""
    batch, length, width, heads, vocabulary, layers = 12, 24, 48, 6, 251, 2
    rows = batch * length

    for n in (1, 2, 3):
        own = 1 if way == "whole rows" else n
        again = (
            rows * width // (1 if way == "own rows, kept" else own)
        )  # what a column layer's weights will meet
        norm = (
            rows * width // own + rows // own + again
        )  # normalised rows, 1 / deviation, the layer's input
        if n == 1:
            norm = 2 * rows * width + rows
        within = (
            12 * rows * width // n
        )  # queries, keys, values, attention's output; slopes and outputs of the MLP
        scores = (
            batch * heads // n * length * (length + 1)
        )  # one block of queries; and 1 / their sums
        config = configured(*GPT, f"layout.tp={n}", *WAYS[way])
        for rank, found in enumerate(run_ranks(n, live_at_the_loss, config)):
            logits = rows * len(share(vocabulary, rank, n))
            assert found == 8 * (layers * (2 * norm + within + scores) + norm + logits), (n, rank)


@pytest.mark.parametrize("way", WAYS)
def test_after_the_first_step_nothing_is_bound_allocated_or_agreed(way):
    def counts(transport, config):
        trainer, step = built(transport, config)
        step(0)
        counted = [
            Counted(group) for group in (trainer.grid.world, trainer.grid.tp, trainer.grid.copies)
        ]
        before = [each.now() for each in counted]
        for number in range(1, 4):
            step(number)
            assert [each.now() for each in counted] == before
        return before

    config = configured(*GPT, "layout.tp=2", "model.tied=true", "batch.micro_batches=2", *WAYS[way])
    assert all(
        calls == 0 and allocations
        for before in run_ranks(4, counts, config)
        for calls, allocations, _ in before
    )


def test_time_spent_waiting_for_activations_is_told():
    def told(transport, config):
        _, step = built(transport, config)
        return [step(number).comm_s for number in range(2)][-1]

    punctual, late = run_ranks(2, told, configured(*GPT, "layout.tp=2", "run.delay=1:400"))
    assert punctual > 0.2 and punctual > late
