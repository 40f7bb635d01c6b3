"""A conversation with a trained model: its turns, within the context of the model."""

from collections.abc import Callable, Iterator
from pathlib import Path

from mpitrain.data.rendering import ASSISTANT, Message
from mpitrain.data.templates import USER, message
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import ConfigError
from mpitrain.run.generate import (
    PromptRequest,
    asked,
    check_writes,
    continued,
    end_of_turn,
    ends_of,
    tokenizer_of_run,
)
from mpitrain.run.trainer import Trainer
from mpitrain.transport.agreement import on_all_ranks

ANSWER = 4
"""One part of so many parts of the context is left for an answer."""


class Chat:
    """The turns of a conversation; all methods are collective, with the same arguments on all ranks.

    note  a sentence for the user after the last answer; "": there is none
    """

    def __init__(self, trainer: Trainer, folder: Path, request: PromptRequest, system: str | None):
        """Take the trainer of a run directory.

        request  how to draw an answer; its ends are those of the run
        system   the first message; None: there is none
        raises   ConfigError if there is no template of conversations
        """
        data = trainer.config.data

        def read() -> tuple[Tokenizer | None, list[int]]:
            check_writes(trainer.config.model.kind)
            if not data.template:
                raise ConfigError(
                    f"A chat needs the template of conversations, but {folder} has none.",
                    "Use `mpitrain generate`.",
                )
            tokenizer = tokenizer_of_run(folder, data)
            return tokenizer, ends_of(tokenizer, data, folder)

        self._trainer, self.note = trainer, ""
        self._tokenizer, ends = on_all_ranks(trainer.transport, read)
        self._request = request._replace(stops=end_of_turn(data), cuts=False, ends=ends)
        self._first: list[Message] = [message("system", system)] if system else []
        self._has_forgotten = False
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._turns = [*self._first]

    def answered(self, said: str, stop_requested: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the answer to what the user says, in pieces of text.

        stop_requested  as in `texts`; what was written until then stays in the conversation
        raises          ConfigError if the template refuses the turns
        """
        self.note, answer = "", b""
        self._turns.append(message(USER, said))
        prompt = self._prompt()
        if not prompt:
            return
        seed = self._request.seed + len(self._turns)
        request = self._request._replace(seed=seed)
        for piece in continued(
            self._trainer, self._tokenizer, [prompt], 1, request, stop_requested
        ):
            answer += piece.text
            yield piece.text
        self._turns.append(message(ASSISTANT, answer.decode(errors="replace").rstrip()))

    def _prompt(self) -> list[int]:
        """Return the tokens of the turns that fit; [] without the newest one, if it alone does not."""
        config = self._trainer.config
        context, first = config.model.context, len(self._first)
        room = context - max(1, context // ANSWER)
        while len(tokens := asked(self._tokenizer, config.data, self._turns)) > room:
            if len(self._turns) == first + 1:
                break
            del self._turns[first : first + 2]  # a question, and its answer
            if not self._has_forgotten:
                self._has_forgotten = True
                self.note = "the conversation is longer than model.context, so the oldest turns are forgotten"
        if len(tokens) < context:
            return tokens
        self._turns.pop()
        self.note = f"a question has fewer than {context} tokens with the template, but this one has {len(tokens)}"
        return []
