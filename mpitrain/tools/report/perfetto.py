"""A timeline as a trace file for Perfetto (https://ui.perfetto.dev) and Chrome (chrome://tracing).

source  Trace Event Format, Google: one object per event, times in microseconds
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.files import write_whole
from mpitrain.trace.recorder import DEVICE, KINDS, RECEIVE, REDUCTION, SEND, STEP
from mpitrain.trace.timeline import Timeline, described

THREADS = ("host", "device")


def write_perfetto(path: Path, timeline: Timeline) -> None:
    """Write all records of all ranks: a process per rank, with threads for host and device."""
    text = json.dumps(
        {"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}, allow_nan=False
    )
    write_whole(path, text, inner=2)


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    start = min(
        (float(trace.records["start"].min()) for trace in timeline.traces if len(trace.records)),
        default=0.0,
    )
    end = timeline.end()
    for trace in timeline.traces:
        rank = trace.facts["rank"]
        yield {
            "ph": "M",
            "pid": rank,
            "name": "process_name",
            "args": {"name": f"rank {rank} on {trace.facts['host']}"},
        }
        for thread, name in enumerate(THREADS):
            yield {
                "ph": "M",
                "pid": rank,
                "tid": thread,
                "name": "thread_name",
                "args": {"name": name},
            }
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
