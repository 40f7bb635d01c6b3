"""`compare --generate`: all sides write the same tokens, in turns."""

from mpitrain.config import parse, with_settings
from mpitrain.run.build import build
from mpitrain.tools.bench.generate import Cached, WholeWindows, measure
from mpitrain.tools.bench.table import WRITTEN, table
from mpitrain.transport.threads import run_ranks

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "batch.size=4"]


def test_whole_windows_write_the_tokens_of_the_cache():
    def run(transport):
        config = parse(with_settings({}, [*TINY, "precision.compute=float64"]))
        trainer = build(transport, config).trainer
        return measure([Cached(trainer), WholeWindows(trainer)], [[3], [5]], 15, 3)

    ((ours, theirs),) = run_ranks(1, run)
    assert [row.side for row in (ours, theirs)] == ["mpitrain", "whole windows"]
    assert ours.tokens == theirs.tokens == ours.same == theirs.same == 30
    assert ours.ratio == 1 and 0 < min(theirs.blocks) <= theirs.step_s and len(theirs.blocks) == 3
    assert len({len(line) for line in table(WRITTEN, ["mpitrain"]).lines([ours, theirs])}) == 1


class Told:
    """A side that writes given tokens."""

    def __init__(self, name, tokens):
        self.name, self.tokens, self.turns = name, tokens, 0

    def write(self, prompts, count):
        self.turns += 1
        return self.tokens


def test_tokens_count_as_the_same_up_to_the_first_other_one():
    sides = [Told("a", [[1, 2, 3], [4, 5, 6]]), Told("b", [[1, 9, 3], [4, 5, 6]])]
    assert [row.same for row in measure(sides, [[0], [0]], 3, 2)] == [6, 4]
    assert [side.turns for side in sides] == [3, 3]
