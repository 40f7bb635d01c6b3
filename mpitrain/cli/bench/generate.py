"""`mpitrain bench generate`: measures text generation, in turns with whole windows and a peer."""

import sys
from typing import Any

import click

from mpitrain.cli.bench.rows import CSV, JSON, BenchReport
from mpitrain.cli.job_options import DEVICE, PP, SET, TP, changes, configured, counted
from mpitrain.cli.session import MOST, mpi_session


@click.command("generate")
@click.argument("model", metavar="[RUN_DIR]", required=False)
@DEVICE
@TP
@PP
@click.option(
    "--tokens",
    "count",
    type=click.IntRange(1, MOST),
    help="Tokens after each prompt, within the context.  [default: fill the context]",
)
@counted("--prompt-tokens", 1, 1, "Tokens of each prompt.")
@counted("--batch", 1, 1, "Prompts.")
@click.option("--windows", is_flag=True, help="Also measure whole windows, without a cache.")
@counted("--blocks", 1, 5, "Turns of each side.")
@SET
@JSON
@CSV
def command(
    model: str | None,
    count: int | None,
    prompt_tokens: int,
    batch: int,
    windows: bool,
    blocks: int,
    settings: tuple[str, ...],
    json_file: Any,
    csv_file: Any,
    **options: Any,
) -> None:
    """Measure the generation of the most likely tokens after random prompts.

    The model has the weights of RUN_DIR, which is a run or a folder of transformers, or random ones.

    On one rank on the CPU, the package transformers is measured in turns, if it is installed. It
    gets the same weights and threads. A model with adapters has no such comparison.

    \b
    ratio  time relative to the first side
    #same  tokens equal to those of the first side, up to the first other one
    """
    changed = changes(settings, **options, base=model)

    def read(ranks: int = 1) -> Any:
        # Files of tokens take their vocabulary from run.init_from. No data are opened here.
        random = ["data.source=tokens:random", "layout.dp=1", f"batch.size={ranks}"]
        return configured(None, [*random, *changed])

    with mpi_session(kind=lambda: read().device.kind) as transport:
        from importlib.util import find_spec

        import numpy as np

        from mpitrain.data import Unopened
        from mpitrain.errors import ConfigError
        from mpitrain.formats.peft import ARCHITECTURES
        from mpitrain.run.build import build
        from mpitrain.run.generate import check_writes
        from mpitrain.tools.bench.generate import (
            TABLE,
            Cached,
            GenerationSide,
            Transformers,
            WholeWindows,
            measure,
        )
        from mpitrain.transport.agreement import on_all_ranks

        def checked() -> Any:
            config = read(transport.size)
            check_writes(config.model.kind)
            if prompt_tokens + (count or 1) > config.model.context + 1:
                raise ConfigError(
                    f"Prompt and tokens fit into model.context {config.model.context}, but there are "
                    f"{prompt_tokens} + {count or 1}.",
                    "Lower --tokens or --prompt-tokens, or raise model.context.",
                )
            if windows and transport.size > 1:
                raise ConfigError(
                    f"--windows measures one rank, but there are {transport.size}.", "Leave it out."
                )
            return config

        config = on_all_ranks(transport, checked)
        vocabulary, context = config.data.vocabulary or 256, config.model.context
        many = count or context - prompt_tokens
        files = {"json_file": json_file, "csv_file": csv_file}
        shown = BenchReport(transport, {"arguments": sys.argv[1:]}, files)
        source = Unopened("tokens", (context,), vocabulary, vocabulary)
        trainer = build(transport, config, source=source).trainer
        sides: list[GenerationSide] = [Cached(trainer)]
        if windows:
            sides.append(WholeWindows(trainer))
        is_cpu = trainer.config.device.kind == "cpu" and config.precision.compute == "float32"
        has_peer = transport.size == 1 and is_cpu and not config.lora.rank
        if has_peer and config.model.kind in ARCHITECTURES and find_spec("transformers"):
            sides.append(Transformers(config.model, vocabulary, trainer.tensors()))
        prompts = np.random.default_rng(0).integers(vocabulary, size=(batch, prompt_tokens))
        shown.rows = measure(sides, prompts.tolist(), many, blocks)
        shape = {
            "parameters": trainer.parameter_count,
            "layers": config.model.layers,
            "width": config.model.width,
            "context": context,
            "vocabulary": vocabulary,
            "batch": batch,
            "prompt_tokens": prompt_tokens,
            "ranks": transport.size,
        }
        shown.facts = {**shape, **shown.facts}
        shown.begin([", ".join(f"{name} {number:,}" for name, number in shape.items())])
        shown.show("\n".join(TABLE.lines(shown.rows)))
        shown.end()
