"""Plain numbers on the command line: ASCII digits only, although Python also reads 1_0 as 10."""

import copy
import math
import re
from typing import Any

import click
from click.types import FloatParamType, IntParamType

PLAIN = r"[0-9A-Za-z.+-]+"
"""Characters of a number. Python then decides which of these texts are numbers."""


def with_plain_numbers(command: click.Command) -> click.Command:
    """Restrict all numeric parameters of a command and of its sub-commands to plain numbers.

    Return the same command, modified.
    """
    for parameter in command.params:
        if isinstance(parameter.type, IntParamType | FloatParamType):
            parameter.type = _plain(parameter.type)
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        with_plain_numbers(inner)
    return command


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse infinity and NaN, which every range lets through: the callback of an option."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, parameter)
    return value


def _plain(kind: Any) -> Any:
    """Copy a numeric Click type; the copy refuses texts that PLAIN does not match."""
    plain, convert = copy.copy(kind), kind.convert

    def checked(
        value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        if isinstance(value, str) and not re.fullmatch(PLAIN, value):
            kind.fail(
                f"{value!r} is not a valid {kind.name.removesuffix(' range')}.", parameter, context
            )
        return convert(value, parameter, context)

    plain.convert = checked
    return plain
