"""One gradient from a layer's backward to the update: its values, and the eight objects that mpitrain/README.md names."""

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


class StepProfile:
    """Profile of one training step on one rank.

    calls       "file: qualified name" of each function of the package that the step called, by first call
    own         gradients as this rank's layers left them
    summed      the same buffer when the update began
    updated_by  the update's change of the parameters
    """

    def __init__(self, trainer):
        self.calls = {}
        first, optimizer = trainer.units[0].layer, trainer.replica.optimizer
        backward_weight, update = first.backward_weight, optimizer.update

        def is_whole(*arguments):
            backward_weight(*arguments)
            self.own = trainer.gradients.copy()

        def updates(*arguments, **more):
            self.summed, before = trainer.gradients.copy(), trainer.parameters.copy()
            update(*arguments, **more)
            self.updated_by = trainer.parameters - before

        first.backward_weight, optimizer.update = is_whole, updates

    def follow(self, step, *arguments):
        """Run a step, and note its calls in the package."""
        sys.setprofile(self._note)
        try:
            step(*arguments)
        finally:
            sys.setprofile(None)

    def _note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.calls[f"{path.relative_to(PACKAGE).as_posix()}: {frame.f_code.co_qualname}"] = None


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
    profile = StepProfile(trainer)
    profile.follow(trainer.step, 1, *batch)
    return profile


def test_a_step_calls_the_eight_objects_that_the_page_names():
    profiles = run_ranks(2, follow)
    section = re.search(r"^## One training step$(.*?)^## ", PAGE.read_text(), re.M | re.S).group(1)
    rows = re.findall(r"^\| [\w ]+ \| `([\w.]+)` in `([\w/]+\.py)` \|", section, re.M)
    named = [f"{path}: {name}" for name, path in rows]
    assert len(named) == 8
    for profile in profiles:
        assert [call for call in profile.calls if call in named] == named
        assert np.array_equal(profile.summed, profiles[0].own + profiles[1].own)
        assert np.abs(profile.updated_by + LR * profile.summed).max() <= 1e-15
    assert np.abs(profiles[0].own - profiles[1].own).max() > 0.01, (
        "ranks that bring the same would hide a sum that is none"
    )
