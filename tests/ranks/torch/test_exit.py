"""A process that exits while a thread of its process group is within PyTorch's C++."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

BEGUN = """
import threading, time, torch
from mpitrain.torch.calls import Call, CallQueue, future_of

begun = threading.Event()
"""
CALLBACK = """
def result():
    begun.set()
    time.sleep(0.5)

complete, future = future_of(result)
threading.Thread(target=complete, daemon=True).start()
begun.wait()
"""
COPIES = """
def copies(call):
    begun.set()
    for _ in range(100):
        many.copy_(ones)

ones, many = torch.ones(2_000_000), torch.empty(2_000_000)
CallQueue(None).add(Call("copies", copies, [], 60), in_background=True)
begun.wait()
"""


@pytest.mark.parametrize("program", [CALLBACK, COPIES], ids=["a callback", "a call"])
def test_a_program_that_exits_while_a_thread_runs_does_not_abort(program):
    ended = subprocess.run([sys.executable, "-c", BEGUN + program], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
