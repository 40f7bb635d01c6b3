"""Messages and memory of each pipeline stage in the last step, compared with its schedule."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from mpitrain.pipeline.instructions import Send, fused_at_the_input, training_program
from mpitrain.pipeline.simulate import peak
from mpitrain.run.trainer import Trainer
from mpitrain.tools.plan.stages import measure


class StageRow(NamedTuple):
    """One pipeline stage, on its rank with the most memory.

    activations, gradients  messages sent in the step
    planned_...             messages in the schedule
    sent_bytes              payload of these messages
    peak_bytes              peak bytes of activations
    simulated_bytes         the same, simulated from the measured bytes of each unit
    """

    stage: int
    units: int
    activations: int
    gradients: int
    planned_activations: int
    planned_gradients: int
    sent_bytes: int
    peak_bytes: int
    simulated_bytes: float


def stage_rows(trainer: Trainer, inputs: np.ndarray, targets: np.ndarray) -> list[StageRow]:
    """Return a row for each stage, of the last step. Collective.

    inputs, targets  rows of this rank, as many as in its step
    """
    pipe, stage = trainer.pipe, trainer.grid.coords.pp
    plan = fused_at_the_input(trainer.resolved.plan, pipe.lowest)
    program = training_program(plan, pipe.lowest)[stage]
    sent, sent_bytes = pipe.channel.sent["activation"]
    returned, returned_bytes = pipe.channel.sent["gradient"]
    held = pipe.peak_bytes
    most = -(-len(inputs) // plan.micro_batches)
    costs = measure(trainer, inputs, targets, [most])[0].costs
    planned = Counter(i.what for i in program if isinstance(i, Send))
    own_row = StageRow(
        stage,
        len(trainer.units),
        sent,
        returned,
        planned["activation"],
        planned["gradient"],
        sent_bytes + returned_bytes,
        held,
        peak(plan.lists[stage], costs).nbytes,
    )
    rows = sorted(StageRow(*row) for row in trainer.transport.gather_text(own_row))
    return [
        max((row for row in rows if row.stage == number), key=lambda row: row.peak_bytes)
        for number in range(trainer.grid.axes.pp)
    ]


def stage_table(rows: list[StageRow]) -> list[str]:
    """Format the rows as lines of a table."""
    lines = [
        f"{'stage':>5} {'units':>6} {'activations sent':>17} {'gradients sent':>15} {'MB sent':>9} "
        f"{'peak activations MB':>20} {'simulated':>10} {'ratio':>6}"
    ]
    for row in rows:
        ratio = (
            f"{row.peak_bytes / row.simulated_bytes:6.2f}" if row.simulated_bytes else f"{'-':>6}"
        )
        lines.append(
            f"{row.stage:>5} {row.units:>6} {f'{row.activations} of {row.planned_activations}':>17} "
            f"{f'{row.gradients} of {row.planned_gradients}':>15} {row.sent_bytes / 1e6:>9.2f} "
            f"{row.peak_bytes / 1e6:>20.2f} {row.simulated_bytes / 1e6:>10.2f} {ratio}"
        )
    return lines
