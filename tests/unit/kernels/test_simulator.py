"""The simulator notices every planted mistake, and says nothing about the corrected kernels."""

import ctypes
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Argument, Kernels
from mpitrain.kernels.simulator.machine import Simulator

ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]


class Planted(NamedTuple):
    """A kernel of planted.cu: its launch, and what each build must show.

    checked   a kind of error, or several with "|" between where the order of the threads decides
    fast      the same, "wrong" for wrong numbers, or None where only the checked build can see it
    truth     what the corrected kernel leaves in the output, the last array of the arguments; None for undefined
    """

    grid: int
    block: int
    arguments: Any
    checked: str
    fast: str | None
    truth: Any
    shared: int = 0


def ramp(count: int) -> np.ndarray:
    """1, 2, 3 ... as float32."""
    return np.arange(1, count + 1, dtype=np.float32)


def out(count: int) -> Any:
    """A fresh output."""
    return Argument(np.empty(count, np.float32), fresh=True)


ROWS = np.zeros((3, 8), np.float32)
REVERSED = np.concatenate([ramp(64)[::-1], 64 + ramp(64)[::-1]])
STAGES = np.concatenate([ramp(128)[::-1], 128 + ramp(128)[::-1]])

PLANTED = {
    "no_barrier": Planted(
        1, 64, lambda: (ramp(64), out(64)), "uninitialised", "wrong", ramp(64)[::-1]
    ),
    "no_barrier_before_reuse": Planted(
        1, 64, lambda: (ramp(128), out(128)), "race", "wrong", REVERSED
    ),
    "no_syncwarp": Planted(
        1, 32, lambda: (ramp(32), out(32)), "uninitialised", "wrong", np.roll(ramp(32), -1)
    ),
    "no_atomic": Planted(2, 32, lambda: (np.zeros(1, np.float32),), "race", None, 64),
    "blocks_share_an_output": Planted(
        2, 32, lambda: (np.zeros(64, np.float32),), "race", "wrong", np.tile(ramp(32) - 1, 2)
    ),
    "past_the_end": Planted(
        1, 64, lambda: (32, ramp(32), out(32)), "out of bounds", "out of bounds", ramp(32)
    ),
    "before_the_start": Planted(
        1, 1024, lambda: (1024, ramp(1024), out(1024)), "out of bounds", "out of bounds", ramp(1024)
    ),
    "shared_row_overrun": Planted(
        1, 32, lambda: (out(32),), "out of bounds|uninitialised", "wrong", 2 * ramp(32) - 2
    ),
    "dynamic_shared_too_small": Planted(
        1,
        32,
        lambda: (out(32),),
        "out of bounds",
        None,
        (np.arange(32) ^ 1).astype(np.float32),
        shared=64,
    ),
    "uninitialised_shared": Planted(
        1, 64, lambda: (out(64),), "uninitialised", "wrong", np.ones(64)
    ),
    "adds_to_a_fresh_output": Planted(
        1, 32, lambda: (out(32),), "uninitialised", "wrong", np.ones(32)
    ),
    "forgets_the_last_element": Planted(
        1, 32, lambda: (32, out(32)), "never written", "wrong", np.ones(32)
    ),
    "misaligned": Planted(
        1, 8, lambda: (ramp(36), out(32)), "alignment", "alignment", 1 + ramp(32)
    ),
    "divergent_barrier": Planted(
        1, 32, lambda: (out(32),), "divergent barrier", "divergent barrier", np.ones(32)
    ),
    "leaves_before_a_barrier": Planted(
        1, 64, lambda: (40, out(40)), "divergent barrier", "divergent barrier", np.ones(40)
    ),
    "shuffle_within_a_branch": Planted(1, 32, lambda: (out(32),), "warp mask", "warp mask", None),
    "writes_to_const": Planted(
        1, 32, lambda: (ramp(32), out(32)), "write to const", None, ramp(32)
    ),
    "writes_between_rows": Planted(
        3,
        32,
        lambda: (5, 8, Argument(ROWS[:, :5], strided=True)),
        "out of bounds",
        None,
        np.ones((3, 5)),
    ),
    "index_overflows": Planted(1, 1, lambda: (1 << 20, out(1)), "undefined", None, 1),
    "reads_before_the_copy_lands": Planted(
        1, 32, lambda: (ramp(256), out(256)), "uninitialised", "wrong", STAGES
    ),
    "copies_over_what_is_read": Planted(
        1,
        64,
        lambda: (ramp(512), out(512)),
        "race",
        "wrong",
        np.concatenate([ramp(256)[::-1], 256 + ramp(256)[::-1]]),
    ),
    "waits_for_what_is_not_committed": Planted(
        1, 32, lambda: (ramp(128), out(128)), "uninitialised", "wrong", ramp(128)[::-1]
    ),
}


def run(name: str, checked: bool, order: tuple[str, int], right: bool) -> str:
    """Launch one planted kernel; what came of it: "", "wrong", or the text of the error."""
    planted = PLANTED[name]
    arguments = planted.arguments()
    kernels = Kernels(Simulator(checked, *order), folder=Path(__file__).parent)
    shared = 4 * planted.block if right else planted.shared
    try:
        kernels.launch(name, (planted.grid,), (planted.block,), arguments, shared, RIGHT=int(right))
    except KernelError as error:
        return error.law
    result = getattr(arguments[-1], "array", arguments[-1])
    return (
        ""
        if planted.truth is None
        or np.array_equal(result, np.broadcast_to(planted.truth, result.shape))
        else "wrong"
    )


@pytest.mark.product
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", PLANTED)
def test_the_checked_build_names_every_planted_mistake_in_any_order(name, order):
    assert run(name, True, order, right=False).startswith(tuple(PLANTED[name].checked.split("|")))


@pytest.mark.parametrize("name", [name for name, planted in PLANTED.items() if planted.fast])
def test_the_fast_build_shows_what_it_can(name, users_kernels):
    for order in ORDERS:
        assert run(name, False, order, right=False).startswith(PLANTED[name].fast), order


@pytest.mark.product
@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize("name", PLANTED)
def test_no_build_complains_about_the_corrected_kernel(name, checked, users_kernels):
    for order in ORDERS:
        assert run(name, checked, order, right=True) == "", order


def test_a_thread_may_launch_a_kernel_while_another_loads_it(monkeypatch):
    """Of what a library is told about its functions no thread misses a part that another has not told yet."""
    kernels, results = (
        Kernels(Simulator(), folder=Path(__file__).parent),
        [np.zeros(64, np.float32) for _ in range(2)],
    )
    others: list[threading.Thread] = []

    def launch(result: np.ndarray) -> None:
        kernels.launch(
            "uninitialised_shared", (1,), (64,), [Argument(result, fresh=True)], 256, RIGHT=1
        )

    class Slow(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name == "simulator_dynamic_shared" and not others:
                others.append(threading.Thread(target=launch, args=(results[1],)))
                others[0].start()
                others[0].join()
            return super().__getattr__(name)

    monkeypatch.setattr(ctypes, "CDLL", Slow)
    launch(results[0])
    assert others and np.array_equal(results, np.ones((2, 64)))


def test_an_error_says_what_where_by_whom_and_the_way_out(binutils):
    text = run("no_barrier_before_reuse", True, ("forward", 0), right=False)
    assert text == (
        "race in no_barrier_before_reuse, planted.cu:21: thread 32 of block 0 reads shared "
        "`tile` + 124 bytes, which thread 31 of block 0 wrote with no barrier between; block (0, "
        "0, 0), thread (32, 0, 0)."
    )
