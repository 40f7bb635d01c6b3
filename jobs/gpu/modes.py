"""Part of the GPU job: two ranks on one device train a small GPT in every mode, and their losses are those of the CPU.

mpirun -n 2 python3 jobs/gpu/modes.py DEVICE WAY [FIRST]    WAY: ipc (reductions without messages), staged (messages through
                                                            host memory), pointers (device pointers to MPI)

A row for each mode as soon as its steps are done. FIRST is the number of the first mode: after a crash the job starts the
rest. With one worker, asynchronous servers apply each gradient to the parameters that it was computed from: the truth of
them, and of all that steps together, is one rank on the CPU. Local SGD and the asynchronous pipeline have two, of the same
mode on threads of the CPU.
"""

import faulthandler
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from table import emit

from mpitrain.config import Config, parse, with_settings
from mpitrain.data import TokenSource
from mpitrain.errors import MpitrainError
from mpitrain.machine import process
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.device import cuda_messages
from mpitrain.transport.mpi import connect
from mpitrain.transport.threads import run_ranks

SECONDS = 30
"""Of a mode, after which it counts as a deadlock; twenty times as many where g++ compiles kernels."""
APART = 1e-5
"""Most that losses may differ from the CPU's, relative to them."""
STEPS, VOCABULARY = 20, 61
SMALL = {
    "cuda": "model.layers=2 model.width=128 model.heads=4 model.context=64 batch.size=16",
    "cuda-sim": "model.layers=2 model.width=16 model.heads=2 model.context=8 batch.size=4",
}
BASE = "optimizer.warmup=3 batch.micro_batches=2 device.passes=numpy"


class Mode(NamedTuple):
    """How ranks share the work.

    settings   of the configuration
    memory     what they are where the ranks read each other's GPU memory; "": there is no such way
    messages   whether it sends parameters, gradients or activations in messages
    truth      ranks on the CPU whose losses are the truth
    model      settings that the truth has, too
    """

    settings: str
    memory: str = ""
    messages: bool = True
    truth: int = 1
    model: str = ""


SHARED = "replication.algorithm=shared"
LOCAL = "replication.mode=local replication.period=4"
MODES = {
    **{
        f"all-reduce, {name}": Mode(f"replication.algorithm={name}")
        for name in ("ring", "halving-doubling", "hierarchical", "star")
    },
    "all-reduce, shared": Mode("", SHARED),
    "servers": Mode("replication.mode=server"),
    "servers, async": Mode("replication.mode=server replication.update=async"),
    "master": Mode("replication.mode=master"),
    "local": Mode(f"{LOCAL} replication.algorithm=ring", f"{LOCAL} {SHARED}", truth=2),
    **{
        f"ZeRO {zero}": Mode(
            f"replication.zero={zero} replication.algorithm=ring",
            f"replication.zero={zero} {SHARED}",
        )
        for zero in (1, 2, 3)
    },
    "tp 2": Mode("layout.tp=2 layout.algorithm=ring", "layout.tp=2 layout.algorithm=shared"),
    "pp 2, 1F1B": Mode("layout.pp=2"),
    "pp 2, async": Mode("layout.pp=2 pipeline.schedule=async", truth=2),
    **{
        f"cp 2, {name}": Mode(
            f"layout.cp=2 layout.cp_mode={name} replication.algorithm=ring",
            f"layout.cp=2 layout.cp_mode={name} {SHARED}",
        )
        for name in ("ulysses", "ring")
    },
    "ep 2": Mode(
        "layout.ep=2 replication.algorithm=ring",
        f"layout.ep=2 {SHARED}",
        model="model.experts=4 model.top_k=2",
    ),
}
CUDA_AWARE = {"ipc": "no", "staged": "no", "pointers": "yes"}


def config(kind: str, device: str, settings: str) -> Config:
    """The configuration of a mode; sizes are those of `kind`."""
    words = f"{SMALL[kind]} {BASE} run.steps={STEPS} device.kind={device} {settings}"
    return parse(with_settings({}, words.split()))


def source(settings: Config) -> TokenSource:
    context = settings.model.context
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=50 * (context + 1))
    return TokenSource(tokens.astype(np.uint16), VOCABULARY, context, "random tokens")


class Trained(NamedTuple):
    """What training gave one rank: losses of all steps, whether replicas are equal, bytes that it
    sent, and those of them that MPI read from the memory of a device."""

    losses: list[float]
    equal: bool
    nbytes: int
    by_pointer: int


def train(transport: Any, settings: Config) -> Trained:
    trainer = build(transport, settings, source=source(settings)).trainer
    rows, replica, losses = source(settings), trainer.replica, []
    before = vars(transport.traffic).copy()
    for index in range(settings.run.steps):
        own = None
        for number in replica.steps(index, lambda: False):
            own = trainer.step(number, *replica.batch(rows, number))
        losses.append(replica.outcome(index, own).loss)
    sent = transport.traffic
    found = Trained(
        losses,
        replicas_equal(trainer),
        sent.nbytes - before["nbytes"],
        sent.by_pointer - before["by_pointer"],
    )
    trainer.close()
    return found


@cache
def truth(kind: str, ranks: int, settings: str) -> list[list[float]]:
    """The losses that threads on the CPU have, by rank."""
    found = run_ranks(ranks, train, config(kind, "cpu", settings))
    return [each.losses for each in found]


def distance(losses: list[float], right: list[float]) -> float:
    """How far apart losses are at most, relative to the right ones; NaN if one is known on one side only."""
    known = ~np.isnan(right)  # a stream of micro-batches has not ended its first steps yet
    apart = np.abs(np.divide(losses, right) - 1)[known]
    same = np.array_equal(known, ~np.isnan(losses)) and known.sum() > STEPS // 2
    return float(apart.max()) if same else np.nan


def modes(way: str) -> Iterator[tuple[str, str, Mode]]:
    """Yield name, settings and mode of what a way has."""
    for name, mode in MODES.items():
        settings = mode.memory if way == "ipc" else mode.settings
        if settings:
            yield name, f"{settings} {mode.model} device.cuda_aware={CUDA_AWARE[way]}", mode


def measure(host: Any, kind: str, way: str, name: str, settings: str, mode: Mode) -> None:
    """Train in a mode, and let rank 0 emit its row."""
    what = f"{STEPS} steps of 2 ranks, {way}, {name}"
    begin = time.perf_counter()
    try:
        found = train(host, config(kind, kind, settings))
    except MpitrainError as error:
        if not error.agreed:
            raise
        if host.rank == 0:
            emit(f"{what}: refused: {error.law[:110]}", ok=False)
        return
    seconds = time.perf_counter() - begin
    everyone = [Trained(*each) for each in host.gather_text(found)]
    if host.rank:
        return
    alone = mode.settings if mode.truth > 1 else mode.model
    right = truth(kind, mode.truth, alone) * (3 - mode.truth)
    apart = max(distance(*each) for each in zip((e.losses for e in everyone), right, strict=True))
    moved = np.ptp(everyone[0].losses[-STEPS // 2 :])
    nbytes, by_pointer = (
        [getattr(each, key) for each in everyone] for key in ("nbytes", "by_pointer")
    )
    as_told = any(by_pointer) == (way == "pointers" and mode.messages)
    equal = all(each.equal for each in everyone)
    emit(
        f"{what}, losses {apart:.0e} from the CPU's"
        + ("" if equal else ", replicas differ")
        + ("" if as_told else f", {max(by_pointer):,} bytes by pointers"),
        f"{max(nbytes) / STEPS:,.0f} B/step",
        ok=bool(apart <= APART and moved > 0 and equal and as_told),
        mode=name,
        way=way,
        losses=everyone[0].losses,
        nbytes=nbytes,
        by_pointer=by_pointer,
        seconds=seconds,
    )


def main(kind: str, way: str, first: int = 0) -> None:
    process.choose_gpu(kind)
    host = connect()
    refusal = ""
    if kind != "cuda" and way != "staged":
        refusal = "there is no GPU here"
    elif way == "pointers" and not (asked := cuda_messages(host, "auto")).cuda:
        refusal = f"refused, MPI {asked.how}"
    if refusal:
        if host.rank == 0:
            emit(f"modes of 2 ranks, {way}: {refusal}")
        return
    for name, settings, mode in list(modes(way))[first:]:
        faulthandler.dump_traceback_later(SECONDS * (1 if kind == "cuda" else 20), exit=True)
        try:
            measure(host, kind, way, name, settings, mode)
        except BaseException as error:
            host.abort(f"{name}: {error!r}")
            raise
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
