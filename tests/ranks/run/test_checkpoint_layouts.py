"""A checkpoint of any layout, on any number of ranks, is loaded by every other; and what of it a rank holds meanwhile."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain.errors import TrainingError
from mpitrain.formats import safetensors_files
from mpitrain.formats.safetensors_files import INDEX
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import HostBackend
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.regions import Piece
from mpitrain.run.checkpoint import loading, saving
from mpitrain.run.checkpoint.manifest import Done, Manifest
from mpitrain.transport.threads import run_ranks
from tests.cases.layouts import LAYOUTS, Described, Layout, kept, load, logical, save
from tests.saving import blocks_of, publish


def owed(held):
    """The sum over ranks of what each owes, by tensor."""
    total = {}
    for storage, found in held:
        flat = np.zeros(storage.length)
        for one in found:
            if one.name == "residual":
                flat[one.pieces[0].start : one.pieces[0].stop] = one.array
        for entry in storage.entries:
            total[entry.name] = total.get(entry.name, 0) + entry.view(flat)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("written", LAYOUTS)
def test_what_one_layout_wrote_every_other_loads(written, tmp_path, capfd):
    path = run_ranks(LAYOUTS[written].ranks, save, tmp_path, LAYOUTS[written])[0]
    owing = [name for name, layout in LAYOUTS.items() if layout.tp == layout.pp == 1]
    total = (
        owed(kept(LAYOUTS[written], rank) for rank in range(LAYOUTS[written].ranks))
        if written in owing
        else {}
    )
    for name, layout in LAYOUTS.items():
        results = run_ranks(layout.ranks, load, path, layout)
        for rank, (_, found, wanted) in enumerate(results):
            for one, other in zip(found, wanted, strict=True):
                if one.kind == "agreed" or name == written:
                    assert one.array.tobytes() == other.array.tobytes(), (name, rank, one.name)
                if one.kind == "bound" and name != written:
                    assert not one.array.any(), (name, rank, one.name)
        if total and name in owing:
            for tensor, found in owed((storage, found) for storage, found, _ in results).items():
                assert np.abs(found - total[tensor]).max() <= 1e-6 * np.abs(total[tensor]).max(), (
                    name,
                    tensor,
                )
    assert capfd.readouterr().err.count("note: factors in ") == len(LAYOUTS) - 1, (
        "a line for each that is another layout"
    )


@pytest.mark.parametrize("name", ["state in 2 shards", "2 stages in 2 shards"])
def test_one_written_when_tensors_began_elsewhere_in_their_buffers_loads(
    name, tmp_path, monkeypatch
):
    layout = LAYOUTS[name]
    with monkeypatch.context() as older:
        older.setattr("mpitrain.layers.flat.GRAIN", 1)
        path = run_ranks(layout.ranks, save, tmp_path, layout)[0]
        offsets = [entry.start for entry in kept(layout, 0)[0].entries]
    for storage, found, wanted in run_ranks(layout.ranks, load, path, layout):
        assert [entry.start for entry in storage.entries][1:] != offsets[1:]
        for one, other in zip(found, wanted, strict=True):
            assert one.kind != "agreed" or one.array.tobytes() == other.array.tobytes(), one.name


@pytest.mark.parametrize("written", LAYOUTS)
def test_every_element_is_written_once_and_whole_tensors_are_whole(written, tmp_path):
    """A thread writes the same bytes, although the state changes meanwhile."""
    layout = LAYOUTS[written]
    path = run_ranks(layout.ranks, save, tmp_path, layout)[0]
    room = saving.HostRoom(1 << 30, 0, 0)
    other = run_ranks(layout.ranks, save, tmp_path / "copied", layout, 1, "run", room)[0]
    assert files(path) == files(other)
    index = json.loads((path / INDEX).read_text())
    shapes = {
        e.name: e.parameter.shape
        for rank in range(layout.ranks)
        for e in kept(layout, rank)[0].entries
    }
    assert index["weight_map"].keys() == shapes.keys()
    for name, shape in shapes.items():
        tensor = load_file(path / index["weight_map"][name])[name]
        assert (
            tensor.shape == shape
            and tensor.tobytes() == logical("parameters", name, shape).tobytes()
        ), name
    states = [
        tensor
        for file in path.glob("state*")
        for key, tensor in load_file(file).items()
        if "moment" in key
    ]
    elements = sum(int(np.prod(shape)) for shape in shapes.values())
    assert sum(tensor.size for tensor in states) == 2 * elements
    assert (
        index["metadata"]["total_size"]
        == 4 * elements
        == sum(
            tensor.nbytes for file in path.glob("model-*") for tensor in load_file(file).values()
        )
    )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_ranks_copy_or_none_and_the_first_host_without_room_is_named():
    layout = LAYOUTS["whole on 4"]

    def short(transport, free, limit):
        storage, found = kept(layout, transport.rank)
        room = saving.HostRoom(free[transport.rank], limit, 100)
        return saving.share_out(found, storage, transport, room)

    for free, limit, left in (
        ((10**6,) * 4, 0, None),
        ((10**6, 10**6, 500, 10**6), 0, ("b", 500)),
        ((10**6,) * 4, 10**6, None),
        ((10**6,) * 4, 900, ("a", 700)),
        ((0,) * 4, 1, ("a", -199)),
    ):
        found = run_ranks(4, short, free, limit, hosts="aabb")
        assert len({short for _, short in found}) == 1
        shares, short_of = found[0]
        assert (short_of and (short_of.host, short_of.room)) == left
        if short_of:
            ranks = [rank for rank, host in enumerate("aabb") if host == short_of.host]
            assert short_of.needed == sum(shares.nbytes[rank] for rank in ranks)
            assert short_of.ranks == len(ranks)


def test_state_that_is_not_needed_may_be_missing_and_numbers_come_back(tmp_path):
    layout = Layout(dp=2)
    path = run_ranks(2, save, tmp_path, layout)[0]

    def run(transport):
        storage, found = kept(layout, transport.rank)
        expected = StateBuffer(
            "prediction",
            np.ones(storage.length, "f4"),
            (Piece(0, storage.length, 0),),
            needed=False,
        )
        loaded = loading.load(
            loading.read_beside(transport, path),
            [*found, expected],
            storage,
            transport,
            HostBackend(),
            layout.facts,
        )
        return loaded.manifest.scalars, loaded.done, expected.array.all()

    assert run_ranks(2, run) == [({"scale": 0.5}, Done(1, 12, "run"), True)] * 2


@pytest.mark.parametrize("failing", (0, 1, 2))
def test_a_full_disk_on_one_rank_fails_the_save_on_all_ranks(failing, tmp_path, monkeypatch):
    layout = LAYOUTS["rectangles on 3"]
    before = run_ranks(3, save, tmp_path, layout)[0]
    real = saving.join

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            self.write(b"what was buffered")

    def join(tasks, held, file, transport, backend, moved):
        if transport.rank == failing:
            file._file = Full()
        real(tasks, held, file, transport, backend, moved)

    monkeypatch.setattr(saving, "join", join)

    def run(transport):
        with pytest.raises(TrainingError, match=f"On rank {failing}.*No space left.*") as raised:
            save(transport, tmp_path, layout, step=2)
        return raised.value.agreed

    assert run_ranks(3, run) == [True] * 3
    monkeypatch.undo()
    assert run_ranks(3, load, before, layout)
    assert run_ranks(3, save, tmp_path, layout, 2)[0].exists()


def large(rank, ranks, tensors, rows, columns):
    """Storage and what is kept by a rank that holds some columns of each tensor."""
    mine = ((slice(0, rows), slice(columns * rank // ranks, columns * (rank + 1) // ranks)),)
    storage = Storage(
        [Unit(f"unit{n}", Described(weight=((rows, columns), mine))) for n in range(tensors)], "f4"
    )
    return storage, [
        StateBuffer(
            name, np.arange(rank, rank + storage.length, dtype="f4"), (Piece(0, storage.length, 0),)
        )
        for name in ("parameters", "momentum")
    ]


@pytest.mark.slow
def test_loading_takes_memory_for_one_tensor_and_reads_only_its_rows(tmp_path, monkeypatch):
    tensors, rows, columns, ranks, moved, block = 16, 64, 4096, 3, 1 << 16, 1 << 18
    for module in (safetensors_files, loading, saving):
        monkeypatch.setattr(module, "MOVED", moved)
    for module in (safetensors_files, saving):
        monkeypatch.setattr(module, "BLOCK", block)
    blocks_of(block, monkeypatch)
    held = [large(rank, ranks, tensors, rows, columns) for rank in range(ranks)]
    wanted = [[one.array.copy() for one in found] for _, found in held]
    nbytes, taken, peaks, preadv = rows * columns * 4, [], [], os.preadv

    def counted(descriptor, *rest):
        length = preadv(descriptor, *rest)
        # A thread of an earlier test may still read ahead, in a file of its own.
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(tmp_path):
            taken.append(length)
        return length

    monkeypatch.setattr(os, "preadv", counted)

    def write(transport):
        storage, found = held[transport.rank]
        manifest = Manifest(Done(1, 1, "run"), {"dp": 1}, {})
        publish(tmp_path, found, storage, transport, HostBackend(), manifest, 1)

    def read(transport):
        storage, found = held[transport.rank]
        saved = loading.read_beside(transport, tmp_path / "step-00000001")
        loading.load(saved, found, storage, transport, HostBackend(), {"dp": 1})

    for work in (write, read):
        tracemalloc.start()
        run_ranks(ranks, work)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        if work is write:
            for _, found in held:
                for one in found:
                    one.array.fill(0)
    constant = ranks * (
        block + 8 * moved
    )  # what is hashed, and what is on its way; of all ranks, as all that is measured
    assert peaks[0] <= constant < tensors * nbytes / 4
    assert peaks[1] <= nbytes + constant
    assert sum(taken) == 2 * tensors * nbytes
    for (storage, found), arrays in zip(held, wanted, strict=True):
        for one, array in zip(found, arrays, strict=True):
            for entry in storage.entries:
                assert np.array_equal(entry.view(one.array), entry.view(array))
