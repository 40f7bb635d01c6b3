"""Parts of tensors: which elements they are, what two of them share, who writes them."""

import json

import numpy as np
import pytest

from mpitrain.errors import TrainingError
from mpitrain.layers.base import Parameter
from mpitrain.regions import Piece, common
from mpitrain.run.checkpoint.regions import HeldRegion, Region, part_of_text, runs
from mpitrain.run.checkpoint.saving import Joined, shared_out, sources

SHAPE = (4, 5, 6)
WHOLE = np.arange(120.0).reshape(SHAPE)
CUTS = {
    "rows": (((1, 3), (0, 5), (0, 6)),),
    "columns": (((0, 4), (0, 5), (2, 5)),),
    "a block": (((1, 3), (2, 3), (2, 5)),),
    "middle": (((0, 4), (1, 4), (0, 6)),),
    "three of columns": (
        ((0, 4), (0, 5), (0, 1)),
        ((0, 4), (0, 5), (2, 3)),
        ((0, 4), (0, 5), (4, 5)),
    ),
    "three of rows, in part": (
        ((0, 1), (0, 5), (1, 3)),
        ((1, 2), (0, 5), (1, 3)),
        ((3, 4), (0, 5), (1, 3)),
    ),
    "out of order": (((3, 4), (0, 5), (0, 6)), ((0, 2), (0, 5), (0, 6))),
    "joined to the whole": (((0, 4), (0, 2), (0, 6)), ((0, 4), (2, 5), (0, 6))),
}


def part_of(cut):
    """What `Parameter` says of it, flattened."""
    slices = tuple(
        tuple(slice(start, stop) for start, stop in rectangle) for rectangle in CUTS[cut]
    )
    return Parameter("a", SHAPE, None, False, slices).part_of(WHOLE).reshape(-1)


@pytest.mark.parametrize("cut", CUTS)
def test_the_runs_of_a_part_are_its_elements_in_the_order_of_the_tensor(cut):
    local = part_of(cut)
    a, b = len(local) // 3, 2 * len(local) // 3
    for pieces in (
        [Piece(0, len(local), 0)],
        [Piece(0, a, 2), Piece(b, len(local), a + 5)],
        [Piece(a, b, 0)],
    ):
        array, taken = np.full(len(local) + 9, np.nan), np.full(120, np.nan)
        for piece in pieces:
            array[piece.offset : piece.offset + piece.stop - piece.start] = local[
                piece.start : piece.stop
            ]
        found = runs(Region("a", SHAPE, CUTS[cut], tuple(pieces)))
        assert all(
            one + length <= other
            for (one, length), other in zip(
                zip(found.start, found.length, strict=True), found.start[1:], strict=False
            )
        )
        for start, place, length in zip(*found, strict=True):
            taken[start : start + length] = array[place : place + length]
        wanted = np.concatenate([local[piece.start : piece.stop] for piece in pieces]).astype(int)
        assert np.array_equal(np.flatnonzero(~np.isnan(taken)), np.sort(wanted))
        assert np.array_equal(taken[wanted], wanted)


@pytest.mark.parametrize("one", CUTS)
@pytest.mark.parametrize("other", CUTS)
def test_what_two_parts_share_lies_where_each_has_it(one, other):
    first, second = part_of(one), part_of(other)
    shared = common(
        *(
            runs(Region("a", SHAPE, CUTS[cut], (Piece(0, len(part), 0),)))
            for cut, part in ((one, first), (other, second))
        )
    )
    found = []
    for a, b, length in zip(*shared, strict=True):
        assert length > 0 and np.array_equal(first[a : a + length], second[b : b + length])
        found += first[a : a + length].tolist()
    assert sorted(found) == sorted({*first} & {*second})


def test_a_part_comes_back_from_text():
    for name, rectangles in CUTS.items():
        part = Region(name, SHAPE, rectangles, (Piece(1, 2, 3), Piece(4, 9, 5)))
        assert part_of_text(json.loads(json.dumps(part))) == part
    assert part_of_text(json.loads('["", [3], null, [[0, 3, 0]]]')) == Region(
        "", (3,), None, (Piece(0, 3, 0),)
    )


@pytest.mark.parametrize("ranks", (1, 2, 3, 5))
def test_ranks_that_hold_the_same_write_about_the_same_bytes(ranks):
    sizes = {f"tensor{number}": 1000 + 37 * number for number in range(40)}
    holdings = [
        HeldRegion(
            number,
            name,
            "agreed",
            np.dtype("f4"),
            Region(tensor, (size,), None, (Piece(0, size, 0),)),
        )
        for number, name in enumerate(("parameters", "momentum"))
        for tensor, size in sizes.items()
    ]
    shares = shared_out([holdings] * ranks)
    nbytes = [sum(4 * held.part.length for held in pieces) for pieces in shares.pieces]
    for joined in shares.tensors.values():
        nbytes[joined.writer] += joined.nbytes
    assert sum(nbytes) == 8 * sum(sizes.values()), "every element once"
    assert max(nbytes) - min(nbytes) <= 4 * max(sizes.values())


def test_a_tensor_is_joined_from_its_writer_first_and_nothing_comes_twice():
    ranges = {0: (0, 5), 1: (0, 5), 2: (3, 10), 3: (0, 10)}
    holders = [
        (
            rank,
            HeldRegion(
                rank,
                "parameters",
                "agreed",
                np.dtype("f4"),
                Region("a", (10,), None, (Piece(start, stop, 0),)),
            ),
        )
        for rank, (start, stop) in ranges.items()
    ]
    for writer, wanted in ((0, {0: 5, 2: 5}), (1, {1: 5, 2: 5}), (2, {2: 7, 3: 3}), (3, {3: 10})):
        found = sources("a", Joined(writer, np.dtype("f4"), (10,), holders))
        assert {source.rank: int(source.runs.length.sum()) for source in found} == wanted
        assert found[0].rank == writer
    with pytest.raises(TrainingError, match="5 of 10 are on none"):
        sources("a", Joined(0, np.dtype("f4"), (10,), holders[:2]))
