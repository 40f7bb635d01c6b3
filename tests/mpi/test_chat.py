"""`mpitrain chat` on a terminal: streamed characters of several bytes, a history that leaves, Ctrl-C and Ctrl-D."""

import json
import os
import signal
import termios
import time
from fcntl import ioctl

import pytest

from mpitrain.errors import ConfigError
from mpitrain.run.build import configured, open_run
from mpitrain.run.chat import Chat
from mpitrain.run.generate import PromptRequest, Sampling
from mpitrain.transport.threads import run_ranks
from tests.processes import PROGRAM, launch, mpitrain
from tests.runs import TINY, go
from tests.terminals import on_a_terminal, rendered

ANSWER = "größe 😀"
SHAPE = ["model.width=32", "model.context=48", "batch.size=8", "run.steps=120", "optimizer.lr=0.01"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that answers every question alike."""
    folder = tmp_path_factory.mktemp("chat")
    lines = [{"prompt": f"q{n}", "answer": ANSWER} for n in range(20)]
    spoken = [
        {"role": role, "content": line[key]}
        for line in lines
        for role, key in (("user", "prompt"), ("assistant", "answer"))
    ]
    lines += [{"messages": spoken[2 * n : 2 * n + 4]} for n in range(18)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = [
        f"data.source=jsonl:{folder}/data.jsonl",
        "data.template=<{role}>{content}|\n",
        "run.eval_every=-1",
    ]
    go(1, [*TINY, *SHAPE, *data, f"run.out={folder}/run"])
    return folder / "run"


def talk(typed, *words):
    """(exit code, bytes) of a command on a terminal; each text is typed when what was shown since the one before fits."""
    begun, typed = 0, [*typed]

    def seen(data, job):
        nonlocal begun
        if typed and typed[0][0](data[begun:]):
            begun = len(data)
            time.sleep(0.3)  # A Ctrl-C between a prompt and its read does not wake the read.
            os.write(job.keyboard, typed.pop(0)[1].encode())

    def controlled():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A shell's background job ignores it.
        ioctl(0, termios.TIOCSCTTY, 0)

    code, data = on_a_terminal(
        [*PROGRAM, *words], 80, seen, start_new_session=True, preexec_fn=controlled
    )
    assert not typed, data
    return code, data


def asks(shown):
    return shown.endswith(b"> ")


def test_a_conversation_on_a_terminal(run):
    typed = ["q1\n", "q2\n", "q3\n", "/reset\n", "q4\n", "x" * 50 + "\n", "\x04"]
    words = ["launch", "-n", 2, "--", "chat", run, "--temperature", 0]
    code, data = talk([(asks, text) for text in typed], *words)
    shown = rendered(data, 80)
    assert code == 0, shown
    assert [line for line in shown if line == ANSWER] == [ANSWER] * 4, shown
    assert sum("oldest turns" in line for line in shown) == 1, shown
    assert sum("fewer than 48 tokens" in line for line in shown) == 1, shown


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(run, tmp_path):
    """The model draws any byte alike, so only the end of the context would end its answer."""
    settings = ["run.steps=1", "model.context=4096", "batch.size=1", f"run.out={tmp_path}/run"]
    lines, template = f"data.source=jsonl:{run.parent}/data.jsonl", "data.template={content}||||||"
    go(1, [*TINY, *settings, lines, template, "run.eval_every=-1"])
    typed = [
        (asks, "q1\n"),
        (lambda shown: len(shown) > 200, "\x03"),
        (asks, "\x03"),
        (asks, "\x04"),
    ]
    code, data = talk(
        typed, "chat", tmp_path / "run", "--temperature", 1e6, "--top-k", 0, "--tokens", 10**6
    )
    assert code == 0 and len(data) < 8192, data


def test_a_stop_ends_an_answer_and_keeps_it(run):
    def talk(transport):
        trainer = open_run(transport, run, lambda: configured(run, []), needs_data=False).trainer
        chat, asked = Chat(trainer, run, PromptRequest(Sampling(0), 0, 400), None), []
        first = b"".join(chat.answered("q1", lambda: asked.append(1) or len(asked) == 4))
        chat.reset()
        return first, b"".join(chat.answered("q1", lambda: False))

    for first, whole in run_ranks(2, talk):
        assert first == ANSWER.encode()[:4] and whole == ANSWER.encode()


def test_a_run_without_conversations_is_no_partner(tmp_path):
    go(1, [*TINY, "run.eval_every=-1", "run.steps=1", f"run.out={tmp_path}/run"])

    def talk(transport):
        opened = open_run(transport, tmp_path / "run", lambda: configured(tmp_path / "run", []))
        with pytest.raises(ConfigError, match="mpitrain generate"):
            Chat(opened.trainer, tmp_path / "run", PromptRequest(Sampling(), 0, 4), None)

    run_ranks(2, talk)


def test_generate_answers_what_a_user_says_or_names_the_template(run):
    words = ["generate", run, "--prompt", "q1", "--prompt", "q2", "--temperature", 0]
    plain, chat = launch(2, *words, "--tokens", 4), launch(2, *words, "--chat", "--json")
    assert plain.returncode == 0 and "--chat" in plain.stderr and "`mpitrain chat`" in plain.stderr
    answers = [json.loads(line) for line in chat.stdout.splitlines()]
    assert [(one["prompt"], one["text"]) for one in answers] == [("q1", ANSWER), ("q2", ANSWER)]
    assert {one["ended"] for one in answers} == {"stop"} and not chat.stderr
    nothing = mpitrain("generate", run, "--chat")
    assert nothing.returncode == 2 and "--prompt" in nothing.stderr
