"""`mpitrain generate`: text from a checkpoint."""

import sys
from pathlib import Path

import click

from mpitrain.cli.ending import kind_of, ranks, settings_of


@click.command()
@click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--prompt", default="\n", help="Text to go on from (default: a line break); token numbers for tokens: sources.")
@click.option("--tokens", "count", type=click.IntRange(min=1), default=400, show_default=True, help="How many to draw.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 takes the likeliest.")
@click.option("--top-k", type=click.IntRange(min=0), default=40, show_default=True, help="Draw among so many; 0: all.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the draws.")
@click.option("--device", metavar="KIND", help="Compute on this kind of device instead of the run's own.")
def command(run: Path, prompt: str, count: int, temperature: float, top_k: int, seed: int, device: str | None) -> None:
    """Write text with the newest checkpoint of RUN_DIR."""
    settings = settings_of(("device.kind", device))
    with ranks(kind=lambda: kind_of(run, settings)) as transport:
        from mpitrain.generate import tokens
        from mpitrain.session import open_run
        from mpitrain.transport.agree import agreed

        trainer, source, _ = open_run(transport, run, [*settings, f"batch.size={transport.size}", "batch.micro_batches=1"])
        is_text = not trainer.config.data.source.startswith("tokens:")
        start = agreed(transport, lambda: _prompt(prompt, is_text, source))
        if transport.rank == 0:
            click.echo(prompt, nl=False)
            drawn = tokens(trainer, start, temperature, top_k, seed)
            for _ in range(count):
                token = next(drawn)
                sys.stdout.buffer.write(bytes([token]) if is_text else f" {token}".encode())
                sys.stdout.buffer.flush()
            click.echo()


def _prompt(prompt: str, is_text: bool, source: object) -> list[int]:
    """The prompt as tokens this model knows."""
    from mpitrain.errors import ConfigError

    if source.model != "gpt":
        raise ConfigError("Only a gpt writes text, but this run trained a " + source.model + ".", "Name another run.")
    if is_text:
        return list(prompt.encode())
    try:
        numbers = [int(word) for word in prompt.split()] or [0]
    except ValueError:
        raise ConfigError(f"A model of token numbers takes numbers as its prompt, but got {prompt!r}.",
                          'For example: --prompt "17 4 120"') from None
    if not all(0 <= number < source.inputs for number in numbers):
        raise ConfigError(f"Tokens must lie in 0..{source.inputs - 1}, but the prompt is {prompt!r}.", "Use known tokens.")
    return numbers
