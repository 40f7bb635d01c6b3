"""The report on a run as text: where the time went, what each rank did last, how a living run is."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.run.metrics import CLOSING, METRICS, read_metrics, seconds, total_s
from mpitrain.run.observation import Observation, observe, question
from mpitrain.tools.report.time_breakdown import COMPUTING, SHARES, TimeShares
from mpitrain.trace.blame import (
    GONE,
    RankState,
    described_finding,
    first_divergence,
    named,
    state_of,
    under_way,
)
from mpitrain.trace.recorder import COMPUTE
from mpitrain.trace.timeline import Timeline, named_steps

SHOWN = 8
"""Largest number of ranks with a column; the totals include the others."""
ENDS = {"end": "finished after", "stopped": "was stopped after", "failed": "failed at"}


def where_the_time_went(breakdown: TimeShares, timeline: Timeline) -> Iterator[str]:
    """Yield a table with the times of all ranks and of the first SHOWN, and the sentences of `who_was_awaited`."""
    heading, rows = time_table(breakdown, timeline)
    has_servers = len(breakdown.workers) < len(breakdown.seconds)
    yield table_title(breakdown, timeline)
    ranks, more = heading[1 : 1 + SHOWN], " ..." if len(heading) > 1 + SHOWN else ""
    yield f"  {'':26}{heading[0]:>7}" + "".join(f"{who.split(', ')[0]:>9}" for who in ranks) + more
    if has_servers:
        yield f"  {'':33}" + "".join(f"{who.split(', ')[1]:>9}" for who in ranks) + more
    for name, (every, *of_ranks) in rows:
        yield f"  {name:26}{every:7.1f}" + "".join(f"{share:9.1f}" for share in of_ranks[:SHOWN])
    yield from who_was_awaited(breakdown, timeline)


def table_title(breakdown: TimeShares, timeline: Timeline) -> str:
    steps, ranks, workers = breakdown.steps, len(breakdown.seconds), breakdown.workers
    step_s = breakdown.seconds[workers].sum() / len(workers) / len(steps)
    hosts = len({trace.facts["host"] for trace in timeline.traces})
    return (
        f"Where the time went in {named_steps(steps)}, {1e3 * step_s:.1f} ms each, on {ranks} rank(s) of "
        f"{hosts} host(s), in %:"
    )


def time_table(
    breakdown: TimeShares, timeline: Timeline
) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """Return the shares of the time of the steps, in %, and the memory of the ranks, in MB.

    returns  the headings of the values, all ranks (without servers) and each rank; (name of a row,
             its values)
    """
    workers, ranks = breakdown.workers, range(len(breakdown.seconds))
    has_servers = len(workers) < len(ranks)
    roles = {rank: f", {'worker' if rank in workers else 'server'}" * has_servers for rank in ranks}
    heading = [
        "workers" if has_servers else "all",
        *(f"rank {rank}{roles[rank]}" for rank in ranks),
    ]
    columns = [
        _per_mille(breakdown.seconds[workers].sum(0)),
        *(_per_mille(breakdown.seconds[rank]) for rank in ranks),
    ]
    rows = [
        (name, [share / 10 for share in shares])
        for name, shares in zip((*SHARES, "sum"), zip(*columns, strict=True), strict=True)
    ]
    return heading, [*rows, *_memory(timeline)]


def who_was_awaited(breakdown: TimeShares, timeline: Timeline) -> Iterator[str]:
    """Yield sentences: the rank awaited longest, and the rank that computed longest."""
    steps, ranks, workers = breakdown.steps, len(breakdown.seconds), breakdown.workers
    has_servers = len(workers) < ranks
    slowest = breakdown.slowest
    if slowest is None:
        yield f"No {'worker' if has_servers else 'rank'} waited for another."
        return
    who, of_them = ("The workers", "all their time") if has_servers else ("The others", "all time")
    role = "" if slowest in workers else ", a server,"
    waits, total = breakdown.waits, breakdown.seconds[workers].sum()
    yield (
        f"{who} waited longest for rank {slowest}{role} on {timeline.traces[slowest].facts['host']}: "
        f"{100 * waits[slowest] / total:.1f}% of {of_them}. In total, {'workers' if has_servers else 'ranks'} "
        f"waited {100 * waits.sum() / total:.1f}% of {of_them} for another."
    )
    computing = {rank: breakdown.seconds[rank, COMPUTING] / len(steps) for rank in workers}
    longest = max(computing, key=lambda rank: computing[rank])
    others = [seconds for rank, seconds in computing.items() if rank != longest]
    if others:
        middle, whose = median(others), "the other workers" if has_servers else "the others"
        ratio = (
            f", {computing[longest] / middle:.2f} times the median of {whose}" if middle > 0 else ""
        )
        yield f"Rank {longest} computes longest: {1e3 * computing[longest]:.1f} ms a step{ratio}."


def _per_mille(seconds: np.ndarray) -> list[int]:
    """Return the shares of some seconds in thousandths, followed by their sum, 1000.

    The shares with the largest remainders are rounded up, so that the sum is exact.
    """
    exact = 1000 * seconds / seconds.sum()
    whole = np.floor(exact).astype(int)
    whole[np.argsort(whole - exact)[: 1000 - whole.sum()]] += 1
    return [*whole.tolist(), int(whole.sum())]


MEMORY = {
    "peak_activation_bytes": "peak activations, MB",
    "counted_activation_bytes": "counted before the start",
    "counted_growth_bytes": "with gradients and state",
    "grown_bytes": "grown in the first 3 steps",
    "released_bytes": "largest release, MB",
}
"""{fact in the header of a trace: its line}."""


def _memory(timeline: Timeline) -> Iterator[tuple[str, list[float]]]:
    """Yield (name, MB of the largest rank and of each) of the facts that all traces have."""
    for fact, name in MEMORY.items():
        values = [trace.facts.get(fact) for trace in timeline.traces]
        known = [nbytes / 1e6 for nbytes in values if isinstance(nbytes, int)]
        if len(known) == len(values) > 0:
            yield name, [max(known), *known]


def whose_traces_are_missing(timeline: Timeline) -> Iterator[str]:
    """Yield a line for each missing trace, with the reason."""
    reasons = list(timeline.missing.values())
    yield from reasons[:SHOWN]
    if len(reasons) > SHOWN:
        yield f"And {len(reasons) - SHOWN} more."


def what_each_did_last(timeline: Timeline) -> Iterator[str]:
    """Yield lines: the last known action of each rank, its time, and the rank's pending messages."""
    end, states = timeline.end(), [state_of(trace) for trace in timeline.traces]
    if states:
        yield "What each rank did last, and how long before the last sign of any:"
    for state, trace in zip(states, timeline.traces, strict=True):
        before = f"{end - state.since:.3f} s before"
        yield f"  {named(state)}, {before}: {state.action}{under_way(trace)}"
    if len(states) > 1 and any(state.step for state in states):
        # A rank that waits for others has not fallen silent by itself.
        silent = [state for state in states if state.wait is None] or states
        first = min(silent, key=lambda state: state.since)
        yield f"First to fall silent was rank {first.rank}."
        finding = first_divergence(states, end, 0.0)
        if finding.culprits:
            yield f"First divergence: {described_finding(finding, states, end, {})}"


def how_it_ended(records: Sequence[Mapping[str, Any]]) -> str:
    """Say how a run ended, by its metrics."""
    if not records:
        return "It has no metrics."
    last = records[-1]
    if last.get("event") in CLOSING:
        return f"It {ENDS[last['event']]} step {last.get('step')}."
    return (
        f"It has not ended by itself: the last line of its metrics is of step {last.get('step')}."
    )


def spent(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of a run by what all its starts did; {} if its starts have noted no times.

    Steps after the last line before an interruption count by the `step_s` of that line.
    """
    parts = dict.fromkeys(SPENT, 0.0)
    logged_at, noted_at, step_s = 0, 0, 0.0
    for record in records:
        for part, keys in SPENT.items():
            parts[part] += sum(seconds(record, key) for key in keys)
        step = int(record.get("step", 0))
        if "lr" in record or record.get("event") == "resume":
            step_s = seconds(record, "step_s") or step_s
            took = (step - logged_at) * step_s
            if (
                record.get("event") == "resume"
            ):  # Living ranks go on from a step after the last line.
                unnoted, waited = max(0, step - noted_at) * step_s, seconds(record, "waited_s")
                parts["waiting between starts"] -= min(unnoted, waited)
                took -= max(0.0, unnoted - waited)
            parts["useful steps"] += took
            logged_at = step
        noted_at = step
        if record.get("event") == "back":
            undone = (step - seconds(record, "to")) * step_s
            parts["useful steps"] -= undone
            parts["repeated or undone steps"] += undone
    total = total_s(records)
    return {**parts, "other": total - sum(parts.values())} if total else {}


SPENT = {
    "useful steps": (),
    "start-up": ("startup_s",),
    "checkpoints": ("checkpoint_pause_s",),
    "evaluation": ("eval_s",),
    "repeated or undone steps": ("repeated_s",),
    "waiting between starts": ("waited_s",),
}
"""{part of a run's time: the keys of its seconds in records}."""


def goodput(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line: the part of a run's time that was useful steps, over all its starts, and the other parts."""
    if parts := spent(records):
        total = sum(parts.values())
        shares = (f"{100 * max(0.0, part) / total:.1f}% {name}" for name, part in parts.items())
        useful, *others = shares
        yield f"Goodput: of {total:,.1f} s since the first start {useful}, {', '.join(others)}."
        yield from goodput_of_ranks(records, total)


def goodput_of_ranks(records: Sequence[Mapping[str, Any]], total: float) -> Iterator[str]:
    """Yield a line for a run with spares or lost ranks: the part of the time of all its ranks, spares too, that was useful.

    total  seconds of the run
    """
    starts = [n for n, one in enumerate(records) if one.get("event") in ("start", "resume")]
    ranks = [int(seconds(records[n], "ranks")) for n in starts]
    spares = [int(seconds(records[n], "spares")) for n in starts]
    paid = max(map(sum, zip(ranks, spares, strict=True)), default=0)
    if not any(spares) and len({*ranks}) < 2:
        return
    useful = before = 0.0
    for number, end in zip(ranks, [*(n + 1 for n in starts[1:]), len(records)], strict=True):
        until = spent(records[:end]).get("useful steps", before)
        useful, before = useful + (until - before) * number, until
    waited = f", of which {spares[0]} waited as spares" * bool(spares[0])
    yield f"Of the time of all {paid} ranks{waited}, {100 * useful / (total * paid):.1f}% was useful."


def energy(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line: the median energy of a token or a sample, and what is counted; or why there is none over several hosts."""
    metered = [name for record in records for name in record.get("metered", ())]
    for unit in ("token", "sample"):
        if each := [record[key] for record in records if (key := f"joules_per_{unit}") in record]:
            parts = ", ".join(dict.fromkeys(metered))
            yield f"Energy: {median(each):.3g} J a {unit} ({parts})."
            return
    if (hosts := int(max((seconds(record, "hosts") for record in records), default=0))) > 1:
        yield f"Energy: not measured, because rank 0 can read only the meters of its own host, one of {hosts}."


def experts(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for a run with experts: how unequal their tokens were, and what they dropped."""
    each = [seconds(record, "imbalance") for record in records if "imbalance" in record]
    dropped = [seconds(record, "dropped") for record in records if "imbalance" in record]
    if each:
        yield (
            f"Experts: the busiest was chosen {median(each):.2f} times as often as the mean one, at most {max(each):.2f} "
            f"times; {100 * fmean(dropped):.1f}% of the choices were dropped."
        )


def losses(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each loss of ranks after which the run went on: who became whom, and how long it took."""
    for record in records:
        if not record.get("lost"):
            continue
        pairs = record.get("replaced") or []
        became = [f"rank {rank} is now process {number} of the start" for rank, number in pairs]
        spares = f", {record.get('spares', 0)} spare(s) were left" * bool(pairs)
        took = seconds(record, "startup_s") + seconds(record, "waited_s")
        parts = record.get("parts_s") or {}
        of_these = ", ".join(f"{part} {seconds(parts, part):.1f}" for part in parts)
        yield (
            f"After step {record.get('step')} {record['lost']} rank(s) were lost: "
            f"{'; '.join(became) or 'fewer ranks went on'}{spares}; {record.get('ranks')} ranks went on "
            f"after {took:.1f} s{f' ({of_these})' * bool(parts)}, from {record.get('filled_from')}."
        )


SECONDS = 10.0
"""Longest time to wait for the answers of the ranks."""
QUIET = 3.0
"""A rank that has recorded something in the last QUIET seconds is moving. If computations of the run
are long, more seconds are allowed.
"""


def what_happens_now(run: Path, with_stacks: bool) -> Iterator[str]:
    """Yield lines: the first divergence, the state of each rank and perhaps its Python stacks.

    raises  ConfigError unless the run has traces and has not ended
    """
    records = read_metrics(run / METRICS)
    if records and records[-1].get("event") in CLOSING:
        raise ConfigError(
            f"--now asks a living run, but the run in {run} has ended.",
            f"Leave --now out: `mpitrain runs report {run}`.",
        )
    seen = observe(run)
    try:
        seen = question(run, seen, with_stacks, SECONDS)
    except OSError as error:
        yield (
            f"The ranks cannot be asked: {error.filename}: {error.strerror}. "
            "The following is from their traces alone."
        )
    yield from seen.timeline.missing.values()
    if all(state.process == GONE for state in seen.states):
        yield "No process of this run is left: it was killed, or it crashed."
    yield seen.text(seen.finding(max(QUIET, 2 * longest(seen.timeline))))
    yield f"The last sign of each of {len(seen.states)} rank(s):"
    for state in seen.states:
        age = f"{seen.now - state.since:.1f} s ago"
        yield f"  {named(state)}{_process(seen, state)}, {age}: {state.action}"
    if with_stacks:
        for state in seen.states:
            yield from seen.stack(state.rank)


def longest(timeline: Timeline) -> float:
    """Return the seconds of the longest computation in the traces."""
    seconds = 0.0
    for trace in timeline.traces:
        spans = trace.records[(trace.records["kind"] == COMPUTE) & (trace.records["end"] > 0)]
        seconds = max(seconds, float((spans["end"] - spans["start"]).max(initial=0.0)))
    return seconds


def _process(seen: Observation, state: RankState) -> str:
    process = f", process {seen.processes[state.rank]}" if state.rank in seen.processes else ""
    reason = state.process or ("" if state.rank in seen.answers else "no answer")
    return f"{process} ({reason})" if reason else process
