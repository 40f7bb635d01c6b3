"""The sizes and digests of data files, by which ranks compare them."""

import pytest

from mpitrain.config import Data
from mpitrain.data import file_digests
from mpitrain.data.token_files import BLOCK, BLOCKS

WHOLE = BLOCK * BLOCKS


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("text:{}/a", ["a"]),
        ("jsonl:{}/a", ["a"]),
        ("tokens:{}/part-*", ["part-1", "part-2"]),
        ("idx:{}", [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte.gz", "labels-idx1-ubyte")]),
        ("pydocs", []),
        ("tenth", []),
        ("text:{}/missing", []),
    ],
)  # fmt: skip
def test_every_file_of_a_source_is_compared(name, files, tmp_path):
    for number, file in enumerate([*files, "other"]):
        (tmp_path / file).write_bytes(bytes([number]) * 100)
    sources = Data(source=name.format(tmp_path))
    first = file_digests(sources)
    assert {*first} == {str(tmp_path / file) for file in files}
    for file in files:
        flipped(tmp_path / file, 50)
        changed = file_digests(sources)
        assert [one for one in first if changed[one] != first[one]] == [str(tmp_path / file)]
        first = changed


@pytest.mark.parametrize(
    ("size", "seen"),
    [
        (1, [0]),
        (WHOLE, [0, 5000, WHOLE - 1]),
        (WHOLE + 1, [0, BLOCK - 1, WHOLE - BLOCK + 1, WHOLE]),
        (5 * WHOLE + 17, [0, BLOCK - 1, 5 * WHOLE + 17 - BLOCK, 5 * WHOLE + 16]),
    ],
)
def test_a_byte_of_a_small_file_and_of_the_ends_of_a_large_one_changes_its_digest(
    size, seen, tmp_path
):
    path, section = tmp_path / "data", Data(source=f"text:{tmp_path}/data")
    path.write_bytes(bytes(size))
    digests = {file_digests(section)[str(path)]}
    for at in seen:
        flipped(path, at)
        digests |= {file_digests(section)[str(path)]}
    path.write_bytes(bytes(size + 1))
    digests |= {file_digests(section)[str(path)]}
    assert len(digests) == len(seen) + 2
    if size == 5 * WHOLE + 17:  # A byte between two blocks is not seen, as the page says.
        before = file_digests(section)
        flipped(path, BLOCK)
        assert file_digests(section) == before
