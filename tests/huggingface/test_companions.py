"""What a folder says beside its tensors goes through a run and its exports, and generation ends where it did."""

import json

import pytest

from mpitrain.data.templates import Conversation, open_template
from mpitrain.run.build import configured as from_folder
from mpitrain.run.build import open_run
from mpitrain.run.export import export
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.huggingface.models import llama, made
from tests.processes import calls_of_one_start, launch, mpitrain
from tests.training import configured

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "</s>"}
NAMES = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
WORDS = {"red": "apple", "blue": "sky", "green": "leaf"}
TRAINED = ["device.kind=cpu", "run.eval_every=-1", "batch.size=6", "model.context=24"]
TRAINED += ["optimizer.warmup=0", "optimizer.schedule=constant", "optimizer.weight_decay=0"]


def saved(folder, kind):
    """Write a folder with special tokens and ends of its own; return its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    text = [*map(" ".join, WORDS.items()), "user\n", "assistant\n", "What is\n"]
    inner.train_from_iterator(text, trainers.BpeTrainer(special_tokens=NAMES, vocab_size=80))
    if kind == "llama":
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    several = {"default": CHATML, "tool_use": "{{ tools | length }}" + CHATML}
    template = CHATML if kind == "llama" else several
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=template, model_max_length=32, **SPECIAL
    )
    special = {"bos_token_id": 1, "eos_token_id": 4, "pad_token_id": 2}
    size = {"vocab_size": inner.get_vocab_size()}
    model = llama(**size, **special) if kind == "llama" else made(n_positions=32, **size, **special)
    model.generation_config = GenerationConfig(
        **{**special, "eos_token_id": [4, 0]}, do_sample=True, top_k=7
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = folder.parent / "rows.jsonl"
    with rows.open("w") as file:
        for word, answer in WORDS.items():
            turns = [("user", f"What is {word}"), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return tokenizer


def trained(out, folder, steps, *settings):
    run = [f"run.init_from={folder}", f"run.out={out}", f"run.steps={steps}"]
    rows = f"data.source=jsonl:{out.parent / 'rows.jsonl'}"
    config = configured(
        *TRAINED, rows, f"data.validation={rows.partition('=')[2]}", *run, *settings
    )
    run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False))
    return out


def answers(folder, adapter=None):
    """Return how each question is answered by generate of transformers, special tokens included."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter or folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    texts = []
    for word in WORDS:
        asked = [{"role": "user", "content": f"What is {word}"}]
        prompt = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0]
        texts.append(tokenizer.decode(tokens[prompt["input_ids"].shape[1] :]).replace(" ", ""))
    return texts


def said(folder):
    """What transformers reads beside the tensors."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder).to_diff_dict()
    generation.pop("transformers_version")
    return {
        "special": tokenizer.special_tokens_map,
        "class": type(tokenizer).__name__,
        "ids": [getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")],
        "generation": generation,
        "tokens": tokenizer("red is <s> x").input_ids,
        "template": tokenizer.chat_template,
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_fine_tuned_folder_keeps_what_it_said_and_stops(kind, tmp_path):
    folder = tmp_path / "theirs"
    saved(folder, kind)
    run = trained(tmp_path / "run", folder, 60, "optimizer.lr=0.01")
    export(run, kind, tmp_path / "whole", "float32", 10**9, [])
    assert said(tmp_path / "whole") == said(folder)
    assert answers(tmp_path / "whole") == [f"{answer}<|im_end|>" for answer in WORDS.values()]
    targets = "q_proj,v_proj,up_proj" if kind == "llama" else "c_attn,c_fc"
    lora = ["lora.rank=4", f"lora.targets={targets}", "optimizer.lr=0.01"]
    tuned = trained(tmp_path / "tuned", run, 3, *lora)  # the base is the run
    export(tuned, kind, tmp_path / "merged", "float32", 10**9, [], merge=True)
    assert said(tmp_path / "merged") == said(folder)
    assert answers(tmp_path / "merged") == answers(tmp_path / "whole")
    export(tuned, "peft", tmp_path / "adapter", "float32", 10**9, [])
    assert answers(tmp_path / "whole", tmp_path / "adapter") == answers(tmp_path / "whole")
    for path in folder.rglob("*.*"):
        if "token" in path.name or path.suffix == ".jinja":
            for out in ("whole", "merged", "adapter"):
                copy = (tmp_path / out / path.relative_to(folder)).read_bytes()
                # The run reads fewer tokens than the folder.
                longest = b'"model_max_length": 32', b'"model_max_length": 24'
                assert copy == path.read_bytes().replace(*longest), path.name


@pytest.mark.parametrize("names", ["", "tokenizer_config.json", "chat_template.jinja"])
def test_the_template_beside_adapters_is_read_before_that_of_their_base(names, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tokenizer = saved(base, "llama")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    settings = [f"run.init_from={base}", f"lora.init_from={adapter}", "data.source=jsonl:x"]
    if names:
        tokenizer.chat_template = "{{ bos_token }}" + CHATML
        tokenizer.save_pretrained(adapter, save_jinja_files="jinja" in names)
        if "jinja" in names:
            (adapter / "tokenizer_config.json").unlink()
    turns = [{"role": "user", "content": "What is red"}]
    wanted = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    for config in (from_folder(adapter, settings[:1]), configured(*settings)):
        with open_template(config.data.template) as template:
            assert template.write(Conversation(turns), True) == wanted


def loss_of(folder, data):
    """The loss that `eval --data` of a run or of a folder computes."""
    settings = [f"data.source=jsonl:{data}", f"data.validation=jsonl:{data}", "device.kind=cpu"]

    def evaluated(own):
        job = open_run(own, folder, lambda: from_folder(folder, settings))
        return job.trainer.evaluate(job.data)[0]

    return run_ranks(1, evaluated)[0]


def test_a_folder_is_used_where_a_run_is(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, rows = tmp_path / "theirs", tmp_path / "rows.jsonl"
    saved(folder, "llama")
    for path in folder.glob("*config.json"):  # Its random model writes any token at any place.
        path.write_text(path.read_text().replace("4,\n    0", "70,\n    71"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = (folder / "config.json").read_text()
    longer = config.replace('max_position_embeddings": 32', 'max_position_embeddings": 5000')
    (folder / "config.json").write_text(longer)
    prompt = "What is red"
    wanted = model.generate(
        **tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=9
    )[0]
    greedy = ["--tokens", 9, "--temperature", 0]
    done = mpitrain("generate", folder, "--prompt", prompt, "--json", "--ignore-eos", *greedy)
    count = len(tokenizer(prompt).input_ids)
    assert json.loads(done.stdout)["tokens"] == wanted[count:].tolist(), done.stderr
    note = "5000 tokens, but 4096 are taken: --context 5000 takes all"
    assert done.stderr.count(note) == 1
    done = mpitrain("generate", folder, "--prompt", prompt, "--context", 5000, *greedy)
    assert not done.returncode and "are taken" not in done.stderr
    (folder / "config.json").write_text(config)
    lora = ["lora.rank=2", "lora.targets=q_proj,v_proj", "optimizer.lr=0.1"]
    tuned = trained(tmp_path / "tuned", folder, 3, *lora)
    (adapter,) = (export(tuned, "", None, "float32", 10**9, []).folder,)
    merged = export(tuned, "", None, "float32", 10**9, [], merge=True).folder
    assert (adapter.name, merged.name) == ("peft", "llama")
    losses = [loss_of(one, rows) for one in (tuned, adapter, merged)]
    assert max(losses) - min(losses) <= 1e-5 and abs(loss_of(folder, rows) - losses[0]) > 0.01
    says = {"input": f"{prompt}\n"}
    answer = mpitrain("chat", tuned, *greedy, **says).stdout
    for chat in (
        launch(2, "chat", adapter, "--tp", 2, *greedy, **says),
        mpitrain("chat", merged, *greedy, **says),
    ):
        assert chat.stdout == answer and answer.strip() and not chat.returncode, chat.stderr


FOLDERLESS = {
    "Name some: --data SOURCE.": ["eval", "theirs"],
    "Leave it out.": ["eval", "theirs", "--data", "jsonl:rows.jsonl", "--best"],
    "mpitrain generate": ["predict", "theirs", "--data", "jsonl:rows.jsonl", "--out", "y.npy"],
    "There is no run in": ["chat", "theirs/.."],
}
"""What is said of a call."""


def test_a_folder_has_no_data_and_no_checkpoints(tmp_path):
    saved(tmp_path / "theirs", "llama")
    said, _ = calls_of_one_start(1, [*FOLDERLESS.values()], tmp_path, code=2)
    for says, text in zip(FOLDERLESS, said, strict=True):
        assert text.count(says) == 1 and "Traceback" not in text, text


def test_a_model_from_nothing_ends_with_the_token_that_ends_its_answers(tmp_path):
    saved(tmp_path / "theirs", "llama")
    tokenizer = tmp_path / "theirs/tokenizer.json"
    shape = ["model.kind=llama", "model.layers=2", "model.width=24", "model.heads=4"]
    own = [f"data.tokenizer={tokenizer}", f"data.template={CHATML}", "optimizer.lr=0.01"]
    run = trained(tmp_path / "run", "", 80, *shape, *own)
    export(run, "llama", tmp_path / "out", "float32", 10**9, [])
    found = said(tmp_path / "out")
    assert found["special"]["eos_token"] == "<|im_end|>" and found["ids"][1] == 4
    assert answers(tmp_path / "out") == [f"{answer}<|im_end|>" for answer in WORDS.values()]


def test_another_template_ends_with_its_own_token_too(tmp_path):
    saved(tmp_path / "theirs", "llama")
    own = CHATML.replace("im_end", "endoftext")
    run = trained(tmp_path / "run", tmp_path / "theirs", 1, f"data.template={own}")
    export(run, "llama", tmp_path / "out", "float32", 10**9, [])
    found, before = said(tmp_path / "out"), said(tmp_path / "theirs")
    assert found["template"] == own
    assert found["generation"] == {**before["generation"], "eos_token_id": [4, 0, 5]}
    assert found["special"] == before["special"]
