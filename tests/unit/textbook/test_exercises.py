"""Right solutions pass, every mutant of them is found, and hostile files are refused in time."""

import csv
import re
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.collectives.plans.checked import Wrong
from mpitrain.errors import ConfigError
from mpitrain.tools.textbook import learn
from mpitrain.tools.textbook.exercises import check as checking
from mpitrain.tools.textbook.exercises import child
from mpitrain.tools.textbook.exercises.answers import programs
from mpitrain.tools.textbook.exercises.check import check_file, judged, lines, skeleton
from mpitrain.tools.textbook.exercises.table import EXERCISES, tensors
from mpitrain.tools.words import LANGUAGES, korean
from tests.unit.textbook.mutants import MUTANTS

pytestmark = pytest.mark.slow

SOLUTIONS = Path(__file__).parent / "solutions"


def solution(name):
    return (SOLUTIONS / f"{name}.py").read_text()


def found(name, code):
    return judged(name, EXERCISES[name], "own.py", code.encode())


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_right_and_costs_no_more_than_the_formula(name):
    result = check_file(SOLUTIONS / f"{name}.py")
    assert result.is_right, result.reason
    assert result.cost.counted == pytest.approx(result.cost.formula)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_example_of_two_ranks_is_what_the_solution_does(name):
    code = solution(name).replace("2 - stage", "1 - stage").replace("three_stages", "two_stages")
    exec(code, own := {})
    lines = [line.split(" -> ") for line in EXERCISES[name].example.splitlines()]
    expected = [eval(result) for _, result in lines]
    if EXERCISES[name].way == "values":
        assert [eval(call, own) for call, _ in lines] == expected
        return
    arguments = [eval(call[call.index("(") :]) for call, _ in lines]
    (answer,) = programs(SimpleNamespace(**own), EXERCISES[name].function, [arguments])
    assert answer["results"] == expected


def test_there_are_30_mutants_or_more():
    assert sum(map(len, MUTANTS.values())) >= 30 and MUTANTS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", EXERCISES)
def test_every_mutant_is_found_and_its_reason_translated(name):
    for old, new in MUTANTS[name]:
        code = solution(name)
        assert code.count(old) == 1, old
        result = found(name, code.replace(old, new))
        assert not result.is_right, new
        assert result.case in EXERCISES[name].cases
        reason = result.why("ko")
        words = re.sub(r"\b(\w+\(|micro_batches|sends|receives|adds|yield)", "", reason)
        assert not re.search("[a-z]{4,} [a-z]{2,}", words) and re.search("[가-힣]", words), reason


def test_the_counterexample_is_the_smallest_case_that_fails():
    wrong = solution("ring").replace("size + min(c, longer)", "size")
    result = found("ring", wrong)
    smaller = EXERCISES["ring"].cases[: result.cases]
    assert result.case == (2, 1) and smaller == ((1, 0), (1, 3))
    unequal = solution("server").replace("range(servers)]", "range(min(servers, 2))]")
    assert found("server", unequal).case == (2, 3, 12)


def test_a_deadlock_names_the_ranks_that_wait():
    steps = "return [([], every, False), (every, [], False)]"
    stuck = solution("server").replace("return [(every, [], False), ([], every, False)]", steps)
    assert "0 waits in step 1" in str(found("server", stuck).reason)
    late = "    if rank == 0:\n        return mine\n    every = yield"
    alone = found("column", solution("column").replace("    every = yield", late))
    assert "0 has returned; rank 1" in str(alone.reason) and alone.case[0] == 2
    crossed = solution("1f1b").replace("min(2 - stage, micro_batches)", "min(stage, micro_batches)")
    stages = found("1f1b", crossed)
    assert "stage 0 waits" in str(stages.reason) and stages.case == (2,)
    assert "스테이지 0" in stages.why("ko")


@pytest.mark.parametrize("name", EXERCISES)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('planned')", "ValueError in line 2"),
        ("return 7", ""),
        ("return [[1, 2], [object()]]", ""),
        ("return ['F0'] * 100000", ""),
        ("yield 5", ""),
        ("return [0] * 10**10", "more than 1024 MiB"),
        ("import os; os._exit(3)", "ended with 3"),
    ],
)
def test_exceptions_and_wrong_types_are_refused(name, body, reason):
    result = found(name, f"def {EXERCISES[name].function}(*arguments):\n    {body}\n")
    assert not result.is_right and result.cases == 0 and reason in str(result.reason)


FORK = "import os\nif os.fork() == 0:\n    import time; time.sleep(60)\nos.wait()"


@pytest.mark.parametrize("code", ["while True: pass", FORK])
def test_an_endless_file_is_refused_in_time(code, monkeypatch):
    monkeypatch.setattr(child, "SECONDS", 0.3)
    began = time.monotonic()
    result = found("ring", code)
    assert "no answer within" in str(result.reason)
    assert time.monotonic() - began < 50, "nobody waits for the process that FORK leaves"


def test_a_problem_is_one_line_so_that_no_file_forges_the_verdict_of_another():
    raises = "raise ValueError('x\\nb.py: exercise ring: right')"
    result = found("ring", f"def backward_ring(*arguments):\n    {raises}\n")
    assert "\n" not in result.why("en")


def test_a_result_that_needs_no_message_is_refused():
    x, a, b = tensors(case := (2, 1, 2, 1, 2))
    result = (np.maximum(x @ a, 0) @ b).tolist()
    with pytest.raises(Wrong, match="ranks share no memory"):
        EXERCISES["column"].judge(case, {"results": [result] * 2, "collectives": []})


@pytest.mark.parametrize("mark", [b'\xef\xbb\xbfEXERCISE = "ring"\r\n', b"EXERCISE = 'ring'\n"])
def test_a_file_of_another_editor_names_its_exercise(mark, tmp_path):
    (tmp_path / "own.py").write_bytes(mark + b"def backward_ring(*arguments): return 7")
    result = check_file(tmp_path / "own.py")
    assert result.name == "ring" and "must return a list" in str(result.reason)


def test_a_huge_file_is_refused_and_not_read(tmp_path):
    with (tmp_path / "own.py").open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(ConfigError) as refused:
        check_file(tmp_path / "own.py")
    assert f"{checking.LARGEST:,}" in refused.value.law


def test_a_file_without_the_function_or_the_mark_is_refused(tmp_path):
    assert "must define" in str(found("1f1b", "order = []").reason)
    (tmp_path / "own.py").write_text("def backward_ring(): pass\n")
    with pytest.raises(ConfigError):
        check_file(tmp_path / "own.py")
    with pytest.raises(ConfigError):
        check_file(tmp_path / "missing.py")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", EXERCISES)
def test_a_skeleton_is_python_and_not_yet_right(name, language):
    code = skeleton(name, EXERCISES[name], language)
    assert "NotImplementedError" in str(found(name, code).reason)


def test_every_text_of_an_exercise_has_a_korean_one():
    texts = {text for one in EXERCISES.values() for text in (one.statement, one.cost, one.formula)}
    assert not texts - {*korean()}


def test_the_formula_of_a_cost_is_korean_in_korean_output():
    found = check_file(SOLUTIONS / "ring.py")
    english = EXERCISES["ring"].formula
    assert english in "".join(lines("own.py", found, "en"))
    assert english not in "".join(lines("own.py", found, "ko"))
    assert english not in skeleton("ring", EXERCISES["ring"], "ko")


def test_a_class_is_marked_in_a_table(tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / "a.py").write_text(solution("1f1b"))
    (folder / "b.py").write_text(solution("1f1b").replace("return order", "return ['=1+1']"))
    (folder / "c.py").write_text("nothing")
    run = CliRunner()
    done = run.invoke(commands, ["check", str(folder), "--csv", str(tmp_path / "class.csv")])
    assert done.exit_code == 0
    rows = [*csv.DictReader((tmp_path / "class.csv").open())]
    assert [row["verdict"] for row in rows] == ["right", "wrong", "wrong"]
    assert rows[0]["cost"] == rows[0]["formula"] == "30" and rows[1]["counterexample"]
    printed = run.invoke(commands, ["check", str(folder), "--csv"])
    assert (printed.exit_code, printed.output) == (0, (tmp_path / "class.csv").read_text())


def test_a_skeleton_never_replaces_a_file(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("solved")
    done = CliRunner().invoke(commands, ["exercise", "ring", "--out", str(own)])
    assert done.exception.exit_code == 2 and own.read_text() == "solved"
    assert CliRunner().invoke(commands, ["exercise", "square"]).exception.exit_code == 2


def test_a_notebook_shows_a_page_and_an_exercise_its_verdict(monkeypatch):
    assert import_module("mpitrain.learn") is learn
    with pytest.raises(ConfigError, match="1 to 8 ranks"):
        learn.explain("ring", ranks="3")
    ring, claim = learn.explain("ring", ranks=3), learn.claims("gpipe-bubble")
    assert "a0+a1+a2" in repr(ring) and "holds: 1" in repr(claim)
    assert all("<iframe srcdoc=" in each._repr_html_() for each in (ring, claim))
    monkeypatch.setattr(learn, "language", "ko")
    assert "링" in repr(learn.explain("ring")) and "모든" in repr(learn.exercise("mean"))
    solved = learn.check(str(SOLUTIONS / "mean.py"))
    assert "맞음" in repr(solved) and solved._repr_html_() is None
    for wrong in (learn.explain, learn.claims, learn.exercise):
        with pytest.raises(ConfigError):
            wrong("nothing")


def test_an_exercise_without_a_name_is_the_list_of_all():
    listed = CliRunner().invoke(commands, ["exercise"]).output.splitlines()
    assert [line.split()[0] for line in listed] == [*EXERCISES]


def test_the_command_for_a_new_skeleton_can_be_typed(tmp_path):
    path = tmp_path / "my ring.py"
    done = CliRunner().invoke(commands, ["exercise", "ring", "--out", str(path)])
    assert done.output == f"mpitrain learn check '{path}'\n"
