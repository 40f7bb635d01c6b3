"""Whatever is altered in a checkpoint is refused before it is loaded, and named."""

import shutil

import numpy as np
import pytest

from mpitrain.errors import CheckpointError
from mpitrain.formats import safetensors_files
from mpitrain.formats.safetensors_files import INDEX
from mpitrain.run.checkpoint import loading
from mpitrain.run.checkpoint.manifest import MANIFEST
from mpitrain.transport.threads import run_ranks
from tests.cases.layouts import LAYOUTS, save
from tests.saving import blocks_of

NAMES = [
    *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
    *(f"state-0000{rank}.safetensors" for rank in (0, 1, 2)),
    INDEX,
    MANIFEST,
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The second checkpoint of a run of three ranks, the first, and the second of another run."""
    folder = tmp_path_factory.mktemp("altered")
    layout = LAYOUTS["whole on 3"]
    for run in ("this", "other"):
        for step in (1, 2):
            run_ranks(3, save, folder / run, layout, step, run)
    return [
        folder / path
        for path in ("this/step-00000002", "this/step-00000001", "other/step-00000002")
    ]


def flip(file, generator, before, other):
    raw = bytearray(file.read_bytes())
    raw[generator.integers(len(raw))] ^= 1 << generator.integers(8)
    file.write_bytes(raw)


def truncate(file, generator, before, other):
    file.write_bytes(file.read_bytes()[: generator.integers(file.stat().st_size)])


def extend(file, generator, before, other):
    file.write_bytes(file.read_bytes() + b"\0" * generator.integers(1, 9))


def remove(file, generator, before, other):
    file.unlink()


def swap_steps(file, generator, before, other):
    shutil.copy(before / file.name, file)


def swap_runs(file, generator, before, other):
    shutil.copy(other / file.name, file)


def swap_ranks(file, generator, before, other):
    first, second = (
        file.read_bytes(),
        (
            twin := file.with_name(
                NAMES[NAMES.index(file.name) // 3 * 3 + (NAMES.index(file.name) + 1) % 3]
            )
        ).read_bytes(),
    )
    file.write_bytes(second)
    twin.write_bytes(first)


def add(file, generator, before, other):
    shutil.copy(file, file.with_name(file.name.replace("0000", "0001")))


MUTATIONS = [
    *((flip, name) for name in NAMES for _ in range(5)),
    *((change, name) for change in (truncate, extend, remove) for name in NAMES),
    *(
        (change, name) for change in (swap_steps, swap_runs) for name in NAMES if name != INDEX
    ),  # which are the same
    *((change, name) for change in (swap_ranks, add) for name in NAMES[:6]),
]


def test_every_mutation_of_a_file_is_refused_and_names_it(written, tmp_path):
    whole, before, other = written
    assert {path.name for path in whole.iterdir()} == {*NAMES} and len(MUTATIONS) >= 60
    run_ranks(3, loading.read_beside, whole)
    for number, (change, name) in enumerate(MUTATIONS):
        path = tmp_path / str(number) / whole.name
        shutil.copytree(whole, path)
        change(path / name, np.random.default_rng(number), before, other)

        def read(transport, path=path, told=(change.__name__, name)):
            with pytest.raises(CheckpointError) as raised:
                loading.read_beside(transport, path)
            return raised.value.agreed, raised.value.law, told

        for agreed, law, told in run_ranks(1 + number % 4, read):
            names = {
                name,
                *({n.replace("0000", "0001") for n in [name]} if change is add else ()),
                *(NAMES[:6] if change is swap_ranks else ()),
            }
            assert agreed and any(one in law for one in names), (told, law)


def test_a_file_whose_blocks_are_right_and_that_goes_on_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "BLOCK", 8)  # a header ends at a multiple of it
    blocks_of(8, monkeypatch)
    path = run_ranks(1, save, tmp_path, LAYOUTS["whole on 1"])[0]
    file = path / "model-00001-of-00001.safetensors"
    assert file.stat().st_size % 8 == 0
    file.write_bytes(file.read_bytes() + bytes(8))
    with pytest.raises(
        CheckpointError, match=rf"{file.name} is damaged: it has \d+ bytes where manifest.json says"
    ):
        run_ranks(1, loading.read_beside, path)
