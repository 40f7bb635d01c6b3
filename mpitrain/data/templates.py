"""Chat templates: they turn the messages of a conversation into text, and this into answers and the rest.

A template is a text with {role} and {content}, which writes each message, or a Jinja template of
HuggingFace, which writes all messages as `apply_chat_template` of transformers does.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError

USER, ASSISTANT = "user", "assistant"
PLAIN = "{role}: {content}\n\n"
"""The template of conversations for which neither data.template nor a folder has one."""
PROBE = "\ue000"
"""A content that no template has in its own text."""
DATE = "strftime_now"
"""The function of transformers that makes a text depend on the day."""
Turn = tuple[str, str]
"""The role and the content of a message."""
Template = Callable[[Sequence[Turn], bool], str]
"""(messages, whether the assistant writes next) -> text; ValueError for messages it does not take."""


class Rendered(NamedTuple):
    """The text of a conversation.

    cuts  the answers are text[cuts[0] : cuts[1]], text[cuts[2] : cuts[3]] and so on, each with the
          template's text after it
    """

    text: str
    cuts: Sequence[int]

    @property
    def pieces(self) -> list[str]:
        """The text, cut before and after each answer: every second piece is an answer."""
        bounds = [0, *self.cuts, len(self.text)]
        return [self.text[start:stop] for start, stop in pairwise(bounds)]


def rendered(template: Template, turns: Sequence[Turn]) -> Rendered:
    """Return the text of a conversation, and its answers.

    raises  ValueError if the template refuses the messages, or if the text of the first messages
            is not the beginning of the whole text
    """
    whole, cuts = template(turns, False), list[int]()
    for number, (role, _) in enumerate(turns):
        if role == ASSISTANT:
            for part in (template(turns[:number], True), template(turns[: number + 1], False)):
                if not whole.startswith(part) or len(part) < (cuts[-1] if cuts else 0):
                    raise ValueError(
                        f"its template writes the first {number + 1} message(s) in another way than in the whole conversation"
                    )
                cuts.append(len(part))
    return Rendered(whole, cuts)


def end_of_answer(template: Template) -> str:
    """Return the text after an answer, without white space around it unless it has only that."""
    text = template([(USER, "?"), (ASSISTANT, PROBE)], False).partition(PROBE)[2]
    return text.strip() or text


def is_jinja(text: str) -> bool:
    return "{%" in text or "{{" in text


@cache
def open_template(text: str) -> Template:
    """Make a template of data.template; ConfigError if it is none."""
    return _jinja(text) if is_jinja(text) else _plain(text)


def _plain(text: str) -> Template:
    head, tail = _checked(text)

    def render(turns: Sequence[Turn], is_next: bool) -> str:
        texts = [head.replace("{role}", role) + content + tail for role, content in turns]
        return "".join(texts) + (head.replace("{role}", ASSISTANT) if is_next else "")

    return render


def _checked(text: str) -> tuple[str, str]:
    """Return the text before and after {content}; ConfigError unless this is there once."""
    head, _, tail = text.partition("{content}")
    if text.count("{content}") != 1 or "{role}" in tail:
        raise ConfigError(
            f"data.template must have one {{content}}, and {{role}} only before it, but is {text!r}.",
            "For example: {role}: {content}\\n\\n",
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


def _jinja(text: str) -> Template:
    """Compile a Jinja template in the environment of transformers; no other code can run in it."""
    try:
        from jinja2 import TemplateError, meta
        from jinja2.exceptions import SecurityError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(
            "A chat template in Jinja needs the package jinja2, which is not installed.",
            "pip install 'mpitrain[text]', or set data.template to a text such as "
            f"{PLAIN.encode('unicode_escape').decode()}",
        ) from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    try:
        if DATE in meta.find_undeclared_variables(environment.parse(text)):
            raise ConfigError(
                f"A chat template must give the same text on every day, but this one calls {DATE}.",
                "Write the date into a copy of the template, and name that by data.template.",
            )
        template = environment.from_string(text)
    except TemplateError as error:
        raise ConfigError(
            f"data.template must be a Jinja template of transformers, but line {getattr(error, 'lineno', 0)} is wrong: "
            f"{str(error.message).rstrip('.')}.",
            "Correct it, or set data.template to another one.",
        ) from None

    def render(turns: Sequence[Turn], is_next: bool) -> str:
        messages: Any = [{"role": role, "content": content} for role, content in turns]
        try:
            return template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=is_next
            )
        except (TemplateError, SecurityError, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"its template says: {str(error) or type(error).__name__}") from None

    return render


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
