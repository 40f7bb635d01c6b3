#!/usr/bin/env bash
# Claim: every lesson runs in both languages, and judges its exercise: as it stands wrong, with its solution right.
# About 4 minutes on two cores. Needs mpitrain[test].
#     bash jobs/prove/lessons.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
MPITRAIN_TEST_LESSONS=all "${1:-python3}" -m pytest -q --durations 12 tests/unit/textbook/test_lessons.py
