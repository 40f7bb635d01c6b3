"""The configuration: what is refused, in which words, and what is filled in."""

from pathlib import Path

import pytest

from mpitrain.config import Config, read_toml, with_settings
from mpitrain.errors import ConfigError
from mpitrain.regions import share
from mpitrain.run.choices import keys, parse
from mpitrain.run.job import axes, resolve_here
from tests.processes import mpitrain

README = Path(__file__).parents[3] / "README.md"
PAGE = Path(__file__).parents[3] / "mpitrain/run/README.md"


def refusal(*settings, tables=None):
    with pytest.raises(ConfigError) as raised:
        parse(with_settings(tables or {}, list(settings)))
    return raised.value.named()


def test_defaults_are_a_whole_configuration_and_survive_a_round_trip():
    assert parse(Config().model_dump()) == Config()


def test_an_unknown_key_names_the_nearest_one():
    assert (
        refusal("model.widht=64").splitlines()[0]
        == "ConfigError: There is no key model.widht; did you mean model.width?"
    )


@pytest.mark.parametrize(
    "setting, complaint",
    [
        ("optimizer.lr=nan", "optimizer.lr must be a finite number, but is nan."),
        ("optimizer.lr=-1", "optimizer.lr must be greater than 0, but is -1."),
        ("optimizer.lr=true", "optimizer.lr must be a valid number, but is True."),
        ("replication.zero=true", "replication.zero must be a valid integer, but is True."),
        ("replication.zero=1.0", "replication.zero must be a valid integer, but is 1.0."),
        ("run.steps=1.5", "run.steps must be a valid integer, but is 1.5."),
        ("run.steps=many", "run.steps must be a valid integer, but is 'many'."),
        ("model.tied=1", "model.tied must be a valid boolean, but is 1."),
        (
            "data.validation=val.bin",
            "data.validation must be text:FILE, tokens:FILE, jsonl:FILE, npy:X.npy,Y.npy, csv:FILE:TARGET or hdf5:FILE:/X,/Y, "
            "or else tenth or empty, but is 'val.bin'.",
        ),
        (
            "model.kind=rnn",
            "model.kind must be 'gpt', 'llama', 'bert', 'mlp' or 'cnn', but is 'rnn'.",
        ),
        ("model.heads=3", "model.heads must divide model.width, but 3 does not divide 128."),
        (
            "replication.async_lr=often",
            "replication.async_lr must be 1/workers, staleness or a number, but is 'often'.",
        ),
        (
            "replication.wire=zip",
            "replication.wire must be none, fp16, bf16, int8, topk[:PART] or powersgd[:RANK], but is 'zip'.",
        ),
        *(
            (
                f"run.delay={text}",
                "run.delay must be RANK:MS or random:MS:P with P from 0 to 1, or several of these with commas "
                f"between, but is {text!r}.",
            )
            for text in ("1:", "random:20:1.5", "1:20,")
        ),
        ("nonsense", "A setting is section.key=value, but got 'nonsense'."),
        (
            "run.seed=9223372036854775808",
            "run.seed must be a whole number of at most 64 bits, but is 9223372036854775808.",
        ),
        (
            "batch.size=1000000001",
            "batch.size must be less than or equal to 1000000000, but is 1000000001.",
        ),
        (
            "optimizer.epsilon=1e-320",
            "optimizer.epsilon must be 0 or of a size between 1e-30 and 1e+30, but is 1e-320.",
        ),
        (
            "run.stall_seconds=1e-9",
            "run.stall_seconds must be greater than or equal to 1, but is 1e-09.",
        ),
        (
            'run.out="a\\u0000b"',
            "run.out must be text without NUL that file names can have in this locale, but is 'a\\x00b'.",
        ),
    ],
)
def test_a_bad_value_is_refused_with_law_and_value(setting, complaint):
    assert refusal(setting).splitlines()[0] == f"ConfigError: {complaint}"


@pytest.mark.parametrize("key", ["run.out", "data.source", "replication.tuning", "device.tiles"])
def test_a_path_that_is_not_utf_8_is_refused(key):
    assert (
        refusal(f"{key}=a\udcffb").splitlines()[0]
        == rf"ConfigError: {key} must be UTF-8, but is 'a\udcffb'."
    )


@pytest.mark.parametrize(
    "setting, hint",
    [
        ("precision.compute=bf16", "did you mean bfloat16?"),
        ("precision.compute=half", "did you mean float16?"),
        ("precision.compute=fp32", "did you mean float32?"),
        ("precision.compute=double", "did you mean float64?"),
        ("device.kind=gpu", "did you mean cuda?"),
    ],
)
def test_a_value_with_another_name_is_told_its_own(setting, hint):
    assert hint in refusal(setting)


@pytest.mark.parametrize(
    "settings, law, way_out",
    [
        (
            ["layout.tp=3"],
            "layout.tp must divide model.heads, but 3 does not divide 4.",
            "Set layout.tp to 2 or 4;",
        ),
        (
            ["layout.tp=4", "model.heads=6", "model.width=48"],
            "layout.tp must divide model.heads, but 4 does not divide 6.",
            "Set layout.tp to 2 or 3; or for as many ranks layout.tp to 2 and layout.pp to 2, or layout.tp to 2, layout.cp to 2 "
            "and layout.cp_mode to ring; or of a new model model.heads to 4 or 8.",
        ),
        (
            ["layout.tp=8", "model.kind=mlp", "model.width=20"],
            "layout.tp must divide model.width, but 8 does not divide 20.",
            "Set layout.tp to 5 or 10; or for as many ranks layout.tp to 4 and layout.pp to 2; or of a new model model.width to "
            "16 or 24.",
        ),
        (
            ["layout.tp=2", "layout.sequence_parallel=true", "model.kind=mlp"],
            "layout.sequence_parallel divides rows of tokens, but model.kind is mlp.",
            "Leave out layout.sequence_parallel.",
        ),
        (
            ["layout.cp=2", "model.kind=mlp"],
            "layout.cp divides rows of tokens, but model.kind is mlp.",
            "Leave out layout.cp.",
        ),
        (
            ["layout.cp=3", "model.heads=6", "model.width=48"],
            "but 3 does not divide model.context 128.",
            "Set model.context to 126 or 129.",
        ),
        (
            ["layout.cp=3", "layout.cp_mode=ring", "model.context=129"],
            "2 x layout.cp divides the tokens of a row equally, but 6 does not divide",
            "Set model.context to 126 or 132.",
        ),
        (
            ["layout.cp=4", "layout.tp=2"],
            "layout.tp x layout.cp must divide model.heads, but 8 does not divide 4.",
            "Set layout.tp x layout.cp to 2 or 4; or for as many ranks layout.cp_mode to ring; or of a new model model.heads to "
            "8 or 16.",
        ),
        (
            ["layout.cp=2", "pipeline.schedule=async"],
            "Schedule async needs layout.cp 1, but it is 2.",
            "Set layout.cp to 1, or pipeline.schedule to 1f1b.",
        ),
        (
            ["layout.tp=2", "replication.mode=local"],
            "Mode local needs layout.tp 1, but it is 2.",
            "Set layout.tp to 1, or replication.mode to all-reduce.",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_nearest_numbers(settings, law, way_out):
    text = refusal(*settings)
    assert law in text and way_out in text, text


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000], ids=["digits", "brackets"])
def test_a_value_that_is_no_value_of_anything_is_refused_in_few_words(value):
    for name in ("run.steps", "optimizer.lr", "model.tied", "model.kind", "run.plugins"):
        text = refusal(f"{name}={value}")
        assert name in text and len(text) < 700, name


def test_all_that_is_wrong_is_said_at_once():
    assert (
        "optimizer.lr" in (text := refusal("optimizer.lr=nan", "run.steps=-1"))
        and "run.steps" in text
    )


TEXTS = ["data.source=jsonl:texts.jsonl"]


@pytest.mark.parametrize(
    "settings, part",
    [
        (["model.heads=3"], "Set model.width to 126 or 129"),
        (["replication.wire=fp16", "precision.compute=float64"], "Wire formats carry float32"),
        (["device.tensor_cores=wgmma"], "precision.compute is float32 and device.gemm tiled"),
        (
            ["device.tensor_cores=wgmma", "precision.compute=float16", "device.gemm=library"],
            "device.gemm library",
        ),
        (["model.kind=bert", 'run.sample_prompt=["a"]'], "is for a gpt or llama"),
        (["model.kind=bert", *TEXTS, "data.packing=true"], "data.packing is of conversations"),
        (["model.kind=bert", *TEXTS, "data.mask=0.3"], "kind is bert and classifies texts"),
        ([*TEXTS, "data.classes=3"], "data.classes is of labelled texts"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(settings, part):
    assert part in refusal(*settings)


@pytest.mark.parametrize(
    "settings, law, way_out",
    [
        (
            ["float16", "replication.wire=topk:0.1"],
            "an overflow of float16 would spoil",
            "precision.compute to bfloat16.",
        ),
        (
            ["float16", "replication.wire=powersgd"],
            "an overflow of float16 would spoil",
            "replication.wire to fp16, bf16,",
        ),
        (
            ["float16", "replication.mode=local"],
            "but in mode local they have no step in common",
            "precision.compute to bfloat16,",
        ),
        (
            ["float16", "replication.mode=gossip"],
            "loss scale together after each step",
            "to all-reduce, master, or server with",
        ),
        (
            ["float16", "replication.mode=server", "replication.update=async"],
            "in mode server with replication.update async",
            "sync.",
        ),
        (
            ["bfloat16", "layout.algorithm=native", "layout.tp=2", "device.kind=cuda-sim"],
            "are bfloat16 on cuda-sim, which MPI has no",
            "Set layout.algorithm to auto, or precision.compute to float32.",
        ),
    ],
)
def test_what_half_precision_cannot_do_is_refused(settings, law, way_out):
    compute, *others = settings
    text = refusal(f"precision.compute={compute}", *others)
    assert law in text and way_out in text.splitlines()[-1]


@pytest.mark.parametrize(
    "other",
    [
        "device.kind=cpu",
        "layout.sequence_parallel=true",
        "layout.tp=1",
        "precision.compute=float64",
    ],
)
def test_mpi_sums_activations_of_types_that_it_has(other):
    parse(
        with_settings(
            {},
            [
                "precision.compute=float16",
                "layout.algorithm=native",
                "layout.tp=2",
                "device.kind=cuda",
                other,
            ],
        )
    )


@pytest.mark.parametrize("zero", (2, 3))
def test_wire_formats_of_divided_sums_are_refused(zero):
    text = refusal("replication.wire=int8", f"replication.zero={zero}")
    assert f"replication.zero {zero} none has, and replication.wire" in text
    assert "replication.wire to none, or replication.zero" in text


def test_among_whom_nothing_is_divided_cannot_be_said():
    text = refusal("replication.shard=host")
    assert "replication.zero is 0" in text and "Set replication.zero to 1, 2 or 3" in text
    parse(with_settings({}, ["replication.shard=host", "replication.zero=1"]))


@pytest.mark.parametrize(
    "others", [["replication.zero=2"], ["replication.zero=3", "precision.compute=float64"]]
)
def test_parameters_travel_coded_where_no_rank_has_them_whole_alone(others):
    assert "int8 is of float32" in refusal("replication.gather=int8", *others)
    parse(with_settings({}, ["replication.gather=int8", "replication.zero=3"]))


@pytest.mark.parametrize("wire", ["topk", "topk:0.1", "powersgd:4"])
def test_formats_with_residuals_are_refused_only_on_a_gpu(wire):
    text = refusal(f"replication.wire={wire}", "device.kind=cuda")
    assert f"Wire format {wire}" in text
    assert "replication.wire to fp16, bf16, int8" in text
    for kind in ("cpu", "cuda-sim", "auto"):
        parse(with_settings({}, [f"replication.wire={wire}", f"device.kind={kind}"]))


def test_a_file_that_is_not_toml_is_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[run\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "missing.toml")


def test_every_key_has_help():
    assert all(key.help and "None" not in key.help for key in keys())
    assert len({key.name for key in keys()}) == len(list(keys()))


@pytest.mark.parametrize(
    "settings, ranks, complaint",
    [
        (
            ["replication.mode=server", "replication.servers=2", "layout.dp=2"],
            3,
            "dp 2 x tp 1 x pp 1 + servers 2 needs 4 ranks, but 3 were started.",
        ),
        (
            ["run.delay=1:5,3:5"],
            3,
            "run.delay names rank 3, but ranks that compute rows are 0 to 2.",
        ),
        (
            ["run.delay=2:5", "replication.mode=server"],
            3,
            "run.delay names rank 2, but ranks that compute rows are 0 to 1.",
        ),
    ],
)
def test_a_layout_that_does_not_come_out_is_refused(settings, ranks, complaint):
    with pytest.raises(ConfigError) as raised:
        axes(parse(with_settings({}, settings)), ranks)
    assert complaint in raised.value.law


@pytest.mark.parametrize("rows", (0, 1, 7, 32))
@pytest.mark.parametrize("parts", (1, 2, 3, 5))
def test_rows_are_partitioned_without_empty_ranks(rows, parts):
    shares = [share(rows, part, parts) for part in range(parts)]
    assert [row for part in shares for row in part] == list(range(rows))
    assert parts > rows or all(shares)


def test_powersgd_starts_with_a_quarter_of_dense_steps_by_default():
    def dense(wire, steps=-1):
        tables = {"replication": {"wire": wire, "dense_steps": steps}}
        return parse(tables).replication.exact_steps(403)

    assert [dense(wire) for wire in ("none", "int8", "topk:0.1", "powersgd", "powersgd:2")] == [
        0,
        0,
        0,
        100,
        100,
    ]
    assert (dense("powersgd", 0), dense("topk", 7)) == (0, 7)


@pytest.mark.parametrize(
    "value, read",
    [
        ("0.5", "0.5"),
        ("2", "2"),
        ("1e-5", "1e-05"),
        ("staleness", "staleness"),
        ("1/workers", "1/workers"),
    ],
)
def test_what_multiplies_the_rate_of_a_late_gradient_is_a_number_or_a_name(value, read):
    config = parse(with_settings({}, [f"replication.async_lr={value}"]))
    assert config.replication.async_lr == read and parse(config.model_dump()) == config


def test_all_ranks_meet_next_where_something_is_due():
    config = parse({"run": {"steps": 20, "eval_every": 6}, "checkpoint": {"every": 4}})
    assert [config.next_pause(step) for step in (0, 3, 4, 6, 11, 12, 18)] == [
        4,
        4,
        6,
        8,
        12,
        16,
        20,
    ]


def test_the_configuration_in_the_readme_is_one(tmp_path):
    (tmp_path / "book.toml").write_text(README.read_text().split("```toml\n")[1].split("```")[0])
    found = parse(read_toml(tmp_path / "book.toml"))
    assert (
        found.data.source == f"text:{tmp_path}/book.txt"
        and found.run.out == f"{tmp_path}/runs/book"
    )


@pytest.mark.slow
def test_page_and_help_have_the_true_defaults():
    c, page = Config(), " ".join(PAGE.read_text().split())
    o = c.optimizer
    rule = (
        f"The optimizer is AdamW, with betas {o.beta1:g} and {o.beta2:g}, and weight decay {o.weight_decay:g} of matrices. "
        f"Its learning rate is {o.lr:g} after {o.warmup} steps of warm-up, with {o.schedule} decay to a tenth. "
        f"Gradients are clipped to norm {o.clip:g}."
    )
    text = " ".join(mpitrain("train", "--help").stdout.split())
    assert o.name == "adamw" and rule in page and rule in text, text
    assert (
        f"{c.batch.size} sequences of {c.model.context} tokens over all ranks (batch.size, "
        f"model.context), {c.run.steps} steps (run.steps)"
    ) in text, text
    batch = f"`batch.size` ({c.batch.size}) sequences of `model.context` ({c.model.context}) tokens over all ranks"
    assert batch in page and f"`run.steps` is {c.run.steps}" in page


def test_a_copy_of_a_checked_configuration_is_checked_again():
    config = parse({"layout.tp": 2})
    assert resolve_here(config, ["a", "a"]).axes.tp == 2
    muon = config.optimizer.model_copy(update={"name": "muon"})
    with pytest.raises(ConfigError, match="Muon updates whole matrices"):
        resolve_here(config.model_copy(update={"optimizer": muon}), ["a", "a"])
