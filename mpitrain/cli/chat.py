"""`mpitrain chat`: turns of a conversation with a checkpoint, in the terminal."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.generate import readable, sampling_options
from mpitrain.cli.job_options import changes, run_options
from mpitrain.cli.session import configured_of, mpi_session
from mpitrain.cli.terminal.output import output_columns
from mpitrain.cli.terminal.stop_requests import EXIT

RESET = "/reset"
"""The line that begins a new conversation."""


@click.command()
@click.option("--system", metavar="TEXT", help="The first message, of the role system.")
@sampling_options
@run_options
def command(
    run: Path,
    system: str | None,
    count: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    best: bool,
    **options: Any,
) -> None:
    """Talk with a model that was trained on conversations, in the terminal.

    RUN_DIR is a run, or a folder of transformers with a chat template.

    A line is what you say, in the template of the run. /reset begins a new conversation. Ctrl-C
    ends an answer (under `launch` the chat), Ctrl-D or /exit the chat. If model.context is full,
    the oldest turns leave.
    """
    configured = configured_of(run, changes((), **options))
    with mpi_session(kind=lambda: configured().device.kind) as transport:
        from mpitrain.run.build import open_run
        from mpitrain.run.chat import Chat
        from mpitrain.run.generate import PromptRequest, Sampling
        from mpitrain.transport.agreement import from_all_ranks

        job = open_run(transport, run, configured, needs_data=False, best=best)
        request = PromptRequest(Sampling(temperature, top_k, top_p), seed, count)
        chat = Chat(job.trainer, run, request, system)
        is_root = transport.rank == 0
        transport.admit_thread()  # So the other ranks sleep while they wait for a line.
        while True:
            said = from_all_ranks(transport, lambda: _line() if is_root else None)[0]
            if said in (None, EXIT):
                break
            if said == RESET:
                chat.reset()
            elif said.strip():
                with _interrupts() as is_asked:
                    for part in chain(readable(chat.answered(said, is_asked)), [b"\n"]):
                        if is_root:
                            sys.stdout.buffer.write(part)
                            sys.stdout.buffer.flush()
                if is_root and chat.note:
                    click.echo(f"note: {chat.note}", err=True)


def _line() -> str | None:
    """Return the next line of the user; None at the end of the input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() or output_columns() else "")
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            if sys.stdin.isatty():
                print(flush=True)
            return None


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was typed since then."""
    typed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: typed.append(number))
    try:
        yield lambda: bool(typed)
    finally:
        signal.signal(signal.SIGINT, before)
