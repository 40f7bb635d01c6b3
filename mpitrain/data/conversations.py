"""Kinds of records with conversations, of this project and of other tools: KINDS says how each becomes messages.

A record keeps the meaning of the tool that it is named for.

messages     of OpenAI and TRL, also with a list of text parts as content; the weight 0 leaves an answer out
ShareGPT     as LLaMA-Factory and FastChat read it, with a system prompt and tools beside the conversation
TRL          the completion alone is trained on; of texts without a template, as one text
Alpaca       by the prompt of Stanford Alpaca; with a chat template, instruction and input are one message
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from mpitrain.data.rendering import ASSISTANT, Message
from mpitrain.data.templates import PLAIN, USER, Conversation, is_jinja, message, with_names
from mpitrain.strict_json import Json, parsed

SYSTEM, TOOL = "system", "tool"
SHOWN = 10
"""The largest number of keys that a message lists."""
SPEAKERS = {
    **dict.fromkeys(("human", USER), USER),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", ASSISTANT), ASSISTANT),
    "function_call": ASSISTANT,
    SYSTEM: SYSTEM,
    **dict.fromkeys(("observation", "function_response", TOOL), TOOL),
}
"""The roles of ShareGPT's speakers. In LLaMA-Factory a function_call has an observation as its result."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of parts of a content that are text."""
AS_IT_IS = "{content}"
"""The template of texts without a template, where no token begins or ends a text."""
COMPLETION = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' and not message['content'].endswith(eos_token) %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
"""The template of texts without a template: TRL puts the tokens that begin and end a text around them."""
UNWANTED = ("label", "kto_tag")
"""The keys of preferences, of TRL and LLaMA-Factory, that say whether an answer is wanted."""
INPUT = "\n\n### Input:\n"
ALPACA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ messages[0]['content'] if messages[0]['role'] == 'system' else 'Below is an instruction that describes a task' ~ "
    "(', paired with an input that provides further context' if '\\n\\n### Input:\\n' in message['content'] else '') ~ "
    "'. Write a response that appropriately completes the request.' }}"
    "{{ '\\n\\n### Instruction:\\n' ~ message['content'] ~ '\\n\\n### Response:' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] ~ eos_token }}{% endif %}{% endfor %}"
)
"""The prompt of Stanford Alpaca (Taori et al. 2023); LLaMA-Factory puts a system prompt before the instruction."""


Fields = Mapping[str, Any]
"""A record, without the keys whose value is null."""


def is_of_texts(template: str) -> bool:
    """Return whether a template is that of a kind: of texts, with the tokens that begin and end them."""
    return template.endswith((COMPLETION, ALPACA))


class RecordKind(NamedTuple):
    """A kind of record.

    name      of the kind, as the second line of a run says it
    example   of a record, for messages of errors
    keys      that it must have
    others    of its keys that are read
    read      (record, template) -> the conversation; ValueError with the end of an error's sentence
    template  (template of the run or "", tokens that begin and end a text) -> that of the records
    is_meant  whether a record with these keys is of this kind
    """

    name: str
    example: str
    keys: Sequence[str]
    others: Sequence[str]
    read: Callable[[Fields, str], Conversation]
    template: Callable[[str, tuple[str, str]], str]
    is_meant: Callable[[Fields], bool] = lambda record: True


def _chat(template: str, ends: tuple[str, str]) -> str:
    return template or PLAIN


def _plain(template: str, ends: tuple[str, str]) -> str:
    if template == AS_IT_IS or template.endswith(COMPLETION):
        return template
    return _named(COMPLETION, ends) if any(ends) else AS_IT_IS


def _alpaca(template: str, ends: tuple[str, str]) -> str:
    return template or _named(ALPACA, ends)


def _named(template: str, ends: tuple[str, str]) -> str:
    return with_names(template, dict(zip(("bos_token", "eos_token"), ends, strict=True)))


def _of_messages(record: Fields, template: str) -> Conversation:
    messages = _messages(record["messages"], template)
    return Conversation(_with_system(record, messages), _tools(record, template))


def _of_sharegpt(record: Fields, template: str) -> Conversation:
    messages = _messages(record["conversations"], template, SPEAKERS)
    return Conversation(_with_system(record, messages), _tools(record, template))


def _of_answer(record: Fields, template: str) -> Conversation:
    return Conversation([_said(USER, record["prompt"]), _said(ASSISTANT, record["answer"])])


def _of_texts(record: Fields, template: str) -> Conversation:
    messages = [_said(USER, record["prompt"]), _said(ASSISTANT, record["completion"])]
    return Conversation(messages, prompt=1)


def _of_lists(record: Fields, template: str) -> Conversation:
    prompt, completion = (_messages(record[key], template) for key in ("prompt", "completion"))
    return Conversation([*prompt, *completion], _tools(record, template), len(prompt))


def _of_alpaca(record: Fields, template: str) -> Conversation:
    between = INPUT if template.endswith(ALPACA) else "\n"
    texts = (_said(USER, record.get(key, ""))["content"] for key in ("instruction", "input"))
    question = between.join(filter(None, texts))
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(p, list) and len(p) == 2 for p in history
    ):
        raise ValueError("its history is no list of pairs")
    pairs = [*history, (question, record["output"])]
    messages = [
        _said(role, text)
        for pair in pairs
        for role, text in zip((USER, ASSISTANT), pair, strict=True)
    ]
    return Conversation(_with_system(record, messages), _tools(record, template))


def _are_lists(record: Fields) -> bool:
    return isinstance(record["prompt"], list) or isinstance(record["completion"], list)


KINDS = (
    RecordKind(
        "messages",
        '{"messages": [{"role": ROLE, "content": TEXT}, ...]}',
        ("messages",),
        ("system", "tools"),
        _of_messages,
        _chat,
    ),
    RecordKind(
        "ShareGPT's conversations",
        '{"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": TEXT}, ...]}',
        ("conversations",),
        ("system", "tools"),
        _of_sharegpt,
        _chat,
    ),
    RecordKind(
        "TRL's prompt and completion, lists of messages",
        '{"prompt": [{"role": ROLE, "content": TEXT}, ...], "completion": [...]}',
        ("prompt", "completion"),
        ("tools",),
        _of_lists,
        _chat,
        _are_lists,
    ),
    RecordKind(
        "TRL's prompt and completion, texts without a template",
        '{"prompt": TEXT, "completion": TEXT}',
        ("prompt", "completion"),
        (),
        _of_texts,
        _plain,
    ),
    RecordKind(
        "prompt and answer",
        '{"prompt": TEXT, "answer": TEXT}',
        ("prompt", "answer"),
        (),
        _of_answer,
        _chat,
    ),
    RecordKind(
        "Alpaca's instruction, input and output",
        '{"instruction": TEXT, "input": TEXT, "output": TEXT}',
        ("instruction", "output"),
        ("input", "history", "system", "tools"),
        _of_alpaca,
        _alpaca,
    ),
)
"""The kinds of records that are known; a record is of the first one that fits."""
WAY_OUT = f"Write {', '.join(k.example for k in KINDS[:-1])} or {KINDS[-1].example}; of documents, see mpitrain data prepare."


def kind_of(record: Json) -> RecordKind | None:
    """Return the kind of a value of JSON; None: it is no conversation."""
    if not isinstance(record, Mapping):
        return None
    known = _without_nulls(record)
    return next(
        (k for k in KINDS if all(map(known.__contains__, k.keys)) and k.is_meant(known)), None
    )


class Ignored:
    """The first keys of records that have no meaning here."""

    def __init__(self) -> None:
        self._keys = dict[str, None]()

    def note(self, keys: Iterable[str]) -> None:
        if len(self._keys) <= SHOWN:
            self._keys |= dict.fromkeys(sorted(keys))

    @property
    def facts(self) -> dict[str, Any]:
        """The keys, as a run records them."""
        more = ["..."] if len(self._keys) > SHOWN else []
        return {"ignored_keys": [*islice(self._keys, SHOWN), *more]} if self._keys else {}


class Recognised:
    """What the records of some files are: their template, their kinds, and the keys that are ignored.

    template  of all records; empty before the first one
    """

    def __init__(self, template: str, ends: tuple[str, str] = ("", "")):
        """template: that of the run or "". ends: the tokens that begin and end a text, as text."""
        self._of_run, self._ends, self.template = template, ends, ""
        self._kinds, self._ignored = dict[str, None](), Ignored()

    def begin(self, value: Json) -> str:
        """Return the template of all records, of which this is the first."""
        if not self.template and (kind := kind_of(value)):
            self.template = self._of(kind)
        return self.template

    def conversation(self, value: Json) -> Conversation:
        """Return the conversation of a record; ValueError with the end of an error's sentence if it has none."""
        if (kind := kind_of(value)) is None:
            raise ValueError(_is(value))
        if (template := self._of(kind)) != self.begin(value):
            others = " and ".join(self._kinds)
            raise ValueError(
                f"it has {kind.name}, and those before have {others}, of another template"
            )
        record = _without_nulls(value)
        for key in UNWANTED:
            if record.get(key) is False:
                raise ValueError(f"its {key} is false, so its answer is one that is not wanted")
        conversation = kind.read(record, template)
        for one in conversation.messages:
            (one["role"] + one["content"]).encode()  # A lone surrogate is a ValueError, too.
        self._kinds[kind.name] = None
        self._ignored.note(record.keys() - {*kind.keys, *kind.others})
        self._ignored.note(
            {"tools"} if record.get("tools") and not _reads(template, "tools") else ()
        )
        for one in conversation.messages:
            keys = one.keys() - {"role", "content", "weight"}
            self._ignored.note(f"{key} of a message" for key in keys if not _reads(template, key))
        return conversation

    def _of(self, kind: RecordKind) -> str:
        return kind.template(self._of_run, self._ends)

    @property
    def facts(self) -> dict[str, Any]:
        """The kinds and the ignored keys, as a run records them."""
        return {"records": " and ".join(self._kinds), **self._ignored.facts} if self._kinds else {}


def _reads(template: str, key: str) -> bool:
    return is_jinja(template) and key in template


def _is(value: Json) -> str:
    if not isinstance(value, Mapping):
        return f"it is {type(value).__name__}"
    more = ["..."] if len(value) > SHOWN else []
    return f"its keys are {', '.join([*map(ascii, islice(value, SHOWN)), *more]) or 'none'}"


def _without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def _said(role: str, text: Any) -> Message:
    if not isinstance(text, str):
        raise ValueError(f"the text of its {role} is {type(text).__name__}")
    return message(role, text)


def _messages(
    messages: Any, template: str, speakers: Mapping[str, str] | None = None
) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("its messages are no list, or an empty one")
    return [_one(number, one, template, speakers) for number, one in enumerate(messages, 1)]


def _one(
    number: int, message: Any, template: str, speakers: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return a message with the keys role and content, from one that has these or from and value.

    speakers  the roles of those who speak under other names; None: names are roles, unless the key is from
    """
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is {type(message).__name__}")
    known = _without_nulls(message)
    speaks, says = ("role", "content") if "role" in known else ("from", "value")
    role, content = known.pop(speaks, None), known.pop(says, None)
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no text as its role")
    if speaks == "from":
        speakers = SPEAKERS
    if speakers is not None and role not in speakers:
        raise ValueError(
            f"message {number} is from {role!a}, which is none of {', '.join(speakers)}"
        )
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    if role == "function_call" and speakers and is_jinja(template) and (calls := _calls(content)):
        known["tool_calls"], content = calls, ""
    if content is None and known.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no text as its content")
    if known.get("weight", 1) not in (0, 1):
        raise ValueError(f"the weight of message {number} is not 0 or 1")
    return {"role": speakers[role] if speakers else role, "content": content, **known}


def _part(number: int, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ValueError(f"a part of message {number} is no text, but {kind!a}")
    if not isinstance(text := part.get("text"), str):
        raise ValueError(f"a part of message {number} has no text")
    return text


def _calls(content: Any) -> list[dict[str, Any]]:
    """Return the calls of tools that a text of JSON describes, as OpenAI writes them; [] if it describes none."""
    try:
        calls = parsed(content.encode())
    except (ValueError, AttributeError):
        return []
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and {"name", "arguments"} <= set(call) for call in calls):
        return []
    return [{"type": "function", "function": call} for call in calls]


def _with_system(record: Fields, messages: Sequence[Message]) -> list[Message]:
    """Put the system prompt of a record before its messages, unless they begin with one."""
    system = record.get("system") or ""
    first = [_said(SYSTEM, system)] if system and messages[0]["role"] != SYSTEM else []
    return [*first, *messages]


def _tools(record: Fields, template: str) -> list[Any] | None:
    """Return the tools of a record, a list or the text of one; None if there are none or the template reads none."""
    tools = record.get("tools")
    if not tools or not _reads(template, "tools"):
        return None
    if isinstance(tools, str):
        try:
            tools = parsed(tools.encode())
        except ValueError as error:
            raise ValueError(f"its tools are no JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("its tools are no list of objects")
    return tools or None
