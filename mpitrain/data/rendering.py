"""A conversation as text: one row or several, with the characters of its answers; the program that runs Jinja.

A chat template comes from another person, and may loop for ever or fill memory. So Jinja runs in a
child process with limits. The child runs this file alone, which imports nothing else of the package.
"""

import json
import random
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

ASSISTANT = "assistant"
Message = Mapping[str, Any]
"""A message with the keys role and content, perhaps with more."""
Span = tuple[int, int]
"""The first character, and the one after the last."""
Writing = Callable[[Sequence[Message], bool], tuple[str, list[Span] | None]]
"""(messages, whether the assistant writes next) -> the text, and what the tag `generation` marks in
it; None: the template does not have this tag. ValueError for messages that it does not take.
"""
SECONDS, PER_MESSAGE = 1.0, 0.01
"""Seconds of the processor that a template may take at once; how many of them come back with each message."""
MEMORY = 1 << 29
"""The most bytes of address space of the child."""
TEXT, GROWTH = 1 << 20, 8
"""A text has at most so many characters, and so many more for each byte of its messages."""
REASON = 300
"""The largest number of characters of a reason."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys of a message for thoughts; as in transformers, a template finds them under the first two."""


class Rendered(NamedTuple):
    """The text of a row.

    spans      the characters of each answer, with the template's text after it; one that ends behind
               the text has all tokens until there
    is_tagged  whether the tag `generation` of the template marks them
    follows    whether the row before is of the same conversation
    is_text    whether its template is one of texts without a template: the tokenizer takes what follows
               the tokens that begin a text for a whole text
    """

    text: str
    spans: Sequence[Span]
    is_tagged: bool = False
    follows: bool = False
    is_text: bool = False


def rows_of(write: Writing, messages: Sequence[Message], prompt: int = 0) -> list[Rendered]:
    """Return the rows of a conversation.

    It is one row, unless the template writes earlier messages in another way when others follow.
    Then each answer is the end of a row of its own, whose text is that of the messages until there.
    A message of the weight 0 is no answer.

    prompt  as `Conversation` says; then there is one answer, all text behind that of these messages
    """
    text, tagged = write(messages, False)
    if not text:
        raise ValueError("it has no text")
    if prompt:
        asked = write(messages[:prompt], True)[0]
        if not text.startswith(asked):
            raise ValueError(
                "its template writes the prompt in another way when the completion follows"
            )
        return [Rendered(text, [(len(asked), len(text) + 1)])]
    if tagged is not None:
        for number in [n for n, message in enumerate(messages) if message.get("weight") == 0][::-1]:
            first, stop = (len(write(messages[: number + n], False)[1] or ()) for n in (0, 1))
            del tagged[first:stop]
        return [Rendered(text, tagged, True)]
    rows, end, is_one = list[Rendered](), 0, True
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT and message.get("weight") != 0:
            asked, answered = (write(messages[: number + n], not n)[0] for n in (0, 1))
            if not answered.startswith(asked):
                raise ValueError(
                    f"its template writes the answer in message {number + 1} in another way than it asks for it; "
                    "mark answers in the template by {% generation %} and {% endgeneration %}"
                )
            rows.append(Rendered(answered, [(len(asked), len(answered))], follows=bool(rows)))
            is_one &= text.startswith(answered) and len(asked) >= end
            end = len(answered)
    if is_one:
        return [Rendered(text, [span for row in rows for span in row.spans])]
    return rows


class _Limit(Exception):
    """What a template does beyond its limits, as the end of a sentence."""


def serve() -> None:
    """Compile the template in the first line of the input, and answer each further line; the main function of the child.

    A line is a list of [messages, tools, prompt, asks], where asks is null for the rows of a conversation, or
    whether the assistant writes next. Each has a line as its answer.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    sys.path += sys.argv[1:]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    text, day = json.loads(sys.stdin.buffer.readline())
    compiled = _answer("wrong", lambda: _Compiled(text, date.fromisoformat(day)))
    left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
    for line in sys.stdin.buffer:
        for messages, tools, prompt, asks in json.loads(line.decode(errors="surrogatepass")):
            left = min(left, SECONDS) + PER_MESSAGE * (1 + len(messages))
            signal.setitimer(signal.ITIMER_PROF, left)
            answer = compiled
            if jinja := compiled.get("is"):
                answer = _answer("refused", lambda: jinja.answer(messages, tools, prompt, asks))  # noqa: B023
            try:
                data = json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass")
            except MemoryError:
                data = json.dumps({"limit": _MEMORY}).encode()
            left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
            sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()


_MEMORY = f"needs more than {MEMORY >> 20} MiB of memory"


def _answer(mistake: str, get: Callable[[], Any]) -> dict[str, Any]:
    """Return {"is": the value}, {"limit": what the template does beyond its limits}, or {`mistake`: reason}."""
    try:
        return {"is": get()}
    except _Limit as error:
        return {"limit": str(error)}
    except MemoryError:
        return {"limit": _MEMORY}
    except RecursionError:
        return {"limit": "is nested too deeply, or calls itself without an end"}
    except Exception as error:  # Of Jinja, or of any method that the template calls.
        reason = " ".join(str(error).split())[:REASON] or type(error).__name__
        return {mistake: reason.rstrip("."), "line": getattr(error, "lineno", 0)}


class _Compiled:
    """A Jinja template in the environment of transformers; no other code can run in it."""

    def __init__(self, text: str, day: date):
        from jinja2 import TemplateError, nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace

        jinja = self
        self.has_tag, self.length, self.spans = False, 0, list[Span]()

        class Generation(Extension):
            """The tag `generation`: its text is an answer."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                jinja.has_tag = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                call = self.call_method("_note")
                return nodes.CallBlock(call, [], [], body).set_lineno(line)

            def _note(self, caller: Callable[[], str]) -> str:
                text = caller()
                jinja.spans.append((jinja.length, jinja.length + len(text)))
                return text

        class Names(Namespace):
            """A namespace; as in transformers, without names that begin with an underscore."""

            def __init__(*args: Any, **values: Any):  # So a value may have the name self.
                own, *rest = args
                for name in (values := dict(*rest, **values)):
                    Names._check(name)
                Namespace.__init__(own, values)

            def __setitem__(self, name: str, value: Any) -> None:
                Names._check(name)
                super().__setitem__(name, value)

            @staticmethod
            def _check(name: Any) -> None:
                if isinstance(name, str) and name.startswith("_"):
                    raise SecurityError(f"a namespace has no name like {name!r}")

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = as_json
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": day.strftime,
            "namespace": Names,
        }
        self._template = environment.from_string(text)
        self._draws = "random" in text or "lipsum" in text

    def answer(self, messages: list[Any], tools: Any, prompt: int, asks: bool | None) -> Any:
        most = TEXT + GROWTH * len(json.dumps([messages, tools]))

        def write(messages: Sequence[Message], asks: bool) -> tuple[str, list[Span] | None]:
            if self._draws:
                random.seed(0)  # Each rank writes the same text.
            parts, self.length, self.spans = list[str](), 0, list[Span]()
            for part in self._template.generate(
                messages=messages, tools=tools, documents=None, add_generation_prompt=asks
            ):
                parts.append(part)
                self.length += len(part)
            if self.length > most:
                raise _Limit(f"writes {self.length:,} characters")
            text = "".join(parts)
            text.encode()  # A lone surrogate is refused.
            return text, self.spans if self.has_tag else None

        messages = [_with_thoughts(message) for message in messages]
        return rows_of(write, messages, prompt) if asks is None else write(messages, asks)[0]


def _with_thoughts(message: Message) -> Message:
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = next((message[key] for key in REASONING if key in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


if __name__ == "__main__":
    serve()
