"""Numbers on the command line."""

import math

import click


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse infinity and NaN, which every range lets through: the callback of an option."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, parameter)
    return value
