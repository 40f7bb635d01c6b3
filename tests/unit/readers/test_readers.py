"""What damaged files become: one refusal that names the file, or what a file of that content says."""

import json
import random
import resource
import signal
from collections import Counter

import numpy as np
import pytest

from mpitrain.formats.safetensors_files import located
from tests.processes import SECONDS
from tests.unit.readers.fuzz_checkpoints import Manifests
from tests.unit.readers.fuzz_headers import Headers
from tests.unit.readers.fuzz_metrics import Metrics
from tests.unit.readers.fuzz_readers import INVALID, emptied, verdict
from tests.unit.readers.fuzz_tables import Tables, Tunings
from tests.unit.readers.fuzz_toml import Configurations
from tests.unit.readers.fuzz_traces import Traces

CASES, MANY = 260, 800
FORMATS = {
    "manifests": Manifests,
    "headers": Headers,
    "tuning": Tunings,
    "tiles": Tables,
    "configurations": Configurations,
    "traces": Traces,
    "metrics": Metrics,
}
CHEAP = ("tuning", "tiles", "configurations", "metrics")
CPU_SECONDS, ROOM = 2, 200_000  # for a case, and KiB for all


@pytest.fixture
def clocks():
    """Call it to begin a case: one that computes for too long, or waits for a pipe, fails."""

    def late(*_):
        raise AssertionError("it computes, or waits, for too long")

    before = [signal.signal(number, late) for number in (signal.SIGVTALRM, signal.SIGALRM)]

    def begin():
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)

    yield begin
    for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)
    for number, handler in zip((signal.SIGVTALRM, signal.SIGALRM), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_by_name_or_says_what_a_fresh_one_does(
    name, tmp_path, clocks, monkeypatch
):
    monkeypatch.setattr("mpitrain.cli.report.find_spec", lambda name: None)  # pictures take seconds
    monkeypatch.setattr("mpitrain.tools.report.text.TRIED", 10)
    form, wrong, kinds = FORMATS[name](tmp_path), [], Counter()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(MANY if name in CHEAP else CASES):
        damaged = form.damage(random.Random(number), emptied(tmp_path / "case"))
        clocks()
        if said := verdict(form.read, damaged):
            wrong.append(f"{number} ({damaged.kind}): {said}")
        kinds[damaged.kind, damaged.expected is not INVALID] += 1
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong[:12])
    assert (
        len({kind for kind, _ in kinds}) >= 12 and sum(kinds[kind, True] for kind, _ in kinds) >= 20
    ), kinds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < ROOM


def test_a_type_that_numpy_has_not_is_named_and_files_need_no_texts(tmp_path):
    header = json.dumps(
        {
            "a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [6, 14]},
        }
    ).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(14))
    texts, found = located(tmp_path / "a.safetensors")
    assert (
        texts == {} and found["b"].numpy == np.float32 and found["b"].start == 8 + len(header) + 6
    )
    assert (found["a"].dtype, found["a"].shape) == ("BF16", (3,))
    with pytest.raises(ValueError, match=r"a\.safetensors has a tensor of BF16,"):
        _ = found["a"].numpy
