"""The default size of a bucket."""

from types import SimpleNamespace

import pytest

from mpitrain.config import parse
from mpitrain.parallel.buckets import bucket_bytes


@pytest.mark.parametrize(
    "configured, on_device, expected", [(0, False, 4e6), (0, True, 25e6), (7, True, 7e6)]
)
def test_buckets_are_larger_between_gpus_of_a_host(configured, on_device, expected):
    transport = SimpleNamespace(hosts=("a", "a"), allocates_on_device=on_device)
    replica = SimpleNamespace(
        config=parse({"replication": {"bucket_mb": configured}}),
        grid=SimpleNamespace(copies=SimpleNamespace(transport=transport)),
        storage=None,
    )
    assert bucket_bytes(replica) == expected
