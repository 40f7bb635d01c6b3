"""How much of the gradients' communication hides behind the backward pass.

    overlap.py ROWS BLOCKS STEPS [SECTION.KEY=VALUE ...]

Started by jobs/prove/overlap.sh on one rank per host.
In turns, BLOCKS times STEPS training steps of the job gpt of `mpitrain compare`
with ROWS sequences per rank: of each rank alone, of the reductions alone, of both in the ways there are to overlap them, and of
PyTorch DDP over gloo if it is installed. Exposed is what a step takes longer than it does alone, over what the reductions take.
"""

import os
import sys
from importlib.util import find_spec
from statistics import median

from mpitrain.cli.compare import gpt
from mpitrain.cli.session import mpi_session
from mpitrain.config import parse, with_settings
from mpitrain.run.build import build
from mpitrain.tools.bench.training.peers import peer_class
from mpitrain.tools.bench.training.steps import Ours, alternate

WAYS = {
    "no overlap": ["replication.overlap=false"],
    "polled between layers": ["replication.progress_thread=no", "replication.bucket_mb=4.0"],
    "a thread, 4 MB": ["replication.bucket_mb=4.0"],
    "a thread, chosen": [],
}


class Reductions(Ours):
    """The reductions of a step, and nothing else."""

    def step(self, index, inputs, targets):
        self.job.trainer.replica.buckets.run()
        return 0.0


def measure(transport, rows, blocks, steps, changes):
    """Print the table."""

    def job(where, *settings):
        shape = {
            "batch.size": rows * where.size,
            "replication.algorithm": "ring",
            "device.kind": "cpu",
        }
        return build(
            where,
            parse(
                with_settings(
                    {},
                    [
                        *gpt(),
                        *(f"{key}={value}" for key, value in shape.items()),
                        *settings,
                        *changes,
                    ],
                )
            ),
        )

    transport.hosts = tuple(
        name.replace("mth", "10.77.0.") for name in transport.hosts
    )  # nobody knows hosts.sh's hosts by name
    jobs = [job(transport, *settings) for settings in WAYS.values()]
    sides = {
        "each rank alone": Ours(job(transport.split(transport.rank))),
        "reductions alone": Reductions(jobs[-1]),
    }
    sides |= {name: Ours(job) for name, job in zip(WAYS, jobs, strict=True)}
    trainer = jobs[0].trainer
    if find_spec("torch"):
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        arrays = {entry.name: entry.view(trainer.parameters) for entry in trainer.storage.entries}
        sides["torch DDP, gloo"] = peer_class("torch", trainer.config)(
            transport, trainer.config, 256, arrays
        )
    results = dict(
        zip(sides, alternate(transport, jobs[0], list(sides.values()), blocks, steps), strict=True)
    )
    if transport.rank:
        return
    compute, bare = results["each rank alone"].blocks, results["reductions alone"].blocks
    megabytes = 1e-6 * trainer.storage.length * trainer.storage.dtype.itemsize
    print(
        f"{transport.size} hosts, {rows} rows per rank, {megabytes:.1f} MB of gradients, "
        f"{len(jobs[-1].trainer.replica.buckets)} buckets chosen; median of {blocks} blocks of {steps} steps, least, most"
    )
    for name, result in results.items():
        exposed = [(s - c) / b for s, c, b in zip(result.blocks, compute, bare, strict=True)]
        share = f"   exposed {median(exposed):4.0%}" if name in WAYS else ""
        print(
            f"{name:<22} {result.step_s:6.3f} s   {min(result.blocks):6.3f} .. {max(result.blocks):6.3f}{share}"
        )


with mpi_session() as transport:
    measure(transport, int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
