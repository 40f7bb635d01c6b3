#!/usr/bin/env bash
# Claim: all lessons run in one folder, in English and then in Korean, and judge an exercise: as it stands wrong, solved right.
# About 2 minutes on two cores. Needs mpitrain[test].
#     bash jobs/prove/lessons.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
MPITRAIN_TEST_LESSONS=all "${1:-python3}" -m pytest -q --durations 12 tests/unit/textbook/test_lessons.py
