"""The text after a prompt: shown as soon as no stop text can cut it off, and cut at the first one."""

import pytest

from mpitrain.data.tokenizer import ByteTokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.run.generate import Continuation, check_room, encoded, read_prompts, stop_bytes


def pieces(tokens, stops, tokenizer=None):
    """Each piece of text, the rest, and whether a stop ended it."""
    one, found = Continuation(tokenizer, [1], stops), []
    for token in tokens:
        found.append(one.add(token))
        if one.stopped:
            break
    return found, one.rest(), one.stopped


@pytest.mark.parametrize(
    "text, stops, wanted",
    [
        ("abc", [], ([b"a", b"b", b"c"], b"", False)),
        ("abc", ["zz"], ([b"a", b"b", b"c"], b"", False)),
        ("abXbabYq", ["bab"], ([b"a", b"", b"bX", b"", b"", b""], b"", True)),
        ("aXYbXYZ", ["XYZ", "q"], ([b"a", b"", b"", b"XYb", b"", b"", b""], b"", True)),
        ("aXY", ["XYZ"], ([b"a", b"", b""], b"XY", False)),
        ("aab", ["aab", "a"], ([b""], b"", True)),
    ],
)
def test_text_before_a_possible_stop_is_shown_at_once(text, stops, wanted):
    assert pieces(text.encode(), stops, ByteTokenizer()) == wanted


def test_a_stop_of_numbers_is_whole_numbers():
    assert pieces([1, 170, 17], ["17"]) == ([b" 1", b" 170", b""], b"", True)
    assert pieces([17, 4], [" 17  4 "]) == ([b"", b""], b"", True)
    assert pieces([17, 40, 5], ["17 4"]) == ([b"", b" 17 40", b" 5"], b"", False)


def test_a_stop_has_characters_and_for_numbers_digits():
    for stop, tokenizer in (("", ByteTokenizer()), ("", None), ("x", None), ("1_0", None)):
        with pytest.raises(ConfigError):
            stop_bytes(stop, tokenizer)


def test_files_of_prompts_have_a_prompt_a_line(tmp_path):
    lines, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_bytes("one\r\n\n  two \ngröße".encode())
    objects.write_text('{"prompt": "a\\nb", "more": 1}\n\n{"prompt": " "}\n')
    assert read_prompts(lines) == ["one", "  two ", "größe"]
    assert read_prompts(objects) == ["a\nb", " "]
    for wrong in (
        b"",
        b"\n \n",
        b"\xff",
        b"{}",
        b"x",
        b"[1]",
        b'{"prompt": 1}',
        b'{"prompt": NaN}',
    ):
        objects.write_bytes(wrong)
        with pytest.raises(DataError):
            read_prompts(objects)


def test_prompts_become_tokens_the_model_knows():
    assert encoded("a\udcff", ByteTokenizer(), 256) == [97, 255]
    assert encoded("3 +4\t5", None, 6) == [3, 4, 5] and encoded(" ", None, 6) == [0]
    for prompt in ("", "6", "-1", "x"):
        with pytest.raises(ConfigError):
            encoded(prompt, None, 6)


def test_a_prompt_leaves_room_within_the_context():
    check_room([[1, 2], [1]], 3)
    with pytest.raises(ConfigError):
        check_room([[1, 2, 3], [1]], 3)
