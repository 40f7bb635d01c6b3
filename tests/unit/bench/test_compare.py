"""The table of `mpitrain compare`: which modes there are, what their formulas say, what is refused, what is printed."""

import json
import math
import re
from statistics import median

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.compare import JOBS, TrainingJob
from mpitrain.collectives.selection.table import choices
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.parallel.modes import MODES, ZERO
from mpitrain.tools.bench.comparison.compare import KINDS, equal_time, footer, loss_at, memory_table
from mpitrain.tools.bench.comparison.formulas import words_of
from mpitrain.tools.bench.comparison.modes import FORMS, jobs, settings_by_mode, settings_of, usual
from mpitrain.tools.bench.results import write_json
from mpitrain.tools.bench.table import KEPT, TRAINED, TRIED, agreement, plot, table
from mpitrain.tools.bench.turns import Row, compared
from mpitrain.tools.plan.memory import count
from mpitrain.tools.plan.mode_traffic import LETTERS
from tests.rows import added_rows


def words(mode):
    return words_of(parse(with_settings({}, settings_of(mode))), 4)


def row(mode, **changes):
    measured = Row(
        mode,
        blocks=[0.25, 0.25],
        step_s=0.25,
        samples=4,
        losses=[2.0, 1.7],
        ends=[0.5, 1.0],
        val_loss=1.5,
        evaluated_s=2.0,
        workers=2,
        comm_s=0.05,
        idle=0.125,
        sent_bytes=[1000.0, 3000.0],
        formula_bytes=3000,
        memory=[dict.fromkeys(KINDS, 1_000_000), dict.fromkeys(KINDS, 500_000)],
        formula=words(mode) if mode in settings_by_mode() else "",
    )
    return measured._replace(**changes)


@pytest.mark.parametrize(
    "mode, settings",
    [
        ("zero3+tp2", {"replication.zero": 3, "layout.tp": 2, "layout.algorithm": "ring"}),
        ("star+bf16", {"replication.algorithm": "star", "precision.compute": "bfloat16"}),
        ("bf16+star", {"replication.algorithm": "star", "precision.compute": "bfloat16"}),
        ("pp2:async", {"layout.pp": 2, "pipeline.schedule": "async"}),
        ("pp2:zb-v", {"layout.pp": 2, "pipeline.schedule": "zb-v"}),
        ("accumulate4+recompute", {"batch.micro_batches": 4, "memory.recompute": "unit"}),
        ("recompute12", {"memory.recompute": "12"}),
        ("lora8+wire:powersgd:2", {"lora.rank": 8, "replication.wire": "powersgd:2"}),
        ("optimizer:adamw8bit", {"optimizer.name": "adamw8bit"}),
    ],
)
def test_words_of_a_mode_are_settings_over_a_ring(mode, settings):
    (found,) = jobs([mode], [], "aaaa").values()
    (ring,) = jobs(["ring"], [], "aaaa").values()
    one, other = found.flat(), ring.flat()
    expected = {"replication.algorithm": "ring", **settings}
    assert {key: one[key] for key in expected} == expected
    assert {key for key in one if one[key] != other[key]} <= {*expected, "replication.shard"}


def test_every_form_is_accepted_with_a_number_and_a_name():
    values = {"N": "2", "SCHEDULE": "gpipe", "FORMAT": "int8", "NAME": "lamb", "FILE": "./own"}
    for form, settings in FORMS.items():
        word = re.sub("SCHEDULE|FORMAT|NAME|FILE|N", lambda hole: values[hole[0]], form)
        assert len(settings_of(word)) >= len(settings), word


@pytest.mark.parametrize("job", JOBS)
def test_a_built_in_job_runs_in_each_kind_of_mode(job):
    modes = ["ring", "zero3", "tp2", "tp4", "pp2:gpipe", "pp4", "pp2:async", "accumulate2"]
    assert jobs(modes, [*JOBS[job]], "aaaa").keys() == set(modes)


def test_mixed_precision_costs_memory_in_the_large_job_and_hardly_in_the_small_one():
    def growth(job):
        found = jobs(["ring", "bf16"], [*JOBS[job], "layout.dp=2"], "aa").values()
        ring, half = (count(config).state + count(config).stages[0].step.peak for config in found)
        return half / ring

    assert 1 < growth("small") < 1.02 and 1.2 < growth("large") < 1.25


def test_one_rank_compares_tricks_but_not_replication():
    assert [*jobs(["ring", "bf16"], [], "a")] == ["ring", "bf16"]
    with pytest.raises(ConfigError) as refused:
        jobs(["ring", "zero1"], [], "a")
    assert "sends nothing" in str(refused.value)


def test_every_all_reduce_and_every_mode_of_the_package_has_a_word():
    found = {
        (config.replication.mode, config.replication.zero)
        for config in jobs(list(settings_by_mode()), [], "aabb").values()
    }
    rows = {
        (name, stage)
        for name, mode in MODES.items()
        for stage in (0, *(ZERO if name == "all-reduce" else ()))
    }
    assert found == rows and {*choices("allreduce"), *usual()} <= set(settings_by_mode())


def test_a_mode_is_stronger_than_a_setting_of_all_and_nothing_else_differs():
    found = jobs(["star", "zero1"], ["replication.algorithm=tree", "batch.size=6"], "aa")
    star, zero = (config.flat() for config in found.values())
    assert {key: (star[key], zero[key]) for key in star if star[key] != zero[key]} == {
        "replication.algorithm": ("star", "tree"),
        "replication.zero": (0, 1),
    }
    assert star["batch.size"] == 6


@pytest.mark.parametrize("key", ["replication.algorithm", "layout.algorithm"])
def test_a_setting_of_all_replaces_the_ring_of_modes_that_name_none(key):
    words = ["ring", "bf16", "zero1", "local", "tp2", "pp2:gpipe"]
    found = jobs(words, [f"{key}=tree"], "aa")
    own = {word: config.flat()[key] for word, config in found.items()}
    ring = "ring" if key == "replication.algorithm" else "tree"
    assert own == dict.fromkeys(words, "tree") | {"ring": ring}


def test_the_job_and_keys_keep_the_algorithm_of_the_job():
    found = jobs(
        ["job", "model.width=64+optimizer.lr=1e+3", "zero1", "zero1+model.width=64"], [], "aa"
    )
    algorithms = [config.replication.algorithm for config in found.values()]
    assert algorithms == ["auto", "auto", "ring", "ring"]
    assert [config.model.width for config in found.values()] == [128, 64, 128, 64]
    assert found["model.width=64+optimizer.lr=1e+3"].optimizer.lr == 1000
    assert jobs(["job"], [], "aa", {"model": {"width": 32}})["job"].model.width == 32


def test_a_setting_of_a_side_is_kept_although_names_of_modes_imply_it():
    sides = ["job", "replication.algorithm=ring", "layout.tp=2+layout.algorithm=ring"]
    found = jobs(sides, ["layout.algorithm=native"], "aa")
    pairs = [(each.replication.algorithm, each.layout.algorithm) for each in found.values()]
    assert pairs == [("auto", "native"), ("ring", "native"), ("auto", "ring")]


def test_a_plus_in_a_value_joins_nothing():
    assert settings_of("replication.tuning=c++/a+b.json+tp2+layout.algorithm=ring") == (
        "replication.tuning=c++/a+b.json",
        "layout.tp=2",
        "layout.algorithm=ring",
        "replication.algorithm=ring",
    )


def test_a_word_in_quotes_is_part_of_a_value():
    found = jobs(
        [
            "replication.tuning='a+tp2+b'+model.width=64",
            'replication.tuning="a+star+b"',
            "replication.tuning=a+tp2",
        ],
        [],
        "aa",
    )
    own = [(each.replication.tuning, each.model.width, each.layout.tp) for each in found.values()]
    assert own == [("a+tp2+b", 64, 1), ("a+star+b", 128, 1), ("a", 128, 2)]
    assert settings_of("replication.tuning=it's+tp2+run.sample_prompt=Bob's")[1] == "layout.tp=2"


def test_a_plugin_of_the_job_adds_words_before_they_are_read(tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from mpitrain.parallel.modes import MODES\nMODES['new'] = MODES['local']\n")
    work = TrainingJob([f"run.plugins={plugin}"], 1, 1)
    with added_rows():
        assert settings_of("new", work.set_keys())[0] == "replication.mode=new"


def test_a_file_sets_keys_as_set_does_for_sides_in_memory(tmp_path):
    (tmp_path / "job.toml").write_text('[replication]\nalgorithm = "star"\n')
    work = TrainingJob(["layout.algorithm=tree"], 1, 1, file=tmp_path / "job.toml")
    keys = work.set_keys()
    assert keys == {"replication.algorithm", "layout.algorithm"}
    assert work.configured(2, settings_of("zero1", keys)).replication.algorithm == "star"


@pytest.mark.parametrize(
    "words, settings, hosts, said",
    [
        (["ring", "rong"], [], "aa", "but this is 'rong'"),
        (["zero1-host"], [], "aba", "there are 2 on a, 1 on b"),
        (["ring+tp"], [], "aa", "this is 'tp' of ring+tp"),
        (["tp0"], [], "aa", "accumulateN, recompute, "),
        (["tp2+tp4"], [], "aaaa", "tp4 sets layout.tp=4"),
        (["ring+star"], [], "aa", "star sets replication.algorithm=star"),
        (["ring", "local+tp2"], [], "aa", "local+tp2: "),
        (["ring", "tp4"], [], "aa", "needs 4 ranks"),
        (["ring"], [], "a", "one rank sends nothing"),
        (["ring"], ["layout.dp=4"], "aa", "needs 4 ranks, but 2 were started"),
        (["ring"], ["batch.size=2"], "aaa", "but batch.size is 2"),
        (["ring"], ["run.steps=1"], "aa", "run.steps is 1"),
        (["of-a-plugin"], ["run.plugins=['no.py']"], "aa", "The plugin no.py cannot be read"),
        (["ring", "local"], ["precision.compute=float16"], "aa", "what works: ring"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(words, settings, hosts, said):
    with pytest.raises(ConfigError) as refused:
        jobs(words, settings, hosts)
    assert said in str(refused.value) and refused.value.way_out


def test_lines_have_a_cell_per_column_and_a_dash_where_none_applies():
    star = row("star")
    heading, line = table(TRAINED, ["star"]).lines([star])
    cells = line.split()
    assert len(line) == len(heading)
    assert cells == ["star", "2", "250.0", "16.0", "50.0", "3,000", "3,000", "4.0", "-", "1.5000"]
    late = row("auto", formula_bytes=None, staleness=3)
    assert table(TRAINED, ["auto"]).line(late).split()[6:9] == ["-", "4.0", "3"]
    assert footer([row("auto")]) == []


def test_memory_is_split_by_kind_on_the_fullest_rank():
    rows = [row("star", val_loss=math.nan), row("a-mode-of-many-letters+bf16")]
    first, *others = memory_table(rows)
    assert [len(each) for each in others] == [len(first)] * 2
    assert others[0].split() == ["star", "12.5", *["1.00"] * 5, "5.00", "1.8500", "1.8500"]


def test_losses_are_compared_after_equal_steps_and_after_equal_time():
    fast, slow = row("ring"), row("star", step_s=0.5, losses=[2.0, 1.0])
    assert equal_time([fast, slow]) == 2 * 0.25
    assert (loss_at(slow), loss_at(slow, 0.5), loss_at(slow, 0.4)) == (1.5, 2.0, None)
    assert loss_at(row("ring", losses=[None, 1.5])) == 1.5


def timed(name, blocks, first=None, **changes):
    """A row whose values relative to the first side's are filled in."""
    own = row(name, blocks=blocks, step_s=median(blocks), **changes)
    return compared(own, first or own)


FIRST = timed("ring", [1.0] * 5)


@pytest.mark.parametrize(
    "blocks, speed, word, ratio",
    [
        ([0.5, 0.9, 0.8, 0.7, 0.9], "faster", "yes", "0.800"),
        ([1.1, 1.2, 2.0, 1.1, 1.3], "slower", "no", "1.200"),
        ([0.6, 0.6, 0.6, 0.6, 1.1], "~", "~", "0.600"),
        ([1.0, 0.6, 0.6, 0.6, 0.6], "~", "~", "0.600"),
        ([9.0, 1.0, 9.0, 9.0, 9.0], "spoilt", "spoilt", "-"),
    ],
)
def test_a_side_is_faster_or_slower_only_if_every_block_agrees(blocks, speed, word, ratio):
    """In the table of trainings, ~ marks the time of the others."""
    other = timed("star", blocks, FIRST)
    assert other.speed == speed
    cells = table(KEPT, ["star"]).line(other).split()
    assert cells[2] == ratio and cells[6] == word
    is_marked = "~" in table(TRAINED, ["star"]).line(other)
    assert is_marked == (speed in ("~", "spoilt"))
    assert f"~ {int(is_marked)} of 1 others" in agreement([FIRST, other])[0]


def test_one_side_or_one_block_has_no_line_about_agreement():
    assert agreement([FIRST]) == []
    assert agreement([timed("ring", [1.0]), timed("a", [2.0], timed("ring", [1.0]))]) == []


def test_times_are_compared_for_as_many_samples_and_memory_on_the_fullest_rank():
    half = [dict.fromkeys(KINDS, 100_000), dict.fromkeys(KINDS, 500_000)]
    twice = timed("larger", [1.0] * 5, FIRST, samples=8, memory=half, settings=["batch.size=8"])
    assert (twice.ratio, twice.space, twice.speed) == (0.5, 0.5, "faster")
    line = table(TRIED, ["larger"]).line(twice)
    assert "2.50   0.50" in line and line.endswith("  batch.size=8")
    assert table(TRIED, ["larger"]).line(twice._replace(is_used=True)).endswith("  set already")


def test_losses_are_compared_step_by_step():
    assert timed("a", [1.0] * 5, FIRST, losses=[2.0, 1.45]).apart == 0.25
    assert timed("a", [1.0] * 5, FIRST, losses=[]).apart is None


def test_the_formulas_below_the_table_explain_their_letters():
    assert footer([row("star"), row("auto")]) == [
        "star               sends (n-1) S, the root",
        "with S bytes of all gradients, padding included, n ranks; besides, control messages and headers",
    ]
    late = [row("server-async", staleness=3, val_loss=1.0, formula=""), row("ring", formula="")]
    assert footer(late) == [
        "server-async has a lower loss because of its updates: 2 times as many, each with 1/2 of the rows"
    ]
    assert footer([row("server-async", staleness=3, val_loss=9.0, formula=""), late[1]]) == []
    for word in settings_by_mode():
        if not (formula := words(word)):
            continue
        said = footer([row(word)])[-1]
        plain = re.sub(r"\b[aA] |'s\b", "", formula)
        letters = {*re.findall(r"n'|\b(?:lg|[a-zA-Z])\b(?!')", plain)}
        assert all(f"{letter} {LETTERS[letter]}" in said for letter in letters), (word, letters)


@pytest.mark.slow
def test_a_nonfinite_loss_is_null_in_the_file_and_absent_in_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row("star", val_loss=math.nan, losses=[2.0, None]), row("ring", losses=[2.0, 1.5])]
    write_json(tmp_path / "rows.json", {"ranks": 2}, rows)
    star, ring = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert star["losses"] == [2.0, None]
    assert (star["val_loss"], ring["val_loss"]) == (None, 1.5)
    plot(rows, "a job", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, said",
    [
        (["zero1", "--tricks", "all"], "--tricks takes no settings beside it, but zero1"),
        (["--shapes", "all", "--generate"], "--shapes and --generate are different measurements"),
        (["--row-seconds", "9"], "Add --shapes"),
        (["--peer", "transformers"], "--peer transformers is not for training"),
        (["--generate", "--peer", "torch"], "--peer torch is not for --generate"),
        (["--shapes", "all", "--peer", "one-rank"], "--peer one-rank is not for --shapes"),
        (["--tricks", "all", "--peer", "torch"], "--peer has no effect beside --tricks"),
        (["--tricks", "all", "--plot", "a.png"], "--plot has no effect beside --tricks"),
        (["--generate", "--plot", "a.png"], "--plot has no effect beside --generate"),
        (["--shapes", "all", "--plot", "a.png"], "--plot has no effect beside --shapes"),
        (["--shapes", "all", "--preset", "gpt2"], "--preset has no effect beside --shapes"),
        (["--shapes", "all", "--job", "gpt"], "--job has no effect beside --shapes"),
        (["job.toml", "--shapes", "all"], "--shapes has jobs of its own, and takes no file"),
        (["ring", "--tokens", "8"], "--tokens has no effect without --generate"),
        (["--kept", "--prompt-tokens", "1"], "--prompt-tokens has no effect beside --kept"),
        (["--peer", "torch", "--batch", "1"], "--batch has no effect without --generate"),
        (["--generate", "--steps", "3"], "--steps has no effect beside --generate"),
        (["--tricks", "all", "--blocks", "2"], "--tricks takes at least 5 blocks"),
        (["--preset", "gpt2", "--job", "gpt"], "--preset and --job are different jobs"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_mpi_starts(words, said):
    done = CliRunner().invoke(commands, ["compare", *words])
    assert done.exit_code == 2 and said in " ".join(done.output.split())
