"""Ends the ranks of a job together: no rank waits for a rank that has raised an error."""

from __future__ import annotations  # so that help() prints signatures as they are written here

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpitrain.errors import MpitrainError
from mpitrain.transport.base import Transport
from mpitrain.transport.mpi import connect


@contextmanager
def ranks() -> Iterator[Transport]:
    """Connect all ranks of the MPI job, and end the job if one of them raises an exception.

    Leaving the block is collective: a rank waits there for the others, then closes the transport.
    A rank that raises in the block prints its traceback and aborts the job, so that the others do
    not wait for its messages. An error that mpitrain raises on every rank is printed once.

    Examples
    --------
    >>> with mpitrain.ranks() as transport:
    ...     mpitrain.Group(transport, "ring").all_reduce(array)
    """
    transport = connect()
    with ending_together(transport):
        yield transport
    transport.close()


@contextmanager
def ending_together(transport: Transport) -> Iterator[None]:
    """Pass a barrier after the block; end all ranks if the block raises.

    Rank 0 prints an error that all ranks raise, and all exit with its code. Any other exception
    aborts the whole job at once and prints this rank's traceback.
    """
    try:
        yield
        transport.barrier()
    except MpitrainError as error:
        if not error.agreed:
            transport.abort(str(error))
        text = str(error)
        leave_together(transport, lambda: print(text, file=sys.stderr, flush=True), error.exit_code)
    except BrokenPipeError:
        if transport.size > 1:
            transport.abort("the reader of its output is gone")
        sys.exit(1)
    except MemoryError as error:
        transport.abort(
            f"out of memory: {error}. Lower batch.size, model.width or model.context, or raise batch.micro_batches; "
            "of a benchmark, lower --max-bytes."
        )
    except BaseException as error:
        if transport.size == 1 and isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        transport.abort(
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
