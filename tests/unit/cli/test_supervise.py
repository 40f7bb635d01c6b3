"""What `launch` makes of a started job, with scripts in place of launchers: output, requests to stop, exit codes."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.cli import NOT_BEGUN
from mpitrain.cli.launch.failed import Failure
from mpitrain.cli.launch.supervise import Errors, LauncherOutput
from mpitrain.cli.terminal.stop_requests import StatusFilter
from mpitrain.machine.status import FLAG
from tests.processes import SECONDS, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PATIENCE = SECONDS
RULE = b"-" * 74 + b"\n"
KILLED = (
    RULE
    + b"prterun noticed that process rank 1 with PID 24807 on node vm exited on\nsignal 9 (Killed).\n"
    + RULE
)
EXITED = (
    RULE + b"prterun detected that one or more processes exited with non-zero status,\n"
    b"thus causing the job to be terminated. The first process to do so was:\n\n"
    b"   Process name: [prterun-vm-24898@1,1]\n   Exit code:    2\n" + RULE
)
NO_SLOTS = RULE + b"There are not enough slots available in the system\n" + RULE
SERVER = b"[vm:09153]"
PMIX = (
    SERVER
    + b" PMIX ERROR: PMIX_ERR_UNREACH in file /openmpi-5.0.11/3rd-party/openpmix/src/server/pmix_server.c at line 31\n"
)
EPOLL = b"[warn] Epoll MOD(4) on fd 21 failed. Old events were 6\n"
REFUSAL = "srun: error: Unable to create step for job 7: More processors requested than permitted"
SRUN = b"srun: error: node2: task 1: Killed\n"
BEGAN = '\x1e{"mpitrain": "began", "run_dir": "runs/x"}'
ENDED, STOPPED, NOTHING, LEFT, ABORTS = (
    f'\x1e{{"mpitrain": "{event}", "run_dir": ""}}'
    for event in ("ended", "stopped", "not begun", "left", "aborts")
)


FAILED = "mpitrain launch: the run failed:"
FAILED_1 = f"{FAILED} rank 1: ended by an exception"
SILENT_1 = f"{FAILED} rank 1 on vm: no progress for 4 s; which rank stood still first is not known"
NO_REASON = f"{FAILED} exit code 3, and no rank gave a reason"


def started(code, training=True, prelude="signal.signal(signal.SIGHUP, signal.SIG_DFL)", **more):
    """A process that supervises a script as `launch` supervises a launcher."""
    call = (
        f"import signal, sys; {prelude}; from mpitrain.cli.launch.supervise import Requests, run; "
        f"sys.exit(run([sys.executable, '-u', '-c', {code!r}], {{}}, Requests(), {training}))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, **pipes | more)


def supervised(code, training=True):
    """(exit code, standard output, standard error) of such a process."""
    process = started(code, training)
    out, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, out, errors


def supervised_in_turn(codes):
    """(exit code, standard error) of each script: one process supervises them one after another."""
    call = (
        "import sys; from mpitrain.cli.launch.supervise import Requests, run\n"
        f"for code in {codes!r}:\n"
        "    ended = run([sys.executable, '-u', '-c', code], {}, Requests(), True)\n"
        "    print(f'=== {ended}', file=sys.stderr, flush=True)"
    )
    said = re.split(r"=== (\d+)\n", run([sys.executable, "-c", call], cwd=ROOT).stderr)
    return [*zip(map(int, said[1::2]), said[::2], strict=False)]


def test_a_program_of_the_user_gets_each_usr1_and_ends_at_term(tmp_path):
    counts = (
        "import signal, time\n"
        "for n in (signal.SIGUSR1, signal.SIGTERM):\n"
        "    signal.signal(n, lambda n, frame: print('got', n, flush=True) or n == 15 and exit(7))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    process = started(counts, training="False, False")
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        assert process.stdout.readline()
        process.send_signal(number)
    out, errors = process.communicate(timeout=PATIENCE)
    assert (out, process.returncode) == (b"got 15\n", 7), (out, errors)


def test_a_result_that_cannot_be_printed_is_an_error():
    with open("/dev/full", "wb") as full:
        process = started("print('the result')", training=False, stdout=full)
        errors = process.communicate(timeout=PATIENCE)[1]
    said = b"standard output takes no more, and the result is lost"
    assert process.returncode == 1 and errors.count(said) == 1, errors


def test_rank_0s_status_line_decides_the_exit_code():
    rows = [
        *((ENDED, 0, 0), (STOPPED, 85, 85), (STOPPED, 0, 85), (ENDED, 1, 1), (STOPPED, 1, 1)),
        *((NOTHING, 85, 85), ("failed at step 5", 1, 1), ("step 4/5", 0, 1), ("", 2, 2)),
        ("done: parameters bitwise equal on all ranks", 0, 1),
        ("stopped at step 5; --resume goes on from there", 0, 1),
    ]
    codes = []
    for said, code, _ in rows:
        words = [BEGAN, *([said] if said else [])]
        codes.append(f"import sys; print(*{words!r}, sep='\\n'); sys.exit({code})")
    assert [ended for ended, _ in supervised_in_turn(codes)] == [row[2] for row in rows]


def test_a_lost_host_is_no_success_and_a_killed_launcher_is_its_signal():
    code, _, errors = supervised(f"print({BEGAN!r})")
    assert code == 1
    assert b"the launcher returned 0, but rank 0 did not say that the run ended" in errors
    ending = "import os; os.kill(os.getpid(), 9)"
    assert supervised(f"print({BEGAN!r}); print({ENDED!r}); {ending}")[0] == 137
    assert supervised(ending, training=False)[0] == 137


@pytest.mark.parametrize(
    "before, said",
    [("a warning", ["mpitrain launch: rank 1 exited with code 2"]), ("rank 1: ended", [])],
)
def test_a_program_that_said_something_and_then_exited_is_named(before, said):
    code = f"import sys; sys.stderr.write({before + chr(10)!r} + {EXITED.decode()!r}); sys.exit(2)"
    process = started(code, training="False, False")
    errors = process.communicate(timeout=PATIENCE)[1].decode()
    assert (process.returncode, errors.splitlines()) == (2, [before, *said])


LOST_HOST = """
A daemon failed to report back after being spawned. This could

  Local host:    vm
  Remote host:   node3
  Daemon exit status: 0
"""


def test_a_program_that_did_not_end_on_all_ranks_is_no_success():
    own = "False, False, leave=2"
    for said, code in (
        ((LEFT, LEFT), 0),
        ((f"ranks print before it{LEFT}", LEFT), 0),
        ((LEFT,), 1),
        ((LOST_HOST,), 1),
    ):
        process = started(f"print(*{said!r}, sep='\\n')", training=own)
        errors = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == code, (said, errors)
        if code:
            why = "host node3 is lost" if LOST_HOST in said else "a rank may have left, or a host"
            ends = f"the program ended on {said.count(LEFT)} of 2 ranks: {why}"
            assert ends in errors.decode(), errors


def test_a_launcher_that_waits_for_a_host_without_power_is_killed():
    short = "import mpitrain.cli.launch.supervise as supervise; supervise.ABORTING = 0.2"
    for line, of_user, code in (
        ("rank 2: ends the stalled job", "True", 137),
        (f"rank 2: ended by an exception on a\n{ABORTS}", "False, False", 1),
    ):
        waits = f"import sys, time; print({line!r}, file=sys.stderr); time.sleep(600)"
        process = started(waits, of_user, short)
        said = process.communicate(timeout=PATIENCE)[1]
        assert b"rank 2: end" in said and b"a host may be lost" not in said, "it has one host"
        assert process.returncode == code


ENDS = """
import atexit, os, subprocess, sys
from mpitrain.machine.status import ProgramEnd
end = ProgramEnd((0, 85))
if os.fork() == 0:
    os._exit(0)
os.wait()
sys.stdout = None
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
"""


@pytest.mark.parametrize(
    "way, events",
    (
        ("end.tell('left')", ["left"]),
        ("end.tell('left'); os._exit(0)", ["left"]),
        ("os._exit(status=85)", ["left"]),
        ("os._exit(1)", []),
        ("os.execlp('true', 'true')", ["left"]),
        ("os.execve(path='/bin/true', argv=['true'], env={})", ["left"]),
        ("raise ValueError", ["aborts"]),
    ),
)
def test_a_rank_tells_once_how_its_program_ends_whatever_became_of_its_output(way, events):
    said = []
    out = run([sys.executable, "-X", FLAG, "-c", ENDS + way]).stdout.encode()
    StatusFilter(lambda event, _: said.append(event)).pass_on(out)
    assert said == events


def test_a_tag_of_the_launcher_before_each_line_does_not_hide_the_end():
    tags = (
        "[1,0]<stdout>: ",
        "0: ",
        "[Sun Nov 22 22:26:43 2026][1,0]<stdout>: ",
        "[1,0][vm:63]<stdout>: ",
    )
    for tag in tags:
        lines = [f"{tag}{BEGAN}", f"{tag}step 1/1", f"{tag}{ENDED}", f"{tag}done"]
        code, out, errors = supervised(f"print(*{lines!r}, sep='\\n')")
        assert (code, out, errors) == (0, f"{tag}step 1/1\n{tag}done\n".encode(), b"")


@pytest.mark.parametrize("stream", ("stdout", "stderr"))
def test_status_lines_are_removed_from_either_stream_and_nothing_else_is(stream):
    code, out, errors = supervised(
        f"import sys; print('a bar', {BEGAN!r} + '\\nstep', {ENDED!r}, 'done', sep='\\n', file=sys.{stream})"
    )
    shown = b"a bar\nstep\ndone\n"
    assert (code, out + errors) == (0, shown)


@pytest.mark.parametrize("size", (1, 7, 10000))
def test_a_status_line_is_read_however_it_is_cut(size):
    events = []
    status = StatusFilter(lambda *facts: events.append(facts))
    text = f"one\r\n{BEGAN}\r\ntwo\x1e\x1e{{three\n{STOPPED}\nfour\x1e".encode()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown = b"".join(map(status.pass_on, pieces)) + status.release()
    assert events == [("began", "runs/x"), ("stopped", "")]
    assert shown == b"one\r\ntwo\x1e\x1e{three\nfour\x1e"


def test_status_lines_are_written_for_launch_only():
    call = (
        "from mpitrain.machine.status import status; print(status('began', 'ü\\n\\udcff'), end='')"
    )
    for flags, wanted in (([], []), (["-X", FLAG], [("began", "ü\n\udcff")])):
        events = []
        out = run([sys.executable, *flags, "-c", call]).stdout.encode()
        status = StatusFilter(lambda *facts, to=events: to.append(facts))
        assert status.pass_on(out) == b"" and events == wanted


LISTENS = (
    "import signal, sys, time\n"
    "def stop(number, frame): print({last!r}); sys.exit({code})\n"
    "signal.signal(signal.SIGUSR1, stop)\n"
    "print({first!r})\n"
    "time.sleep(60)"
)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
def test_a_quiet_run_answers_a_stop_request_in_one_line(number):
    process = started(LISTENS.format(first="ready", last=STOPPED, code=85))
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85
    assert b"mpitrain launch: asked to stop" in errors


def test_a_stop_before_the_run_began_says_that_there_was_nothing_to_save():
    process = started("import time; print('ready'); time.sleep(60)")
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)  # USR1, for which nobody listens there, ends the script
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85 and NOT_BEGUN.encode() in errors


LAST_LINES = {
    "rank 1: run.inject: raise at step 3\nrank 1: ended by an exception\nTraceback": FAILED_1,
    "rank 1 on vm: no progress for 4 s\nrank 0 on vm: no progress for 4 s": SILENT_1,
    "a box of the MPI": NO_REASON,
    REFUSAL: f"{FAILED} {REFUSAL}",
    f"{REFUSAL}\nrank 1: ended by an exception": FAILED_1,
    BEGAN: f"{NO_REASON}; `mpitrain runs report runs/x` names the rank that fell silent first. "
    "With --resume=auto it goes on from its last checkpoint, if it has one",
    "TrainingError: a law\n               a way out": "               a way out",
}
"""What is printed to standard error -> the last line of `launch`."""


def test_the_last_line_of_a_failed_run_is_its_first_failure():
    plugin = "import sys; print('rank 0: the data are read, to standard output', flush=True); "
    codes = [
        f"{plugin}print({printed!r}, file=sys.stderr, flush=True); sys.exit(3)"
        for printed in LAST_LINES
    ]
    for (code, errors), last in zip(supervised_in_turn(codes), LAST_LINES.values(), strict=True):
        assert code == 3 and errors.splitlines()[-1] == last, errors


def test_the_signal_behind_an_exit_code_is_named():
    failure = Failure()
    assert "exit code 153 (SIGXFSZ: File size limit exceeded), and" in failure.last_line(
        153, "", Path()
    )
    assert "exit code 213, and" in failure.last_line(213, "", Path())


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_dead_run_leaves_no_half_checkpoint_unless_another_run_began(is_locked, tmp_path):
    half, whole = (tmp_path / "checkpoints" / name for name in (".step-8.partial", "step-00000004"))
    half.mkdir(parents=True)
    whole.mkdir()
    began = BEGAN.replace("runs/x", str(tmp_path))
    with (tmp_path / "lock").open("w") as lock:
        if is_locked:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert supervised(f"import sys; print({began!r}); sys.exit(3)")[0] == 3
    assert half.exists() == is_locked and whole.exists()


def test_a_run_that_rank_0_ends_before_it_began_is_reported_once():
    process = started(LISTENS.format(first="ready", last=NOTHING, code=14))
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85 and (out + errors).count(NOT_BEGUN.encode()) == 1


def test_an_early_stop_request_is_repeated_when_the_run_begins():
    code = (
        "import signal, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: got.append(1))\n"
        "print('ready')\n"
        "while not got: time.sleep(.01)\n"
        f"print({BEGAN!r})\n"
        "while len(got) < 2: time.sleep(.01)\n"
        f"print({STOPPED!r}); sys.exit(85)"
    )
    process = started(code)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 85


def test_a_second_request_ends_the_launcher():
    process = started(
        f"import signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('heard'));\nprint({BEGAN!r} + '\\nready')\n"
        "while True: time.sleep(1)"
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"heard\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143 and b"ending it now" in errors


@pytest.mark.parametrize(("event", "code"), [("ended", 0), ("stopped", 85)])
def test_a_run_that_has_ended_keeps_its_exit_code_whatever_signals_come(event, code):
    over = {"ended": ENDED, "stopped": STOPPED}[event]
    killed = KILLED.decode()
    process = started(
        f"import sys, time; print({BEGAN!r}); print({over!r} + '\\nready'); print({killed!r}, file=sys.stderr)\n"
        "while True: time.sleep(1)"
    )
    assert process.stdout.readline() == b"ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code and b"goes on from its last" not in errors, errors


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    process = started(
        LISTENS.format(first=f"{BEGAN}\nready", last=STOPPED, code=85),
        prelude="signal.signal(signal.SIGHUP, signal.SIG_IGN)",
    )
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85 and errors.count(b"asked to stop") == 1


def test_all_bytes_pass_unchanged(tmp_path):
    raw = bytes(range(256)) * 1000 + RULE + b"no box\n\r 5%|\xf0\x9f and no line break"
    (tmp_path / "raw").write_bytes(raw)
    code, out, errors = supervised(
        "import os\n"
        f"raw = open({str(tmp_path / 'raw')!r}, 'rb').read()\n"
        "for fd in (1, 2):\n"
        "    left = raw\n"
        "    while left: left = left[os.write(fd, left):]",
        training=False,
    )
    assert (code, out, errors) == (0, raw, raw)


def test_a_bar_arrives_on_a_terminal_while_it_is_drawn(tmp_path):
    """Each piece is written only when the one before it was seen: one that is held back would be waited for in vain."""
    pieces = [b"\r 10%|#", b"\r 20%|##", b"-", b"---", b"[", b"plain", b"\n", RULE + b"a table\n"]
    code = (
        "import os, time\n"
        f"for i, piece in enumerate({pieces!r}):\n"
        "    os.write(2, piece)\n"
        f"    while not os.path.exists(f'{tmp_path}/{{i}}'): time.sleep(.01)"
    )
    master, slave = pty.openpty()
    process = started(code, training=False, stdout=slave, stderr=slave)
    seen = wanted = b""
    for number, piece in enumerate(pieces):
        wanted += piece.replace(b"\n", b"\r\n")  # the terminal's own line ends
        while seen != wanted:
            assert select.select([master], [], [], PATIENCE)[0], (seen, wanted)
            seen += os.read(master, 4096)
            assert wanted.startswith(seen)
        (tmp_path / str(number)).touch()
    assert process.wait(PATIENCE) == 0
    os.close(master)
    os.close(slave)


def test_a_slow_reader_gets_all_that_was_said():
    process = started("print('x' * 300_000)", training=False)
    time.sleep(3)  # the script has long ended, and what it said fills more than a pipe
    assert len(process.communicate(timeout=PATIENCE)[0]) == 300_001


def sifted(*chunks):
    """What is shown of these chunks of standard error, and what was understood."""
    words = LauncherOutput()
    errors = Errors(words, SERVER)
    shown = b"".join(map(errors.pass_on, chunks)) + errors.release()
    return shown, words


@pytest.mark.parametrize("pieces", (1, 7, 10000))
def test_a_box_that_repeats_our_own_error_is_dropped_however_it_is_cut(pieces):
    ours = b"ConfigError: run.steps must be\n             more\n"
    box = EXITED + b"\0"
    for said in (EXITED + PMIX, PMIX + EXITED, box, box + PMIX, EPOLL):
        text = ours + said
        step = -(-len(text) // pieces)
        shown, _ = sifted(*(text[i : i + step] for i in range(0, len(text), step)))
        assert shown == ours


def test_a_box_that_alone_tells_what_happened_stays():
    of_a_rank = PMIX.replace(SERVER, b"[node2.local:77]")
    for text in (
        *(EXITED, NO_SLOTS, b"ours\n" + NO_SLOTS, PMIX, RULE, RULE[:10], EPOLL, of_a_rank),
    ):
        assert sifted(text)[0] == text
    words = LauncherOutput()
    words.note("stopped", "")
    shown = Errors(words, SERVER).pass_on(EXITED + PMIX + of_a_rank)
    assert shown == b"", "after a stop neither box nor line says anything new"


def test_srun_victims_are_not_named_as_the_killed_rank():
    left = b"srun: error: node1: task 0: Exited with exit code 1\n"
    assert sifted(left + SRUN)[1].killed.first() is None
    assert sifted(left, SRUN)[1].killed.first() is None
    assert sifted(SRUN, left)[1].killed.first().rank == "1"
    assert sifted(SRUN + left)[1].killed.first().rank == "1"


# What srun of Slurm 22.05 said on two hosts with two ranks each when rank 3 was killed: most often, and one time in six.
SRUN_KNOWS = (
    b"srun: error: node2: task 3: Killed\n"
    b"slurmstepd-node2: error:  mpi/pmix_v4: _errhandler: node2 [1]: pmixp_client_v2.c:211: Error handler invoked: status = -61, "
    b"source = [slurm.pmix.9.0:3]\n"
    b"srun: Job step aborted: Waiting up to 12 seconds for job step to finish.\n"
    b"slurmstepd-node1: error: *** STEP 9.0 ON node1 CANCELLED AT 2026-11-22T18:07:05 ***\n"
    b"srun: error: node2: task 2: Killed\nsrun: error: node1: tasks 0-1: Killed\n"
)
SRUN_MIXES = (
    b"srun: Job step aborted: Waiting up to 12 seconds for job step to finish.\n"
    b"slurmstepd-node1: error: *** STEP 11.0 ON node1 CANCELLED AT 2026-11-22T18:07:10 ***\n"
    b"srun: error: node2: tasks 2-3: Killed\nsrun: error: node1: task 0: Killed\n"
    b"srun: error: node1: task 1: Exited with exit code 14\n"
)


ONE_OF = "at least one of the ranks {} was killed: {} (Slurm then ends the others)"


@pytest.mark.parametrize(
    "text, said",
    [
        (KILLED, "rank 1 on vm was killed: signal 9 (Killed)"),
        (SRUN, "rank 1 on node2 was killed: Killed"),
        (
            b"srun: error: node1: tasks 0-1: Segmentation fault (core dumped)\n",
            ONE_OF.format("0-1 on node1", "Segmentation fault (core dumped)"),
        ),
        (
            b"=   PID 25723 RUNNING AT vm\n=   EXIT CODE: 9\n"
            b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n",
            "process 25723 on vm was killed: signal 9. "
            "MPICH does not tell its rank, and ends the others itself when one has left",
        ),
        (SRUN_KNOWS, "rank 3 on node2 was killed: Killed"),
        (SRUN_MIXES, ONE_OF.format("2-3,0 on node2, node1", "Killed")),
        (SRUN_MIXES + SRUN_KNOWS.splitlines(True)[1], "rank 3 on node2 was killed: Killed"),
        (b"srun: error: node1: tasks 0,2-3: Killed\n", ONE_OF.format("0,2-3 on node1", "Killed")),
    ],
)
def test_a_killed_rank_is_named_with_its_host_and_no_wrong_one(text, said):
    for parts in ([text], [text[:30], text[30:]], text.splitlines(True)):
        assert str(sifted(*parts)[1].killed.first()) == said


def test_launch_says_which_rank_was_killed_or_points_to_the_report():
    code = "import sys; print({!r}, flush=True); sys.stderr.buffer.write({!r}); sys.exit(137)"
    scripts = [code.format(BEGAN, text) for text in (SRUN_MIXES, KILLED)]
    (_, several), (ended, one) = supervised_in_turn(scripts)
    points = (
        "others). `mpitrain runs report runs/x` says which one fell silent first. With --resume"
    )
    assert points in several
    assert ended == 137 and one == (
        "mpitrain launch: rank 1 on vm was killed: signal 9 (Killed). With --resume=auto the run "
        "goes on from its last checkpoint, if it has one\n"
    )
