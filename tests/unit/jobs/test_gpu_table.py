"""jobs/gpu-table.sh: what survives, what its table makes of results, how a bare machine gets what it lacks, and that all runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mpitrain.machine.process import gpus
from mpitrain.ops.device import device_for
from mpitrain.tools.bench.kernels.gemm import PRODUCTS, case_of
from tests.processes import SECONDS, run

pytestmark = pytest.mark.compile

JOBS = Path(__file__).parents[3] / "jobs"
SAID = {"what": "a product", "ours": "1 us", "peer": "1 us"}
GOOD = {**SAID, "ratio": 1.0, "required": 0.9, "ok": True}
EMIT = "import json\ndef emit(**row): print(json.dumps(row), flush=True)\n"


@pytest.fixture
def job(monkeypatch):
    """The modules of the job, which are programs beside each other."""
    monkeypatch.syspath_prepend(str(JOBS / "gpu"))
    for name in (
        "job",
        "table",
        "profiles",
        "suite",
        "kernels",
        "workload",
        "predicted",
        "training",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import job

    return job


@pytest.fixture
def parts(job, tmp_path, monkeypatch):
    """Runs these programs as parts on a device; (exit code, results)."""

    def run(*programs, device="cuda", late=(), since=0.0, **facts):
        """late: numbers of parts that are stopped, after seconds in which any machine has started them"""
        monkeypatch.setattr(job, "HERE", tmp_path)
        found = []
        for number, code in enumerate(programs):
            (tmp_path / f"{number}.py").write_text(f"{EMIT}good = {GOOD!r}\n{code}\n")
            seconds = 5.0 if number in late else float(SECONDS)
            found.append(job.Part(f"part {number}", seconds, f"{number}.py", **facts))
        code = job.main(job.Work(560, tuple(found)), device, tmp_path, time.time() - since)
        return code, job.read(tmp_path / "results.jsonl")

    return run


def test_every_result_is_taken_down_and_the_table_is_printed_after_each(parts, capsys):
    code, rows = parts(
        "emit(**good)\nprint('talk')\nemit(**good | {'what': 'another'})",
        "emit(**good | {'required': None})",
    )
    assert code == 0 and [row["what"] for row in rows] == ["a product", "another", "a product"]
    assert [row["part"] for row in rows] == ["part 0", "part 0", "part 1"]
    tables = capsys.readouterr().out.split("\n\n")
    assert [len(table.strip().splitlines()) for table in tables] == [3, 4, 5]
    assert "talk" not in "".join(tables)


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        ({"ratio": 0.89}, "short"),
        ({"ratio": None}, "short"),
        ({"ok": False}, "failed"),
        ({"ratio": 0.5, "required": None}, ""),
        ({"ratio": 0.5, "required": None, "goal": 0.7, "predicted": "2 us"}, ""),
    ],
)
def test_what_is_wrong_or_slow_is_marked_and_fails(change, mark, parts, capsys):
    code, _ = parts(f"emit(**good | {change!r})")
    said = capsys.readouterr().out
    row = said.splitlines()[2]
    assert code == bool(mark)
    assert ("short" in row or "failed" in row) == bool(mark)
    assert f"1 lines, {int(bool(mark))}" in said
    if "goal" in change:  # It stands beside the prediction, and is no requirement.
        assert row.split()[2:] == ["1", "us", "2", "us", "1", "us", "0.50", "goal", "0.70"]


def test_the_end_of_the_output_repeats_failed_and_short_rows(parts, capsys):
    long = "a product with a name of more than forty characters"
    parts(
        f"emit(**good)\nemit(**good | {{'what': {long!r}, 'ratio': 0.5}})\nemit(**good | {{'ok': False}})"
    )
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == f"{long[:40]} 0.50 of 0.90" and second.split() == ["a", "product", "failed"]


@pytest.mark.parametrize(
    ("way", "kind"), [("float32", "required"), ("3xtf32", "goal"), ("bfloat16", "goal")]
)
def test_what_needs_wgmma_is_a_goal(way, kind, job, capsys):
    import kernels

    dtype, plan = kernels.stored(way), "128x128x64"
    product = kernels.GemmRow("NT", 4096, 4096, 4096, dtype, plan, 200.0, 100.0, 0, 50.0, 1e-6, 0)
    kernels.report(product._replace(error=3e-6), {}, way)
    assert json.loads(capsys.readouterr().out)["ok"] == (way != "3xtf32")
    kernels.report(product, {}, way)
    row = json.loads(capsys.readouterr().out)
    assert row[kind] > 0 and row[{"goal": "required", "required": "goal"}[kind]] is None
    assert row["predicted"].endswith(" us") and row["ok"]


@pytest.mark.parametrize("vocabulary", [33, 50257])
def test_products_with_the_vocabulary_have_the_pitch_of_training(vocabulary, job):
    import workload

    seen, device = [], device_for("cuda-sim")
    shapes = {"NT": (4, vocabulary, 8), "NN": (4, 8, vocabulary), "TN": (vocabulary, 8, 4)}
    for name, shape in shapes.items():
        arrays = workload.operands(shape, np.float32, name)
        case = case_of(device, shape, "float32", PRODUCTS[name])
        case.by(lambda kernels, arena, *operands, **ways: seen.append(operands))()
        assert [array.strides for array in arrays] == [array.strides for array in seen[-1]]
        assert all(array.strides[0] % 256 == 0 for array in arrays if vocabulary in array.shape[1:])


def test_no_part_of_an_mpi_is_asked_for_by_a_name_that_not_all_versions_have():
    """Shared memory is `vader` in Open MPI 4 and `sm` in 5: a list of what to use ends one of them, a list of what not, none."""
    settings = dict(
        re.findall(r"(OMPI_MCA_(?:btl|osc))=(\S+)", (JOBS / "gpu-table.sh").read_text())
    )
    assert set(settings) == {"OMPI_MCA_btl", "OMPI_MCA_osc"}
    assert all(words.startswith("^") for words in settings.values())


def test_versions_are_known_without_an_import(job, monkeypatch):
    import kernels

    monkeypatch.setitem(sys.modules, "torch", None)
    assert kernels.version("numpy").split()[1][0].isdigit() and kernels.version("nome") == "no nome"


def test_what_ncu_says_is_read_in_any_unit(job):
    import profiles

    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    lines = [
        f'"{number}","gemm","gpu__time_duration.sum","{unit}","1,500.5"\n'
        for number, unit in enumerate(("ns", "usecond", "ms"))
    ]
    lines.append('"0","gemm","sm__warps_active.avg.pct_of_peak_sustained_active","%","n/a"\n')
    lines += [
        f'"1","gemm","launch__occupancy_limit_{limit}","block","{most}"\n'
        for limit, most in (("warps", 8), ("registers", 2), ("blocks", 32))
    ]
    found = profiles.profiles(head + "".join(lines))
    assert [profiles.blocks(each) for each in found.values()] == [0, 2, 0]
    assert [each["seconds"] for each in found.values()] == pytest.approx(
        [1.5005e-6, 1.5005e-3, 1.5005]
    )
    with pytest.raises(KeyError):
        profiles.profiles(head + '"0","gemm","gpu__time_duration.sum","fortnight","1"\n')


def test_the_prediction_has_every_product_and_no_gpu_is_faster_than_its_bytes(job):
    import predicted

    found = list(predicted.products())
    assert len(found) == 3 * (4 * 12 + 1)
    operations = sum(2 * m * n * k for _, (m, n, k) in found)
    assert operations == pytest.approx(6.07e12, rel=0.01)
    h100, h200 = predicted.GPUS
    for compute, peak in (("bfloat16", 990e12), ("float32", 67e12), ("3xtf32", 165e12)):
        parts = predicted.step(h100, compute)
        assert operations / peak < parts["products"] < 4 * operations / peak
        assert parts["updates"] > 30 * predicted.PARAMETERS / h100.memory
        assert predicted.total(h200, compute) < predicted.total(h100, compute)
        tilings = list(predicted.tilings(h100, compute))
        assert len(tilings) == len(found)
        assert sum(seconds for *_, seconds in tilings) == parts["products"]


def test_without_a_gpu_nothing_is_too_slow(parts):
    code, (row,) = parts("emit(**good | {'ratio': 0.1})", device="cuda-sim")
    assert code == 0 and row["required"] is None


def test_a_failed_or_late_section_keeps_its_rows_and_others_go_on(parts):
    code, rows = parts(
        "emit(**good)\nraise ValueError('the driver is gone')",
        "emit(**good)\nimport time\ntime.sleep(60)",
        "",
        "emit(**good)",
        late=[1],
    )
    assert code == 1 and [row["ok"] for row in rows] == [True, False, True, False, False, True]
    assert rows[1]["what"].endswith("exit code 1: ValueError: the driver is gone")
    assert rows[3]["what"] == "part 1: stopped after its 5 s" and "no result" in rows[4]["what"]


def test_a_case_that_ends_its_program_loses_only_its_own_result(parts):
    program = (
        "import os, sys\n"
        "for case in range(int(sys.argv[-1]), 7):\n"
        "    if case in (1, 3, 4): os._exit(case)\n"
        "    emit(**good | {'what': str(case)})\n"
    )
    code, rows = parts(program, cases=True)
    assert code == 1
    assert [row["what"][:19] for row in rows] == [
        *("0", "part 0: exit code 1", "2", "part 0: exit code 3", "part 0: exit code 4", "5", "6")
    ]
    _, rows = parts("raise ValueError('there is no GPU')", cases=True)
    assert len(rows) == 2, "what ends before its first case is not tried for each"


def test_no_part_is_begun_when_the_time_of_all_is_over(parts):
    code, (row,) = parts("emit(**good)", since=569)
    assert code == 1 and "not begun" in row["what"]


def test_parts_of_several_ranks_say_that_there_is_no_mpi(parts, monkeypatch):
    monkeypatch.setenv("PATH", "")
    code, (row,) = parts("emit(**good)", ranks=2)
    assert code == 0 and row["what"] == "part 0: skipped, there is no MPI here (mpirun and mpi4py)"


def test_what_was_measured_survives_a_kill(job, tmp_path):
    (tmp_path / "slow.py").write_text(f"{EMIT}emit(**{GOOD!r})\nimport time\ntime.sleep(20)\n")
    code = (
        f"import sys; sys.path.insert(0, {str(JOBS / 'gpu')!r})\nimport job, pathlib, time\n"
        f"job.HERE = pathlib.Path({str(tmp_path)!r})\n"
        "work = job.Work(560, (job.Part('slow', 20, 'slow.py'),))\n"
        f"job.main(work, 'cuda', job.HERE, time.time())\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("1 lines"):
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"half a li')
    done = run([sys.executable, JOBS / "gpu/table.py", tmp_path / "results.jsonl"])
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("1 lines, 0 of them short")


def wheel(folder, name, **files):
    """A wheel as pip would build it."""
    facts, tag = f"{name}-1.0.dist-info", "Root-Is-Purelib: true\nTag: py3-none-any\n"
    contents = {
        f"{facts}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{facts}/WHEEL": f"Wheel-Version: 1.0\nGenerator: a test\n{tag}",
        **files,
    }
    contents[f"{facts}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{facts}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for inside, text in contents.items():
            archive.writestr(inside, text)


def table_of(*words, folder, **environment):
    paths = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "WHEELS": str(folder / "no wheels"),
    }
    return run(["bash", JOBS / "gpu-table.sh", *words], env={**os.environ, **paths, **environment})


@pytest.mark.skipif(gpus() > 0, reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = table_of("cuda", tmp_path, folder=tmp_path)
    assert done.returncode == 2 and "install mpitrain[cuda13]" in done.stdout.splitlines()[-1]


def test_missing_packages_are_named_before_a_part_begins(tmp_path):
    """As with a python3 whose environment is not active; some are imported by a part alone."""
    for name in ("pydantic", "ml_dtypes", "pytest"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is missing')\n")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(path)
    done = table_of("cuda-sim", tmp_path / "out", folder=tmp_path, PYTHONPATH=str(tmp_path))
    said, way_out = done.stdout.splitlines()
    assert done.returncode == 2 and "wheels.sh" in way_out and sys.executable in said
    assert said.endswith("need: pydantic is missing; ml_dtypes is missing; pytest is missing")
    assert not (tmp_path / "out/results.jsonl").exists()


@pytest.mark.skipif(gpus() > 0, reason="there is a GPU here")
def test_packages_that_the_machine_lacks_come_from_the_wheels(tmp_path):
    """numpy and click are there, and have no wheel."""
    (tmp_path / "requirements.txt").write_text("numpy\nclick\nlacking\n")
    wheel(tmp_path, "lacking", **{"sitecustomize.py": "print('from the wheel')\n"})
    done = table_of("cuda", tmp_path / "out", folder=tmp_path, WHEELS=str(tmp_path))
    assert done.returncode == 2 and "from the wheel" in done.stdout, done.stdout + done.stderr


def test_wheels_that_cannot_be_installed_stop_the_job(tmp_path):
    (tmp_path / "requirements.txt").write_text("lacking\n")
    done = table_of("cuda-sim", tmp_path / "out", folder=tmp_path, WHEELS=str(tmp_path))
    assert done.returncode == 2 and "cannot be installed" in done.stdout


def test_each_kind_of_product_by_warpgroups_is_tried_in_a_process_of_its_own_before_it_is_timed(
    job,
):
    import predicted
    import workload

    table, guarded = workload.table("wgmma"), set(workload.GUARDED["cuda"])
    timed = [(name[:2], shape) for shape, _, name in workload.all_products("cuda", ["wgmma"])]
    for gpu in predicted.GPUS:
        for form, shape in [*predicted.products(), *timed]:
            (tile, splits), _ = predicted.tiled(gpu, form, shape, "bfloat16", table)
            assert (tile, form, min(splits, 2)) in guarded


def test_all_parts_for_hopper_can_take_their_seconds_within_ten_minutes(job):
    from job import JOBS

    seconds, parts = JOBS["hopper"]
    assert sum(part.seconds for part in parts) <= seconds <= 600 - 40, "wheels are installed before"


def test_a_step_as_a_graph_begins_with_bfloat16_for_which_it_is_measured(job, monkeypatch):
    import training

    asked = []
    monkeypatch.setattr(training, "graphs", lambda transport, kind, compute: asked.append(compute))
    training.main(None, "cuda", "graph")
    assert asked == ["bfloat16", "float32"]


def test_all_of_it_runs_in_the_simulator_and_leaves_two_files(tmp_path):
    done = table_of("cuda-sim", folder=tmp_path, OUT=str(tmp_path / "out"))
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    log = (tmp_path / "out/log.txt").read_text()
    assert done.returncode == 0, done.stdout[-5000:] + log[-3000:]
    last = f"{len(rows)} lines, 0 of them short of what is required, or failed"
    assert done.stdout.splitlines()[-1] == last
    assert list(dict.fromkeys(row["part"] for row in rows)) == [
        *("machine", "suite", "compiled", "losses", "profile of a product"),
        *("training", "graphs", "ring, IPC", "process group", "products", "attention", "memory"),
        *("ring, staged", "ring, pointers", "torch.compile"),
    ]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(rows) > 30 and files == ["log.txt", "results.jsonl"]
    trained = [row["what"] for row in rows if row["part"] == "training"]
    assert "training step of a GPT" in {what.partition(",")[0] for what in trained}
    assert any("bfloat16" in what for what in trained)
