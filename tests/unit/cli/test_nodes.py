"""The probe of nodes from outside MPI, with agents that answer, fail or hang."""

import json

import pytest

from mpitrain import __version__
from mpitrain.cli import main
from mpitrain.cli.certify import agent_for, probe

pytestmark = pytest.mark.slow

AGENT = """#!/bin/bash
case $1 in
    good*) shift; exec bash -c "$*" ;;
    old) echo mpitrain 0.0.1 ;;
    other) echo mpitrain VERSION ;;
    broken) echo "no such interpreter" >&2; exit 127 ;;
    faulty) shift; exec env PYTHONPATH="$(dirname "$0")" bash -c "$*" ;;
    silent) exec sleep 60 ;;
esac
"""


@pytest.fixture
def agent(tmp_path):
    path = tmp_path / "agent"
    path.write_text(AGENT.replace("VERSION", __version__))
    path.chmod(0o755)
    (tmp_path / "numpy.py").write_text("raise ImportError('half a package')\n")
    return str(path)


def test_nodes_that_cannot_be_used_are_named(agent):
    found = dict(probe(["good1", "old", "other", "broken", "faulty", "good2"], [agent]))
    assert {*found} == {"old", "other", "broken", "faulty"}
    assert "0.0.1" in found["old"] and __version__ in found["other"]
    assert "no such interpreter" in found["broken"] and "half a package" in found["faulty"]


def test_a_node_that_fails_is_named_while_another_one_is_silent(agent):
    (first, _), (last, why) = probe(["silent", "old"], [agent], 1.5)
    assert (first, last) == ("old", "silent") and "1.5 s" in why


def test_a_missing_agent_fails_every_node():
    assert "cannot be started" in dict(probe(["a"], ["/missing"]))["a"]


def test_a_slurm_job_has_another_agent():
    assert agent_for({"SLURM_JOB_ID": "1"})[0] == "srun" and agent_for({})[0] == "ssh"


@pytest.mark.parametrize("job", ["", "old 4 broken 4"])
def test_without_any_node_of_the_option_or_the_job_the_certificate_fails(
    job, tmp_path, agent, monkeypatch
):
    path = tmp_path / "found.json"
    monkeypatch.setenv("LSB_MCPU_HOSTS", job)
    hosts = [] if job else ["--hosts", "old,broken:2"]
    with pytest.raises(SystemExit) as end:
        main(["certify", *hosts, "--agent", agent, "--json", str(path)])
    assert end.value.code == 1
    assert [node["node"] for node in json.loads(path.read_text())["nodes"]] == ["old", "broken"]


@pytest.mark.parametrize(
    "words",
    [
        ["--agent", "ssh"],
        ["--hosts", "a", "--agent", "'x"],
        ["--absent", "a"],
        ["--rounds", "4"],
        ["--hosts", "a:0"],
        ["--ppn", "2"],
        ["--hostfile", "/missing"],
        ["--hosts", "a", "--expect", "/missing.toml"],
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(words):
    with pytest.raises(SystemExit) as end:
        main(["certify", *words])
    assert end.value.code == 2
