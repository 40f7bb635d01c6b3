"""From raw text to a model with a BPE tokenizer; its bits per byte are fewer than those of a byte model of equal time.

    python jobs/prove/bits-per-byte.py [SECONDS] [RANKS]

Both models have the same layers, and train for SECONDS (120) on RANKS (2) ranks, on the text of Python's documentation. Both hold
out the same text. A few steps of each give the number of steps. Exit code 1 if the byte model is better. It takes SECONDS twice,
and a minute.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from mpitrain.data.token_files import pydocs

CALIBRATION = 20
VOCABULARY = 1024


def mpitrain(*words):
    subprocess.run(["mpitrain", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def trained(folder, name, tokens, steps, ranks):
    """Train for so many steps; return the seconds of a step, and the last evaluation."""
    settings = [f"data.source=tokens:{tokens}/train.bin", f"run.steps={steps}", "run.sample=0"]
    words = [word for setting in settings for word in ("--set", setting)]
    mpitrain("launch", "-n", ranks, "--", "train", "--out", folder / name, *words)
    lines = [*map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())]
    steps_s = sorted(line["step_s"] for line in lines if "loss" in line)
    return steps_s[len(steps_s) // 2], next(line for line in lines if "val_loss" in line)


def main():
    seconds, ranks = (float(word) for word in [*sys.argv[1:], "120", "2"][:2])
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        (folder / "book.txt").write_bytes(bytes(pydocs().astype("u1")))
        book, file = folder / "book.txt", folder / "tokenizer.json"
        mpitrain("data", "train-tokenizer", book, "--vocab", VOCABULARY, "--out", file)
        print(
            f"{'tokenizer':12}{'ms a step':>10}{'steps':>8}{'val nats':>10}{'bits per byte':>15}",
            flush=True,
        )
        for kind, tokenizer in (("bytes", "bytes"), ("BPE", file)):
            tokens = folder / kind
            mpitrain("data", "prepare", book, "--tokenizer", tokenizer, "--out", tokens)
            step_s, _ = trained(folder, f"{kind}-first", tokens, CALIBRATION, int(ranks))
            steps = max(CALIBRATION, round(seconds / step_s))
            step_s, last = trained(folder, f"{kind}-run", tokens, steps, int(ranks))
            found[kind] = last["val_bits_per_byte"]
            print(
                f"{kind:12}{1e3 * step_s:10.1f}{steps:8}{last['val_loss']:10.4f}{found[kind]:15.4f}",
                flush=True,
            )
    return not found["BPE"] < found["bytes"]


if __name__ == "__main__":
    sys.exit(main())
