"""How tests start programs."""

import subprocess
import sys

import pytest

from tests.processes import NEVER_BEGAN, begun


@pytest.mark.slow
def test_a_start_is_repeated_only_where_mpirun_had_no_thread_to_begin_with(tmp_path):
    count = tmp_path / "count"
    code = (
        "import sys; from pathlib import Path; count = Path(sys.argv[1]); count.open('a').write('x')\n"
        "if len(count.read_text()) < 3: sys.exit(sys.argv[2])"
    )

    def starts(words):
        count.write_text("")
        done = begun(
            lambda: subprocess.run([sys.executable, "-c", code, count, words], capture_output=True),
            (0, 0, 0),
        )
        return done.returncode, len(count.read_text())

    assert starts("a law is broken") == (1, 1)
    assert starts(f"The PMIx server's {NEVER_BEGAN}.") == (0, 3)
