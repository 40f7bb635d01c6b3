"""Conversations as transformers writes them: the same text from the same template, there and back."""
# ruff: noqa: E501

import contextlib
import json
import tomllib
from datetime import date
from itertools import pairwise
from pathlib import Path
from runpy import run_path

import pytest

from mpitrain.data.templates import (
    PLAIN,
    Conversation,
    as_jinja,
    day_of,
    end_of_answer,
    message,
    open_template,
    with_day,
    without_day,
)
from mpitrain.data.tokenizer import ByteTokenizer
from mpitrain.errors import ConfigError
from mpitrain.formats.chat import chat_template, template_files
from mpitrain.formats.writing import tokenizer_files
from mpitrain.run.export import export
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.huggingface.models import loaded
from tests.runs import TINY, go, records
from tests.training import configured

pytest.importorskip("jinja2")

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
IM = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
# The templates of public models, some shortened by their cases of tools.
TEMPLATES = {
    "ChatML": f"{{% for message in messages %}}{IM}{{% endfor %}}{ASKS}",
    "Qwen 1.5": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful assistant<|im_end|>\n' }}{% endif %}" + IM + "{% endfor %}" + ASKS,
    "Qwen 2.5, without tools": "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0]['content'] "
    "+ '<|im_end|>\\n' }}\n{%- else %}\n    {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}\n{%- endif %}\n"
    '{%- for message in messages %}\n    {%- if (message.role == "user") or (message.role == "system" and not loop.first) '
    "or (message.role == \"assistant\" and not message.tool_calls) %}\n        {{- '<|im_start|>' + message.role + '\\n' + "
    "message.content + '<|im_end|>' + '\\n' }}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n",
    "Llama 2": "{% for message in messages %}"
    + ALTERNATE
    + "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
    "message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() "
    "+ ' ' + eos_token }}{% endif %}{% endfor %}",
    "Llama 3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "Mistral 7B": "{{ bos_token }}{% for message in messages %}"
    + ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + "
    "message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    "Mixtral": "{{ bos_token }}{% for message in messages %}"
    + ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + "
    "message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token + ' ' }}{% endif %}{% endfor %}",
    "Zephyr": "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == "
    "'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n{% if loop.last and "
    "add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "Gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = "
    "message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "Phi 3": "{% for message in messages %}{{'<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "Vicuna": "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}",
    "Alpaca": "{% for message in messages %}{% if message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'].strip() + "
    "'\n\n' }}{% elif message['role'] == 'assistant' %}{{ '### Response:\n' + message['content'].strip() + eos_token + '\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    "OpenChat 3.5": "{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ': ' + "
    "message['content'] + '<|end_of_turn|>'}}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}",
    "SmolLM 2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    + IM
    + "{% endfor %}"
    + ASKS,
    "StableLM 2": "{% for message in messages %}{% if message['role'] in ['user', 'assistant', 'system'] %}{{ '<|' + message['role'] "
    "+ '|>\n' + message['content'] + '<|endoftext|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|assistant|>\n' }}{% endif %}",
    "DeepSeek LLM": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}{% elif "
    "message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "Falcon": "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{{ message['role'].capitalize() + ': ' + "
    "message['content'] | trim }}{% endfor %}{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}",
    "OLMo": "{{ eos_token }}{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "Granite 3": "{%- for message in messages %}\n    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + "
    "message['content'] + '<|end_of_text|>\n' }}\n  {%- if loop.last and add_generation_prompt %}\n    {{- '<|start_of_role|>"
    "assistant<|end_of_role|>' }}\n  {%- endif %}\n{%- endfor %}",
    "Yi": "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% endif %}{% if system_message is "
    "defined %}{{ system_message }}{% endif %}{% for message in messages %}{% set content = message['content'] %}{% if "
    "message['role'] == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n<|im_start|>assistant\n' }}{% elif "
    "message['role'] == 'assistant' %}{{ content + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}",
    "ours": PLAIN,
    "ours, with quotes": "<\"{role}'>\\{content}</é😀\n",
}
TURNS = [
    message("user", "What's 2 + 3?\n"),
    message("assistant", '5 "é😀"'),
    message("user", "<b>"),
    message("assistant", "ok."),
]


def written(text, turns, asks=False, **more):
    with open_template(text) as template:
        return template.write(Conversation(turns, **more), asks)


def rows(text, *conversations):
    with open_template(text) as template:
        return [*template.rows(Conversation(turns) for turns in conversations)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(ByteTokenizer(), 64).items():
        (path / name).write_bytes(content)
    settings = json.loads((path / "tokenizer_config.json").read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, **NAMES}))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_the_text_of_transformers(folder, name):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = as_jinja(TEMPLATES[name])
    (folder / "chat_template.jinja").write_text(theirs.chat_template)
    template = TEMPLATES[name] if name.startswith("ours") else chat_template(folder)
    with open_template(template) as opened:
        for count in (1, 2, 3, 4):
            for asks in (False, True):
                wanted = theirs.apply_chat_template(
                    TURNS[:count], tokenize=False, add_generation_prompt=asks
                )
                assert opened.write(Conversation(TURNS[:count]), asks) == wanted
        ((row,),) = opened.rows([Conversation(TURNS)])
    assert row.text == wanted.removesuffix(wanted[len(row.text) :]) and not row.is_tagged
    bounds = [0, *(bound for span in row.spans for bound in span), len(row.text)]
    pieces = [row.text[start:stop] for start, stop in pairwise(bounds)]
    assert ['5 "é😀"' in pieces[1], "ok." in pieces[3]] == [True, True] and len(pieces) == 5
    assert not any(answer in "".join(pieces[::2]) for answer in ("ok.", 'é😀"'))
    assert end_of_answer(template) in pieces[1] and "?" not in end_of_answer(template)
    exported = template_files(chat_template(folder))["chat_template.jinja"].decode()
    theirs.chat_template = exported
    assert theirs.apply_chat_template(TURNS, tokenize=False) == row.text


@pytest.mark.parametrize(
    "text, reason", [("{% for m in messages %}", "line 1"), ("{% generatio %}", "generatio")]
)
def test_a_template_that_is_none_is_refused_with_its_line(text, reason):
    with pytest.raises(ConfigError, match=reason):
        written(text, TURNS)


def test_messages_that_a_template_refuses_are_named():
    with pytest.raises(ValueError, match="roles must alternate"):
        rows(TEMPLATES["Llama 2"], TURNS[1:])


def test_a_template_can_run_no_code():
    for text in (
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
    ):
        with pytest.raises(ValueError, match=r"unsafe|namespace"):
            written(text, TURNS)


# As Qwen3 writes messages: thoughts stay only in the last answer, which always has some.
THINKING = (
    "{% if tools %}{{ '# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '\n' }}{% endif %}"
    "{{ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\n' }}"
    "{% for m in messages %}{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thoughts = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (thoughts if '</think>' in m.content or m.reasoning_content else '') + '\n</think>\n\n' }}"
    "{% endif %}{{ content + '<|im_end|>\n' }}{% endfor %}" + ASKS
)
THOUGHT = [
    message("user", "2 + 3?"),
    message("assistant", "<think>\nfive\n</think>\n\n5"),
    message("user", "And 4 + 3?"),
    {**message("assistant", "7"), "reasoning_content": "seven"},
    message("user", "Thanks."),
]
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "<é> 'quoted'"}}]


def test_a_template_that_rewrites_answers_makes_each_answer_the_end_of_a_row(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, chat_template=THINKING)
    with open_template(THINKING) as template:
        ((first, second),) = template.rows([Conversation(THOUGHT, TOOLS)])
    for row, count in ((first, 2), (second, 4)):
        text, prompt = (
            theirs.apply_chat_template(
                THOUGHT[:n], tools=TOOLS, tokenize=False, add_generation_prompt=n < count
            )
            for n in (count, count - 1)
        )
        assert row.text == text and [*row.spans] == [[len(prompt), len(text)]]
    assert [first.follows, second.follows] == [False, True]
    assert "five" in first.text and "five" not in second.text and "seven" in second.text


@pytest.mark.parametrize("has_files", [False, True])
def test_the_template_tool_use_of_a_folder_writes_conversations_with_tools(
    folder, tmp_path, has_files
):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    tools = "\n{% if tools %}\n{{ tools | tojson }}\n{% endif %}\n{{ messages[0].content }}\n  "
    theirs.chat_template = {"default": TEMPLATES["ChatML"] + "\n", "tool_use": tools}
    theirs.save_pretrained(tmp_path, save_jinja_files=has_files)
    for more in ({}, {"tools": TOOLS}):
        wanted = theirs.apply_chat_template(TURNS, tokenize=False, **more)
        assert written(chat_template(tmp_path), TURNS, **more) == wanted


def test_values_that_json_does_not_have_reach_a_template_as_their_types(folder):
    from transformers import AutoTokenizer

    text = "{% for m in messages %}{{ m.content ~ m.more }}{% endfor %}"
    theirs = AutoTokenizer.from_pretrained(folder, chat_template=text)
    turns = [{**message("user", "?"), "more": [date(2031, 2, 1), b"\xff", {"at": {1}}]}]
    assert written(text, turns) == theirs.apply_chat_template(turns, tokenize=False)


def test_a_template_without_a_prompt_that_begins_its_answer_is_refused_with_a_way_out():
    text = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    with pytest.raises(ValueError, match=r"message 2 .*generation %\}"):
        rows(text, TURNS)


def test_a_template_keeps_its_day_in_a_run(folder):
    day = with_day(THINKING, "2031-02-01")
    assert "Today: 01 Feb 2031\n" in written(day, TURNS)
    assert (day_of(day), without_day(day), with_day(day, "2032-01-01")) == (
        "2031-02-01",
        THINKING,
        day,
    )
    assert with_day(TEMPLATES["ChatML"], "2031-02-01") == TEMPLATES["ChatML"]
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, chat_template=day)
    assert written(THINKING, TURNS) == theirs.apply_chat_template(TURNS, tokenize=False)


@pytest.mark.parametrize(
    "text, reason",
    [
        (f"{'{% for i in range(99999) %}' * 2}{'{% endfor %}' * 2}", "takes more than 1 s"),
        ("{{ [0] * 10 ** 10 }}", "memory"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "memory",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{{ 'x' * 10 ** 7 }}", "10,000,000 characters"),
    ],
)
def test_a_template_without_an_end_is_one_error(text, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        rows(text, TURNS)
    assert len(str(raised.value)) < 500


def test_a_resume_keeps_the_day_on_which_the_run_began(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 4)
    run = tmp_path / "run"
    data = [f"data.source=jsonl:{tmp_path}/a.jsonl", f"data.template={THINKING}"]
    settings = [*TINY, *data, "model.context=99", "run.eval_every=-1", f"run.out={run}"]
    go(1, [*settings, "run.steps=1"])
    path, today = run / "config.toml", date.today().isoformat()
    path.write_text(
        path.read_text().replace(f"{{# strftime_now: {today} #}}", "{# strftime_now: 2031-02-01 #}")
    )
    go(2, [*settings, "run.steps=2"], "yes")
    assert day_of(tomllib.loads(path.read_text())["data"]["template"]) == "2031-02-01"
    changed = [record["changed"] for record in records(tmp_path) if "changed" in record]
    assert all("data.template" not in keys for keys in changed) and changed
    export(run, "gpt2", tmp_path / "gpt2", "float32", 10**9, [])
    assert (tmp_path / "gpt2/chat_template.jinja").read_text() == THINKING
    next_run = configured(*settings[:-1], f"run.init_from={run}", "run.out=")
    assert next_run.data.template == THINKING


CONTEXT, SIZE, STEPS = 40, 16, 50
FIFTY = [
    f"model.context={CONTEXT}",
    f"batch.size={SIZE}",
    f"run.steps={STEPS}",
    "run.log_every=1",
    "run.eval_every=-1",
    "device.kind=cpu",
]


def labels_of(folder, lines):
    """{tokens of a row: its labels}, by the template and the masks of transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = "{{ m.content + '<|im_end|>\n' }}"
    answer = f"{{% generation %}}{said}{{% endgeneration %}}"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{said}{{% endif %}}{{% endfor %}}"
    )
    spoken = [json.loads(line)["messages"] for line in lines]
    found = tokenizer.apply_chat_template(
        spoken, return_dict=True, return_assistant_tokens_mask=True
    )
    labels = {}
    for tokens, mask in zip(found["input_ids"], found["assistant_masks"], strict=True):
        rest = CONTEXT - len(tokens)
        counted = [token if counts else -100 for token, counts in zip(tokens, mask, strict=True)]
        labels[(*tokens, *[0] * rest)] = counted + [-100] * rest
    return labels


def assert_same_losses(model, run, data, settings):
    """Train our way, and this model of transformers in a loop on the same rows."""
    import torch

    settings = [*FIFTY, *settings, f"data.source=jsonl:{data}", f"run.out={run}"]
    config = configured(*settings, f"run.init_from={run.parent}/gpt2")
    source = run_ranks(2, lambda own: train(own, lambda: config))[0].job.data
    labels = labels_of(run.parent / "gpt2", data.open())
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if (one.ndim > 1) == (decay > 0)], "weight_decay": decay}
        for decay in (0.1, 0.0)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    assert len(steps) == STEPS and steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    for step, record in enumerate(steps):
        tokens = torch.from_numpy(source.batch(0, step, SIZE, range(SIZE), SIZE * step)[0])
        chosen = torch.tensor([labels[tuple(row)] for row in tokens.tolist()])
        loss = model(tokens, labels=chosen).loss
        assert abs(record["loss"] - loss.item()) <= 1e-4 * loss.item(), step
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = record["lr"]
        optimizer.step()


def test_a_whole_fine_tune_and_lora_on_it_have_the_losses_of_transformers_and_peft(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)  # of the adapters
    with contextlib.chdir(tmp_path):
        run_path(str(Path(__file__).parents[2] / "jobs/prove/sums.py"))["make"]()
    model = loaded(tmp_path / "gpt2")
    assert_same_losses(model, tmp_path / "whole", tmp_path / "sums.jsonl", ["optimizer.lr=0.002"])
    model.save_pretrained(tmp_path / "gpt2")
    layers = ["c_attn", "c_fc", "c_proj"]
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=layers, fan_in_fan_out=True)
    model = get_peft_model(model, lora).eval()
    model.save_pretrained(tmp_path / "adapters")
    settings = ["optimizer.lr=0.005", f"lora.init_from={tmp_path}/adapters"]
    assert_same_losses(model, tmp_path / "adapted", tmp_path / "words.jsonl", settings)
