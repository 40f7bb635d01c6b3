#!/usr/bin/env bash
# Claim: the tables of "Modes side by side" in mpitrain/bench/README.md are the output of their commands. This script runs each
# command that matches WORDS and writes its output below it. About 6 minutes on two free cores; on a busy machine times mean nothing.
#     bash jobs/prove/tables.sh [PYTHON] [WORDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
"${1:-python3}" - "${2:-}" <<'PY'
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path("mpitrain/bench/README.md")
BLOCK = re.compile(r"^```\n(\$ mpitrain (launch -n \d+ -- compare --job .*)\n)(?:.*\n)*?```$", re.M)
LAST = "step ms: "  # the formulas below stand on the page of replication

for block in BLOCK.finditer(PAGE.read_text()):
    command, words = block[1], shlex.split(block[2])
    if sys.argv[1] not in command:
        continue
    print(command, end="", flush=True)
    done = subprocess.run([sys.executable, "-m", "mpitrain", *words], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(done.stderr)
    lines = done.stdout.splitlines()
    last = next(number for number, line in enumerate(lines) if line.startswith(LAST))
    table = "\n".join(lines[: last + 1])
    # The page may have changed since.
    page = BLOCK.sub(lambda found: f"```\n{command}{table}\n```" if found[1] == command else found[0], PAGE.read_text())
    PAGE.write_text(page)
    print(table, flush=True)
PY
