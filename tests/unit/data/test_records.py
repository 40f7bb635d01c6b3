"""Records of conversations that other tools wrote: each has the meaning of its tool, in lines, an array or Parquet."""

import json
import sys

import numpy as np
import pytest

from mpitrain.cli.terminal.progress import of_records
from mpitrain.data import IGNORED, Reading, open_source
from mpitrain.data.conversations import AS_IT_IS, KINDS, Recognised
from mpitrain.data.documents import Form, first_record
from mpitrain.data.instructions import written
from mpitrain.data.prepare import Options, prepare, processes
from mpitrain.data.records import read_records
from mpitrain.data.tokenizer import ByteTokenizer, ends_of_text, read_tokenizer, train_tokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import BYTE_ORDER_MARK

TEMPLATE = "<{role}>{content}|"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def spoken(*turns, **more):
    return [{"from": name, "value": text, **more} for name, text in turns]


CALL = json.dumps({"name": "f", "arguments": {"x": 1}})
RECORDS = {
    "messages": (
        {"messages": [said("user", "a"), said("assistant", "b")], "id": 7},
        "<user>a|<assistant>b|",
        ["b|"],
    ),
    "text parts": (
        {
            "messages": [
                said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}]),
                said("assistant", [{"type": "text", "text": "b"}]),
            ]
        },
        "<user>ac|<assistant>b|",
        ["b|"],
    ),
    "a weight": (
        {
            "messages": [
                said("user", "a", name=None),
                said("assistant", "b", weight=0),
                said("user", "c"),
                said("assistant", "d", weight=1, name="Ann"),
            ],
            "prompt": "a",
        },
        "<user>a|<assistant>b|<user>c|<assistant>d|",
        ["d|"],
    ),
    "ShareGPT": (
        {
            "id": "x",
            "conversations": spoken(
                ("human", "a"), ("gpt", "b"), ("observation", "c"), ("gpt", "d")
            ),
            "system": "s",
            "tools": json.dumps([TOOL]),
        },
        "<system>s|<user>a|<assistant>b|<tool>c|<assistant>d|",
        ["b|", "d|"],
    ),
    "a system prompt in the conversation": (
        {"conversations": spoken(("system", "s"), ("human", "a"), ("gpt", "b")), "system": "other"},
        "<system>s|<user>a|<assistant>b|",
        ["b|"],
    ),
    "conversations with roles": (
        {"conversations": [said("human", "a"), said("assistant", "b")], "messages": None},
        "<user>a|<assistant>b|",
        ["b|"],
    ),
    "a call": (
        {"conversations": spoken(("human", "a"), ("function_call", CALL), ("observation", "c"))},
        f"<user>a|<assistant>{CALL}|<tool>c|",
        [f"{CALL}|"],
    ),
    "TRL's lists": (
        {
            "prompt": [said("user", "a"), said("assistant", "b"), said("user", "c")],
            "completion": [said("assistant", "d"), said("user", "e"), said("assistant", "f")],
        },
        "<user>a|<assistant>b|<user>c|<assistant>d|<user>e|<assistant>f|",
        ["d|<user>e|<assistant>f|"],
    ),
    "TRL's texts": ({"prompt": "a b", "completion": " c", "label": None}, "a b c", [" c"]),
    "a prompt and an answer": (
        {"prompt": "a", "answer": "b", "source": "x"},
        "<user>a|<assistant>b|",
        ["b|"],
    ),
    "Alpaca": (
        {"instruction": "a", "input": "c", "output": "b", "system": "s", "history": [["e", "f"]]},
        "<system>s|<user>e|<assistant>f|<user>a\nc|<assistant>b|",
        ["f|", "b|"],
    ),
    "Alpaca without an input": (
        {"instruction": "a", "input": "", "output": "b", "text": "a b"},
        "<user>a|<assistant>b|",
        ["b|"],
    ),
}


def write(path, records, kind):
    """Write a file of records as lines, lines with a byte-order mark, an array, or Parquet."""
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(records), path)
        return path
    text = json.dumps(records, indent=1) if kind == "json" else "\n".join(map(json.dumps, records))
    path.write_bytes(BYTE_ORDER_MARK * (kind != "plain") + text.encode())
    return path


def rows(path, template=TEMPLATE, ends=("", "")):
    """[(text, answers)] of each conversation of a file, and what its records are."""
    recognised = Recognised(template, ends)
    found = [
        (row.text, [row.text[start:stop] for start, stop in row.spans])
        for _, rows in written(read_records(path, "."), recognised, path)
        for row in rows
    ]
    return found, recognised


@pytest.mark.parametrize("kind", ["plain", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_meaning_of_its_tool_in_every_kind_of_file(tmp_path, name, kind):
    record, text, answers = RECORDS[name]
    found, _ = rows(write(tmp_path / "data", [record, record], kind))
    assert found == [(text, answers)] * 2


def test_records_of_which_each_has_other_keys_are_the_same_in_parquet(tmp_path):
    """Arrow gives every row the keys of any row; those that are null are none."""
    pytest.importorskip("pyarrow")
    records = [
        {
            "messages": [said("user", "a"), said("assistant", "", tool_calls=[TOOL])],
            "tools": [TOOL],
        },
        {"messages": [said("user", "a", name="Ann"), said("assistant", "b")], "id": 1},
    ]
    template = "{% for m in messages %}{{ m | tojson }}{{ tools | tojson }}{% endfor %}"
    pytest.importorskip("jinja2")
    lines, arrow = (
        [
            (record.tools, [dict(sorted(one.items())) for one in record.messages])
            for value in read_records(write(tmp_path / kind, records, kind), ".")
            for record in [Recognised(template).conversation(value.value())]
        ]
        for kind in ("plain", "parquet")
    )
    (tool,) = arrow[0][0]
    assert lines[1] == arrow[1] and tool["function"]["name"] == "f"
    assert [set(one) for one in arrow[0][1]] == [set(one) for one in lines[0][1]]


def test_keys_that_nothing_reads_are_said_once(tmp_path):
    _, found = rows(
        write(tmp_path / "data", [RECORDS[k][0] for k in ("a weight", "ShareGPT")], "plain")
    )
    words = "records are messages and ShareGPT's conversations, ignored keys prompt, name of a message, id, tools"
    assert of_records(found.facts) == words
    many = {**RECORDS["messages"][0], **dict.fromkeys(map(str, range(10, 99)), 1)}
    _, found = rows(write(tmp_path / "data", [many] * 3, "plain"))
    assert of_records(found.facts).endswith("15, 16, 17, 18, 19, ...")
    assert of_records({}) == ""


def test_a_call_of_a_tool_reaches_a_template_that_reads_it():
    pytest.importorskip("jinja2")
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    recognised = Recognised(template)
    conversation = recognised.conversation({**RECORDS["a call"][0], "tools": [TOOL]})
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert conversation.messages[1] == {**said("assistant", ""), "tool_calls": [call]}
    assert conversation.tools == [TOOL] and "ignored_keys" not in recognised.facts
    for tools in ("a tool", "[1]", {"a": 1}):
        with pytest.raises(ValueError, match="its tools are no"):
            recognised.conversation({**RECORDS["a call"][0], "tools": tools})
        assert (
            Recognised(TEMPLATE).conversation({**RECORDS["a call"][0], "tools": tools}).tools
            is None
        )
    plain = {"conversations": spoken(("human", "a"), ("function_call", "no JSON"))}
    assert recognised.conversation(plain).messages[1] == said("assistant", "no JSON")


BELOW = "Below is an instruction that describes a task"
REQUEST = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"


def test_alpaca_and_texts_without_a_template_are_those_of_their_tools(tmp_path):
    """Alpaca's own prompts; the tokens that begin and end a text as transformers and TRL add them."""
    pytest.importorskip("jinja2")
    alpaca = [
        {"instruction": "a", "input": "c", "output": "b"},
        {"instruction": "a", "output": "b"},
    ]
    path = write(tmp_path / "data", alpaca, "plain")
    for ends in (("", ""), ("<s>", "</s>")):
        found, recognised = rows(path, "", ends)
        begin, end = ends
        paired = ", paired with an input that provides further context"
        assert found == [
            (f"{begin}{BELOW}{more}{REQUEST}a{given}\n\n### Response:b{end}", [f"b{end}"])
            for more, given in ((paired, "\n\n### Input:\nc"), ("", ""))
        ]
        assert rows(path, recognised.template)[0] == found  # as a resume reads them
    texts = [{"prompt": "a", "completion": " b"}, {"prompt": "a", "completion": " b</s>"}]
    path = write(tmp_path / "data", texts, "plain")
    for given in ("", TEMPLATE):
        found, recognised = rows(path, given, ("<s>", "</s>"))
        assert found == [("<s>a b</s>", [" b</s>"])] * 2
        assert rows(path, recognised.template)[0] == found
    assert rows(path, "")[1].template == AS_IT_IS


def test_the_tokens_that_end_a_text_are_those_of_the_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    train_tokenizer([f"{n} is {n + 1}\n" for n in range(99)], 300, path)
    assert ends_of_text(str(path), read_tokenizer(str(path))) == ("", "<|endoftext|>")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(["<s>", "<|im_end|>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|im_end|>",
        special_tokens=[(name, inner.token_to_id(name)) for name in ("<s>", "<|im_end|>")],
    )
    inner.save(str(path))
    for end in ("<|im_end|>", {"content": "<|im_end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert ends_of_text(str(path), read_tokenizer(str(path))) == ("<s>", "<|im_end|>")
    assert ends_of_text("", ByteTokenizer()) == ("", "")


def test_an_unknown_record_names_the_six_that_are_known(tmp_path):
    path = write(tmp_path / "data", [{"question": "a", "chosen": "b"}], "json")
    with pytest.raises(
        DataError, match=r"Element 1 of .* its keys are 'question', 'chosen'"
    ) as raised:
        rows(path)
    assert all(kind.example in raised.value.way_out for kind in KINDS) and len(KINDS) == 6
    path = write(tmp_path / "data", [RECORDS["messages"][0], RECORDS["TRL's texts"][0]], "plain")
    with pytest.raises(
        DataError, match=r"Line 2 of .* it has TRL's .*, and those before have messages"
    ):
        rows(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_prepared_records_are_the_rows_of_the_file(tmp_path, kind, monkeypatch):
    """Chunks of few records, each of which may be the last before an interruption."""
    for room in ("documents", "records"):
        monkeypatch.setattr(f"mpitrain.data.{room}.CHUNK", 300)
    shared = [
        {"id": n, "conversations": spoken(("human", f"{n}?"), ("gpt", "yes" * (n % 5)))}
        for n in range(60)
    ]
    path = write(tmp_path / f"data.{kind}", shared, kind)
    recognised = Recognised(TEMPLATE)
    assert recognised.begin(first_record(path)) == TEMPLATE
    form = Form(0, 0, "text", "", TEMPLATE)
    options = Options([path], ByteTokenizer(), -1, form, recognised)
    prepare(options, tmp_path, processes(1))
    assert recognised.facts == {"records": "ShareGPT's conversations", "ignored_keys": ["id"]}
    reading = Reading(template=TEMPLATE)
    names = f"jsonl:{path}", f"tokens:{tmp_path}/train.bin"
    lines, tokens = (open_source(name, 40, "float32", reading=reading) for name in names)
    both = [source.batch(0, 0, 54, range(54)) for source in (lines, tokens)]
    assert all(np.array_equal(one, other) for one, other in zip(*both, strict=True))
    assert (both[0][1] != IGNORED).any() and lines.amounts["conversations"] == 54


def test_documents_may_be_an_array_with_the_name_json(tmp_path):
    documents = [{"text": f"document {n}\n", "id": n} for n in range(9)]
    form = Form(0, 0, "text", "")
    for kind in ("json", "plain"):
        folder = tmp_path / kind
        folder.mkdir()
        path = write(folder / "data.json", documents, kind)
        prepare(Options([path], ByteTokenizer(), -1, form), folder, processes(1))
        tokens = np.fromfile(folder / "train.bin", "<u2").astype("u1").tobytes()
        assert tokens == b"".join(one["text"].encode() for one in documents)
    (tmp_path / "data.json").write_text('{\n "text": "pretty"\n}')
    prepare(Options([tmp_path / "data.json"], ByteTokenizer(), -1, form), tmp_path, processes(1))
    assert (tmp_path / "train.bin").stat().st_size == 2 * len('{\n "text": "pretty"\n}')


@pytest.mark.parametrize("kind", ["plain", "json", "parquet"])
def test_labelled_texts_may_have_further_keys(tmp_path, kind):
    texts = [{"idx": n, "text": f"text {n}", "label": n % 2, "text_pair": None} for n in range(20)]
    path = write(tmp_path / "data", texts, kind)
    source = open_source(f"jsonl:{path}", 16, "float32", form="texts")
    assert source.samples == 18 and source.classes == 2
    assert of_records(source.amounts) == "ignored keys idx"


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(b"PAR1" * 3)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs the package pyarrow") as raised:
        rows(tmp_path / "data")
    assert "pip install 'mpitrain[parquet]'" in raised.value.way_out
