"""Packing: several short sequences in one row, by first-fit decreasing (Johnson 1973)."""

from collections.abc import Sequence


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the numbers of the sequences in each row; the result depends on the arguments alone.

    The longest sequence comes first, and each goes to the first row that has room for it. This
    takes at most 11/9 of the fewest rows, plus 1.

    lengths   in tokens; a longer one than `capacity` counts as `capacity`
    capacity  tokens of a row
    """
    rows: list[list[int]] = [[] for _ in lengths]
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    # A binary tree of maxima: node k has the children 2 k and 2 k + 1. Leaf r is the number of
    # tokens that row r still has space for.
    room = [capacity] * (2 * leaves)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length, node = min(lengths[number], capacity), 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        rows[node - leaves].append(number)
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]
