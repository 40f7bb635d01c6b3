"""Tokens of conversations and prompts, and the tokens that count: those of `apply_chat_template` of transformers."""

import random
from functools import cache

import pytest

from mpitrain.config import Data
from mpitrain.data.conversations import Recognised
from mpitrain.data.instructions import COUNTS, encoded, written
from mpitrain.data.records import DataRecord
from mpitrain.data.templates import Conversation, message, open_template, with_names
from mpitrain.data.tokenizer import ends_of_text, open_tokenizer, read_tokenizer
from mpitrain.formats.chat import chat_template
from mpitrain.run.generate import asked

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

COUNT = 60
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = [
    *NAMES.values(),
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|assistant|>", "<start_of_turn>", "<end_of_turn>"),
]


def turns(head, said):
    """A template that writes `head` and `said` of each message; [ and ] are around what an assistant writes."""
    return (
        f"{{% for m in messages %}}{{{{ {head} }}}}{{% if m.role == 'assistant' %}}[{{{{ {said} }}}}]"
        f"{{% else %}}{{{{ {said} }}}}{{% endif %}}{{% endfor %}}"
    )


IM = turns(r"'<|im_start|>' + m.role + '\n'", r"m.content + '<|im_end|>' + '\n'")


def asks(text):
    return f"{{% if add_generation_prompt %}}{{{{ '{text}' }}}}{{% endif %}}"


def system(text):
    return f"{{{{ '<|im_start|>system\n{text}<|im_end|>\n' }}}}"


INSTRUCTS = "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER' }}{% else %}[{{ ANSWER }}]{% endif %}{% endfor %}"
TEMPLATES = {
    "ChatML": IM + asks(r"<|im_start|>assistant\n"),
    "SmolLM": system("You are SmolLM.") + IM + asks(r"<|im_start|>assistant\n"),
    "Qwen2": system("You are a helpful assistant.") + IM + asks(r"<|im_start|>assistant\n"),
    "Llama 3": "{{ bos_token }}"
    + turns(
        r"'<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'",
        "m.content | trim + '<|eot_id|>'",
    )
    + asks(r"<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "Gemma": "{{ bos_token }}"
    + turns(
        r"'<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'",
        r"m.content | trim + '<end_of_turn>\n'",
    )
    + asks(r"<start_of_turn>model\n"),
    "Zephyr": turns(r"'<|' + m.role + '|>\n'", r"m.content + eos_token + '\n'")
    + asks(r"<|assistant|>\n"),
    "Llama 2": INSTRUCTS.replace(
        "'USER'", "bos_token + '[INST] ' + m.content.strip() + ' [/INST]'"
    ).replace("[{{ ANSWER }}]", "[{{ ' ' + m.content.strip() + ' ' + eos_token }}]"),
    "Mistral": "{{ bos_token }}"
    + INSTRUCTS.replace("'USER'", "'[INST] ' + m.content + ' [/INST]'").replace(
        "ANSWER", "m.content + eos_token"
    ),
}


def conversations(count):
    """Conversations of words, blanks and line breaks in any order."""
    draw = random.Random(0)
    words = [
        "is",
        "Is",
        "",
        "no\n",
        "5",
        "+",
        "é",
        "▁",
        "_",
        "<b>",
        "\t",
        "\n\n",
        "😀",
        "a",
        "an",
        "(x)",
    ]

    def text():
        return " ".join(draw.choices(words, k=draw.randint(1, 6)))

    return [
        [message(role, text()) for _ in range(draw.randint(1, 3)) for role in ("user", "assistant")]
        for _ in range(count)
    ]


TOKENIZERS = ("ByteLevel", "Prepend", "Metaspace first", "Metaspace always")


@pytest.fixture(scope="module")
def tokenizers():
    """{name: a tokenizer of this kind}, trained on the text of the conversations."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = {}
    for name in TOKENIZERS:
        inner = Tokenizer(models.BPE(unk_token=None if name == "ByteLevel" else "<unk>"))
        if name == "ByteLevel":
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        elif name == "Prepend":
            steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            inner.normalizer = normalizers.Sequence(steps)
        else:
            scheme = name.partition(" ")[2]
            inner.pre_tokenizer = pre_tokenizers.Metaspace(
                prepend_scheme=scheme, split=scheme == "always"
            )
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<unk>", *SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if name == "ByteLevel" else [],
            show_progress=False,
        )
        inner.train_from_iterator(
            [one["content"] for spoken in conversations(COUNT) for one in spoken[:-1]] * 4, trainer
        )
        made[name] = inner
    return made


@cache
def rows_of(text):
    """The rows of all conversations by a template, which no tokenizer changes."""
    with open_template(with_names(text, NAMES)) as write:
        return [*write.rows(Conversation(one) for one in conversations(COUNT))]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_and_what_counts_are_those_of_transformers(tokenizers, name, template):
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers[name]
    ours = open_tokenizer(inner.to_str().encode(), name)
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **NAMES)
    tagged = (
        TEMPLATES[template]
        .replace("[{{", "{% generation %}{{")
        .replace("}}]", "}}{% endgeneration %}")
    )
    plain = TEMPLATES[template].replace("[{{", "{{").replace("}}]", "}}")
    theirs.chat_template = tagged
    spoken = conversations(COUNT)
    wanted = theirs.apply_chat_template(spoken, return_dict=True, return_assistant_tokens_mask=True)
    for text in (tagged, plain):
        for (row,), tokens, counts in zip(
            rows_of(text), wanted["input_ids"], wanted["assistant_masks"], strict=True
        ):
            own, marks = encoded(ours, row)
            assert own.tolist() == tokens
            assert (marks & COUNTS).tolist() == counts
    data = Data(template=with_names(plain, NAMES))
    for one in spoken[:1]:
        prompt = theirs.apply_chat_template(one[:-1], add_generation_prompt=True)["input_ids"]
        assert asked(ours, data, one[:-1]) == prompt


@pytest.mark.parametrize("kind", ["texts", "lists of messages"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_completions_of_trl_are_its_tokens_and_those_that_count(tokenizers, tmp_path, name, kind):
    """As TRL's SFTTrainer: those count that differ from the prompt's, and the token of the end follows a text."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(tokenizers[name].to_str())
    begin, end = NAMES.values()
    inner.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, inner.token_to_id(begin))]
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **NAMES)
    theirs.chat_template = TEMPLATES["Zephyr"].replace("[{{", "{{").replace("}}]", "}}")
    theirs.save_pretrained(tmp_path)
    template = chat_template(tmp_path)
    ours = read_tokenizer(str(tmp_path / "tokenizer.json"))
    recognised = Recognised(template, ends_of_text(str(tmp_path / "tokenizer.json"), ours))
    records, wanted = [], []
    for one in conversations(COUNT):
        prompt, completion = one[:-1], one[-1:]
        if kind == "texts":
            prompt, completion = (part[-1]["content"] for part in (prompt, completion))
            tokens = theirs(f"{prompt}{completion}{end}")["input_ids"]
            asks = theirs(prompt)["input_ids"]
        else:
            tokens = theirs.apply_chat_template(one)["input_ids"]
            asks = theirs.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        records.append({"prompt": prompt, "completion": completion})
        wanted.append((tokens, [0] * len(asks) + [1] * (len(tokens) - len(asks)), asks))
    read = [DataRecord("", number, value) for number, value in enumerate(records)]
    count = 0
    for (_, (row,)), (tokens, counts, asks) in zip(
        written(read, recognised, tmp_path), wanted, strict=True
    ):
        own, marks = encoded(ours, row)
        assert own.tolist() == tokens, row.text
        if asks == tokens[: len(asks)]:  # Otherwise TRL warns that tokens cross the border.
            assert (marks & COUNTS).tolist() == counts, row.text
            count += 1
    assert count > COUNT // 2
