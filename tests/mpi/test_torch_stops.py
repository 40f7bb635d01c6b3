"""A PyTorch program that its batch job asks to stop: one answer on all ranks, and an orderly exit with 85."""

import os
import signal
import subprocess

import pytest

from tests.processes import PROGRAM, SECONDS

pytest.importorskip("torch")

READY = """
import os, sys, time
import torch.distributed as dist
import mpitrain.torch
dist.init_process_group("mpitrain")
rank = dist.get_rank()
"""
STOPS = f"""{READY}
for step in range(1_000_000):
    if mpitrain.torch.stop_requested():
        break
    if step == 0 and rank == 0:
        print("ready", flush=True)
    time.sleep(0.001 * rank)  # The ranks are asked at different times.
steps = [None] * 3
dist.all_gather_object(steps, step)
assert len({{*steps}}) == 1 and mpitrain.torch.stop_requested(), steps
if rank == 0:
    time.sleep(1)  # The other ranks leave, and this one is not ended.
    print("saved", flush=True)
sys.exit(85)
"""
IGNORES = (
    f"{READY}\nprint('ready', flush=True)\ntime.sleep(1)\ndist.barrier()\nsys.exit(3 * (rank == 0))"
)
OWN = f"""{READY}
import signal, threading
asked = threading.Event()
signal.signal(signal.SIGUSR1, lambda *of: asked.set())
dist.barrier()
if rank == 0: print("ready", flush=True)
asked.wait()
assert not mpitrain.torch.stop_requested()  # The signal is the program's own.
"""


@pytest.mark.parametrize(
    "program, ranks, code, said", [(STOPS, 3, 85, "saved\n"), (IGNORES, 2, 3, ""), (OWN, 2, 0, "")]
)
def test_a_program_that_is_asked_to_stop_ends_as_it_decides(program, ranks, code, said, tmp_path):
    (tmp_path / "own.py").write_text(program)
    words = [*PROGRAM, "launch", "-n", str(ranks), "--", "python", "own.py"]
    text = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env={**os.environ}, **text) as job:
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGUSR1)
        out, errors = job.communicate(timeout=SECONDS)
    assert job.returncode == code, out + errors
    assert out.replace("ready\n", "") == said and (code == 3 or not errors), out + errors
