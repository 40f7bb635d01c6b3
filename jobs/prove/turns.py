"""Started by compare-tensor.sh on two ranks: the ways of tensor parallelism in turns, and two replicas."""

import sys

from mpitrain.cli.bench.train import TrainingJob
from mpitrain.cli.session import mpi_session

BLOCKS, STEPS = 6, 3
ROWS, KEPT = "layout.sequence_parallel=true", "layout.keep_gathered=true"
WAYS = {  # settings, and whether a column-parallel layer sums the gradient of its input while it computes that of its weights
    "tp 2": ([], True),
    "tp 2, no overlap": ([], False),
    "own rows": ([ROWS], True),
    "own rows, no overlap": ([ROWS], False),
    "own rows, kept": ([ROWS, KEPT], True),
    "two replicas": (["layout.tp=1"], True),
}


def main(settings):
    """Print the table."""
    with mpi_session() as transport:
        from mpitrain.parallel.tensor.linear import Column
        from mpitrain.run.build import build
        from mpitrain.tools.bench.training.steps import Ours, alternate, table

        fused = Column.backward

        class Way(Ours):
            """Our trainer, with both halves of column-parallel layers in one, or one after the other."""

            overlaps = True

            def step(self, index, inputs, targets):
                if self.overlaps:
                    Column.backward = fused  # type: ignore[method-assign]
                elif "backward" in vars(Column):
                    del Column.backward
                return super().step(index, inputs, targets)

        sides, source = [], None
        for name, (more, overlaps) in WAYS.items():
            job = build(
                transport,
                TrainingJob(["layout.tp=2", *settings, *more], BLOCKS, STEPS).configured(
                    transport.size
                ),
                source=source,
            )
            source = job.source
            sides.append(Way(job, name))
            sides[-1].overlaps = overlaps
        tokens = job.trainer.config.batch.size * job.trainer.config.model.context
        results = alternate(transport, sides[0].job, sides, BLOCKS, STEPS)
        for side in sides:
            side.close()
        if transport.rank == 0:
            print("\n".join(table(results, tokens)))


main(sys.argv[1:])
