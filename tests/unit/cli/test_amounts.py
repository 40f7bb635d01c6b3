"""The second line of a run: the size of its data, and the epochs that its steps make."""

from mpitrain.cli.terminal.progress import amounts
from mpitrain.config import parse, with_settings


def test_conversations_are_counted_and_so_are_those_that_were_cut():
    config = parse(with_settings({}, ["data.source=jsonl:a", "batch.size=10", "run.steps=45"]))
    record = {"conversations": 180, "held_out_conversations": 20, "cut_conversations": 7}
    said = amounts(config, record)
    assert all(part in said for part in ("180 conv", "20 held out", "7 cut", "2.5 epochs"))
