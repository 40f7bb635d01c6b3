"""Damaged files that are read line by line: configurations are refused by name; metrics and traces lose what is no line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from mpitrain.cli import report
from mpitrain.cli.job_options import Outputs
from mpitrain.config import CONFIG, parse, read_toml
from mpitrain.run.metrics import METRICS, past, read_metrics
from mpitrain.tools.bench.plot_loss import AXES, points
from mpitrain.tools.report.text import how_it_ended
from mpitrain.trace.recorder import BACKWARD, FORWARD, HEAD, MAGIC, PACE, RECORD, Recorder, Ring
from mpitrain.trace.timeline import read_trace, trace_file
from tests.processes import SECONDS
from tests.unit.readers.damages import DEEP, WAYS, in_the_way, of_values, refusal

pytestmark = pytest.mark.timeout(SECONDS)
KEYS = {
    "run": {"seed": 3, "stall_seconds": 60.0, "on_nonfinite": "skip", "trace": False},
    "model": {"layers": 2, "kind": "gpt", "context": 64, "tied": True},
    "batch": {"size": 8},
}
LINE, TABLE = "seed = 3", "[run]"
NO_TOML = [
    *(
        "seed =",
        "seed",
        "seed = 01",
        "seed = 0x",
        "seed = 1_",
        "seed = _1",
        "seed = '",
        "seed = nan",
    ),
    *(
        'seed = "\\q"',
        "seed = [1,,]",
        "seed = {,}",
        "seed = 1979-05-27",
        "seed = 1e999",
        "seed = inf",
    ),
    *(
        f"seed = {'9' * 5000}",
        f"seed = {'[' * DEEP}",
        f"seed = {'{a=' * DEEP}",
        "seed = '''",
        "seed = ",
    ),
    *(
        f"{LINE}\n{more}"
        for more in (LINE, TABLE, "[run.seed]", "[[run]]", "=", "]", "a b", "\x1b[2J")
    ),
]


def configuration(path):
    return parse(read_toml(path), path)


def test_a_damaged_configuration_is_refused_by_name(tmp_path):
    path, text = tmp_path / "run.toml", tomli_w.dumps(KEYS)
    damaged = [text.replace(LINE, line).encode() for line in NO_TOML]
    damaged += [text.encode("utf-16"), text[:9].encode() + b"\xff", text[:9].encode() + b"\0"]
    for damage, value in of_values(KEYS):
        if ": no " in damage:  # a default is there for every key and every section
            path.write_text(tomli_w.dumps(value))
            assert configuration(path) == parse(value), damage
            continue
        try:
            damaged.append(tomli_w.dumps(value).encode())
        except (TypeError, ValueError):
            assert "null" in damage
    for data in damaged:
        path.write_bytes(data)
        assert refusal(configuration, path, path) == "", data[:200]
    blocks = text.split("\n\n")
    for data in (b"\xef\xbb\xbf" + text.encode(), text.replace("\n", " # a comment\r\n").encode()):
        path.write_bytes(data)
        assert configuration(path) == parse(KEYS), data
    for same in (
        text.replace("= 64", "= 6_4").replace("= 3", "= +3"),
        "\n\n".join(reversed(blocks)),
    ):
        path.write_text(same)
        assert configuration(path) == parse(KEYS), same
    for way in WAYS:
        for file in tmp_path.iterdir():
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        path.write_text(text)
        in_the_way(way, path)
        if way == "no bytes" or way.startswith("link"):
            assert configuration(path) == parse(KEYS if way != "no bytes" else {})
        else:
            assert refusal(configuration, path, path) == "", way


RECORDS = [
    {"event": "start", "step": 0, "ranks": 2},
    {"step": 1, "loss": 2.5, "lr": 0.1, "wall_s": 1.0, "tokens_seen": 64},
    {"step": 2, "loss": None, "skipped": True, "nonfinite": True, "wall_s": 2.0},
    {"step": 2, "val_loss": 2.0},
    {"step": 3, "loss": 2.25, "grad_norm": 1.0, "wall_s": 3.0, "tokens_seen": 192},
    {"event": "end", "step": 3},
]
NO_RECORDS = [
    *(
        b"",
        b"NaN",
        b'{"step": NaN}',
        b"{'step': 1}",
        b"5",
        b"null",
        b'"text"',
        b"[1]",
        b'{"step": 01}',
    ),
    *(b'{"step": ' + b"9" * 5000 + b"}", b'{"step": 1, "step": 1}', b'{"step": 1', b'{"step": 1}}'),
    *(b'{"step": 1, "a": "\xff"}', '{"step": 1}'.encode("utf-16"), b'\xef\xbb\xbf{"step": 1}'),
    *(b"[" * DEEP, b'{"a":' * DEEP, b'{"step": 1, "a": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
    *(bytes(1000), b"\x1a\x85", bytes(range(11, 256)), b'{"step": 1e999}'),
    *(
        b'{"step": %s}' % step
        for step in (b"null", b"true", b'"5"', b"-1", b"[1]", b"1%s" % (b"0" * 400))
    ),
]


def metrics(path: Path) -> list[str]:
    found = read_metrics(path)
    for over in AXES:
        assert all(map(np.isfinite, sum(points(found, "loss", over), ())))
    how_it_ended(found)
    past(path.parent, 2)
    return [json.dumps(record) for record in found]


def test_a_line_of_metrics_that_is_no_record_is_left_out(tmp_path):
    path, lines = tmp_path / METRICS, [json.dumps(record).encode() for record in RECORDS]
    wanted = [json.dumps(record) for record in RECORDS]
    for damage in NO_RECORDS:
        for at in (0, 3, len(lines)):
            path.write_bytes(b"\n".join([*lines[:at], damage, *lines[at:]]))
            assert metrics(path) == wanted, (at, damage[:99])
    for at, record in enumerate(RECORDS):
        for name in record.keys() - {"step"}:
            for new in (None, "5", [1], {"a": 1}, True, 10**400, -1, 2**63, 1e300, -(10**400), 0.5):
                changed = [*wanted[:at], json.dumps({**record, name: new}), *wanted[at + 1 :]]
                path.write_text("\r\n".join(changed) + " \n\n")
                assert metrics(path) == changed, (name, new)
    for way in WAYS:
        folder = tmp_path / way
        folder.mkdir()
        (folder / METRICS).write_bytes(b"\n".join(lines))
        in_the_way(way, folder / METRICS)
        if way in ("nothing", "nowhere", "no bytes"):
            assert metrics(folder / METRICS) == []
        elif way.startswith("link"):
            assert metrics(folder / METRICS)
        else:
            assert refusal(metrics, folder / METRICS, folder / METRICS) == "", way


RANKS, CAPACITY, TEXT_END = 2, 64, HEAD - PACE.size
WRONG_FACTS = {
    "rank": [-1, "0", True, 1.5, None, 10**400],
    "ranks": [0, -1, "2", 10**9, 2.0, None],
    "host": [None, 5, []],
    "run": [[1], {}, 7],
    "place": [[], 5, {"dp": "0"}, {"dp": -1, "tp": 0, "pp": 0}, {"more": 1}],
    "records": [0, "64", 65, None],
    "parts": [[1], {"0": 5}, {"a": ["b"]}, {"-1": []}, {"01": []}, {"0": [1]}, 3],
    "peak_activation_bytes": [-1, 1.5, "9", 2**70],
}
CLOCKS = [[10**400, 0], [1], [1, 2, 3], 5, "12", ["a", "b"], [1e300, 1e300], None, [1e13, 0]]
NO_RANKS = [[0, 2**40, 1], [0, 1, 0], [0, 2, 1, 1], [], {}, 5, None, [0.0, 2.0, 1.0], "a", "-1"]
NO_LINES = [
    *(b"", b"NaN", b"{'rank': 0}", b'{"host": "a"', b'{"host": "a"}x', b'{"time": 1e999}'),
    *(b"[" * 3000, b'{"a":' * 3000, b'{"host": "\xff"}', '{"host": "a"}'.encode("utf-16")),
    *(b"5", b"null", b'"text"', b"[]", b"[1]", b"[1, 2, 3]", b'{"host": "a", "host": "a"}'),
    *(json.dumps(["a name", ranks]).encode() for ranks in NO_RANKS),
]
NO_RECORD = [
    *(("what", 60000), ("kind", 8), ("kind", 255), ("phase", 6), ("number", 0)),
    *(("start", number) for number in (np.nan, np.inf, -1e300, 1e13)),
    *(("end", number) for number in (np.nan, np.inf, 1e13, 1e300, -1.0, 1e-3)),
]


def traced(folder: Path) -> Path:
    """A run of two stages with the traces of three steps."""
    (folder / "trace").mkdir(parents=True)
    tables = parse({"layout": {"pp": RANKS}, "batch": {"micro_batches": 2}}).model_dump()
    tables["run"]["out"] = str(folder)
    (folder / CONFIG).write_text(
        f"# All {sum(map(len, tables.values()))} keys\n{tomli_w.dumps(tables)}"
    )
    (folder / METRICS).write_text('{"step": 1, "loss": 2.5}\n')
    for rank in range(RANKS):
        now = iter(np.arange(100.0, 200.0, 0.25).tolist())
        recorder = Recorder(Ring(CAPACITY), clock=lambda now=now: next(now))
        place = {"dp": 0, "tp": 0, "pp": rank}
        facts = {"rank": rank, "ranks": RANKS, "host": f"host{rank}", "run": "this", "place": place}
        recorder.facts(**facts, parts={rank: [f"part {rank}"]}, peak_activation_bytes=1000)
        for clock in ((100.0, 0.5), (150.0, 0.75)):
            recorder.facts(clock=clock)
        for step in range(3):
            with recorder.stepping(step):
                for phase in (FORWARD, FORWARD, BACKWARD, BACKWARD):
                    name = recorder.name(f"part {rank}")
                    recorder.end(recorder.compute(name, phase, 0, step % 2))
                recorder.go_on(recorder.wait(recorder.name("the sums of gradients", range(RANKS))))
        recorder.keep(trace_file(folder, rank))
    return folder


def told(path: Path):
    """What a trace says, once `mpitrain runs report` has said what it makes of the run."""
    run, outputs = path.parents[1], Outputs()
    report.reported(run, outputs)
    outputs.settle()
    json.loads((run / "report/perfetto.json").read_text())
    facts, names, records, clocks = read_trace(path)
    return json.dumps(facts), [(what, [*ranks]) for what, ranks in names], records.tobytes(), clocks


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.cli.report.find_spec", lambda name: None)  # pictures take seconds
    return trace_file(traced(tmp_path / "run"), 1)


def head(lines: list[bytes], data: bytes) -> bytes:
    """A trace with another head."""
    return (MAGIC + b"\n".join([*lines, b""])).ljust(TEXT_END, b"\0") + data[TEXT_END:]


def test_a_head_of_a_trace_holds_up_to_its_first_line_that_is_none(trace):
    data = trace.read_bytes()
    lines = data[len(MAGIC) : TEXT_END].rstrip(b"\0").split(b"\n")[:-1]
    with_records = next(n for n, line in enumerate(lines) if b'"records"' in line)
    no_lines = [*NO_LINES, *(json.dumps({"clock": clock, "rank": 9}).encode() for clock in CLOCKS)]
    for turn, line in enumerate(no_lines):
        at = (with_records, with_records + 1, len(lines) - 1)[turn % 3]
        trace.write_bytes(head(lines[:at], data))
        wanted = refusal(told, trace, trace) if at <= with_records else told(trace)
        trace.write_bytes(head([*lines[:at], line, *lines[at + 1 :]], data))
        said = refusal(told, trace, trace) if at <= with_records else told(trace)
        assert said == wanted and (said == "") is (at <= with_records), line[:99]
    trace.write_bytes(data)
    whole = told(trace)
    full = data[:TEXT_END].rstrip(b"\0") + b'{"more": "'
    trace.write_bytes(full.ljust(TEXT_END, b"x") + data[TEXT_END:])
    assert told(trace) == whole
    facts = [(name, new) for name, values in WRONG_FACTS.items() for new in values]
    for name, new in facts:
        at = next(n for n, line in enumerate(lines) if f'"{name}": '.encode() in line)
        changed = json.dumps({**json.loads(lines[at]), name: new}).encode()
        trace.write_bytes(head([*lines[:at], changed, *lines[at + 1 :]], data))
        assert refusal(told, trace, trace) == "", (name, new)


def test_a_record_of_a_trace_that_is_none_is_left_out(trace):
    data = trace.read_bytes()
    records = np.frombuffer(data[HEAD:], RECORD)
    used = np.flatnonzero(records["number"])
    for turn, (field, value) in enumerate(NO_RECORD):
        at, damaged, fresh = used[turn % len(used)], records.copy(), records.copy()
        damaged[field][at], fresh[at] = value, np.zeros((), RECORD)
        found = []
        for each in (damaged, fresh):
            trace.write_bytes(data[:HEAD] + each.tobytes())
            found.append(told(trace))
        assert found[0] == found[1], (field, value)
    for part in (b"", data[:5], data[: HEAD - 1], data[: HEAD + 9], data[:-1], data + b"\0"):
        trace.write_bytes(part)
        assert refusal(told, trace, trace) == "", len(part)
    for bit in range(len(MAGIC)):
        trace.write_bytes(data[:bit] + bytes([data[bit] ^ 1]) + data[bit + 1 :])
        assert refusal(told, trace, trace) == "", bit
    for way in WAYS:
        shutil.rmtree(trace.parent)
        trace.parent.mkdir()
        trace.write_bytes(data)
        in_the_way(way, trace)
        if way.startswith("link"):
            assert told(trace)
        else:
            assert refusal(told, trace, trace.parents[1]) == "", way
