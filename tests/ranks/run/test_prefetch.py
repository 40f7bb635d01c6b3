"""A run that prefetches is the run that does not, bit for bit, in every mode and after a resume."""

import hashlib

import pytest

from mpitrain.run.checkpoint.manifest import newest
from tests.runs import TINY, go, records

MODES = [
    (1, []),
    (2, ["run.eval_every=2"]),
    (3, ["replication.mode=master"]),
    (3, ["replication.mode=server", "replication.servers=1", "replication.update=sync"]),
    (2, ["replication.mode=server", "replication.servers=1", "replication.update=bounded"]),
    (2, ["replication.mode=local", "replication.period=2"]),
    (2, ["layout.pp=2", "batch.micro_batches=2", "pipeline.schedule=async"]),
    (2, ["layout.tp=2", "model.heads=2"]),
    (1, ["data.order=epochs", "data.separator=10"]),
]


def result(folder):
    """What a run has recorded but for times, and the bits of its last parameters."""
    named = ("step", "loss", "grad_norm", "val_loss", "val_accuracy", "samples_seen")
    found = [{key: line[key] for key in named if key in line} for line in records(folder)]
    saved = newest(folder / "run/checkpoints")
    files = sorted(saved.glob("model-*.safetensors"))
    return found, [hashlib.sha256(tensors(file.read_bytes())).hexdigest() for file in files]


def tensors(data):
    """The bytes behind the header of a safetensors file, which names the run."""
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.parametrize("ranks, settings", MODES, ids=str)
def test_every_mode_has_the_same_bits(tmp_path, ranks, settings):
    found = []
    for ahead in (0, 3):
        folder = tmp_path / str(ahead)
        go(
            ranks,
            [
                *TINY,
                "run.eval_rows=20",
                "run.sample=0",
                *settings,
                f"run.out={folder}/run",
                f"data.prefetch={ahead}",
            ],
        )
        found.append(result(folder))
    assert found[0] == found[1] and found[0][1]


def test_a_resumed_run_has_the_same_bits(tmp_path):
    found = []
    for ahead in (0, 2):
        folder = tmp_path / str(ahead)
        settings = [
            *TINY,
            "run.eval_rows=20",
            "run.sample=0",
            f"run.out={folder}/run",
            f"data.prefetch={ahead}",
        ]
        go(2, [*settings, "run.steps=3"])
        go(3, [*settings, "batch.size=9"], resume="yes")
        found.append(result(folder))
    assert found[0] == found[1]
