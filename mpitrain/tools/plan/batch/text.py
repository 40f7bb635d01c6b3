"""The report of `plan batch`: the table of sizes, the noise scale, and the keys to set."""

import math
from collections.abc import Iterator

from mpitrain.tools.plan.batch.noise import Noise
from mpitrain.tools.plan.batch.search import SearchResult
from mpitrain.tools.plan.batch.timing import Timed


def report(result: SearchResult) -> Iterator[str]:
    """Yield the lines of the report."""
    config, axes, room = result.resolved.config, result.resolved.axes, result.fit.room
    yield (
        f"{config.model.kind}, {result.parameters:,} parameters; dp {axes.dp} x tp {axes.tp} x pp {axes.pp}, "
        f"{result.resolved.plan.micro_batches} micro-batch(es) in a step, {config.device.kind}"
    )
    yield (
        f"{room.free / 1e6:,.1f} MB {room.allowed} {room.where}; {len(room.ranks)} rank(s) need "
        f"{room.needed / 1e6:,.1f} MB for parameters, gradients and optimizer state"
    )
    yield ""
    yield f"{'rows':>6} {'batch':>7} {'counted MB':>11} {'step ms':>10} {'rows/s':>10}   blocks, ms"
    for each in result.timed:
        yield _line(result, each)
    yield ""
    yield _largest(result)
    if result.best is None:
        yield "No size is named the fastest: other work ran (~). Repeat the command."
    yield from _noise(result.noise, result.tokens)
    yield from _keys(result)


def _line(result: SearchResult, each: Timed) -> str:
    times = f"{'-':>10} {'-':>10}   one step, not timed"
    if each.blocks:
        mark = "~" if each.is_spoilt else " "
        times = (
            f"{1e3 * each.step_s:10.2f}{mark}{each.rows_per_s:10.1f}   "
            f"{1e3 * min(each.blocks):.2f} .. {1e3 * max(each.blocks):.2f}"
        )
    note = "  <- fastest" if each is result.best else ""
    note += (
        "  <- largest that fits" if each.rows == result.fit.rows and not result.fit.is_most else ""
    )
    return f"{each.rows:>6} {each.size:>7} {result.counted[each.rows] / 1e6:>11.2f} {times}{note}"


def _largest(result: SearchResult) -> str:
    fit = result.fit
    did_run = any(each.rows == fit.rows for each in result.timed)
    proof = "a step ran" if did_run else "counted alone: --seconds is too short for a step"
    if fit.is_most:
        return f"Micro-batches of {fit.rows} rows fit ({proof}); --most looks no further."
    return (
        f"The largest micro-batch has {fit.rows} rows ({proof}); {fit.rows + fit.unit} do not fit."
    )


def _noise(noise: Noise | None, tokens: int) -> Iterator[str]:
    if noise is None:
        yield (
            "No gradient noise scale: it needs finite gradients of two batch sizes, and "
            "replication.wire=none."
        )
        return
    of = f"{noise.batches} batches of {noise.large} rows, each also in batches of {noise.small}"
    if not math.isfinite(noise.rows):
        yield f"The noise hides the gradient in {of}: raise --seconds."
        return
    mark = "~" if noise.is_uncertain else ""
    text = f" ({noise.rows * tokens:,.0f} tokens)" if tokens else ""
    yield (
        f"Gradient noise scale (McCandlish et al. 2018): {mark}{noise.rows:,.1f} rows{text}, "
        f"standard error {noise.error:,.1f}"
    )
    yield f"  from {of}"


def _keys(result: SearchResult) -> Iterator[str]:
    size, noise = result.resolved.config.batch.size, result.noise
    present, critical = result.present, result.critical
    yield ""
    if noise and critical:
        yield (
            f"At these parameters batch.size {size} needs {noise.samples_factor(size):.2f} times the fewest rows "
            f"and {noise.steps_factor(size):.2f} times the fewest steps;"
        )
        yield f"the critical size {critical.size} needs about 2 times each."
        if not result.resolved.config.run.init_from:
            yield "They are the initial ones, and noise grows in training: set run.init_from=RUN to measure a later model."
    if present:
        yield f"same results:   {present.keys}   ({present.rows} rows in a micro-batch)"
    else:
        yield f"No number of micro-batches makes batch.size {size} fit."
    if critical and critical.size != size:
        yield f"critical size:  {critical.keys}   ({critical.rows} rows in a micro-batch)"
