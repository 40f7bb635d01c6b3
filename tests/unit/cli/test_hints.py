"""The answers to words of other tools and to misspelt ones: commands, options, keys, and files of other tools."""

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.config import parse, read_toml, with_settings
from mpitrain.errors import ConfigError

ANSWERS = {
    # commands
    "torchrun": "`mpitrain launch -n 4 -- python train.py`",
    "accelerate": "`mpitrain launch -n 4 -- train`",
    "deepspeed": "`mpitrain launch --hostfile hosts -- train`",
    "horovodrun": "`mpitrain launch --hosts a:4,b:4 -- python train.py`",
    "mpirun": "`mpitrain launch -n 4 -- python own.py`",
    "srun": "`mpitrain launch -- train` in a job",
    "sbatch": "`mpitrain slurm --follow -- train`",
    "finetune": "`mpitrain train`; from a folder of HuggingFace with `run.init_from`",
    "sft": "`mpitrain train`",
    "resume": "-- train --out runs/a --resume`",
    "merge": "--merge`",
    "serve": "none; `mpitrain export",
    "evaluate": "`mpitrain eval runs/a`",
    "benchmark": "`mpitrain compare --peer torch`",
    "ds_report": "`mpitrain doctor --dir .`",
    "all_reduce_perf": "`mpitrain launch -n 4 -- bench all-reduce`",
    "all_reduce": "`mpitrain launch -n 4 -- bench all-reduce`",
    "osu_latency": "`mpitrain launch -n 2 -- bench pairs`",
    "bench latency": "`mpitrain launch -n 2 -- bench pairs`",
    "bench osu_bw": "`mpitrain launch -n 2 -- bench bandwidth`",
    "launch -- torchrun": "`mpitrain launch -n 4 -- python train.py`",
    "launch -- accelerate launch own.py -n 3": "Type the file alone: -- python own.py -n 3",
    "slurm -- torchrun --nnodes 2 own.py": "Type the file alone: -- python own.py",
    "slurm -- finetune": "`mpitrain train`",
    # options of launch and slurm
    "launch --np 4 -- train": "`mpitrain launch -n 4 -- train`",
    "launch --nproc-per-node 4 -- train": "`mpitrain launch -n 4 -- train`, the ranks of all hosts",
    "launch --nproc_per_node=4 -- train": "`mpitrain launch -n 4 -- train`, the ranks of all hosts",
    "launch --num_processes 4 -- train": "`mpitrain launch -n 4 -- train`",
    "launch --nnodes 2 -- train": "`mpitrain launch --hosts a:4,b:4 -- train`",
    "launch --master-port 29500 -- train": "not needed: MPI connects the ranks",
    "launch -H a:4 -- train": "`mpitrain launch --hosts a:4,b:4 -- train`",
    "launch --mca btl tcp -- train": "--with: Options for mpirun, mpiexec or srun",
    "slurm --array 0-3 -- train": "`mpitrain slurm --sweep optimizer.lr=0.001,0.002 -- train`",
    "slurm --ntasks 8 -- train": "`mpitrain slurm --nodes 2 --ranks-per-node 4 -- train`",
    "slurm --licenses a:1 -- train": "--with: A further option of the batch system",
    # options of train and of other commands with --set
    "train -np 4": "`mpitrain launch -n 4 -- train`",
    "train --learning-rate 3e-4": "`--set optimizer.lr=3e-4`",
    "train --gradient_accumulation_steps 4": "`--set batch.micro_batches=4`",
    "train --per_device_train_batch_size 4": "follows from `batch.size`, `batch.micro_batches`",
    "train --num_train_epochs=3": "`--set run.epochs=3`",
    "train --early_stopping_patience 3": "`--set run.patience=3`, with `run.eval_every`",
    "train --eval_strategy epoch": "`--set run.eval_every=epoch`",
    "train --load_best_model_at_end": "`--set checkpoint.best=true`",
    "train --packing": "did you mean --set data.packing=VALUE?",
    "train --assistant_only_loss": "always, by the tag or without it",
    "train --deepspeed zero2.json": "`--set replication.zero=zero2.json`",
    "train --model llama": "`--set run.init_from=llama`, a folder of HuggingFace",
    "train --config job.yaml": "the file alone: `mpitrain train job.toml`",
    "train --bf16": "`--set precision.compute=bfloat16`",
    "train --offload_optimizer": "mpitrain has no counterpart",
    "train --tensor-model-parallel-size 2": "`--set layout.tp=2`",
    "compare --max_steps 9": "`--set run.steps=9`",
    "train --n_layer 4": "`--set model.layers=4`",
    # keys
    "plan memory --set optimizer.learning_rate=1": "learning_rate of HuggingFace: `optimizer.lr`.",
    "plan memory --set max_steps=9": "max_steps of HuggingFace: `run.steps`.",
    "plan memory --set lr=1": "did you mean optimizer.lr?",
    "plan memory --set training.save_steps=9": "save_steps of HuggingFace: `checkpoint.every`.",
    "plan memory --set model.widht=4": "did you mean model.width?",
    "plan memory --set optimiser.lr=4": "did you mean optimizer.lr?",
    "plan memory --set precision.compute=fp16": "did you mean float16?",
    "plan memory --set device.kind=gpu": "did you mean cuda?",
    # misspelt words, and words that mean nothing
    "trian": "did you mean train?",
    "train --rezume": "did you mean --resume?",
    "train --clip 0.5": "did you mean --set optimizer.clip=0.5?",
    "plan all-redcue": "did you mean all-reduce?",
    "banana": "No such command 'banana'.",
    "train --banana 1": "No such option: --banana.",
    "plan memory --set model.kind=rnn": "'cnn', but is 'rnn'.",
}


@pytest.mark.parametrize("line", ANSWERS)
def test_a_word_gets_its_answer_and_no_guess(line):
    shown = CliRunner().invoke(commands, line.split())
    error = shown.exception
    said = " ".join((shown.output + (error.law if isinstance(error, ConfigError) else "")).split())
    assert ANSWERS[line] in said and "Did you mean one of" not in said, said
    assert shown.exit_code == 2 or isinstance(error, ConfigError)
    if "did you mean" not in ANSWERS[line]:
        assert "did you mean" not in said, said


def refused(path):
    with pytest.raises(ConfigError) as error:
        read_toml(path)
    return str(error.value)


def test_a_json_file_of_another_tool_is_answered_by_lines_of_toml(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"learning_rate": 3e-4, "bf16": true, "zero_optimization": {"stage": 2}, "foo": 1}'
    )
    said = refused(file)
    assert "mpitrain reads TOML" in said and "# foo: no such key" in said
    (tmp_path / "own.toml").write_text("\n".join(said.partition("is:\n")[2].splitlines()))
    tables = read_toml(tmp_path / "own.toml")
    assert tables == {
        "optimizer": {"lr": 3e-4},
        "precision": {"compute": "bfloat16"},
        "replication": {"zero": 2},
    }
    assert parse(tables).optimizer.lr == 3e-4


def test_a_yaml_file_is_answered_by_lines_of_toml(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "# axolotl\nsequence_len: 2048\noptimizer:\n  lr: 1e-3  # peak\nfp16: false\nxs:\n  - 1\n"
    )
    said = refused(file)
    assert "context = 2048" in said and "lr = 0.001" in said and "fp16" not in said


def test_the_variable_has_settings_and_those_of_the_command_line_win():
    words = ["--set", "model.width=64"]
    for text, wrong in (("model.widht=1 run.seed=2", "no key model.widht"), ("run.seed=2", "")):
        shown = CliRunner().invoke(commands, ["plan", "memory", *words], env={"MPITRAIN_SET": text})
        assert wrong in str(shown.exception or "") and bool(shown.exception) == bool(wrong)
    assert with_settings({}, ["run.seed=1", "run.seed=2"]) == {"run": {"seed": 2}}


def test_the_file_to_start_from_is_the_default_run(tmp_path):
    path = tmp_path / "job.toml"
    shown = CliRunner().invoke(commands, ["train", "--write-config", str(path)])
    assert shown.exit_code == 0, shown.output
    assert parse(read_toml(path)) == parse({})
    assert path.read_text().count("\n# ") > 25
    again = CliRunner().invoke(commands, ["train", "--write-config", str(path)])
    assert isinstance(again.exception, ConfigError) and "exists" in again.exception.law
    changed = "--lr 0.5 --set run.patience=3 --set run.eval_every=5 --write-config"
    CliRunner().invoke(commands, ["train", *changed.split(), str(tmp_path / "b")])
    tables = read_toml(tmp_path / "b")
    assert tables["optimizer"]["lr"] == 0.5 and tables["run"]["patience"] == 3


@pytest.mark.parametrize(
    "word, key",
    [
        ("lr", "optimizer.lr"),
        ("learning_rate", "optimizer.lr"),
        ("dropout", "model.dropout"),
        ("warm-up", "optimizer.warmup"),
    ],
)
def test_help_config_finds_keys_by_a_word(word, key):
    shown = CliRunner().invoke(commands, ["train", f"--help-config={word}"])
    assert f"{key} = " in shown.output and "checkpoint.every" not in shown.output


def test_sizes_are_also_spelt_as_nccl_tests_and_osu_spell_them():
    group = commands.get_command(None, "bench")
    for words, wanted in (
        ("-b 8 -e 128M -f 2 -n 20 -w 5", (8, 128 << 20, 2, 20, 5)),
        ("-m 1:1M", (1, 1 << 20, 4, 0, 3)),
        ("-m 1M -b 8", (8, 1 << 20, 4, 0, 3)),
    ):
        options = group.commands["all-reduce"].make_context("all-reduce", words.split()).params
        names = "min_bytes", "max_bytes", "factor", "iterations", "warmup"
        assert tuple(options[name] for name in names) == wanted
