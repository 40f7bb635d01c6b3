"""Traces of a run that are damaged."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import tomli_w

from mpitrain.cli import report
from mpitrain.cli.job_options import Outputs
from mpitrain.config import CONFIG, parse
from mpitrain.run.metrics import METRICS
from mpitrain.trace.recorder import BACKWARD, FORWARD, HEAD, MAGIC, RECORD, Recorder, Ring
from mpitrain.trace.timeline import read_trace, trace_file
from tests.unit.readers.fuzz_readers import INVALID, Damaged, in_the_way

RANKS, CAPACITY = 2, 64


def traced(folder: Path) -> Path:
    """A run of two stages with the traces of two steps."""
    (folder / "trace").mkdir(parents=True)
    tables = parse({"layout": {"pp": RANKS}, "batch": {"micro_batches": 2}}).model_dump()
    tables["run"]["out"] = str(folder)
    (folder / CONFIG).write_text(
        f"# All {sum(map(len, tables.values()))} keys of a run of mpitrain.\n\n{tomli_w.dumps(tables)}"
    )
    (folder / METRICS).write_text('{"step": 1, "loss": 2.5}\n')
    for rank in range(RANKS):
        now = iter(np.arange(100.0, 200.0, 0.25).tolist())
        recorder = Recorder(Ring(CAPACITY), clock=lambda now=now: next(now))
        recorder.facts(
            rank=rank,
            ranks=RANKS,
            host=f"host{rank}",
            run="this",
            place={"dp": 0, "tp": 0, "pp": rank},
            parts={rank: [f"part {rank}"]},
            peak_activation_bytes=1000,
        )
        for clock in ((100.0, 0.5), (150.0, 0.75)):
            recorder.facts(clock=clock)
        for step in range(3):
            with recorder.stepping(step):
                for phase in (FORWARD, FORWARD, BACKWARD, BACKWARD):
                    recorder.end(
                        recorder.compute(recorder.name(f"part {rank}"), phase, 0, step % 2)
                    )
                wait = recorder.wait(recorder.name("the sums of gradients", range(RANKS)))
                recorder.go_on(wait)
        recorder.keep(trace_file(folder, rank))
    return folder


def told(path: Path):
    """What a trace says, once `mpitrain runs report` has said what it makes of the run."""
    run = path.parents[1]
    outputs = Outputs()
    report.reported(run, outputs)
    outputs.settle()
    json.loads((run / "report/perfetto.json").read_text())
    facts, names, records, clocks = read_trace(path)
    return json.dumps(facts), [(what, [*ranks]) for what, ranks in names], records.tobytes(), clocks


class Traces:
    """The trace of one rank of two. A head holds up to its first line that is none; a record that
    is none is left out.
    """

    read = staticmethod(told)
    OF_HEAD = (
        "type",
        "range",
        "missing",
        "unknown",
        "duplicate",
        "nesting",
        "no JSON",
        "encoding",
        "ranks",
        "clock",
    )
    OF_FILE = (
        "truncation",
        "more behind",
        "magic",
        "records",
        "records",
        "records",
        "swap",
        "in the way",
        "head is full",
    )

    def __init__(self, folder: Path):
        self.whole = traced(folder / "whole")

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        run = folder / "run"
        shutil.copytree(self.whole, run)
        path = trace_file(run, rng.randrange(RANKS))
        data = bytearray(path.read_bytes())
        kind = rng.choice([*self.OF_HEAD, *self.OF_FILE])
        if kind in self.OF_HEAD:
            fresh = self.of_head(kind, rng, data)
        elif kind == "in the way":
            in_the_way(rng, path)  # links below a run directory are not followed, either
            return Damaged(kind, path, path.name, INVALID)
        else:
            data, fresh = self.of_file(kind, rng, data)
        path.write_bytes(data)
        return Damaged(kind, path, path.name, self.result(path, fresh, folder))

    def result(self, path: Path, fresh: bytes | None, folder: Path):
        """What is read of the fresh file."""
        if fresh is None:
            return INVALID
        other = trace_file(shutil.copytree(self.whole, folder / "fresh"), int(path.name[-1]))
        other.write_bytes(fresh)
        return told(other)

    def of_head(self, kind: str, rng: random.Random, data: bytearray) -> bytes | None:
        """Damage a line of the head, in place; returns a fresh file of what the head says then, or
        None.
        """
        text = bytes(data[len(MAGIC) : HEAD]).rstrip(b"\0")
        lines = text.split(b"\n")[:-1]
        known = [
            number
            for number, line in enumerate(lines)
            if line.startswith(b"{") and b"clock" not in line
        ]
        at = (
            rng.choice(known)
            if kind in ("type", "range") and rng.random() < 0.8
            else rng.randrange(len(lines))
        )
        found = json.loads(lines[at])
        holds = lines[:at]  # of what says nothing any more
        if kind in ("type", "range", "missing", "unknown"):
            line, good, is_line = self.of_facts(kind, rng, found)
            holds = (
                [*lines[:at], good, *lines[at + 1 :]]
                if is_line and good is not None
                else lines[:at]
                if not is_line
                else None
            )
        elif kind == "duplicate":
            line = (
                lines[at][:-1] + b", " + lines[at][1:-1] + b"}"
                if isinstance(found, dict)
                else lines[at] + lines[at]
            )
        elif kind == "nesting":
            line = rng.choice([b"[", b'{"a":']) * 3000
        elif kind == "no JSON":
            line = rng.choice(
                [
                    b"",
                    b"NaN",
                    b"{'rank': 0}",
                    lines[at][:-1],
                    lines[at] + b"x",
                    b'{"time": 1e999}',
                    b'{"time": NaN}',
                ]
            )
        elif kind == "encoding":
            line = (
                b'{"host": "\xff"}' if rng.random() < 0.5 else lines[at].decode().encode("utf-16")
            )
        elif kind == "ranks":
            ranks = rng.choice(
                [
                    [0, 2**40, 1],
                    [0, 10**400, 1],
                    [0, 1, 0],
                    [-5, 2, 1],
                    [0, 2, 1, 1],
                    [],
                    "a",
                    "1_0 -3",
                    "-1",
                    "70000",
                    {},
                    5,
                    None,
                    [0.0, 2.0, 1.0],
                    [70000, 70001, 1],
                ]
            )
            line = json.dumps(["a name", ranks]).encode()
        else:
            clock = rng.choice(
                [
                    [10**400, 0],
                    [1],
                    [1, 2, 3],
                    5,
                    "12",
                    ["a", "b"],
                    [1e300, 1e300],
                    None,
                    [None, None],
                    [1e13, 0],
                ]
            )
            line = json.dumps({"clock": clock, "rank": 9}).encode()
        text = b"\n".join([*lines[:at], line, *lines[at + 1 :]]) + b"\n"
        data[len(MAGIC) : HEAD] = text.ljust(HEAD - len(MAGIC), b"\0")
        if holds is None or not any(b'"records"' in one for one in holds):
            return None
        fresh = bytearray(data)
        fresh[len(MAGIC) : HEAD] = (b"\n".join(holds) + b"\n").ljust(HEAD - len(MAGIC), b"\0")
        return bytes(fresh)

    def of_facts(self, kind, rng, found):
        """(a line, one that says the same or None if the file is invalid then, whether it is a line
        at all).
        """
        wrong = {
            "rank": [-1, "0", True, 1.5, None, 10**400],
            "ranks": [0, -1, "2", 10**9, 2.0, None],
            "host": [None, 5, []],
            "run": [[1], {}, 7],
            "place": [[], 5, {"dp": "0"}, {"dp": -1, "tp": 0, "pp": 0}, {"more": 1}],
            "records": [0, "64", 65, None],
            "parts": [[1], {"0": 5}, {"a": ["b"]}, {"-1": []}, {"01": []}, {"0": [1]}, 3],
            "peak_activation_bytes": [-1, 1.5, "9", 2**70],
        }
        known = [name for name in wrong if isinstance(found, dict) and name in found]
        if kind in ("type", "range") and known:
            name = rng.choice(known)
            return json.dumps({**found, name: rng.choice(wrong[name])}).encode(), None, True
        if kind == "missing" and isinstance(found, dict) and "records" in found:
            return b"{}", None, True
        if kind == "unknown" and isinstance(found, dict):
            line = json.dumps({**found, "more": rng.choice([1, [], "x", {"y": None}])}).encode()
            return line, line, True
        line = json.dumps(
            rng.choice([5, None, "text", [], [1], [1, 2, 3], True, [["a"], 5]])
        ).encode()
        return line, None, False

    def of_file(self, kind, rng, data):
        """(the damaged file, a fresh one of what it says or None)."""
        if kind == "truncation":
            return data[
                : rng.choice([rng.randrange(len(data)), rng.randrange(HEAD), 0, 5, len(data) - 1])
            ], None
        if kind == "more behind":
            return data + bytes(rng.choice([1, RECORD.itemsize])), None
        if kind == "magic":
            data[rng.randrange(len(MAGIC))] ^= 1 << rng.randrange(7)
            return data, None
        if kind == "head is full":
            text = bytes(data[len(MAGIC) : HEAD]).rstrip(b"\0")
            full = bytearray(data)
            full[len(MAGIC) : HEAD] = (text + b'{"more": "' + b"x" * HEAD)[: HEAD - len(MAGIC)]
            return full, data
        records = np.frombuffer(bytes(data[HEAD:]), RECORD).copy()
        used = np.flatnonzero(records["number"])
        fresh = records.copy()
        if kind == "swap":
            i, j = rng.sample(used.tolist(), 2)
            records[[i, j]] = records[[j, i]]
        else:
            at = rng.choice(used.tolist())
            field, value = rng.choice(
                [
                    ("what", 60000),
                    ("kind", 8),
                    ("kind", 255),
                    ("phase", 6),
                    ("start", np.nan),
                    ("start", np.inf),
                    ("start", -1e300),
                    ("start", 1e13),
                    ("end", np.nan),
                    ("end", np.inf),
                    ("end", 1e13),
                    ("end", 1e300),
                    ("end", -1.0),
                    ("end", 1e-3),
                    ("number", 0),
                ]
            )
            records[field][at] = value
            fresh[at] = np.zeros((), RECORD)
        return data[:HEAD] + records.tobytes(), data[:HEAD] + fresh.tobytes()
