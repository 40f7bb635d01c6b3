"""What an MPI library is called, and CUDA-awareness where it has no function to ask."""

import ctypes.util

import pytest

from mpitrain.transport.library import cuda_awareness, named


def test_without_a_library_the_answer_is_no():
    assert cuda_awareness("", {}) == (False, "no libmpi is loaded")


def test_the_environment_is_believed_where_there_is_nothing_to_ask():
    path = ctypes.util.find_library("c")
    assert cuda_awareness(path, {"MV2_USE_CUDA": "1"}) == (True, "MV2_USE_CUDA=1 (MVAPICH)")
    assert cuda_awareness(path, {"MV2_USE_CUDA": "0"}).cuda is False


@pytest.mark.parametrize(
    "told, name",
    [
        (
            "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, "
            "ident: 5.0.11, repo rev: v5.0.11rc1, Sep 16, 2026\0",
            "Open MPI v5.0.11",
        ),
        (
            "MPICH Version:      5.0.2\nMPICH Release date: Mon Jun 1 2026\nMPICH ABI:          17:2:5\n",
            "MPICH 5.0.2",
        ),
        (
            "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : Wed March 02\n",
            "MVAPICH2 2.3.7",
        ),
        (
            "Intel(R) MPI Library 2021.11 for Linux* OS\n",
            "Intel(R) MPI Library 2021.11 for Linux* OS",
        ),
    ],
)
def test_a_library_is_called_by_its_name_and_version(told, name):
    assert named(told) == name
