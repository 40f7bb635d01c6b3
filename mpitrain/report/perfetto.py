"""A timeline as a trace that Perfetto (https://ui.perfetto.dev) and Chrome (chrome://tracing) open.

source  Trace Event Format, Google: one object per event, times in microseconds
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.files import write_whole
from mpitrain.report.timeline import Timeline, told
from mpitrain.trace.ring import KINDS, RECEIVE, REDUCTION, SEND, STEP


def write_perfetto(path: Path, timeline: Timeline) -> None:
    """Write everything that the ranks have noted: a process per rank, messages and reductions beside what computes."""
    write_whole(path, json.dumps({"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    start, end = min(float(trace.records["start"].min(initial=0)) for trace in timeline.traces), timeline.end()
    for rank, trace in enumerate(timeline.traces):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} on {trace.facts['host']}"}}
        for record in trace.records:
            kind, last = int(record["kind"]), float(record["end"] or end)
            name = f"step {record['step'] + 1}" if kind == STEP else told(trace, record)
            event = {"pid": rank, "tid": 0, "name": name, "cat": KINDS[kind], "ts": 1e6 * (float(record["start"]) - start),
                     "args": {"step": int(record["step"]) + 1}}
            if kind in (SEND, RECEIVE, REDUCTION):    # several are under way at a time
                event |= {"id": f"{rank}.{record['number']}"}
                yield {**event, "ph": "b"}
                yield {**event, "ph": "e", "ts": 1e6 * (last - start)}
            else:
                yield {**event, "ph": "X", "dur": 1e6 * (last - float(record["start"]))}
