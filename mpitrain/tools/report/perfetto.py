"""A trace for Perfetto (https://ui.perfetto.dev) and Chrome (chrome://tracing): Google's Trace Event Format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.files import write_whole
from mpitrain.trace.recorder import DEVICE, KINDS, RECEIVE, REDUCTION, SEND, STEP
from mpitrain.trace.timeline import Timeline, described

THREADS = ("host", "device")


def write_perfetto(path: Path, timeline: Timeline) -> None:
    """Write all records of all ranks: each rank is a process, its host and its device are threads."""
    trace = {"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(trace, allow_nan=False))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    starts = [trace.records["start"] for trace in timeline.traces if len(trace.records)]
    start = min((float(times.min()) for times in starts), default=0.0)
    end = timeline.end()
    for trace in timeline.traces:
        rank = trace.facts["rank"]
        named = {"name": f"{trace.rank_name} on {trace.facts['host']}"}
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": named}
        for thread, name in enumerate(THREADS):
            about = {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name"}
            yield {**about, "args": {"name": name}}
        for record in trace.records:
            kind, last = int(record["kind"]), float(record["end"] or end)
            name = f"step {record['step'] + 1}" if kind == STEP else described(trace, record)
            event = {
                "pid": rank,
                "tid": int(kind == DEVICE),
                "name": name,
                "cat": KINDS[kind],
                "ts": 1e6 * (float(record["start"]) - start),
                "args": {"step": int(record["step"]) + 1},
            }
            if kind in (SEND, RECEIVE, REDUCTION):  # Several of these can overlap.
                event |= {"id": f"{rank}.{record['number']}"}
                yield {**event, "ph": "b"}
                yield {**event, "ph": "e", "ts": 1e6 * (last - start)}
            else:
                yield {**event, "ph": "X", "dur": 1e6 * (last - float(record["start"]))}
