"""Agreement on errors: an error that only some ranks see is raised on all ranks, or ends them.

Without it, the other ranks would wait for ever for a rank that has stopped.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from mpitrain import errors
from mpitrain.errors import MpitrainError, PeerLost, say
from mpitrain.transport.base import Transport

Result = TypeVar("Result")


def on_all_ranks(
    transport: Transport,
    function: Callable[[], Result],
    subject: str = "",
    facts: Callable[[Result], dict[str, Any]] = lambda result: {},
) -> Result:
    """Call `function` on every rank; if any rank raises an MpitrainError, raise it on all ranks.

    Collective. Errors are as in `from_all_ranks`. All ranks also raise a ConfigError if the facts
    about their results differ.

    subject  the thing that the facts describe, for the message
    facts    (result) -> {name: value}, serialisable as JSON
    """
    results: list[Result] = []

    def facts_of_result() -> dict[str, Any]:
        results.append(function())
        return facts(results[0])

    try:
        check_same(subject, from_all_ranks(transport, facts_of_result), transport.hosts)
        return results[0]
    finally:
        results.clear()  # The traceback of an error must not keep a result alive.


def from_all_ranks(transport: Transport, function: Callable[[], Any]) -> list[Any]:
    """Call `function` on every rank, and return the results of all ranks, by rank.

    Collective: one `gather_text`. The results must be serialisable as JSON. The function must not
    communicate. All ranks raise the error of the lowest rank that failed. The attribute `agreed`
    of the error is set: one rank may print it, and all ranks may exit together. If only some ranks
    failed, the message names them. An OSError becomes a ConfigError: the system refused a path.
    Any other exception becomes the cause of an MpitrainError; but if all ranks failed, a rank with
    such an exception raises that one.
    """
    result = failure = cause = None
    try:
        result = function()
    except MemoryError:
        raise  # It ends the job with advice of its own.
    except Exception as error:
        failure = _described(error)
        cause = None if isinstance(error, (MpitrainError, OSError)) else error
    everyone = transport.gather_text([failure, result])
    failures = [failure for failure, _ in everyone]
    if not any(failures):
        return [result for _, result in everyone]
    # A frame in an error's own traceback must not refer to it. Such a cycle would keep all objects
    # of those frames alive.
    try:
        if cause and all(failures):
            raise cause
        raise _agreed(failures, transport.hosts) from cause
    finally:
        del result, cause


def _described(error: Exception) -> list[str | None]:
    """Return the name of one of our errors, its law and its way out, for an error of `from_all_ranks`."""
    if isinstance(error, MpitrainError):
        return [type(error).__name__, error.law, error.way_out]
    if isinstance(error, OSError):
        return [
            "ConfigError",
            f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.",
            "Name another path, or look at what is there.",
        ]
    law = f"{type(error).__name__}: {error}"
    return ["MpitrainError", law, "The traceback of that rank says where."]


def _agreed(failures: Sequence[list[str] | None], hosts: Sequence[str]) -> MpitrainError:
    """Return the error of `from_all_ranks` that all ranks raise; failures: described, of each rank."""
    kind, law, way_out = next(failure for failure in failures if failure)
    ranks = [rank for rank, failure in enumerate(failures) if failure]
    if len(ranks) < len(failures):
        law = f"On rank {listed(ranks, hosts)}: {law}"
    agreed: MpitrainError = getattr(errors, kind)(law, way_out).on_every_rank()
    return agreed


def listed(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return up to eight ranks with their hosts as text."""
    named = [f"{rank} ({hosts[rank]})" for rank in ranks[:8]]
    return ", ".join([*named, *(["..."] if len(ranks) > 8 else [])])


def check_same(subject: str, everyone: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Raise an agreed ConfigError unless every rank has the same facts.

    subject   the thing that the facts describe, for the message
    everyone  {name: value} of each rank, as `from_all_ranks` returns them
    """
    for rank, others in enumerate(everyone):
        for name in {**everyone[0], **others}:
            one, other = everyone[0].get(name), others.get(name)
            if one != other:
                raise errors.ConfigError(
                    f"All ranks need one {subject}, but {name} is {one!r} on rank 0 ({hosts[0]}) and "
                    f"{other!r} on rank {rank} ({hosts[rank]}).",
                    "Start all ranks with the same arguments, and let them read the same files.",
                ).on_every_rank()


@contextmanager
def ending_together(transport: Transport, leaving: Callable[[], object] = bool) -> Iterator[None]:
    """Pass a barrier after the block; end all ranks if the block raises.

    Rank 0 prints an error that all ranks raise, and all exit with its code. A rank that caused it
    by another exception prints the traceback of that. A rank that raises an MpitrainError alone
    prints it, and ends the job with the code of the error. A rank that exits in the block ends the
    job with its exit code; 0 becomes 1. Any other exception prints its traceback and ends the job.
    Where the ranks outlive a loss, these three end only their own rank.

    leaving  called at the end of the block, before the barrier
    """
    try:
        yield
        leaving()
        # Where a job outlives its ranks, one that has passed this barrier may end before the others do.
        with suppress(*(() if transport.needs_all else (PeerLost,))):
            transport.barrier()
    except MpitrainError as error:
        if not error.agreed:
            transport.end_rank(error.named(), error.exit_code)
        text = error.named()
        if error.__cause__:
            say(
                f"rank {transport.rank}: ended by an exception on {transport.hosts[transport.rank]}\n"
                + "".join(traceback.format_exception(error.__cause__))
            )
        leave_together(transport, lambda: say(text), error.exit_code)
    except BrokenPipeError:
        if transport.size > 1:
            transport.end_rank("the reader of its output is gone")
        sys.exit(1)
    except MemoryError as error:
        transport.end_rank(
            f"out of memory: {error}. Lower batch.size, model.width or model.context, or raise batch.micro_batches; "
            "of a benchmark, lower --max-bytes."
        )
    except SystemExit as error:
        if transport.size == 1:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        reason = f": {error.code}" if isinstance(error.code, str) else f" by sys.exit({code})"
        transport.end_rank(
            f"left the job on {transport.hosts[transport.rank]}{reason}; the other ranks end with it",
            code or 1,
        )
    except BaseException as error:
        if transport.size == 1 and isinstance(error, KeyboardInterrupt):
            raise
        transport.end_rank(
            f"ended by an exception on {transport.hosts[transport.rank]}\n{traceback.format_exc()}"
        )


def leave_together(transport: Transport, show: Callable[[], None], exit_code: int) -> None:
    """Print the reason on rank 0, then exit on every rank after a barrier.

    Without the barrier a launcher could end rank 0 before the message is complete.
    """
    if transport.rank == 0:
        show()
    transport.barrier()
    sys.exit(exit_code)
