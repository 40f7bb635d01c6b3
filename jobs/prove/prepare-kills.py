"""SIGKILL to a random rank of `data prepare` at 50 random times: no file under its final name is ever half, and it goes on.

    python jobs/prove/prepare-kills.py [RANKS] [KILLS]

It prepares 90 MB of text by `mpitrain launch -n RANKS` (3), kills one rank, checks the directory, and types the command again.
At the end the files are those of one process. Exit code 1 if any is not. 50 kills take about 10 minutes.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpitrain.data.token_files import pydocs

COPIES = 200
NAMES = ("train.bin", "val.bin", "meta.json", "tokenizer.json")


def ranks_of(out):
    """Process ids of the ranks that write to `out`, by their command lines and environments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            is_rank = b"OMPI_COMM_WORLD_RANK=" in (process / "environ").read_bytes()
        except OSError:
            continue
        if str(out).encode() in words and is_rank:
            found.append(int(process.name))
    return found


def files(folder):
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).exists()}


def main():
    ranks, kills = (int(word) for word in [*sys.argv[1:], "3", "50"][:2])
    with tempfile.TemporaryDirectory() as name:
        folder, drawn = Path(name), random.Random(0)
        (folder / "in.txt").write_bytes(bytes(pydocs().astype("u1")) * COPIES)
        words = ["data", "prepare", str(folder / "in.txt"), "--tokenizer", "bytes", "--out"]
        subprocess.run(
            ["mpitrain", *words, str(folder / "truth")], check=True, stdout=subprocess.DEVNULL
        )
        truth, killed, finished = files(folder / "truth"), 0, 0
        out = folder / "out0"
        while killed < kills:
            job = subprocess.Popen(
                ["mpitrain", "launch", "-n", str(ranks), "--", *words, str(out)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while not (out / ".prepare.json").exists() and job.poll() is None:
                time.sleep(0.01)
            time.sleep(drawn.uniform(0, 0.4))
            if found := ranks_of(out):
                os.kill(drawn.choice(found), signal.SIGKILL)
                killed += 1
            code = job.wait(timeout=300)
            there = files(out) if out.exists() else {}
            wrong = [name for name, data in there.items() if data != truth[name]]
            if wrong or ("train.bin" in there and there.keys() != truth.keys()):
                print(f"kill {killed}: {out} has {sorted(there)}, wrong: {wrong}")
                return 1
            if code == 0:
                finished += 1
                out = folder / f"out{finished}"
        subprocess.run(["mpitrain", *words, str(out)], check=True, stdout=subprocess.DEVNULL)
        if files(out) != truth:
            print(f"{out} differs from the files of one process")
            return 1
        print(
            f"{killed} kills of {ranks} ranks, {finished} directories completed between them: no file is half"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
