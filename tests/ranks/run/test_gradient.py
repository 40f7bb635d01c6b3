"""One gradient from a layer's backward to the update: its values on the way, and the files that mpitrain/README.md lists."""

import re
import sys
from pathlib import Path

import numpy as np

import mpitrain
from mpitrain import Plain, Trainer, Unit, normal, ops_for, parse, run_ranks

PACKAGE = Path(mpitrain.__file__).parent
PAGE = Path(__file__).parents[3] / "mpitrain" / "README.md"
LR = 0.01
CONFIG = {
    "replication": {"algorithm": "ring"},
    "device": {"kind": "cpu"},
    "precision": {"compute": "float64"},
    "optimizer": {
        "name": "sgd",
        "lr": LR,
        "warmup": 0,
        "schedule": "constant",
        "weight_decay": 0.0,
        "clip": 0.0,
    },
}


class Way:
    """What happens to the gradients of one step on one rank.

    files       of the package in which a function was called, or called another, since the first backward
    own         gradients as this rank's layers left them
    summed      the same buffer when the update began
    updated_by  how much the update added to the parameters
    """

    def __init__(self, trainer):
        self.files = set()
        last, first, optimizer = (
            trainer.units[-1].layer,
            trainer.units[0].layer,
            trainer.replication.optimizer,
        )
        backward_input, backward_weight, update = (
            last.backward_input,
            first.backward_weight,
            optimizer.update,
        )

        def begins(*arguments):
            sys.setprofile(self._note)
            return backward_input(*arguments)

        def is_whole(*arguments):
            backward_weight(*arguments)
            self.own = trainer.gradients.copy()

        def updates(*arguments, **more):
            self.summed, before = trainer.gradients.copy(), trainer.parameters.copy()
            update(*arguments, **more)
            sys.setprofile(None)
            self.updated_by = trainer.parameters - before

        last.backward_input, first.backward_weight, optimizer.update = begins, is_whole, updates

    def _note(self, frame, event, argument):
        if event == "call":
            for path in (Path(near.f_code.co_filename) for near in (frame, frame.f_back)):
                if path.is_relative_to(PACKAGE):
                    self.files.add(path.relative_to(PACKAGE).as_posix())


def follow(transport):
    layers = Plain(ops_for("cpu"))
    trainer = Trainer(
        transport,
        [
            Unit("hidden", layers.linear(2, 8, normal(1.0), "relu")),
            Unit("out", layers.linear(8, 2, normal(1.0))),
        ],
        parse(CONFIG),
    )
    inputs = np.random.default_rng(3).standard_normal((32, 2))[list(trainer.share())]
    batch = inputs, (inputs[:, 0] > 0).astype(int)
    trainer.step(0, *batch)
    way = Way(trainer)
    trainer.step(1, *batch)
    return way


def test_a_gradient_passes_through_the_files_that_the_page_lists_is_summed_once_and_moves_the_parameters():
    ways = run_ranks(2, follow)
    section = re.search(r"^## How a step flows$(.*?)^## ", PAGE.read_text(), re.M | re.S).group(1)
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", section, re.M)
    for way in ways:
        assert sorted(way.files) == sorted(listed)
        assert np.array_equal(way.summed, ways[0].own + ways[1].own)
        assert np.abs(way.updated_by + LR * way.summed).max() <= 1e-15
    assert np.abs(ways[0].own - ways[1].own).max() > 0.01, (
        "ranks that bring the same would hide a sum that is none"
    )
