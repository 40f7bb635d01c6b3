"""certify as a user runs it, from outside MPI: a node that does not answer fails, and the other is
measured. A stopped one reports what it knows.
"""

import json
import signal
import subprocess
import time
from xml.etree import ElementTree

import pytest

from tests.processes import PROGRAM, SECONDS, mpitrain

AGENT = """#!/bin/bash
[[ $1 == localhost ]] || exit 255
shift
exec bash -c "$*"
"""


def test_a_node_that_does_not_answer_fails_and_the_other_one_is_measured(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    (tmp_path / "limits.toml").write_text("ratio = 0.0\n")  # no test asserts speed
    words = ["--hosts", "localhost:2,nowhere", "--agent", agent, "--dir", tmp_path]
    words += ["--expect", tmp_path / "limits.toml"]
    words += ["--json", tmp_path / "found.json", "--junit", tmp_path / "found.xml"]
    done = mpitrain("certify", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [node["passes"] for node in found["nodes"]] == [True, False], found
    assert found["nodes"][1]["node"] == "nowhere" and found["others"] == []
    assert len(found["ranks"]) == 2 and found["collectives"] > 40
    assert len({found["jobs"][name] for name in ("first", "moved", "resumed")}) == 1
    suite = ElementTree.parse(tmp_path / "found.xml").getroot()
    assert [len(case) for case in suite] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "agent",
        "found.json",
        "found.xml",
        "limits.toml",
    ]


@pytest.mark.parametrize("measurement", ("matrix products", "a training run"))
def test_a_stopped_certificate_prints_and_keeps_the_verdicts_so_far(measurement, tmp_path):
    words = ["certify", "--dir", tmp_path, "--absent", "gone=silent", "--json", tmp_path / "c.json"]
    with subprocess.Popen(
        [*map(str, [*PROGRAM, *words])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if line.startswith(f"certify: {measurement}"):
                break
        if measurement == "a training run":
            while process.poll() is None and not [*tmp_path.glob("mpitrain-certify-*/*")]:
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    speeds = [line.split(":")[0] for line in printed.splitlines() if ": least " in line]
    assert speeds == (["matrix products", "memory"] if measurement == "a training run" else [])
    assert printed.startswith("gone") and len(printed.splitlines()) == 4 + len(speeds), printed
    found = json.loads((tmp_path / "c.json").read_text())
    assert [node["passes"] for node in found["nodes"]] == [None, False]
    assert not [*tmp_path.glob("mpitrain-certify-*")]
