"""Every command does what it is for, and says so once, on two ranks of one start: a row for each, in one folder."""

from typing import NamedTuple

import click
import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from tests.processes import TINY_STEPS, said_of_one_start, sets, skip_without

RANKS = 2
TINY = [*TINY_STEPS, *sets(model__heads=2, run__steps=2, run__eval_rows=8, run__sample=0)]
REGRESSION = sets(model__kind="mlp", model__loss="mse", data__validation=0.2, batch__size=8)
JOB = [*TINY, *sets(data__source="text:in.txt")]


class Row(NamedTuple):
    """A command line, and what the ranks together must print once.

    more   words after those of `line`
    code   the exit code of rank 0; others have the same one, or 0 where rank 0 works alone
    needs  a package without which the row is skipped
    """

    line: str
    said: str
    more: list[str] = []
    code: int = 0
    needs: str = ""


COLLECTIVES = (
    *("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all"),
    "send-receive",
)
ROWS = [
    Row("--help", "Usage: "),
    Row("--version", "mpitrain, version"),
    Row("no-such-command", "No such command", code=2),
    Row("train --help-config", "layout.dp = "),
    Row("train --out run", "the run is in run; next:", JOB),
    Row("train --out xy --data npy:x.npy,y.npy", "the run is in xy; next:", [*TINY, *REGRESSION]),
    Row("eval run", "validation loss"),
    Row("predict xy --out p.npy", "p.npy: float64 of shape (8,)"),
    Row("generate run --prompt Once --tokens 4", "Once"),
    Row("chat run", "A chat needs the template of conversations", code=2),
    Row("export run --to gpt2 --out gpt2", "run at step 2 in gpt2: config.json"),
    Row("launch -n 3 --spares 1 --dry-run -- train", "--spares 1 needs ranks", code=2),
    Row("slurm --nodes 2 -- train", "#SBATCH --nodes=2"),
    Row("data prepare in.txt --tokenizer bytes --out tokens", "--data tokens:tokens"),
    Row(
        "data train-tokenizer in.txt --vocab 260 --out tokenizer.json",
        "260 tokens",
        needs="tokenizers",
    ),
    Row("data show tokens/train.bin --rows 1", "--- token"),
    *(
        Row(
            f"bench {name} --min-bytes 64 --max-bytes 64 --iterations 2 --warmup 1",
            "wrong elements 0",
        )
        for name in COLLECTIVES
    ),
    Row("bench fit --min-bytes 64 --max-bytes 128 --sweeps 1 --out tuning.json", "us of a message"),
    Row("bench units --most-rows 2 --out units.json", "written to units.json", JOB),
    Row("bench pairs --long 1k --iterations 3", "wrong elements 0"),
    Row("bench bandwidth --max-bytes 64 --iterations 2", "wrong elements 0"),
    Row("bench program --json nowhere/rows.json", "nowhere/rows.json", code=2, needs="torch"),
    Row("bench gemm --shapes 8 --products NT", "8 x 8 x 8"),
    Row("bench kernels", "cross_entropy_loss"),
    Row("bench transactions --dtype int7", "Invalid value for", code=2),
    Row("compare --blocks 1 --steps 2", "sends (n-1) S, the root", [*JOB, "ring", "star"]),
    Row("plan schedule --schedule gpipe --stages 2 --micro-batches 2", "bubble"),
    Row("plan checkpoints --days 30 --ranks 64 --pause 2 --step 0.5", "Daly"),
    Row("plan layout --ranks 2 --rate 1", "mpitrain launch -n 2 -- train", JOB),
    Row("plan memory", "activations of a step", JOB),
    Row("plan batch --most 4 --seconds 1", "critical size:", JOB),
    *(
        Row(f"plan {name} --ranks 3 --bytes 1k", "busiest rank: 0-2")
        for name in ("all-reduce", "reduce-scatter", "all-gather")
    ),
    Row("doctor", "2 rank(s) can train with --device cpu"),
    Row("certify --expect nowhere.toml", "nowhere.toml", code=2),
    Row("runs report run", "run/report/perfetto.json"),
    Row("runs plot run", "1 run(s) drawn in curves.png", needs="matplotlib"),
    Row("runs plot nowhere", "There is no run in nowhere", code=2, needs="matplotlib"),
    Row("runs metrics run", "val_bits_per_byte"),
    Row("runs checkpoints run --verify", "best, newest, verified"),
    Row("runs diff run run", "The configurations are equal."),
    Row("learn explain ring", "bytes of all ranks"),
    Row("learn claims --list", "loss-scaling"),
    Row("learn exercise mean --out mean.py", "mean.py"),
    Row("learn check mean.py", "wrong", code=1),
]


def listed(command, words=()):
    """The words of every command that `--help` lists."""
    if not isinstance(command, click.Group):
        return [" ".join(words)]
    names = command.list_commands(click.Context(command))
    return [
        each for name in names for each in listed(command.get_command(None, name), (*words, name))
    ]


def test_every_command_has_a_row_and_explains_itself():
    for name in listed(commands):
        shown = CliRunner().invoke(commands, [*name.split(), "--help"])
        assert shown.exit_code == 0 and "Usage:" in shown.output, name
    missing = [
        name
        for name in listed(commands)
        if not any(f"{row.line} ".startswith(f"{name} ") for row in ROWS)
    ]
    assert not missing


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    (folder / "in.txt").write_text("Once upon a time.\n" * 400)
    np.save(folder / "x.npy", np.linspace(0, 1, 80, dtype="f4").reshape(40, 2))
    np.save(folder / "y.npy", np.linspace(0, 1, 40, dtype="f4"))
    calls = [[*row.line.split(), *row.more] for row in ROWS]
    return said_of_one_start(RANKS, calls, folder)


@pytest.mark.parametrize("number, row", [*enumerate(ROWS)], ids=[row.line for row in ROWS])
def test_a_command_does_what_it_is_for(number, row, said):
    if row.needs:
        skip_without(row.needs)
    found = said[number]
    text = f"{found.output}{found.errors}"
    assert found.codes[0] == row.code and {*found.codes} <= {0, row.code}, text
    assert text.count(row.said) == 1 and "Traceback" not in text, text
