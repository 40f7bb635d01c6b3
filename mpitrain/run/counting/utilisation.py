"""Utilisation of the arithmetic units: MFU and HFU, the fractions of the GEMM peak that are used.

MFU counts the FLOPs that the model needs, and HFU the FLOPs that the hardware executes. Recomputed
forwards are the difference (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.data import Source, Unopened
from mpitrain.models.table import MODELS
from mpitrain.parallel.grid import Axes
from mpitrain.pipeline.chunks import Units
from mpitrain.pipeline.schedules import plan_of
from mpitrain.run.counting.step import SERIAL, Counter, Scheduled


class StepFlops(NamedTuple):
    """Floating-point operations of one step of all ranks.

    model     that the model needs
    hardware  that are executed: the model's, and those of recomputed forwards
    """

    model: float
    hardware: float

    def rates(self, step_s: float, peak: float) -> dict[str, float]:
        """Return `mfu` and `hfu` of a step.

        peak  floating-point operations per second of all ranks together
        """
        return {"mfu": self.model / step_s / peak, "hfu": self.hardware / step_s / peak}


def work_of(job: Scheduled, source: Source | Unopened, units: Units, parameters: int) -> StepFlops:
    """Count the work of a step, which is proportional to rows: on one rank with the whole model.

    Models with a formula in `MODELS` use it: PaLM's for a GPT. Others count forward and backward.

    units       the model, as a function of a layer factory
    parameters  of the model; a tied tensor counts once
    """
    counted = Counter(_alone(job), source, units).step(0)
    kind, rows = MODELS[job.config.model.kind], job.config.batch.size
    needed: float = counted.flops - counted.recomputed
    if kind.flops:
        needed = kind.flops(job.config.model, parameters)
    return StepFlops(rows * needed, rows * (needed + counted.recomputed))


def _alone(job: Scheduled) -> Scheduled:
    """Return the job on one rank, with one row."""
    config: Config = job.config
    one_rank = {"dp": 1, "tp": 1, "pp": 1, "sequence_parallel": False}
    updated = {
        "layout": config.layout.model_copy(update=one_rank),
        "batch": config.batch.model_copy(update={"size": 1, "micro_batches": 1}),
        "pipeline": config.pipeline.model_copy(update={"partition": ""}),
    }
    return job._replace(
        config=config.model_copy(update=updated), axes=Axes(), plan=plan_of(SERIAL, 1, 1)
    )
