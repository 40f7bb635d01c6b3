"""Picture of a simulated pipeline; needs matplotlib (the `report` extra)."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.pipeline.instructions import Plan
from mpitrain.pipeline.schedule_files import LETTERS
from mpitrain.pipeline.simulate import Simulation
from mpitrain.plots import save, subplots
from mpitrain.tools.plan.chart import NAMES

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "W": "#009e73", "BW": "#cc79a7"}
FEWEST_INCHES, MOST_INCHES = 8, 40
CHARACTERS, ENTRY = 11, 2.6
"""Characters of a title in an inch, and inches of an entry in the legend."""
CELL = 0.28
"""Inches of the shortest instruction, if the picture has room."""


def draw(
    plan: Plan, simulation: Simulation, title: str, path: Path, notes: Sequence[Sequence[str]] = ()
) -> None:
    """Draw a row of boxes for each stage over time in ms, each box with its micro-batch.

    The later chunks of a stage are paler.

    notes  of an asynchronous stage, for each event: the weight version, with * if an update follows
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    events = [event for stage_events in simulation.timeline for event in stage_events]
    shortest = min(event.end - event.start for event in events if event.end > event.start)
    inches = min(max(simulation.makespan / shortest * CELL, FEWEST_INCHES), MOST_INCHES)
    figure, axes = subplots(inches + 1, 1.6 + 0.4 * len(plan.lists))
    for stage, stage_events in enumerate(simulation.timeline):
        chunks = [chunk for chunk, stage_of in enumerate(plan.stage_of) if stage_of == stage]
        for event, (start, end, instruction) in enumerate(stage_events):
            axes.barh(
                stage,
                end - start,
                0.9,
                start,
                color=COLOURS[LETTERS[type(instruction)]],
                edgecolor="white",
                linewidth=0.5,
                alpha=1 - 0.6 * chunks.index(instruction.chunk) / len(chunks),
            )
            if (end - start) / simulation.makespan * inches > CELL / 2:
                version = f"\nv{notes[stage][event].rstrip('*')}" if notes else ""
                axes.text(
                    (start + end) / 2,
                    stage,
                    f"{instruction.micro}{version}",
                    ha="center",
                    va="center",
                    fontsize="x-small",
                )
            if notes and notes[stage][event].endswith("*"):
                axes.plot(
                    end, stage + 0.45, "^", color="black", markersize=4, clip_on=False, zorder=3
                )
    has_micros = any(text.get_text() for text in axes.texts)
    axes.set(
        xlabel="time, ms" + "; in each box its micro-batch" * has_micros,
        xlim=(0, simulation.makespan),
        yticks=range(len(plan.lists)),
        yticklabels=[f"stage {stage}" for stage in range(len(plan.lists))],
    )
    axes.set_title(textwrap.fill(title, int(inches * CHARACTERS)), fontsize="medium")
    axes.invert_yaxis()
    kinds = dict.fromkeys(LETTERS[type(event.instruction)] for event in events)
    handles: list[Any] = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    if notes:
        handles.append(
            Line2D(
                [],
                [],
                color="black",
                marker="^",
                linestyle="",
                markersize=4,
                label="update: makes the next version of the stage's weights (v)",
            )
        )
    if len(plan.stage_of) > len(plan.lists):
        handles.append(
            Patch(color=COLOURS["F"], alpha=0.4, label="paler: a later chunk of the stage")
        )
    figure.legend(
        handles=handles,
        loc="outside lower right",
        ncols=max(1, int(inches / ENTRY)),
        fontsize="small",
    )
    save(figure, path, 110)
