"""Intervals against sets of elements."""

from itertools import product

import pytest

from mpitrain.regions import Piece, cut, moved, overlap, within, without

ENDS = [(start, stop) for start, stop in product(range(6), repeat=2) if start <= stop]


@pytest.mark.parametrize("one", ENDS)
def test_an_overlap_has_the_elements_of_both(one):
    for other in ENDS:
        both = overlap(range(*one), range(*other))
        assert {*both} == {*range(*one)} & {*range(*other)}
        assert bool(both) == (len({*both}) > 0)


def test_a_moved_interval_names_the_same_elements_of_a_buffer():
    elements = [*range(100, 120)]
    assert elements[moved(range(103, 107), -100)] == [103, 104, 105, 106]
    assert elements[moved(Piece(3, 5, 0), 4)] == [107, 108]


def test_pieces_minus_intervals_are_the_elements_in_neither():
    pieces = [Piece(0, 10, 100), Piece(12, 25, 300)]
    for one, other in product(ENDS, repeat=2):
        others = [range(3 * one[0], 3 * one[1]), range(4 * other[0], 4 * other[1])]
        left = without(pieces, others)
        elements = {i for piece in left for i in range(piece.start, piece.stop)}
        assert elements == {*range(10), *range(12, 25)} - {*others[0]} - {*others[1]}
        assert all(piece.offset - piece.start in (100, 288) for piece in left)


def test_pieces_are_cut_and_taken_from_each_other():
    pieces = [Piece(0, 10, 100), Piece(20, 25, 3)]
    assert list(within(pieces, 8, 22)) == [Piece(8, 10, 108), Piece(20, 22, 3)]
    left = [Piece(0, 2, 100), Piece(4, 9, 104), Piece(21, 25, 4)]
    assert without(pieces, [Piece(2, 4, 0), Piece(9, 21, 0), Piece(30, 40, 0)]) == left
    assert list(cut(pieces, 4)) == [
        Piece(0, 4, 100),
        Piece(4, 8, 104),
        Piece(8, 10, 108),
        Piece(20, 24, 3),
        Piece(24, 25, 7),
    ]
