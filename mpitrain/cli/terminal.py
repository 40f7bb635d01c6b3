"""How wide a terminal is, for charts that fill it."""

import shutil

NARROWEST, WIDEST, PIPED = 80, 130, 100
"""Columns of a chart: those of the terminal within bounds, and where there is none."""


def columns() -> int:
    return min(max(shutil.get_terminal_size((PIPED, 24)).columns, NARROWEST), WIDEST)
