"""The table "In and out" of the page of formats: each command and each expression runs, and does what the row says."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import mpitrain as package
from tests.huggingface.test_companions import NAMES, WORDS, saved
from tests.processes import mpitrain

PAGE = Path(package.__file__).parent / "formats/README.md"
QUICK = "--set batch.size=6 --set optimizer.warmup=0 --set optimizer.weight_decay=0"
QUICK += " --set run.eval_every=-1 --set device.kind=cpu --set data.validation={}"
SMALL = "--set model.layers=2 --set model.width=32 --set model.context=256"


def rows_of_page():
    """{first cell: the code in each other cell}."""
    part = PAGE.read_text().partition("## In and out")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {
        cells[0]: [code for cell in cells[1:] for code in re.findall("`([^`]+)`", cell)]
        for cells in lines[2:]
    }


ROWS = rows_of_page()


def bert(folder):
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *WORDS.values()]
    tokenizer = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {
        f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")
    }
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(names),
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=40,
            max_position_embeddings=16,
            id2label=dict(enumerate(WORDS)),
        )
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all files that the table names."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("in_and_out")
    saved(place / "llama", "llama")
    saved(place / "gpt2", "gpt2")
    bert(place / "bert")
    torch.manual_seed(0)
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(place / "llama"), lora)
    model.save_pretrained(place / "adapter")
    config = json.loads((place / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "llama"
    (place / "adapter/adapter_config.json").write_text(json.dumps(config))

    def lines(name, made):
        (place / name).write_text("".join(json.dumps(made(*row)) + "\n" for row in WORDS.items()))

    def said(key, role, content, names):
        return lambda asked, answer: {
            key: [{role: names[0], content: asked}, {role: names[1], content: answer}]
        }

    lines("messages.jsonl", said("messages", "role", "content", ("user", "assistant")))
    lines("sharegpt.jsonl", said("conversations", "from", "value", ("human", "gpt")))
    turns = said("m", "role", "content", ("user", "assistant"))
    lines(
        "trl.jsonl",
        lambda *row: dict(
            zip(("prompt", "completion"), ([t] for t in turns(*row)["m"]), strict=True)
        ),
    )
    lines("labelled.jsonl", lambda asked, answer: {"text": answer, "label": asked})
    alpaca = [
        {"instruction": asked, "input": "", "output": answer} for asked, answer in WORDS.items()
    ]
    (place / "alpaca.json").write_text(json.dumps(alpaca))
    return place


def opened(code, place):
    """Evaluate an expression of the last column, its paths in `place`."""
    import peft
    import transformers

    code = re.sub(r'"((?:runs/)?(?:llama|gpt2|bert|adapter|bytes)[\w/]*)"', rf'"{place}/\1"', code)
    loaded = transformers.AutoModelForCausalLM.from_pretrained
    names = {"pipeline": transformers.pipeline, "PeftModel": peft.PeftModel, "loaded": loaded}
    return eval(code, names)  # a line of our own page


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table(row, place):
    import transformers

    *commands, expression = ROWS[row]
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "train":
            data = words[words.index("--data") + 1]
            # The pooler of a BERT saturates at a higher rate.
            words += ["--lr", "0.002" if "bert" in command else "0.01"]
            words += shlex.split(QUICK.format(data) + (f" {SMALL}" if "bytes" in command else ""))
        done = mpitrain(*words, cwd=place, input="red\n")
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    made = opened(expression, place)
    if "text-classification" in expression:
        predict = ["--data", "jsonl:labelled.jsonl", "--out", "y.npy"]
        assert mpitrain("predict", "runs/bert", *predict, cwd=place).returncode == 0
        here = [[*WORDS][number] for number in np.load(place / "y.npy")]
        assert [made(answer)[0]["label"] for answer in WORDS.values()] == here
        assert len({*here}) > 1
        return
    if "bytes" in expression:
        assert made.config.vocab_size == 256
        return
    if expression.startswith("Peft"):
        folder = place / re.findall('"([^"]+)"', expression)[-1]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        made = transformers.pipeline("text-generation", made, tokenizer=tokenizer)
    ends = made.tokenizer.convert_tokens_to_ids(NAMES[4])
    for asked, answer in WORDS.items():
        asks = [{"role": "user", "content": asked}]
        prompt = made.tokenizer.apply_chat_template(
            asks, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = made.model.generate(**prompt, do_sample=False, max_new_tokens=12)[0].tolist()
        assert tokens[-1] == ends and tokens.count(ends) == 2, (
            row
        )  # that of the question, and its own
        answered = made(asks, do_sample=False, max_new_tokens=12)[0]["generated_text"][-1]
        assert answered["content"].strip() == answer, row
