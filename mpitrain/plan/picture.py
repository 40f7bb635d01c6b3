"""A simulated pipeline as a picture; needs matplotlib (the `report` extra)."""

from pathlib import Path
from typing import Any

from mpitrain.pipeline.files import LETTERS
from mpitrain.pipeline.instructions import Plan
from mpitrain.pipeline.simulate import Simulation
from mpitrain.plan.chart import NAMES

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "W": "#009e73", "BW": "#cc79a7"}
FEWEST_INCHES, MOST_INCHES = 6, 40
CELL = 0.28
"""Inches of the shortest instruction, where that fits."""


def painter() -> Any:
    """matplotlib's pyplot, which needs no screen here."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(plan: Plan, simulation: Simulation, title: str, path: Path) -> None:
    """A row of boxes per stage over time in ms, with the micro-batch in each; paler for a stage's later parts."""
    pyplot = painter()
    from matplotlib.patches import Patch

    events = [event for mine in simulation.timeline for event in mine]
    shortest = min(event.end - event.start for event in events if event.end > event.start)
    inches = min(max(simulation.makespan / shortest * CELL, FEWEST_INCHES), MOST_INCHES)
    figure, axes = pyplot.subplots(figsize=(inches + 1, 1.6 + 0.4 * len(plan.lists)), layout="constrained")
    for stage, mine in enumerate(simulation.timeline):
        parts = [part for part, place in enumerate(plan.place) if place == stage]
        for start, end, instruction in mine:
            axes.barh(stage, end - start, 0.9, start, color=COLOURS[LETTERS[type(instruction)]], edgecolor="white", linewidth=0.5,
                      alpha=1 - 0.6 * parts.index(instruction.part) / len(parts))
            if (end - start) / simulation.makespan * inches > CELL / 2:
                axes.text((start + end) / 2, stage, str(instruction.micro), ha="center", va="center", fontsize="x-small")
    axes.set(xlabel="ms", yticks=range(len(plan.lists)), yticklabels=[f"stage {stage}" for stage in range(len(plan.lists))],
             xlim=(0, None))
    axes.set_title(title, fontsize="medium")
    axes.invert_yaxis()
    kinds = dict.fromkeys(LETTERS[type(event.instruction)] for event in events)
    figure.legend(handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds], loc="outside lower right",
                  ncols=len(kinds), fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
