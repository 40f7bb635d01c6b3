"""The default size of a bucket."""

import pytest

from mpitrain.parallel.buckets import bucket_bytes


@pytest.mark.parametrize(
    "configured, on_device, expected", [(0, False, 4e6), (0, True, 25e6), (7, True, 7e6)]
)
def test_buckets_are_larger_between_gpus_of_a_host(configured, on_device, expected):
    assert bucket_bytes(configured, ("a", "a"), on_device, lambda: 1) == expected
    assert bucket_bytes(configured, ("a", "b"), on_device, lambda: 1) == (
        1 if not configured else expected
    )
