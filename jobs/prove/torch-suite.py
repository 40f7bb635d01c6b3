"""Claim: of PyTorch's own tests of process groups, all that pass over gloo without a GPU pass over mpitrain.

    python jobs/prove/torch-suite.py [--ranks 3 4] [--backends gloo mpitrain] [--only PATTERN]

The tests are those of `torch.testing._internal.distributed.distributed_test`, which PyTorch's wheel contains. They need
`pip install torch expecttest`. PyTorch starts the ranks of a test as children; here the ranks are those of one
`mpitrain launch`, which run one test after another. A test that fails or hangs ends its ranks, and others go on behind it. About
ten minutes.
"""

import argparse
import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 90.0
"""A test that takes longer hangs."""
LIFTED = "get_future is only|Only MPI supports|Only gloo|GLOO|Only Nccl & Gloo|Test requires backend .* one of .*gloo"
"""Reasons to skip a test that ask for a backend of another name: such tests run here over any backend."""
RESERVED = "monitored_barrier"
"""PyTorch itself refuses it over other backends than gloo."""


class Found(NamedTuple):
    """What came of a test. word: passed, skipped or failed; text: why"""

    word: str
    text: str
    seconds: float


def suite(backend: str) -> tuple[Any, Any]:
    """Import PyTorch's module, which reads the name of the backend and WORLD_SIZE; return it and a class with all tests."""
    from torch.testing._internal import common_distributed, common_utils

    os.environ["BACKEND"] = backend
    for feature in ("ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add("mpitrain")
    # Without this, tests of groups of two ranks ask for eight ranks.
    common_distributed.skip_if_small_worldsize = lambda body: body
    skip = common_utils.skip_but_pass_in_sandcastle

    def skip_unless_lifted(reason: str) -> Callable[[Any], Any]:
        is_lifted = re.match(LIFTED, reason, re.IGNORECASE)
        return lambda body: (
            body if is_lifted and RESERVED not in body.__name__ else skip(reason)(body)
        )

    common_utils.skip_but_pass_in_sandcastle = skip_unless_lifted
    common_utils.skip_but_pass_in_sandcastle_if = lambda condition, reason: (
        skip_unless_lifted(reason) if condition else lambda body: body
    )
    from torch.testing._internal.distributed import distributed_test

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return distributed_test, Case


def run(module: Any, kind: Any, name: str, folder: Path, world: Any) -> tuple[str, str]:
    """Run a test on this rank, and return what came of it and why. All ranks call it; a failure raises an error.

    folder  an empty one, the same on all ranks
    world   communicator of mpi4py
    """
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    body = getattr(kind, name)
    if getattr(body, "__unittest_skip__", False):
        return "skipped", body.__unittest_skip_why__
    case = kind(name)
    case.rank, case.file_name = world.rank, str(folder / "store")
    os.environ["TEMP_DIR"] = str(folder)
    for part in ("barrier", "test_dir"):
        (folder / part).mkdir(exist_ok=True)
    module.Barrier.barrier_id = 0
    backend = os.environ["BACKEND"]
    # These ask for the name again, to know whether a model is on the CPU.
    module.BACKEND = "gloo" if "accumulate_gradients_no_sync" in name else backend
    file = f"file://{case.file_name}"
    where = {"rank": world.rank, "world_size": world.size, "init_method": file}
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)),
        **({} if backend == "mpitrain" else where),
    )
    set_rng_seed()
    try:
        world.Barrier()  # A rank that skips a test would close connections that others are opening.
        body(case)
        world.Barrier()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if end.code not in reasons:
            raise
        return "skipped", reasons[end.code]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed", ""


def on_a_rank(backend: str, only: str, folder: Path) -> None:
    """Run the tests that are not known yet, and append what came of each to the file of this rank."""
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
    torch.set_num_threads(1)
    if backend == "mpitrain":
        import mpitrain.torch  # noqa: F401  registers the backend
    module, kind = suite(backend)
    names = [name for name in dir(kind) if name.startswith("test_") and re.search(only, name)]
    done = world.bcast(known(folder) if rank == 0 else None)
    for name in names:
        if name in done:
            continue
        own = folder / name
        own.mkdir(exist_ok=True)
        world.Barrier()
        if rank == 0:
            (folder / "running").write_text(name)
        start = time.perf_counter()
        with (own / f"stack-{rank}").open("w") as stack:
            faulthandler.dump_traceback_later(0.8 * SECONDS, file=stack)
            try:
                word, text = run(module, kind, name, own, world)
            except BaseException:
                word, text = "failed", f"rank {rank}: {traceback.format_exc()}"
            faulthandler.cancel_dump_traceback_later()
        with (folder / f"rank-{rank}").open("a") as log:
            log.write(json.dumps([name, word, text, time.perf_counter() - start]) + "\n")
        if word == "failed":
            time.sleep(1)  # others may fail, too
            os._exit(1)
    world.Barrier()


def known(folder: Path) -> dict[str, Found]:
    """Return what came of the tests so far: the worst of the ranks, a failure first."""
    lines = [json.loads(line) for file in folder.glob("rank-*") for line in file.open()]
    return {
        name: Found(*rest) for name, *rest in sorted(lines, key=lambda line: line[1] == "failed")
    }


def series(backend: str, size: int, only: str, folder: Path) -> dict[str, Found]:
    """Start ranks until each test has run, and return what came of each."""
    words = [sys.executable, __file__, "--rank", backend, "--only", only, "--folder", str(folder)]
    launch = [sys.executable, "-m", "mpitrain", "launch", "-n", str(size), "--"]
    running, ended = folder / "running", False
    while not ended:
        with (folder / "output").open("a") as output:
            job = subprocess.Popen([*launch, *words], stdout=output, stderr=output)
            first = time.time() + SECONDS  # to start and to import PyTorch takes long, too
            while job.poll() is None:
                time.sleep(0.2)
                since = running.stat().st_mtime if running.exists() else 0
                if time.time() - max(since, first) > SECONDS:
                    job.terminate()  # launch ends the ranks
                    job.wait()
        ended = job.wait() == 0
        name = running.read_text() if running.exists() else ""
        if not ended and known(folder).get(name, Found("", "", 0)).word != "failed":
            if not name or name in known(folder):
                raise SystemExit((folder / "output").read_text()[-3000:])
            stacks = "\n".join(file.read_text() for file in (folder / name).glob("stack-*"))
            with (folder / "rank-0").open("a") as log:
                text = f"{stacks}\nhangs, or ends its process"
                log.write(json.dumps([name, "failed", text, SECONDS]) + "\n")
    if not (results := known(folder)):
        raise SystemExit(f"No test has run.\n{(folder / 'output').read_text()[-3000:]}")
    return results


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


def main() -> None:
    """Print a table, the tests that fail, and those that are skipped here and pass over the first backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--backends", nargs="*", default=["gloo", "mpitrain"])
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--rank", metavar="BACKEND", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        on_a_rank(given.rank, given.only, given.folder)
        return
    top = given.folder or Path(tempfile.mkdtemp())
    print("| ranks | backend | passed | skipped | failed | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    lines, lost = [], 0
    for size in given.ranks:
        found = {}
        for backend in given.backends:
            folder = top / f"{backend}-{size}"
            folder.mkdir(parents=True, exist_ok=True)
            found[backend] = series(backend, size, given.only, folder)
            words = Counter(one.word for one in found[backend].values())
            seconds = sum(one.seconds for one in found[backend].values())
            counts = " | ".join(str(words[word]) for word in ("passed", "skipped", "failed"))
            print(f"| {size} | {backend} | {counts} | {seconds:.0f} |", flush=True)
        first, *others = given.backends
        for backend in given.backends:
            for name, one in found[backend].items():
                passes = found[first].get(name, one).word == "passed"
                if one.word == "failed" or (one.word == "skipped" and passes):
                    lines.append(
                        f"{size} ranks, {backend}: {name} {one.word}: {last_line(one.text)}"
                    )
                    lost += one.word == "failed" and passes and backend in others
    print("", *lines, f"logs: {top}", sep="\n")
    raise SystemExit(lost > 0)


if __name__ == "__main__":
    main()
