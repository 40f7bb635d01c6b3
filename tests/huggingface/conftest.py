"""Skips tests of this folder without the packages transformers and peft.

Tests import the packages when they run: an import takes seconds, and every session collects all tests.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = ("transformers", "peft", "torch")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

missing = [name for name in PACKAGES if find_spec(name) is None]


def pytest_collection_modifyitems(items):
    """Skip the tests of this folder without the packages."""
    for item in items:
        if missing and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)} is not installed"))
