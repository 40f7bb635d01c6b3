"""The start of `mpitrain train`: how often ranks parse and agree before the first step, and what they refuse."""

import re
import sys
from ast import literal_eval

import pytest

from mpitrain.collectives.selection.tuning import DEFAULT, write_tuning
from mpitrain.machine import process
from mpitrain.trace.recorder import STEP, WAIT
from mpitrain.trace.timeline import read_trace
from tests.mpi.test_commands import TINY
from tests.processes import python_ranks, run, sets

WORDS = "words of all ranks"
"""The name of a gather of JSON in a trace."""
EVERYONE = (0, 1, 2, 3)
CONFIGURATION, RUN = [EVERYONE] * 2
"""Agreements of all ranks before the first step of a new run:

CONFIGURATION  with devices, tuning, schedule, location of the run, and facts of data and model: a file may be
               missing or differ on a rank
RUN            the run directory, which rank 0 has made or not, and the earlier part of the run
"""
LAYOUTS = {
    "dp 4": ["--dp", "4"],
    "dp 2 x tp 2": ["--dp", "2", "--tp", "2"],
    "ring": ["--dp", "4", *sets(replication__algorithm="ring")],
}
REFUSED = [
    (["job.toml"], "On rank 1 (", "The configuration file job.toml cannot be read"),
    (["--set", "data.source=text:book"], "On rank 1 (", "The data file book cannot be read"),
    (["other.toml"], "All ranks need one configuration, but run.seed is 1 on rank 0 (", ""),
    *(
        (
            ["--set", f"data.source={source}", "--set", f"data.validation={validation}"],
            "All ranks need one data source and checkpoint, but b.txt is ",
            " on rank 1 (",
        )
        for source, validation in (("text:b.txt", "tenth"), ("text:a.txt", "text:b.txt"))
    ),
    (
        sets(replication__tuning="tuning.json"),
        "All ranks need one data source and checkpoint, but replication.tuning is ",
        " on rank 1 (",
    ),
]
"""(arguments, what is said of them) where rank 1 is in a folder without job.toml and book and with other files."""
PROGRAM = """
import os, sys; from mpi4py import MPI; from mpitrain.cli import main; from mpitrain.config import Config
rank, validate, parsed = MPI.COMM_WORLD.rank, Config.model_validate, []
Config.model_validate = lambda tables, **names: parsed.append(1) or validate(tables, **names)
if rank == 1: os.chdir('elsewhere')
for words in {calls!r}:
    parsed.clear()
    try: main(words)
    except SystemExit as end: everyone = MPI.COMM_WORLD.gather((end.code, len(parsed)))
    for stream in (sys.stdout, sys.stderr):
        if rank == 0: print(f'=== {{everyone}}', file=stream, flush=True)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """One start of all calls: the folder, and (exit code, parses) of all ranks and the text after each call."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "elsewhere").mkdir()
    (folder / "job.toml").touch()
    (folder / "book").write_text("word " * 1000)
    for seed, place in enumerate((folder, folder / "elsewhere"), 1):
        for name, last in (("a.txt", "."), ("b.txt", ".!"[seed - 1])):
            (place / name).write_text("Words. " * 5000 + last)
        (place / "other.toml").write_text(f"[run]\nseed = {seed}\n")
        machine = {**DEFAULT.machine, "cores": seed}
        write_tuning(place / "tuning.json", DEFAULT._replace(machine=machine))
    calls = [
        ["train", "--out", str(folder / name), *words, *TINY, *sets(run__sample=0)]
        for name, words in LAYOUTS.items()
    ] + [["train", *words] for words, *_ in REFUSED]
    done = python_ranks(4, PROGRAM.format(calls=calls), folder)
    parts = re.split(r"^=== (.*)\n", done.stderr, flags=re.MULTILINE)
    assert len(parts) == 2 * len(calls) + 1, done.stderr
    return folder, [*zip(map(literal_eval, parts[1::2]), parts[0::2], strict=False)]


def test_a_configuration_is_parsed_once_on_each_rank(start):
    assert [ended for ended, _ in start[1][: len(LAYOUTS)]] == [[(0, 1)] * 4] * len(LAYOUTS)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_file_that_differs_on_one_rank_is_refused_on_every_rank(number, start):
    ended, said = start[1][len(LAYOUTS) + number]
    assert [code for code, _ in ended] == [2] * 4
    assert said.count("Error: ") == 1 and all(part in said for part in REFUSED[number][1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_agree_twice_before_the_first_step(layout, start):
    folder, _ = start
    trace = read_trace(folder / layout / "trace/rank-00000")
    first = trace.records[trace.records["kind"] == STEP][0]["number"]
    waits = trace.records[(trace.records["kind"] == WAIT) & (trace.records["number"] < first)]
    found = [trace.names[name] for name in waits["what"]]
    assert {what for what, _ in found} == {WORDS}, "no barrier, no message"
    assert [tuple(ranks) for _, ranks in found if len(ranks) > 1] == [CONFIGURATION, RUN]


def test_a_program_that_a_rank_starts_is_no_rank(tmp_path):
    child = "import mpitrain; print(mpitrain.connect().size, 'of its own')"
    program = (
        "import subprocess, sys, mpitrain; transport = mpitrain.connect()\n"
        f"done = subprocess.run([sys.executable, '-c', {child!r}], capture_output=True, text=True, timeout=60)\n"
        "assert f'rank {transport.rank} started this process' in done.stderr, done.stderr\n"
        "print(done.stdout, transport.size)"
    )
    done = python_ranks(2, program, tmp_path)
    lines = sorted(done.stdout.splitlines())  # Those of two ranks may come in any order.
    assert done.returncode == 0 and lines == [" 2", " 2", *["1 of its own"] * 2], done.stderr


def test_an_error_of_one_rank_alone_ends_the_job_with_its_exit_code(tmp_path):
    program = (
        "import mpitrain; from mpitrain.errors import ConfigError\nwith mpitrain.ranks() as transport:\n"
        "    if transport.rank == 1: raise ConfigError('Only here.', 'Mend it.')\n"
        "    transport.barrier()"
    )
    done = python_ranks(2, program, tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("rank 1: ConfigError: Only here.") == 1, done.stderr


def test_without_a_folder_for_temporary_files_no_rank_crashes():
    environment = {**process.environment_of_one(), "TMPDIR": "/proc"}
    done = run([sys.executable, "-c", "import mpitrain; mpitrain.connect()"], env=environment)
    assert done.returncode == 1 and "ConfigError: Open MPI needs a folder" in done.stderr
    assert "ConfigError: ConfigError" not in done.stderr


@pytest.mark.parametrize(
    ("package", "named"),
    [("'0.2.0 (0123456789ab)'", "0.2.0 (0123456789ab)"), ("''", "an earlier version")],
    ids=["other code", "no digest"],
)
def test_ranks_with_other_code_end_before_the_first_agreement(package, named, tmp_path):
    program = (
        "import mpitrain; from mpitrain.machine import process\n"
        f"if process.launched().rank == 1: process.package = lambda: {package}\n"
        "mpitrain.connect(); print('connected')"
    )
    done = python_ranks(2, program, tmp_path)
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert done.stderr.count("ConfigError: ") == 1 and "Traceback" not in done.stderr
    assert (
        f"{process.package()} on rank 0 (" in done.stderr and f"{named} on rank 1 (" in done.stderr
    )
