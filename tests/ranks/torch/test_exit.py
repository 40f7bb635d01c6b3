"""A process that exits while a thread of its process group completes a future."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

EXITS = """
import threading, time
from mpitrain.torch.calls import future_of

def result():
    begun.set()
    time.sleep(0.5)

begun = threading.Event()
complete, future = future_of(result)
threading.Thread(target=complete, daemon=True).start()
begun.wait()
"""


def test_a_program_that_exits_while_a_callback_runs_does_not_abort():
    ended = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
