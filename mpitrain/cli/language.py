"""The option `--language` of the commands of the textbook."""

import os
from collections.abc import Callable

import click


def _chosen(context: click.Context, option: click.Parameter, value: str | None) -> str:
    from mpitrain.tools.textbook.words import language_of

    if value:
        return value
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_MESSAGES") or os.environ.get("LANG")
    return language_of(locale or "")


def language_option(function: Callable) -> Callable:
    """Give a command the option `--language`: its argument `language` is "en" or "ko"."""
    return click.option(
        "--language",
        type=click.Choice(["en", "ko"]),
        callback=_chosen,
        help="English or Korean. Default: the language of LANG.",
    )(function)
