"""A text that people write may begin with a byte-order mark: it means the same with it."""

import json

import pytest

from mpitrain.cli.launch.hosts import host_lines
from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning, write_tuning
from mpitrain.config import read_toml
from mpitrain.config.plugins import module_of
from mpitrain.data import open_source
from mpitrain.data.arrays import table
from mpitrain.data.documents import Form, texts
from mpitrain.data.tasks import read_tasks
from mpitrain.data.token_files import noted_dtype
from mpitrain.data.tokenizer import BYTES_FILE, read_tokenizer
from mpitrain.errors import DataError
from mpitrain.files import BYTE_ORDER_MARK
from mpitrain.formats.chat import chat_template
from mpitrain.formats.companions import companions
from mpitrain.formats.folder import weight_map
from mpitrain.ops.cuda.tiles import TILES, FastestTile, Tiling, read_tiles, write_tiles
from mpitrain.pipeline.schedule_files import EXAMPLE, read_plan
from mpitrain.run.generate import read_prompts


def rows(name):
    """Read the first held-out row of a source that is a file."""

    def read(path):
        x, y = open_source(f"{name}:{path}", 24, "float32").held_out_rows([0])
        return x.tolist(), y.tolist()

    return read


def labelled(path):
    source = open_source(f"jsonl:{path}", 8, "float32", form="texts")
    return [part.tolist() for part in source.held_out_rows([0])]


def documents(mark):
    return lambda path: [*texts([path], Form(0.2, 0, "text", mark))]


PAIR = json.dumps({"prompt": "a", "answer": "b"})
TEXTS = "one line\n" * 30
FILES = {
    "a configuration": ("job.toml", "[run]\nseed = 3\n", read_toml),
    "text": ("book.txt", TEXTS, rows("text")),
    "a text to prepare": ("in.txt", TEXTS, documents("")),
    "documents": ("in.txt", TEXTS, documents("\n")),
    "lines": ("in.jsonl", '{"text": "a"}\n{"text": "b"}\n', documents("")),
    "an array": ("in.json", '[{"text": "a"}]', documents("")),
    "conversations": ("in.jsonl", f"{PAIR}\n{PAIR}\n", rows("jsonl")),
    "labelled texts": (
        "in.jsonl",
        "".join(f'{{"text": "a", "label": {n % 2}}}\n' for n in range(9)),
        labelled,
    ),
    "a table": ("in.csv", "a,y\n1,2\n3,4\n", lambda path: table(f"csv:{path}:y").x.tolist()),
    "tasks": ("tasks.jsonl", '{"context": "a", "choices": ["b", "c"], "answer": 0}\n', read_tasks),
    "prompts": ("prompts.txt", "One\nTwo\n", read_prompts),
    "prompts in lines of JSON": ("prompts.jsonl", '{"prompt": "One"}\n', read_prompts),
    "a tokenizer": (
        "tokenizer.json",
        BYTES_FILE.decode(),
        lambda path: read_tokenizer(str(path)).data,
    ),
    "a meta.json": ("meta.json", '{"dtype": "uint32"}', noted_dtype),
    "a chat template": ("chat_template.jinja", "{{ a }}", lambda path: chat_template(path.parent)),
    "the settings of a folder": (
        "tokenizer_config.json",
        '{"chat_template": "{{ bos_token }}", "bos_token": "<s>"}',
        lambda path: (chat_template(path.parent), companions(path.parent)),
    ),
    "an index of tensors": ("a.json", '{"weight_map": {"a": "b"}}', lambda path: weight_map(path)),
    "hosts": ("hosts", "a slots=2\nb slots=2\n", lambda path: host_lines(path, "--hostfile")),
    "a schedule": ("own.json", EXAMPLE, read_plan),
    "a plugin": ("mine.py", "A = 3\n", lambda path: module_of(str(path)).A),
}


def tuning(path):
    write_tuning(path, DEFAULT)


def tiles(path):
    write_tiles(path, "a device", [FastestTile("float32", "NT", 8, 8, 8, Tiling(TILES[0], 1))])


WRITTEN = {
    "a tuning": ("tuning.json", tuning, read_tuning),
    "a table of tiles": ("tiles.json", tiles, lambda path: read_tiles(path).measured),
}


@pytest.mark.parametrize("name", [*FILES, *WRITTEN])
def test_a_text_means_the_same_with_a_byte_order_mark(tmp_path, name):
    if name in FILES:
        file, text, read = FILES[name]
        path = tmp_path / file
        path.write_text(text)
    else:
        file, write, read = WRITTEN[name]
        path = tmp_path / file
        write(path)
    truth = read(path)
    path.write_bytes(BYTE_ORDER_MARK + path.read_bytes())
    assert read(path) == truth


def test_a_text_of_a_byte_order_mark_is_empty(tmp_path):
    (tmp_path / "text").write_bytes(BYTE_ORDER_MARK)
    with pytest.raises(DataError, match="is empty"):
        open_source(f"text:{tmp_path}/text", 8, "float32")
