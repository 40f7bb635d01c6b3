#!/usr/bin/env bash
# Claim: the tables of "Modes side by side" in mpitrain/tools/bench/README.md and of "Which tricks to use" in mpitrain/tools/plan/README.md are
# the output of their commands. This script runs each command that contains WORDS and writes its output below it. About 6 minutes
# on two free cores; on a busy machine times mean nothing.
#     bash jobs/prove/tables.sh [PYTHON] [WORDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
"${1:-python3}" - "${2:-}" <<'PY'
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGES = Path("mpitrain/tools/bench/README.md"), Path("mpitrain/tools/plan/README.md")
BLOCK = re.compile(r"^```\n(\$ mpitrain (launch -n \d+ -- compare (?:--job|--tricks) .*)\n)(?:.*\n)*?```$", re.M)
LAST = "step ms: "  # the formulas below it stand on the page of replication

for path in PAGES:
    for block in BLOCK.finditer(path.read_text()):
        command, words = block[1], shlex.split(block[2])
        if sys.argv[1] not in command:
            continue
        print(command, end="", flush=True)
        done = subprocess.run([sys.executable, "-m", "mpitrain", *words], capture_output=True, text=True, timeout=1800)
        if done.returncode:
            sys.exit(done.stderr)
        lines = done.stdout.splitlines()
        last = next((number for number, line in enumerate(lines, 1) if line.startswith(LAST)), len(lines))
        table = "\n".join(lines[:last])
        # The page may have changed since.
        page = BLOCK.sub(lambda found: f"```\n{command}{table}\n```" if found[1] == command else found[0], path.read_text())
        path.write_text(page)
        print(table, flush=True)
PY
