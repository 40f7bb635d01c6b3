"""`mpitrain compare` as a user runs it: modes one after the other in one start, whose bytes and losses are known."""

import json

import pytest

from tests.processes import TINY_STEPS, calls_of_one_start, launch, sets

TINY = ["--steps", "3", *TINY_STEPS, *sets(run__eval_rows=6, precision__compute="float64")]


def test_compared_modes_send_their_formulas_bytes_and_reach_one_loss(tmp_path):
    pytest.importorskip("matplotlib")
    done = launch(
        3,
        "compare",
        *TINY,
        *("star", "ring", "zero1", "zero3"),
        "--blocks",
        2,
        "--json",
        tmp_path / "rows.json",
        "--plot",
        tmp_path / "rows.png",
    )
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr, "no bar where there is no terminal"
    written = json.loads((tmp_path / "rows.json").read_text())
    star, ring, zero, _ = rows = written["rows"]
    assert [row["side"] for row in rows] == ["star", "ring", "zero1", "zero3"] and written[
        "header"
    ]["ranks"] == 3
    held = {
        row["side"]: [sum(m.values()) - m["activations"] for m in row["memory"]] for row in rows
    }
    nbytes = held["star"][1] // 4  # parameters, gradients, two moments
    assert held["star"] == [6 * nbytes + 80, 4 * nbytes, 4 * nbytes], (
        "the root receives from two ranks at once"
    )
    for row, divided in (
        (ring, 4 * nbytes),
        (zero, 2 * nbytes + 2 * nbytes // 3),
    ):  # and a chunk that arrives
        assert [own - divided - nbytes // 3 for own in held[row["side"]]] == [16, 16, 16], (
            "of the control message as well"
        )
    assert star["sent_bytes"] == [2 * (nbytes + 40), nbytes + 40, nbytes + 40]
    for row in (
        ring,
        zero,
    ):  # of the control message's 5 numbers two ranks do not send 3 of 10, one 4
        assert sorted(row["sent_bytes"]) == [
            4 * nbytes // 3 + 48,
            4 * nbytes // 3 + 56,
            4 * nbytes // 3 + 56,
        ]
    for row in rows:
        assert (
            max(row["sent_bytes"]) == row["formula_bytes"]
            and row["workers"] == 3
            and row["staleness"] == 0
        )
        assert len(row["losses"]) == 3 and abs(row["val_loss"] - star["val_loss"]) <= 1e-9
        assert row is star or row["apart"] <= 1e-9
        assert sum(line.startswith(f"{row['side']} ") for line in done.stdout.splitlines()) == 3
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_one_message_and_no_table(tmp_path):
    calls = [
        ["compare", "ring", "rong"],
        ["compare", "--modes", "ring,zero3+pp2:1f1b"],
        ["compare", *sets(batch__size=1)],
        ["compare", "--json", str(tmp_path / "missing/rows.json")],
    ]
    said, shown = calls_of_one_start(2, calls, tmp_path, code=2)
    for words, text in zip(
        ("but this is 'rong'", "zero3+pp2:1f1b: ", "but batch.size is 1", "cannot be written"),
        said,
        strict=True,
    ):
        assert text.count(words) == 1, text
    assert not any("val loss" in printed for printed in shown)


def test_tricks_are_tried_on_a_job_and_their_lines_can_be_set_also_by_the_old_word(tmp_path):
    names = "recomputation,ZeRO 1,sequence parallelism"
    words = [
        [*call, "--tricks", names, "--steps", "1", "--json", f"{number}.json", *TINY_STEPS]
        for number, call in enumerate([["compare"], ["plan", "tricks"]])
    ]
    said, shown = calls_of_one_start(2, words, tmp_path, code=0)
    for number, printed in enumerate(shown):
        rows = json.loads((tmp_path / f"{number}.json").read_text())["rows"]
        having = [row for row in rows if row["side"] != "without"]
        assert [row["side"] for row in having] == names.split(",")
        assert [row["settings"] for row in having[:2]] == [
            ["memory.recompute=unit"],
            ["replication.zero=1"],
        ]
        assert all(len(row["ratios"]) == 5 and row["space"] < 1 for row in having[:2])
        assert having[2]["reason"] and "in 4 of 4 jobs" in printed
    assert "\r" not in said[0], "no bar where there is no terminal"
