"""How a rank begins and ends: connected, and leaving together with the others or taking them along."""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError, MpitrainError, on_every_rank
from mpitrain.machine import process

if TYPE_CHECKING:  # NumPy must not be loaded before `mpi_session` has limited its threads
    from mpitrain.transport.base import Transport

STALL_SECONDS = (
    600.0  # for ranks to find each other, and until a configuration says run.stall_seconds
)
MOST = 10**6  # of anything that an option counts
LONGEST = 1e9  # seconds that a timer of the system can be set to


@contextmanager
def mpi_session(
    allow_alone: bool = False,
    kind: Callable[[], str] = lambda: "cpu",
    patience: Callable[[], float] = lambda: STALL_SECONDS,
    does_trace: Callable[[], bool] = lambda: False,
) -> "Iterator[Transport]":
    """Connect to the other ranks; when the body has run, all pass a barrier before any leaves.

    An error that every rank has is printed by rank 0, and all leave with its exit code. Anything else that is raised ends
    the whole job at once, with this rank's traceback.

    allow_alone  do not refuse N processes that are each alone
    kind         the device.kind that will be asked for, since a GPU is chosen before MPI starts; an error it may raise
                 is dropped: the body will meet it again, with all ranks there to agree on it
    patience     the seconds after which this process ends if the ranks have not found each other; as for `kind`
    does_trace   whether what they do is recorded, from before the first message; as for `kind`
    """
    process.limit_blas_threads()
    seconds = STALL_SECONDS
    with suppress(MpitrainError, OSError):
        seconds = patience()
    with suppress(MpitrainError, OSError):
        process.choose_gpu(kind())
    recorder = None
    with suppress(MpitrainError, OSError):
        if does_trace():
            from mpitrain.trace.startup import begun

            recorder = begun(process.launched().rank, process.launched().size)
    from mpitrain.transport.mpi import connect
    from mpitrain.transport.traced_transport import recorded

    # mpi4py starts MPI with the interpreter's lock held: a watchdog in Python would not run, this one does, and exits with 1.
    faulthandler.dump_traceback_later(min(seconds, LONGEST), exit=True, file=2)
    transport = recorded(connect, recorder)
    faulthandler.cancel_dump_traceback_later()
    try:
        if not allow_alone:
            refuse_strangers(transport)
        yield transport
        transport.barrier()
    except MpitrainError as error:
        if not error.agreed:
            transport.abort(str(error))
        text = str(error)
        leave_together(transport, lambda: print(text, file=sys.stderr, flush=True), error.exit_code)
    except BrokenPipeError:
        if transport.size > 1:
            transport.abort("nobody reads its output any more")
        sys.exit(1)
    except MemoryError as error:
        transport.abort(
            f"out of memory: {error}. Lower batch.size, model.width or model.context, or raise batch.micro_batches; "
            "of a benchmark, lower --max-bytes."
        )
    except BaseException as error:
        if transport.size == 1 and isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        import traceback

        transport.abort(
            f"ended by an exception on {transport.hosts[transport.rank]}\n{traceback.format_exc()}"
        )


def settings_of(*options: tuple[str, Any]) -> list[str]:
    """`section.key=value` for each option that was given."""
    return [f"{key}={_toml(value)}" for key, value in options if value is not None]


def _toml(value: Any) -> str:
    import tomli_w

    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


def kind_of(folder: Path, settings: list[str]) -> str:
    """The device.kind of a run directory under these settings."""
    from mpitrain.run.open_run import configured

    return configured(folder, settings).device.kind


def refuse_strangers(transport: "Transport") -> None:
    """N processes that each believe they are rank 0 of 1 would all write the same files: refuse them."""
    started = process.launched()
    if started.size == 1 or transport.size > 1:
        return
    if started.rank > 0:
        time.sleep(
            1
        )  # no barrier joins these processes, and the first to leave may end the one that prints
        sys.exit(ConfigError.exit_code)
    raise on_every_rank(
        ConfigError(
            f"{started.launcher} started {started.size} processes, but MPI tells each of them that it is alone.",
            "Use the launcher of the MPI that mpi4py loads: `mpitrain launch` finds it, `mpitrain doctor` shows both.",
        )
    )


def leave_together(transport: "Transport", show: Callable[[], None], exit_code: int) -> None:
    """Rank 0 shows why; every rank leaves with the code after a barrier, so that no launcher cuts the message off."""
    if transport.rank == 0:
        show()
    transport.barrier()
    sys.exit(exit_code)


def leave_usage(show: Callable[[], None], exit_code: int) -> None:
    """As `leave_together`, for a command line that was refused before anything was connected."""
    if process.launched().size == 1:
        show()
        sys.exit(exit_code)
    from mpitrain.transport.mpi import connect

    leave_together(connect(), show, exit_code)
