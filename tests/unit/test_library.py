"""CUDA-awareness where the library has no function to ask."""

import ctypes.util

from mpitrain.transport.library import cuda_awareness


def test_without_a_library_the_answer_is_no():
    assert cuda_awareness("", {}) == (False, "no libmpi is loaded")


def test_the_environment_is_believed_where_there_is_nothing_to_ask():
    path = ctypes.util.find_library("c")
    assert cuda_awareness(path, {"MV2_USE_CUDA": "1"}) == (True, "MV2_USE_CUDA=1 (MVAPICH)")
    assert cuda_awareness(path, {"MV2_USE_CUDA": "0"}).cuda is False
