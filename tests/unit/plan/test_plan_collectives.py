"""`mpitrain plan all-reduce`, `reduce-scatter` and `all-gather`: steps, contents, totals, files."""

import json
import struct
from fractions import Fraction

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.collectives.selection.table import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mpitrain.errors import ConfigError
from mpitrain.tools.plan.collective import (
    collective,
    complete,
    contents,
    data_of,
    meeting,
    plans_of,
    rounds,
)
from mpitrain.tools.plan.traffic import FORMULAS, amounts, numbers, totals
from tests.unit.plan.shown import shown

PRINTABLE = [name for name, algorithm in ALL_REDUCE.items() if algorithm.plans]
HALVES = [
    (operation, name)
    for operation, table in (("reduce-scatter", REDUCE_SCATTER), ("all-gather", ALL_GATHER))
    for name, algorithm in table.items()
    if algorithm.plans
]
RANKS = [1, 2, 3, 5, 8, 13]


def blocks(ranks, hosts):
    return [f"host {rank * hosts // ranks}" for rank in range(ranks)]


def test_an_all_reduce_is_printed_with_its_contents_and_totals():
    assert (
        shown("allreduce", "--ranks", 3, "--bytes", 12).partition("\nof a float32")[0]
        == """\
ring all-reduce on 3 ranks: the array is cut into 3 chunks, 4 steps

0>1 +2    rank 0 sends chunk 2 to rank 1, which adds it to its own
0>1 =0    rank 0 sends chunk 0 to rank 1, which puts it in the place of its own
contents  a row per rank, a column per chunk: 0 is what rank 0 had, 0+1 the sum of what ranks 0 and
          1 had, all the sum over all ranks

start
         chunk    0  1  2
         rank 0   0  0  0
         rank 1   1  1  1
         rank 2   2  2  2
step 1   0>1 +2   1>2 +0   2>0 +1
         rank 0   0    0+2  0
         rank 1   1    1    0+1
         rank 2   1+2  2    2
step 2   0>1 +1   1>2 +2   2>0 +0
         rank 0   all  0+2  0
         rank 1   1    all  0+1
         rank 2   1+2  2    all
-- the halves meet: reduce-scatter done, all-gather begins --
step 3   0>1 =0   1>2 =1   2>0 =2
         rank 0   all  0+2  all
         rank 1   all  all  0+1
         rank 2   1+2  all  all
step 4   0>1 =2   1>2 =0   2>0 =1
         ranks 0-2   all  all  all

of an array of S bytes     counted    formula                               is
steps                            4    2 (n - 1)                              4
messages                        12    2 n (n - 1)                           12
sent by all ranks              4 S    2 (n - 1) S                          4 S
sent by the busiest one    1.333 S    2 (n - 1)/n S                    1.333 S
busiest rank: 0-2
where n = 3 ranks

of an array of 12 bytes, float32:
each of ranks 0-2: 16 bytes in 4 messages
all together: 48 bytes
"""
    )


def test_messages_of_several_chunks_and_folded_ranks_are_named():
    lines = shown("allreduce", "--algorithm", "halving-doubling", "--ranks", 5).splitlines()
    assert "2-3       chunks 2 to 3 in one message" in lines
    assert [line for line in lines if line.startswith("step ") and line[5].isdigit()] == [
        "step 1   0>1 +all   2>4 +2-3   4>2 +0-1",
        "step 2   1>3 +2-3   3>1 +0-1",
        "step 3   1>2 +1   2>1 +0   3>4 +3   4>3 +2",
        "step 4   1>2 =0   2>1 =1   3>4 =2   4>3 =3",
        "step 5   1>3 =0-1   2>4 =0-1   3>1 =2-3   4>2 =2-3",
        "step 6   1>0 =all",
    ]
    assert any(
        line.startswith("sent by the busiest one      2.5 S    2 (n' - 1)/n' S, + S if r > 0 ")
        for line in lines
    )


@pytest.mark.product
@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", PRINTABLE)
def test_the_printed_steps_reduce_everything_to_every_rank(algorithm, ranks, hosts):
    count, names = 4 * ranks, blocks(ranks, hosts)
    held = [
        [{rank} for _ in range(count)] for rank in range(ranks)
    ]  # whose numbers are in each element
    for moves in rounds(plans_of("allreduce", algorithm, names, count)):
        before = [list(mine) for mine in held]
        for source, target, start, stop, combine in moves:
            for i in range(start, stop):
                assert not (combine and held[target][i] & before[source][i]), (
                    "nothing is added twice"
                )
                held[target][i] = before[source][i] | (held[target][i] if combine else set())
    assert held == [[set(range(ranks))] * count] * ranks
    found = collective("allreduce", algorithm, names)
    *_, last = contents(found)
    assert last == [complete(found)] * ranks


@pytest.mark.product
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("operation, algorithm", HALVES)
def test_reduce_scatter_and_all_gather_print_their_chunks(operation, algorithm, ranks):
    found = collective(operation, algorithm, blocks(ranks, 1))
    *_, last = contents(found)
    whole = complete(found)
    assert len(whole) == ranks
    for rank, mine in enumerate(last):
        assert mine == whole if operation == "all-gather" else mine[rank] == whole[rank]


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("ranks", [*RANKS, 64])
@pytest.mark.slow
def test_counted_totals_are_those_of_the_formula(ranks, hosts):
    names = blocks(ranks, min(hosts, ranks))
    for operation, algorithm in [*(("allreduce", name) for name in PRINTABLE), *HALVES]:
        found = collective(operation, algorithm, names)
        chunk = (
            Fraction(max(stop - start for start, stop in found.bounds), found.elements)
            if len(set(names)) > 1
            else 0
        )
        steps, messages, everyone, busiest = totals(found)
        expected = FORMULAS[operation, algorithm].value(numbers(names))
        assert (steps, messages, everyone) == expected[:3], (operation, algorithm)
        assert abs(busiest - expected[3]) <= (chunk if algorithm == "hierarchical" else 0), (
            operation,
            algorithm,
        )


@pytest.mark.parametrize(
    "algorithm, ranks, expected",
    [
        ("ring", 5, (4, "reduce-scatter", "all-gather")),
        ("halving-doubling", 5, (3, "reduce-scatter", "all-gather")),
        ("tree", 5, (3, "reduce to rank 0", "broadcast from rank 0")),
        ("star", 5, (1, "reduce to rank 0", "broadcast from rank 0")),
        ("recursive-doubling", 8, None),
        ("recursive-doubling", 5, (3, "sum on the active ranks", "copy to the others")),
        ("ring", 1, None),
    ],
)
def test_the_halves_meet_after_the_last_step_that_adds(algorithm, ranks, expected):
    assert meeting(collective("allreduce", algorithm, blocks(ranks, 1))) == expected


@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.parametrize("ranks", [1, 2, 8, 13, 64])
@pytest.mark.slow
def test_what_is_printed_fits_a_terminal_and_a_few_pages(ranks, columns):
    for operation, algorithm in [*(("allreduce", name) for name in PRINTABLE), *HALVES]:
        lines = shown(
            operation,
            "--ranks",
            ranks,
            "--algorithm",
            algorithm,
            "--hosts",
            min(3, ranks),
            columns=columns,
        ).splitlines()
        assert max(map(len, lines)) <= columns and len(lines) < 240, (operation, algorithm)


def test_many_ranks_are_summed_up_with_the_steps_where_the_halves_meet():
    lines = shown("allreduce", "--ranks", 64).splitlines()
    meet = lines.index("-- the halves meet: reduce-scatter done, all-gather begins --")
    assert lines[meet - 1].startswith("step 63        64     1 .. 1   0>1 +1   1>2 +2   ")
    assert lines[meet + 1].startswith("step 64        64     2 .. 2   0>1 =0   ") and lines[
        meet + 1
    ].endswith("   ...")
    assert lines.count("...      57 steps like these") == 2
    many = shown("reduce-scatter", "--ranks", 600, "--hosts", 600, "--bytes", "4KiB").splitlines()
    assert "steps: n - 1 = 599" in many and "messages: n (n - 1) = 359400" in many
    fastest, time = many[-3].split()
    assert fastest == "bruck" and float(time) < 60e-3 * float(many[-2].split()[1])


def test_the_json_has_every_message_and_what_it_changes(tmp_path):
    assert "written to" in shown(
        "allreduce", "--ranks", 3, "--algorithm", "star", "--json", tmp_path / "star.json"
    )
    found = json.loads((tmp_path / "star.json").read_text())
    assert found["header"]["halves_meet"] == {
        "step": 1,
        "first": "reduce to rank 0",
        "second": "broadcast from rank 0",
    }
    assert found["header"]["totals"]["busiest"] == {"counted": 2.0, "formula": "(n - 1) S"}
    assert [step["contents"] for step in found["steps"]] == [
        {"0": {"0": "0-2"}},
        {"1": {"0": "0-2"}, "2": {"0": "0-2"}},
    ]
    assert found["steps"][0]["messages"] == [
        {"source": rank, "target": 0, "chunks": [0, 1], "adds": True} for rank in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("allreduce", "--ranks", 1), 1),
        (("allreduce", "--ranks", 6, "--hosts", 2, "--algorithm", "hierarchical"), 1),
        (("allreduce", "--ranks", 8, "--algorithm", "ring"), 3),
        (("allreduce", "--ranks", 64), 1),
        (("all-gather", "--ranks", 3), 1),
    ],
)
def test_a_collective_is_drawn_for_a_wall(words, count, tmp_path):
    pytest.importorskip("matplotlib")
    assert "drawn in" in shown(*words, "--plot", tmp_path / "steps.png")
    drawn = [file.read_bytes()[16:24] for file in tmp_path.glob("steps*.png")]
    assert drawn == [struct.pack(">2I", 1280, 720)] * count


def test_ranks_are_listed_in_runs():
    assert [data_of(data) for data in (0, 0b1, 0b11, 0b111, 0b1011, 0b101110)] == [
        "-",
        "0",
        "0+1",
        "0-2",
        "0+1+3",
        "1-3+5",
    ]


def test_all_ranks_together_send_twice_the_array_for_each_rank_but_one():
    for nbytes in (0, 4, 4000, 1 << 22):
        for algorithm in ("ring", "halving-doubling", "tree", "star"):
            assert (
                amounts("allreduce", algorithm, ["here"] * 6, nbytes)[-1]
                == f"all together: {2 * 5 * nbytes} bytes"
            )


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["--algorithm", "shared"],
            "Algorithm shared is no plan of messages that could be printed.\n",
        ),
        (
            ["--algorithm", "rnig"],
            "allreduce algorithm must be one of ring, halving-doubling, recursive-doubling, tree, star, hierarchical, "
            "but it is 'rnig'.",
        ),
        (["--ranks", "257", "--hosts", "1"], "Take at least --hosts 5."),
        (["--ranks", "257", "--hosts", "9", "--json", "a"], "257 are too many"),
        (["--ranks", "257", "--hosts", "9", "--algorithm", "rnig"], "must be one of ring, "),
        (["--hosts", "5"], "Every host has a rank, but there are 4 ranks on 5 hosts.\n"),
        (["--json", "/dev/null/steps.json"], "cannot be written"),
    ],
)
def test_what_is_no_plan_or_cannot_be_written_is_refused(words, said):
    done = CliRunner().invoke(commands, ["plan", "allreduce", *words])
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)
