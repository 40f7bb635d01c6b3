"""Chat templates: they turn the messages of a conversation into text.

A template is a text with {role} and {content}, which writes each message, or a Jinja template of
HuggingFace, which writes all messages as `apply_chat_template` of transformers does.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain.data import rendering
from mpitrain.data.rendering import ASSISTANT, Message, Rendered, rows_of
from mpitrain.errors import ConfigError
from mpitrain.machine.process import environment_of_one

USER = "user"
PLAIN = "{role}:\n{content}\n\n"
"""The template of conversations for which neither data.template nor a folder has one.

A blank before {content} would be part of the first token of an answer, but a prompt would end with it.
"""
PROBE = "\ue000"
"""A content that no template has in its own text."""
DATE = "strftime_now"
"""The function of transformers that makes a text depend on the day."""
DAY = f"{{{{# {DATE}: {{}} #}}}}\n"
"""The comment before a template that gives the text of one day. Jinja drops the line break, as after a block."""
_DAY = re.compile(re.escape(DAY.format("@")).replace("@", r"(\d{4}-\d\d-\d\d)"))
BATCH = 64
"""Conversations that the process of Jinja gets at once."""


class Conversation(NamedTuple):
    """A conversation.

    tools   that its row offers, as JSON describes them
    prompt  the number of messages that are the prompt, whose completion alone is trained on; 0: all
            answers are
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    prompt: int = 0


class Template(Protocol):
    def write(self, conversation: Conversation, asks: bool) -> str:
        """Return the text of a conversation.

        asks    whether the assistant writes next
        raises  ValueError with the end of a sentence, if the template refuses the messages;
                ConfigError if it is no template, or exceeds its limits
        """

    def rows(self, conversations: Iterable[Conversation]) -> Iterator[list[Rendered]]:
        """Yield the rows of each conversation; errors as those of `write`."""


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@cache
def end_of_answer(text: str) -> str:
    """Return what the template of data.template writes after an answer, without white space around it unless it has only that."""
    turns = [message(USER, "?"), message(ASSISTANT, PROBE)]
    with open_template(text) as template:
        end = template.write(Conversation(turns), False).partition(PROBE)[2]
    return end.strip() or end


def is_jinja(text: str) -> bool:
    return "{%" in text or "{{" in text


@contextmanager
def open_template(text: str) -> Iterator[Template]:
    """Make a template of data.template; ConfigError if it is none, perhaps when it is first used."""
    if not is_jinja(text):
        yield _Plain(text)
        return
    with _child() as child:
        yield _Jinja(text, child)


class _Plain(Template):
    def __init__(self, text: str):
        self._head, self._tail = _checked(text)

    def write(self, conversation: Conversation, asks: bool) -> str:
        return self._written(conversation.messages, asks)[0]

    def rows(self, conversations: Iterable[Conversation]) -> Iterator[list[Rendered]]:
        return (rows_of(self._written, one.messages, one.prompt) for one in conversations)

    def _written(self, messages: Sequence[Message], asks: bool) -> tuple[str, None]:
        texts = [
            self._head.replace("{role}", one["role"]) + one["content"] + self._tail
            for one in messages
        ]
        return "".join(texts) + (self._head.replace("{role}", ASSISTANT) if asks else ""), None


class _Jinja(Template):
    """A template in Jinja, which a child process runs."""

    def __init__(self, text: str, child: Any):
        self._child = child
        self._send([text, day_of(text) or date.today().isoformat()])

    def write(self, conversation: Conversation, asks: bool) -> str:
        (text,) = self._answers([[*conversation, asks]])
        return str(text)

    def rows(self, conversations: Iterable[Conversation]) -> Iterator[list[Rendered]]:
        following = iter(conversations)
        while batch := [*islice(following, BATCH)]:
            for rows in self._answers([[*one, None] for one in batch]):
                yield [Rendered(*row) for row in rows]

    def _send(self, value: Any) -> None:
        # As in transformers, a value that JSON does not have, such as a date of Parquet, is its type.
        text = json.dumps(value, ensure_ascii=False, default=lambda one: f"<{type(one).__name__}>")
        data = text.encode(errors="surrogatepass")
        with suppress(BrokenPipeError):  # `_answers` says why the child ended.
            self._child.stdin.write(data + b"\n")
            self._child.stdin.flush()

    def _answers(self, conversations: list[Any]) -> Iterator[Any]:
        self._send(conversations)
        for _ in conversations:
            if not (line := self._child.stdout.readline()).endswith(b"\n"):
                if (ended := self._child.wait()) == -signal.SIGPROF:
                    raise _beyond(f"takes more than {rendering.SECONDS:g} s")
                raise _beyond(f"ended its process with {ended}")
            answer = json.loads(line.decode(errors="surrogatepass"))
            if "limit" in answer:
                raise _beyond(answer["limit"])
            if "refused" in answer:
                raise ValueError(f"its template says: {answer['refused']}")
            if "wrong" in answer:
                raise ConfigError(
                    f"data.template must be a Jinja template of transformers, but line {answer['line']} is wrong: "
                    f"{answer['wrong']}.",
                    "Correct it, or set data.template to another one.",
                )
            yield answer["is"]


@contextmanager
def _child() -> Iterator[Any]:
    """Start the process that runs Jinja."""
    folders = []
    for package in ("jinja2", "markupsafe"):
        if (spec := find_spec(package)) is None or not spec.origin:
            raise ConfigError(
                f"A chat template in Jinja needs the package {package}, which is not installed.",
                "pip install 'mpitrain[text]', or set data.template to a text such as "
                f"{PLAIN.encode('unicode_escape').decode()}",
            )
        folders.append(str(Path(spec.origin).parents[1]))
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", rendering.__file__, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment_of_one(),
            start_new_session=True,  # Ctrl-C is for this process.
        )
    except OSError as error:
        raise ConfigError(
            f"A chat template in Jinja runs in its own process, but {sys.executable or 'Python'} cannot start: {error}.",
            "Raise the limits of processes and memory (ulimit -u, ulimit -v), or set data.template to a text.",
        ) from None
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _beyond(does: str) -> ConfigError:
    return ConfigError(
        f"A chat template must write a text within {rendering.SECONDS:g} s and {rendering.MEMORY >> 20} MiB of memory, "
        f"but this one {does}.",
        "Set data.template to another one, or correct it: look for a loop or a recursion without an end.",
    )


def _checked(text: str) -> tuple[str, str]:
    """Return the text before and after {content}; ConfigError unless this is there once."""
    head, _, tail = text.partition("{content}")
    if text.count("{content}") != 1 or "{role}" in tail:
        raise ConfigError(
            f"data.template must have one {{content}}, and {{role}} only before it, but is {text!r}.",
            "For example: {role}:\\n{content}\\n\\n",
        )
    return head, tail


def as_jinja(text: str) -> str:
    """Return a template as Jinja; in transformers it gives the same text."""
    if is_jinja(text):
        return text
    head, tail = _checked(text)

    def quoted(part: str) -> str:
        return json.dumps(part, ensure_ascii=False)

    *before, last = head.split("{role}")
    role = "".join(f"{quoted(part)} + message['role'] + " for part in before) + quoted(last)
    asks = quoted(head.replace("{role}", ASSISTANT))
    return (
        f"{{% for message in messages %}}{{{{ {role} + message['content'] + {quoted(tail)} }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {asks} }}}}{{% endif %}}"
    )


def with_names(text: str, names: dict[str, str]) -> str:
    """Return a Jinja template that knows the names of special tokens, such as bos_token.

    names  {variable: name of the token}
    """
    used = {name: value for name, value in names.items() if re.search(rf"\b{name}\b", text)}
    # The line break is no part of the text: Jinja drops the first one after a block (trim_blocks).
    sets = "".join(
        f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n"
        for name, value in used.items()
    )
    return sets + text


def day_of(text: str) -> str:
    """Return the day of which a template gives the text, in ISO format; empty: of each day that day's."""
    return day[1] if (day := _DAY.search(text)) else ""


def without_day(text: str) -> str:
    return _DAY.sub("", text)


def with_day(text: str, day: str) -> str:
    """Return a template that gives the text of one day, if it asks for the date and has no day yet."""
    if not is_jinja(text) or DATE not in text or day_of(text):
        return text
    return DAY.format(day) + text
