#!/usr/bin/env python3
"""Claim: this tree trains as the tree of OLD_COMMIT, bit for bit: every mode, layout, schedule, optimizer and wire format.

Each case runs 10 steps on ranks that are threads. Losses, gradient norms, digests of parameters and optimizer state, and the
elements in the files of checkpoints after steps 5 and 10 must be equal. What the old tree has saved after 5 steps is then
resumed by both trees. A case that the old tree refuses must be refused with the same error. 4 minutes on two free cores.

    python jobs/prove/same-results.py OLD_COMMIT [PART OF A NAME]...
"""

import json
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
COMMON = """model.layers=4 model.width=16 model.heads=2 model.context=16 batch.size=8 run.steps=10 run.eval_every=5
    run.eval_rows=8 run.sample=0 run.log_every=1 run.digest_every=5 run.trace=false optimizer.warmup=2 optimizer.lr=0.01
    replication.bucket_mb=0.004 data.source=text:LICENSE checkpoint.every=5 checkpoint.keep=9 device.kind=cpu"""
FLOAT64 = "precision.compute=float64"
RESUMED = (
    "dp 2",
    "dp 3",
    "ZeRO",
    "tp 2",
    "pp 2, 1f1b",
    "local",
    "master",
    "int8",
    "momentum",
    "adamw8bit",
    "experts",
)
"""Beginnings of the names of the cases that the old tree saves and both trees resume."""


def cases():
    """Return {name: (ranks, settings)}."""
    layouts = {
        "dp 1": (1, ""),
        "dp 2": (2, ""),
        "dp 3": (3, ""),
        "dp 2, 4 micro-batches": (2, "batch.micro_batches=4"),
        "dp 2, without overlap": (2, "replication.overlap=false"),
        "tp 2": (2, "layout.tp=2"),
        "tp 2, sequence parallel": (2, "layout.tp=2 layout.sequence_parallel=true"),
        "tp 2 x dp 2": (4, "layout.tp=2"),
        "cp 2": (2, "layout.cp=2"),
        "cp 2, ring": (2, "layout.cp=2 layout.cp_mode=ring"),
        "pp 2 x dp 2": (4, "layout.pp=2"),
        "pp 2 x tp 2, tied": (4, "layout.pp=2 layout.tp=2 model.tied=true"),
        "recomputation": (2, "memory.recompute=unit"),
        "logit chunks": (2, "memory.logit_chunks=2"),
        "dropout": (2, "model.dropout=0.1"),
        "masked": (2, "data.order=epochs"),
        "llama": (2, "model.kind=llama model.kv_heads=1"),
        "bert": (2, "model.kind=bert"),
        "mlp": (2, "model.kind=mlp data.source=digits model.layers=2"),
        "cnn": (2, "model.kind=cnn data.source=digits model.layers=2"),
        "lora": (2, "lora.rank=2"),
        "frozen": (2, 'model.freeze=["embedding*"]'),
        "bfloat16": (2, "precision.compute=bfloat16"),
        "float16": (2, "precision.compute=float16"),
        "skipped spikes": (2, "run.on_spike=skip run.spike=0.5"),
        "experts": (2, "model.experts=4 model.capacity=1.0"),
        "experts, ep 2": (2, "model.experts=4 layout.ep=2 model.shared=8"),
        "experts, ep 2, ZeRO 3": (4, "model.experts=4 layout.ep=2 replication.zero=3"),
        "experts, ep 2 x tp 2": (4, "model.kind=llama model.experts=4 layout.ep=2 layout.tp=2"),
    }
    for zero in (1, 2, 3):
        layouts[f"ZeRO {zero}"] = (2, f"replication.zero={zero}")
        layouts[f"ZeRO {zero}, 3 ranks"] = (3, f"replication.zero={zero} batch.micro_batches=2")
        layouts[f"ZeRO {zero} x tp 2"] = (4, f"replication.zero={zero} layout.tp=2")
        layouts[f"ZeRO {zero} x pp 2"] = (
            4,
            f"replication.zero={zero} layout.pp=2 pipeline.schedule=gpipe",
        )
        layouts[f"ZeRO {zero}, bfloat16"] = (
            2,
            f"replication.zero={zero} precision.compute=bfloat16",
        )
    modes = {
        "master": (3, "replication.mode=master"),
        "server, sync": (3, "replication.mode=server"),
        "2 servers, sync": (4, "replication.mode=server replication.servers=2"),
        "server, async": (2, "replication.mode=server replication.update=async run.digest_every=0"),
        "server, bounded": (
            2,
            "replication.mode=server replication.update=bounded run.digest_every=0",
        ),
        "local": (2, "replication.mode=local replication.period=3 run.digest_every=0"),
        "local, outer": (
            2,
            "replication.mode=local replication.period=3 run.digest_every=0 replication.outer_lr=0.7"
            " replication.outer_momentum=0.9",
        ),
        "gossip": (4, "replication.mode=gossip run.digest_every=0"),
    }
    schedules = {
        f"pp 2, {name}": (2, f"layout.pp=2 batch.micro_batches=4 pipeline.schedule={name} {more}")
        for name, more in {
            "naive": "",
            "gpipe": "",
            "1f1b": "",
            "zero-bubble": "",
            "zb-v": "",
            "v-half": "",
            "async": "run.digest_every=0",
            "async-2bw": "run.digest_every=0",
            "interleaved": "pipeline.chunks=2",
            "breadth-first": "pipeline.chunks=2",
        }.items()
    }
    optimizers = {
        name: (2, f"optimizer.name={name}")
        for name in (
            "sgd",
            "momentum",
            "nesterov",
            "adam",
            "adamw",
            "adamw8bit",
            "lion",
            "lamb",
            "adafactor",
            "muon",
        )
    }
    optimizers |= {
        f"ZeRO 2, {name}": (2, f"optimizer.name={name} replication.zero=2")
        for name in ("adamw8bit", "lamb", "muon")
    }
    wires = {
        f"wire {wire}": (2, f"replication.wire={wire} replication.dense_steps=2")
        for wire in ("fp16", "bf16", "int8", "topk:0.1", "powersgd:2")
    }
    algorithms = {
        f"algorithm {name}": (4, f"replication.algorithm={name}")
        for name in (
            "ring",
            "halving-doubling",
            "recursive-doubling",
            "tree",
            "star",
            "shared",
            "native",
        )
    }
    return {**layouts, **modes, **schedules, **optimizers, **wires, **algorithms}


def records(folder):
    """Return the records of a run that do not depend on time, and a digest of each file of its checkpoints."""
    kept = (
        "step",
        "loss",
        "grad_norm",
        "val_loss",
        "val_accuracy",
        "digests",
        "loss_scale",
        "overflows",
        "updated",
        "counted",
    )
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    metrics = [
        record
        for line in lines
        if len(record := {key: line[key] for key in kept if key in line}) > 1
    ]
    return [*metrics, *map(elements_of, sorted(folder.glob("checkpoints/step-*/*.safetensors")))]


def elements_of(path):
    """Return a digest of all elements in a safetensors file. Its header also names the run, which is another one each time."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return {f"{path.parent.name}/{path.name}": sha256(content[start:]).hexdigest()}


def trained(folder, ranks, settings, resume):
    """Train in a folder; return the records, or the error of a refused case. Runs in one of the trees."""
    import mpitrain
    from mpitrain.config import with_settings
    from mpitrain.run.loop import train

    try:
        config = mpitrain.parse(
            with_settings({}, [*COMMON.split(), *settings.split(), f"run.out={folder}"])
        )
        mpitrain.run_ranks(ranks, train, lambda: config, resume)
    except mpitrain.MpitrainError as error:
        return str(error).splitlines()
    return records(Path(folder))


def work(place, names):
    """Run in a tree: train each case in PLACE/name, or resume it; write PLACE.json after each."""
    place, results = Path(place), {}
    Path(f"{place}.json").write_text("{}")
    progress = os.fdopen(os.dup(2), "w", buffering=1)
    for descriptor in (1, 2):  # What the runs print says nothing here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    for name in names:
        ranks, settings = cases()[name]
        folder = place / name.replace(" ", "_").replace(",", "")
        results[name] = trained(str(folder), ranks, settings, "yes" if folder.exists() else "no")
        Path(f"{place}.json").write_text(json.dumps(results))
        print(".", end="", file=progress, flush=True)


def run(tree, place, names):
    """Run `work` in a tree; return its results."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, __file__, "--work", str(place), *names],
        cwd=tree,
        env=environment,
        check=True,
    )
    print(file=sys.stderr)
    return json.loads(Path(f"{place}.json").read_text())


def report(claim, old, new):
    """Print the cases that differ; return whether there are none."""
    differing = [name for name in old if old[name] != new[name]]
    refused = [name for name, rows in old.items() if rows and isinstance(rows[0], str)]
    print(
        f"{claim}: {len(old) - len(differing)} of {len(old)} equal bit for bit; {len(refused)} of them are refused by both"
    )
    for name in differing:
        step = next(
            (pair for pair in zip(old[name], new[name], strict=False) if pair[0] != pair[1]),
            (len(old[name]), len(new[name])),
        )
        print(f"  {name}\n    old {step[0]}\n    new {step[1]}")
    for name in refused:
        print(f"  refused: {name}: {old[name][0]}")
    return not differing


def main(commit, *parts):
    names = [name for name in cases() if not parts or any(part in name for part in parts)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "tree").mkdir()
        archive = subprocess.run(
            ["git", "-C", HERE, "archive", commit], stdout=subprocess.PIPE, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", place / "tree"], input=archive, check=True)
        is_same = report(
            "trained", run(place / "tree", place / "old", names), run(HERE, place / "new", names)
        )
        resumed = [name for name in names if name.startswith(RESUMED)]
        for side in ("from-old-by-old", "from-old-by-new"):
            subprocess.run(["cp", "-a", place / "old", place / side], check=True)
            for run_dir in (place / side).iterdir():
                subprocess.run(
                    ["rm", "-r", run_dir / "checkpoints/step-00000010"],
                    check=False,
                    stderr=subprocess.DEVNULL,
                )
        old = run(place / "tree", place / "from-old-by-old", resumed)
        is_same &= report(
            "saved by the old tree and resumed", old, run(HERE, place / "from-old-by-new", resumed)
        )
    return 0 if is_same else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(*sys.argv[1:]))
