"""The progress of a run or a benchmark on rank 0: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm

from mpitrain.cli.terminal import stop_requests
from mpitrain.cli.terminal.output import shows_output, width
from mpitrain.collectives.selection.own_algorithm import shown
from mpitrain.collectives.selection.tuning import DEFAULT, foreign
from mpitrain.config import Config
from mpitrain.data import perplexity, source_kind
from mpitrain.errors import in_singular, visible
from mpitrain.machine.process import processor
from mpitrain.machine.status import is_launched, status
from mpitrain.ops.host.product import installed_mkl
from mpitrain.parallel.modes import servers_of
from mpitrain.parallel.replica import StepResult
from mpitrain.run.job import slow_heads
from mpitrain.run.watcher import Watcher


class Bar(tqdm):
    """A tqdm bar that erases the rest of its line by an escape sequence.

    tqdm writes spaces there, which wrap into the next line of a window that has become narrower.
    """

    def say(self, text: str) -> None:
        """Print a line of text on standard output, above the bar."""
        self.write(text, file=sys.stdout)
        sys.stdout.flush()

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        def draw(text: str) -> None:
            file.write(f"\r{text}\x1b[K")
            file.flush()

        return draw


ROWS = "{{percentage:3.0f}}% |{{bar}}| {{n}}/{{total}} {unit}, {{remaining}} left{{postfix}}"
"""The form of a bar below measured rows; `unit` is the noun for them."""


def bar(steps: int, first: int = 0, form: str | None = None) -> Bar:
    """Return a bar of `steps` steps; hidden unless standard error is a terminal.

    first  number of steps that are done already
    form   tqdm's `bar_format`
    """

    def size(_: TextIO | None = None) -> tuple[int, None]:
        # In a line that fills the last column, the terminal would erase its end.
        return max(1, (width() or 0) - 1), None

    shown = Bar(
        total=steps,
        initial=first,
        unit="step",
        disable=width() is None,
        file=sys.stderr,
        ncols=size()[0],
        nrows=20,  # A terminal that reports 0 rows would hide every bar.
        bar_format=form,
    )
    shown.dynamic_ncols = size  # tqdm calls it each time it draws the bar
    return shown


SKIPPED = {
    "empty": "no target counts",
    "spike": "a spike of the loss",
    "skipped": "not finite",
    "overflow": "gradients beyond float16",
}
"""{key of a record: reason for which the update was skipped}."""


class Progress(Watcher):
    """A watcher that prints a line for each record; on a terminal, a bar below shows the newest loss and the time left."""

    def __init__(self, say_last: Callable[[str], None] | None = None) -> None:
        """say_last  prints the last line of a stopped or failed run; None: standard output does"""
        self._say_last = say_last or partial(print, flush=True)
        self._has_bar = width() is not None
        self._is_above_bar = self._has_bar and shows_output()
        self._bar: Any = None
        self._logged: list[dict[str, Any]] = []

    def on_agreed(self, config: Config, hosts: Sequence[str]) -> None:
        if advice := unmeasured(config, hosts):
            print(advice, flush=True)
        if not is_launched() and stop_requests.parent() == "prterun":
            print(stop_requests.ADVICE, flush=True)

    def on_begin(self, config: Config, run_dir: Path, record: dict[str, Any]) -> None:
        c, m = config, config.model
        network = in_singular(f"{m.kind}, {m.layers} layers of width {m.width}")
        frozen = f" ({record['frozen']:,} frozen)" if "frozen" in record else ""
        print(
            f"{status('began', str(run_dir))}{network}: {record['parameters']:,} parameters{frozen} on "
            f"{visible(c.data.source)}; {record['ranks']} rank(s), {way(c)}; run directory {run_dir}",
            flush=True,
        )
        lines = [amounts(c, record), slow_heads(c)]
        lines += [slow_products(c)] if record["event"] == "start" else []
        for line in filter(None, lines):
            print(line, flush=True)
        for key, (then, now) in record.get("changed", {}).items():
            is_total = key in ("run.steps", "run.epochs") or (key in OF_TOTAL and c.run.epochs > 0)
            does_decay = is_total and c.optimizer.schedule != "constant"
            follows = "; the learning rate follows the new total" * does_decay
            print(f"changed since it was last run: {key} {then!r} -> {now!r}{follows}", flush=True)
        if record["step"] == c.run.steps and record["event"] == "resume":
            of, key = (
                (f" of run.epochs {c.run.epochs:g}", "epochs") if c.run.epochs else ("", "steps")
            )
            done = f"all {c.run.steps} steps{of} were done before"
            print(f"{done}; to train on, set run.{key} to more", flush=True)
        self._has_tokens = "conversations" in record or "tokens" in record
        self._steps, self._first, self._start = c.run.steps, record["step"], time.perf_counter()
        if self._bar is not None:
            self._bar.close()  # The run goes on after the loss of a rank.
        self._bar = bar(c.run.steps, self._first)

    def on_step(self, step: int, result: StepResult) -> None:
        self._bar.update()

    def on_log(self, record: dict[str, Any]) -> None:
        self._logged.append(record)
        rate = record.get("tokens_per_s", record["samples_per_s"])
        unit = "tokens/s" if "tokens_per_s" in record else "samples/s"
        used = "".join(
            f"  {name} {record[name]:.1%}"
            for name in ("mfu", "hfu")
            if name in record and (name == "mfu" or record["hfu"] != record["mfu"])
        )
        slow = f"  {slow_rank(record)}" if "slow_rank" in record else ""
        why = next((f"  skipped: {why}" for key, why in SKIPPED.items() if record.get(key)), "")
        if self._has_bar:
            more = (used + slow).replace("  ", ", ")
            text = f"loss {record['loss']:.3f}, {rate:,.0f} {unit}{more}"
            self._bar.set_postfix_str(text, refresh=False)
        # The bar has utilisation and time left, and a line above it fits 80 columns.
        rest = "" if self._is_above_bar else f"{used}  left {self._left(record['step'])}"
        self._bar.say(
            f"step {record['step']:>{len(str(self._steps))}}/{self._steps}  loss {record['loss']:.4f}  "
            f"lr {record['lr']:.2e}  grad norm {record['grad_norm']:.3f}  {rate:,.0f} {unit}{rest}{why}{slow}"
        )

    def on_evaluation(self, record: dict[str, Any]) -> None:
        loss = record["val_loss"]
        bits = record.get("val_bits_per_byte")
        # Bits per byte say the same, and the line fits 80 columns.
        odds = f", perplexity {perplexity(loss):.4g}" if self._has_tokens and bits is None else ""
        best = record.get("best_step", record["step"])
        is_best = "" if best == record["step"] else f"; the best was after step {best}"
        shown = f"{loss:.4f}"
        if "val_accuracy" in record:
            shown = f"{nats(loss, bits)}{odds}, accuracy {record['val_accuracy']:.1%}"
        self._bar.say(f"step {record['step']}: validation loss {shown}{is_best}")
        for prompt, text in record.get("samples", ()):
            self._bar.say(f"  {visible(prompt)} -> {visible(text.strip())}")

    def on_end(self, record: dict[str, Any]) -> None:
        self._bar.close()
        event, step = record["event"], record["step"]
        if event == "end":
            is_equal = record["replicas_equal"]
            peaks = record["peak_activation_bytes_of_ranks"]
            if step < self._steps:
                why = "the validation loss did not improve any more (run.patience)"
                print(f"ended at step {step} of {self._steps}: {why}")
            if line := predicted(self._logged, record):
                print(line)
            are = f"bitwise {'equal' if is_equal else 'NOT equal'} on all ranks"
            most = f"{max(peaks) / 1e6:.1f} MB on rank {peaks.index(max(peaks))}"
            ended = status("ended") if is_equal else ""
            print(f"{ended}done: parameters {are}, peak activations {most}", flush=True)
        elif event == "stopped":
            where = f"stopped at step {step}{_limit(record)}"
            self._say_last(f"{status('stopped')}{where}; --resume goes on from there")
        else:
            self._say_last(f"{event} at step {step}")

    def _left(self, step: int) -> str:
        step_s = (time.perf_counter() - self._start) / max(1, step - self._first)
        minutes, seconds = divmod(int(step_s * (self._steps - step)), 60)
        return f"{minutes}:{seconds:02d}"


OF_TOTAL = ("batch.size", "data.source", "data.mixture")
"""Keys that change the steps of run.epochs."""


def predicted(logged: Sequence[dict[str, Any]], end: dict[str, Any]) -> str:
    """Return a line with predicted and measured time and memory; "" where there is no prediction.

    The predicted step has only its FLOPs, at the rate of matrix products: no messages, no idle time.

    logged  records of steps; the first, which compiles and allocates, does not count
    """
    rates = [each for each in logged[1:] if "hfu" in each]
    if not rates or "counted_activation_bytes" not in end:
        return ""
    step_s = median(each["step_s"] for each in rates)
    products_s = median(each["step_s"] * each["hfu"] for each in rates)
    counted, peak = end["counted_activation_bytes"], end["peak_activation_bytes_of_ranks"][0]
    return (
        f"predicted: a step of at least {1e3 * products_s:.4g} ms, for matrix products, and {counted / 1e6:.1f} MB of "
        f"activations on rank 0; measured: {1e3 * step_s:.4g} ms, {peak / 1e6:.1f} MB"
    )


def slow_rank(record: dict[str, Any]) -> str:
    times = f"{record['slow_times']:.1f} times the median since step {record['slow_since']}"
    return f"rank {record['slow_rank']} on {record['slow_host']}: {times}"


def _limit(record: dict[str, Any]) -> str:
    left = record.get("before_limit_s")
    return f", {left:.0f} s before the time limit of the job" if left is not None else ""


def nats(loss: float, bits: float | None) -> str:
    """Return a loss with its unit; in bits per byte of text, too, if these are known."""
    return f"{loss:.4f} nats" + (f", {bits:.4f} bits per byte" if bits is not None else "")


def amounts(config: Config, record: dict[str, Any]) -> str:
    """Return the size of the data and the epochs of the run; "" if the source has no size."""
    size, steps = config.batch.size, config.run.steps
    before = (
        record.get("samples_seen", 0) - record.get("step", 0) * size
    )  # by steps of another size
    source = config.data.validation.partition(":")[2] or "the last tenth"
    if "tokens" in record:
        size, before = size * config.model.context, before * config.model.context
        unit, there, extent = "tokens", record["tokens"], f"vocabulary {record['vocabulary']:,}"
        held_out = f"{record['held_out_tokens']:,} held out ({source})"
    elif "samples" in record:
        unit, there = "samples", record["samples"]
        extent = f"{record.get('classes', record.get('outputs')):,} "
        extent += "classes" if "classes" in record else "output(s)"
        extent += f", {words}" if (words := of_records(record)) else ""
        held_out = f"{record['held_out_samples']:,} held out"
    elif "conversations" in record:
        unit, there = "conversations", record["conversations"]
        extent = f"{record['cut_conversations']:,} cut after model.context"
        if source_kind(config.data.source).is_text:
            extent += f", in {'tokens of ' + visible(name) if (name := config.data.tokenizer) else 'bytes'}"
        extent += f", {words}" if (words := of_records(record)) else ""
        held_out = f"{record['held_out_conversations']:,} held out ({source})"
        if count := record.get("without_answer"):
            first = record["first_without_answer"]
            extent += f", {count:,} train nothing, without an answer in model.context (the first is number {first:,})"
        if count := record.get("rewritten_conversations"):
            unit = "rows"
            extent += f", each answer of {count:,} conversations is a row, since the template writes earlier ones in another way"
        if "packed_rows" in record:
            extent = f"{there:,} conversations packed, {extent}"
            unit, there = "rows", record["packed_rows"]
    else:
        return ""
    epochs = (steps * size + before) / there
    rate = f"; learning rate {config.optimizer.lr:g}" if "init_from" in record else ""
    return (
        f"{there:,} {unit} to train on, {held_out}, {extent}; {size:,} {unit} a step: "
        f"{epochs:,.{0 if epochs >= 100 else 1 if epochs >= 1 else 3}f} epochs in {steps:,} steps{rate}"
    )


def of_records(record: Mapping[str, Any]) -> str:
    """Return what the records of conversations are, and which of their keys are ignored; "" if they are not known."""
    ignored = ", ".join(map(visible, record.get("ignored_keys", [])))
    words = [f"records are {record['records']}"] if record.get("records") else []
    return ", ".join([*words, *([f"ignored keys {ignored}"] if ignored else [])])


def unmeasured(config: Config, hosts: Sequence[str]) -> str:
    """Return advice if `auto` has no measured constants for these hosts, else ""."""
    advice = foreign(DEFAULT, hosts)
    is_guessed = config.replication.algorithm == "auto" and not config.replication.tuning
    return f"{advice} in replication.tuning" if advice and is_guessed else ""


def slow_products(config: Config) -> str:
    """Return advice if MKL would multiply faster on this processor, else ""."""
    would_gain = config.device.kind == "cpu" and processor().gains_from_mkl and not installed_mkl()
    return "MKL multiplies faster on this processor: pip install 'mpitrain[mkl]'" * would_gain


def way(config: Config) -> str:
    layout, replication = config.layout, config.replication
    if servers := servers_of(config.replication, config.pipeline.schedule):
        return f"{servers} of them {replication.update} server(s)"
    if replication.mode != "all-reduce":
        return f"mode {replication.mode}"
    parts = []
    if layout.tp > 1:
        rows = ", rows of norms divided" if layout.sequence_parallel else ""
        by = f"{shown(layout.algorithm)} all-reduce{rows}"
        parts.append(f"{layout.tp} of them share layers by {by}")
    if layout.cp > 1:
        parts.append(f"{layout.cp} of them share rows by {layout.cp_mode}")
    if layout.pp > 1:
        parts.append(f"{layout.pp} stages by {config.pipeline.schedule}")
        parts.append(f"{config.batch.micro_batches} micro-batches")
    if layout.tp == 1:
        parts.append(f"{shown(replication.algorithm)} all-reduce")
    return ", ".join(parts)
