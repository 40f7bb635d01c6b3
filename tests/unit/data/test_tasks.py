"""Files of multiple-choice tasks: the valid forms of a line, and lines that are refused."""

import json

import pytest

from mpitrain.data.tasks import Task, read_tasks
from mpitrain.errors import DataError

GOOD = {"context": "a", "choices": ["b", "c"], "answer": 1}


def test_tasks_are_read_with_their_lines_and_other_keys_are_ignored(tmp_path):
    lines = ["", json.dumps({**GOOD, "id": 3}), "  ", json.dumps({**GOOD, "context": "é"}), ""]
    (tmp_path / "t").write_text("\n".join(lines))
    assert read_tasks(tmp_path / "t") == [Task(2, "a", ["b", "c"], 1), Task(4, "é", ["b", "c"], 1)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"context": "a"}',
        json.dumps({**GOOD, "choices": []}),
        json.dumps({**GOOD, "choices": "bc"}),
        json.dumps({**GOOD, "choices": ["b", ""]}),
        json.dumps({**GOOD, "choices": ["b", 1]}),
        json.dumps({**GOOD, "context": None}),
        json.dumps({**GOOD, "answer": 2}),
        json.dumps({**GOOD, "answer": -1}),
        json.dumps({**GOOD, "answer": True}),
        json.dumps({**GOOD, "answer": "b"}),
        json.dumps({**GOOD, "answer": 1.0}),
        '{"context": "a", "context": "b", "choices": ["b"], "answer": 0}',
        '{"context": "\\ud800", "choices": ["b"], "answer": 0}',
        "\xff",
    ],
)
def test_a_malformed_line_is_one_error_with_its_number(line, tmp_path):
    (tmp_path / "t").write_bytes(f"{json.dumps(GOOD)}\n\n{line}\n".encode("latin-1"))
    with pytest.raises(DataError, match="Line 3 of") as error:
        read_tasks(tmp_path / "t")
    assert "\n" not in error.value.law


def test_a_file_without_tasks_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "t").write_text("\n \n")
    for name in ("t", "none"):
        with pytest.raises(DataError, match=name):
            read_tasks(tmp_path / name)
