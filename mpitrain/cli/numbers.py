"""Numbers of the command line: ASCII digits, as a shell writes them, where Python would also take
1_0 for 10.
"""

import copy
import math
import re
from typing import Any

import click
from click.types import FloatParamType, IntParamType

PLAIN = r"[0-9A-Za-z.+-]+"
"""What a number is made of; which of these texts are numbers is then up to Python."""


def with_plain_numbers(command: click.Command) -> click.Command:
    """The command, whose options and arguments, and those of its own commands, take plain numbers
    alone.
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
    """A copy of a type of numbers that refuses what is not plain."""
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
