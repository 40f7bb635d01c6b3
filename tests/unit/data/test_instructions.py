"""Instruction data: prompts are masked, answers are not, and a wrong line is named."""

import json

import numpy as np
import pytest

from mpitrain.config import Config
from mpitrain.data import DOCUMENT_END, IGNORED, Reading, open_source
from mpitrain.data.documents import Form
from mpitrain.data.prepare import Options, prepare, processes
from mpitrain.data.rows import first_fit
from mpitrain.data.templates import PLAIN
from mpitrain.data.tokenizer import ByteTokenizer, read_tokenizer, train_tokenizer
from mpitrain.errors import ConfigError, DataError

PAIRS = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(12)]


def written(folder, lines):
    path = folder / "data.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return f"jsonl:{path}"


def opened(folder, examples, context=40, **reading):
    lines = map(json.dumps, examples)
    return open_source(
        written(folder, lines), context, "float32", reading=Reading()._replace(**reading)
    )


def text_of(tokens):
    return bytes(tokens.astype(np.uint8)).decode()


def test_the_answer_alone_counts(tmp_path):
    source = opened(tmp_path, PAIRS)
    inputs, targets = source.batch(0, 0, 11, range(11))
    assert source.samples == 11 and source.held_out == 1
    for x, y in zip(inputs, targets, strict=True):
        whole = text_of(x).rstrip("\0")
        number = int(whole.removeprefix("user:\n").partition(" ")[0])
        assert f"user:\n{number} + 1?\n\nassistant:\n{number + 1}\n\n".startswith(whole)
        assert text_of(y[y != IGNORED]) == f"{number + 1}\n\n"
        (counted,) = np.nonzero(y != IGNORED)
        assert (np.diff(counted) == 1).all() and whole[: counted[0] + 1].endswith("assistant:\n")


def test_messages_are_the_same_conversations_as_pairs(tmp_path):
    messages = [
        {
            "messages": [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["answer"]},
            ]
        }
        for pair in PAIRS
    ]
    pairs, same = (
        opened(tmp_path, examples).batch(1, 2, 5, range(5)) for examples in (PAIRS, messages)
    )
    assert all(np.array_equal(one, other) for one, other in zip(pairs, same, strict=True))


def test_every_turn_of_the_assistant_counts(tmp_path):
    roles = ("system", "user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"{role}{n}"} for n, role in enumerate(roles)]
    source = opened(tmp_path, [{"messages": turns}] * 2, 100, template="<{role}>{content}|")
    inputs, targets = source.held_out_rows([0])
    assert text_of(targets[targets != IGNORED]) == "assistant2|assistant4|"
    start = "".join(f"<{turn['role']}>{turn['content']}|" for turn in turns[:3])
    assert text_of(inputs[0]).startswith(start)


def test_a_long_conversation_is_cut_and_counted(tmp_path):
    source = opened(tmp_path, PAIRS, 26)
    assert source.cut == 11
    targets = source.batch(0, 0, 11, range(11))[1]
    assert targets.shape == (11, 26) and (targets != IGNORED).any()


def test_an_epoch_has_each_conversation_once(tmp_path):
    source = opened(tmp_path, PAIRS)
    whole = source.batch(3, 0, 22, range(22))[0]
    assert len({row.tobytes() for row in whole[:11]}) == 11
    assert np.array_equal(source.batch(3, 9, 4, range(1, 4), before=5)[0], whole[6:9])


def answers(targets):
    """Return the targets that count in some rows, one list for each run without a gap."""
    texts = [bytes(np.where(row < 0, 0, row).astype(np.uint8)).split(b"\0") for row in targets]
    return sorted(run for runs in texts for run in runs if run)


def conversations(inputs, targets):
    """The tokens of some rows, cut before each conversation."""
    last = np.where(targets[:, -1:] < 0, 0, targets[:, -1:])
    rows = np.concatenate([inputs, last], 1).astype(np.uint8)
    texts = [bytes(row).rstrip(b"\0").split(b"user:\n") for row in rows]
    return sorted(text for row in texts for text in row if text)


@pytest.mark.parametrize("context", [33, 40, 64, 97, 500])
def test_packed_rows_train_on_the_same_targets_once_an_epoch(tmp_path, context):
    pairs = [
        {"prompt": f"{n} + 1?", "answer": str(n + 1) * (n % 5 + 1)} for n in range(0, 1480, 37)
    ]
    alone, packed = (opened(tmp_path, pairs, context, packing=packing) for packing in (False, True))
    one, other = (
        source.batch(0, 0, source.samples, range(source.samples)) for source in (alone, packed)
    )
    assert answers(one[1]) == answers(other[1]) and conversations(*one) == conversations(*other)
    assert len(answers(one[1])) == alone.samples == packed.conversations == 36
    assert (packed.samples < alone.samples / 8) == (context == 500)
    assert np.array_equal(alone.held_out_rows([0, 1])[0], packed.held_out_rows([0, 1])[0])
    ranks = [packed.batch(3, 2, 6, range(start, start + 2))[0] for start in (0, 2, 4)]
    assert np.array_equal(np.concatenate(ranks), packed.batch(3, 2, 6, range(6))[0])


def test_a_packed_row_of_one_conversation_is_that_row(tmp_path):
    long = [{"prompt": "a" * 9, "answer": "b" * (20 + n)} for n in range(6)]
    alone, packed = (opened(tmp_path, long, 45, packing=packing) for packing in (False, True))
    rows = [
        {(x.tobytes(), y.tobytes()) for x, y in zip(*source.batch(0, 0, 5, range(5)), strict=True)}
        for source in (alone, packed)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 301])
def test_first_fit_puts_each_sequence_once_into_a_row_with_room(count):
    lengths = np.random.default_rng(count).integers(0, 60, count).tolist()
    rows = first_fit(lengths, 50)
    assert sorted(number for row in rows for number in row) == [*range(count)]
    sums = [sum(min(lengths[number], 50) for number in row) for row in rows]
    assert all(total <= 50 for total in sums)
    for number, row in enumerate(rows):  # Each found no room in any earlier row.
        smallest = min(min(lengths[one], 50) for one in row)
        assert all(total + smallest > 50 for total in sums[:number]) or not smallest


def test_the_defaults_of_the_keys_are_those_of_the_reading():
    data = Config().data
    assert Reading(*(getattr(data, key) for key in Reading._fields)) == Reading()


IM = "{% for m in messages %}{{ '<|im|>' + m.role + ':' + m.content + '<|end|>' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}{{ '<|im|>assistant:' }}{% endif %}"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A BPE tokenizer with the special tokens of IM."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_tokenizer([f"user:\n{n} + 1? assistant:\n{n}\n\n" * 9 for n in range(40)], 300, path)
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(["<|im|>", "<|end|>"])
    inner.save(str(path))
    return path


@pytest.mark.parametrize("template", ["", "{role}>{content}<|end|>", IM + ASKS], ids=str)
@pytest.mark.parametrize("packing", [False, True])
def test_tokens_of_conversations_are_those_of_their_bytes(tmp_path, bpe, template, packing):
    """Lines and prepared files have the same rows: the text and the answers of the rows of bytes."""
    if template.startswith("{%"):
        pytest.importorskip("jinja2")
    tokenizer = read_tokenizer(str(bpe))
    spoken = [{"messages": [{"role": "user", "content": "?"}]}, *PAIRS]
    attend = "document" if packing else "window"
    how = {"template": template, "packing": packing, "attend": attend}
    lines = opened(tmp_path, spoken, 120, tokenizer=str(bpe), **how)
    form = Form(0, 0, "text", "", template or PLAIN)
    prepare(Options([tmp_path / "data.jsonl"], tokenizer, -1, form), tmp_path, processes(1))
    files = open_source(
        f"tokens:{tmp_path}/train.bin",
        120,
        "float32",
        reading=Reading()._replace(packing=packing, attend=attend),
    )
    assert files.template == lines.template == (template or PLAIN)
    assert lines.amounts.pop("records") == "messages and prompt and answer"
    assert lines.amounts == files.amounts and lines.amounts["conversations"] == 12
    found = [source.batch(0, 0, lines.samples, range(lines.samples)) for source in (lines, files)]
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    inputs, targets = found[0]
    assert (targets == DOCUMENT_END).sum() == 11 * packing
    counted = [row[row >= 0].tolist() for row in targets]
    ends = {"": "\n\n"}.get(template, "<|end|>")
    assert sorted(b"".join(map(tokenizer.decode, counted)).decode().split(ends)[:-1]) == sorted(
        str(n + 1) for n in range(11)
    )
    text = b"".join(tokenizer.decode(row[row > 0].tolist()) for row in inputs).decode()
    assert all(f"{pair['prompt']}" in text for pair in PAIRS[:-1])
    special = {tokenizer.named("<|end|>")} if template else set()
    assert special <= set(inputs.ravel().tolist())
    assert (lines.amounts["without_answer"], lines.amounts["first_without_answer"]) == (1, 1)
    with pytest.raises(DataError, match=r"tokens, but data\.vocabulary"):
        open_source(
            f"jsonl:{tmp_path}/data.jsonl", 120, "float32", 299, reading=Reading(tokenizer=str(bpe))
        )


LAST = "{% for m in messages %}{{ m.role + ':' + (m.content if loop.last or m.role == 'user' else '-') + '|' }}{% endfor %}"


@pytest.mark.parametrize("packing", [False, True])
def test_answers_that_a_template_rewrites_have_rows_of_their_own_in_lines_and_files(
    tmp_path, packing
):
    """The last answer is written in another way than earlier ones; one conversation has one answer."""
    pytest.importorskip("jinja2")
    asks = LAST + "{% if add_generation_prompt %}assistant:{% endif %}"
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]
    spoken = [*[{"messages": turns}] * 9, {"messages": turns[:2]}]
    lines = opened(tmp_path, spoken, 60, template=asks, packing=packing)
    form = Form(0, 0, "text", "", asks)
    prepare(Options([tmp_path / "data.jsonl"], ByteTokenizer(), -1, form), tmp_path, processes(1))
    reading = Reading()._replace(packing=packing)
    files = open_source(f"tokens:{tmp_path}/train.bin", 60, "float32", reading=reading)
    for source in (lines, files):
        assert (source.amounts["conversations"], source.held_out) == (18, 1)
        assert source.amounts["rewritten_conversations"] == 9
        inputs, targets = source.batch(0, 0, source.samples, range(source.samples))
        assert answers(targets) == [b"a|"] * 18
        both = b"user:u|assistant:-|user:u|assistant:a|"
        assert sum(bytes(row.astype(np.uint8)).count(both) for row in inputs) == 9


GOOD = json.dumps(PAIRS[0])


def test_a_line_that_is_no_json_names_its_column(tmp_path):
    with pytest.raises(DataError, match=r"in column 2 \("):
        open_source(written(tmp_path, [GOOD, "{prompt: 1}"]), 40, "float32")


def test_the_message_of_a_line_with_many_keys_lists_some(tmp_path):
    line = json.dumps(dict.fromkeys(map(str, range(50_000)), 1))
    with pytest.raises(DataError, match=r"'8', '9', \.\.\.\.") as raised:
        open_source(written(tmp_path, [GOOD, line]), 40, "float32")
    assert len(raised.value.law) < 1000


def test_a_conversation_without_text_is_refused_not_left_out(tmp_path):
    empty = {"prompt": "", "completion": ""}
    with pytest.raises(DataError, match=r"Line 2 .*has no text"):
        opened(tmp_path, [{"prompt": "a", "completion": "b"}, empty] * 2)


@pytest.mark.parametrize("template", ["", "{% for m in messages %}{{ '\\ud83d' }}{% endfor %}"])
def test_text_that_is_no_unicode_is_one_error_with_its_place(tmp_path, bpe, template):
    if template:
        pytest.importorskip("jinja2")
    lone = PAIRS[0] if template else {"prompt": "\ud83d", "answer": "b"}
    with pytest.raises(DataError, match=r"Line 1 .*surrogates"):
        opened(tmp_path, [lone, *PAIRS], template=template, tokenizer=bpe)


@pytest.mark.parametrize("lines", [[], ["", " "], [GOOD]])
def test_a_file_with_fewer_than_two_conversations_is_refused(tmp_path, lines):
    with pytest.raises(DataError, match="at least 2"):
        open_source(written(tmp_path, lines), 40, "float32")


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_whose_answer_is_behind_the_context_are_counted_and_not_packed(
    tmp_path, packing
):
    late = {"prompt": "?" * 60, "answer": "late"}
    source = opened(tmp_path, [PAIRS[0], late, *PAIRS[1:], late, *PAIRS], packing=packing)
    assert (source.amounts["without_answer"], source.amounts["first_without_answer"]) == (2, 2)
    assert source.amounts["conversations"] == 24
    inputs, targets = source.batch(0, 0, source.samples, range(source.samples))
    assert len(answers(targets)) == 22
    assert sum(b"????" in bytes(row.astype(np.uint8)) for row in inputs) == 2 * (not packing)


def test_a_second_file_of_conversations_is_what_is_held_out(tmp_path):
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", map(json.dumps, PAIRS[:1]))
    name = written(tmp_path, map(json.dumps, PAIRS[1:]))
    source = open_source(name, 40, "float32", validation=other)
    assert (source.conversations, source.samples, source.held_out) == (11, 11, 1)
    assert text_of(source.held_out_rows([0])[0][0]).startswith("user:\n0 + 1?")
    texts = [text_of(row) for row in source.batch(0, 0, 11, range(11))[0]]
    assert not any(text.startswith("user:\n0 + 1?") for text in texts)
    with pytest.raises(DataError, match="at least 1"):
        open_source(name, 40, "float32", validation=written(tmp_path / "other", []))
    with pytest.raises(ConfigError, match="jsonl:FILE like"):
        open_source(name, 40, "float32", validation="text:a")


def test_answers_behind_the_context_are_refused(tmp_path):
    for packing in (False, True):
        with pytest.raises(DataError, match="first 5 tokens"):
            opened(tmp_path, PAIRS, 4, packing=packing)


@pytest.mark.parametrize("template", ["text", "{role}", "{content}{content}", "{content}{role}"])
def test_a_template_without_one_content_is_refused(tmp_path, template):
    with pytest.raises(ConfigError, match=r"data\.template"):
        opened(tmp_path, PAIRS, template=template)


@pytest.mark.parametrize("key, value", [("order", "epochs"), ("separator", 3), ("dtype", "uint32")])
def test_keys_of_other_sources_are_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=rf"data\.{key}"):
        opened(tmp_path, PAIRS, **{key: value})
