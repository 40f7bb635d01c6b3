"""What is refused before a launch, word for word, and what the loader does without being told."""

import threading
from inspect import isfunction
from pathlib import Path

import numpy as np
import pytest

from mpitrain.errors import ConfigError, KernelError
from mpitrain.kernels.loader import Argument, Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.kernels.source import package_sources
from mpitrain.machine import compiling
from mpitrain.ops import OPERATIONS
from mpitrain.ops.cuda import wire
from mpitrain.ops.device import cuda_ops
from tests.cases import launches

HERE = Path(__file__).parent
WIRE = {
    name
    for name, found in vars(wire).items()
    for body in [getattr(found, "func", found)]  # of a partial one
    if isfunction(body) and body.__module__ == wire.__name__ and name[0] != "_"
}
FLOATS = np.zeros(32, np.float32)
GAPS = np.zeros((32, 2), np.float32)[:, 0]


@pytest.fixture(scope="module")
def kernels():
    return Kernels(Simulator(), folder=HERE)


REFUSED = {
    "missing argument": (
        "past_the_end",
        (32, FLOATS),
        32,
        "KernelError: past_the_end takes 3 arguments, but 2 were passed.\n"
        "             Its parameters: n, x, y.",
    ),
    **{
        f"{value!r:.40} for {parameter}": (
            "past_the_end",
            (value, FLOATS, FLOATS) if parameter == "n" else (32, value, FLOATS),
            32,
            f"KernelError: past_the_end: argument `{parameter}` must be {wanted}, but is {text}.\n"
            "             Cast or copy it first, or split arrays with too many elements.",
        )
        for parameter, wanted, cases in (
            (
                "x",
                "a contiguous array of float32",
                (
                    (np.zeros(32), "of float64, shape (32,) and strides (8,)"),
                    (np.zeros(32, np.int32), "of int32, shape (32,) and strides (4,)"),
                    (GAPS, "of float32, shape (32,) and strides (8,)"),
                    (Argument(GAPS, strided=True), "of float32, shape (32,) and strides (8,)"),
                    (1.0, "1.0"),
                ),
            ),
            ("n", "a number of int32", ((32.0, "32.0"), (2**31, "2147483648"), (True, "True"))),
        )
        for value, text in cases
    },
    "too many threads": (
        "past_the_end",
        (32, FLOATS, FLOATS),
        1025,
        "KernelError: past_the_end: a block of (1025,) is 1025 threads; 1 to 1024 are possible.\n"
        "             Use a smaller block and a larger grid.",
    ),
    "more threads than the launch bounds": (
        "bounded",
        (np.zeros(65, np.float32),),
        65,
        "KernelError: bounded is launched with 65 threads a block; its launch bounds say 64.\n"
        "             Use smaller blocks, or raise __launch_bounds__.",
    ),
    "overlap": (
        "past_the_end",
        (16, FLOATS[:16], FLOATS[8:24]),
        16,
        "KernelError: past_the_end: arguments `x` and `y` overlap in part; one is written.\n"
        "             Pass the same array twice for work in place, or arrays that share no element.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_launch_is_refused_with_the_law_the_values_and_the_way_out(kernels, case):
    name, arguments, threads, text = REFUSED[case]
    with pytest.raises(KernelError) as caught:
        kernels.launch(name, (1,), (threads,), arguments, RIGHT=1)
    assert caught.value.named() == text


def test_an_unknown_kernel_is_refused_with_the_known_ones(kernels):
    with pytest.raises(KernelError, match=r"There is no kernel `gem`\.\nThere are: .*bounded"):
        kernels.launch("gem", (1,), (1,), ())


def test_a_source_that_does_not_compile_shows_the_compilers_words(tmp_path):
    (tmp_path / "broken.cu").write_text(
        'extern "C" __global__ void broken(int n) { nonsense(n); }\n'
    )
    with pytest.raises(KernelError, match=r"broken\.cu:1:.*nonsense"):
        Kernels(Simulator(), folder=tmp_path).launch("broken", (1,), (1,), (1,))


def test_scalars_and_arrays_of_every_kind_pass(kernels):
    kernels.launch(
        "takes_many_types",
        (1,),
        (1,),
        (1, 2**40, 0.5, np.zeros(2, np.float16), np.zeros(3, np.uint8)),
    )


def test_an_empty_grid_launches_nothing(kernels):
    before = kernels.launches
    kernels.launch("past_the_end", (0,), (32,), (0, FLOATS[:0], FLOATS[:0]), RIGHT=1)
    assert kernels.launches == before


def test_an_absent_array_is_a_null_pointer(tmp_path):
    (tmp_path / "optional.cu").write_text(
        'extern "C" __global__ void optional(const float* x, float* y) { y[0] = x ? x[0] : -1.0f; }\n'
    )
    y = np.zeros(1, np.float32)
    Kernels(Simulator(), folder=tmp_path).launch(
        "optional", (1,), (1,), (None, Argument(y, fresh=True))
    )
    assert y == -1


def test_nothing_is_written_back_after_an_error(kernels):
    y = np.zeros(32, np.float32)
    with pytest.raises(KernelError):
        kernels.launch("past_the_end", (1,), (64,), (32, np.ones(32, np.float32), y), RIGHT=0)
    assert not y.any()


def test_a_strided_view_is_written_between_its_gaps_alone(kernels):
    whole = np.zeros((3, 8), np.float32)
    kernels.launch(
        "writes_between_rows", (3,), (32,), (5, 8, Argument(whole[:, :5], strided=True)), RIGHT=1
    )
    assert whole[:, :5].all() and not whole[:, 5:].any()


def test_an_array_keeps_its_alignment_in_the_simulator(users_kernels):
    kernels = Kernels(Simulator(), folder=HERE)
    shifted = np.zeros(36, np.float32)[1:33]
    aligned = shifted.ctypes.data % 16 == 0
    assert not aligned, "NumPy did not align the whole array; the test shows nothing"
    with pytest.raises(KernelError, match="alignment"):
        kernels.launch("misaligned", (1,), (8,), (np.zeros(40, np.float32)[3:39], shifted), RIGHT=0)


def test_ranks_as_threads_may_launch_at_the_same_time(kernels):
    outputs = [np.zeros(32, np.float32) for _ in range(8)]

    def launch(rank):
        for _ in range(20):
            kernels.launch(
                "past_the_end",
                (1,),
                (64,),
                (32, np.full(32, rank, np.float32), outputs[rank]),
                RIGHT=1,
            )

    threads = [threading.Thread(target=launch, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(output) for output in outputs] == [{rank} for rank in range(8)]


def test_a_machine_without_a_compiler_is_told_what_to_install(no_compiler):
    with pytest.raises(ConfigError) as caught:
        compiling.compiler()
    assert caught.value.named() == (
        "ConfigError: device.kind cuda-sim compiles kernels with g++ 11 or later on x86-64, but "
        "there is no g++ here.\n"
        "             Install g++ on an x86-64 machine (apt install g++, or "
        "pip install ziglang), or use --device cpu."
    )


def test_a_changed_header_is_compiled_again(tmp_path):
    (tmp_path / "value.cuh").write_text("#define VALUE 1.0f\n")
    (tmp_path / "user.cu").write_text(
        '#include "value.cuh"\nextern "C" __global__ void set(float* y) { *y = VALUE; }\n'
    )
    y = np.zeros(1, np.float32)
    for value in (1, 2):
        (tmp_path / "value.cuh").write_text(f"#define VALUE {value}.0f\n")
        package_sources.cache_clear()
        Kernels(Simulator(), folder=tmp_path).launch("set", (1,), (1,), (y,))
        assert y == value


def test_cached_launches_take_at_most_twelve_calls(monkeypatch):
    """Of every operation on kernels, and of what all-reduces do to chunks."""
    kernels = Kernels(launches.Nothing(takes_plain=True))
    made = launches.operations(kernels)
    named = {name for name in vars(cuda_ops(kernels)) if OPERATIONS[name].launches}
    assert made.keys() == {*named, *WIRE, "top_k"}
    for run in made.values():
        run()
    monkeypatch.setattr(Argument, "__new__", None)
    for name, run in made.items():
        calls, count = launches.calls(kernels, run)
        assert 0 < calls <= 12 * count, (name, calls, count)
    monkeypatch.undo()
    looked_at = Kernels(launches.Nothing(takes_plain=False))
    calls, count = launches.calls(looked_at, launches.operations(looked_at)["linear"])
    assert count == 1 and calls > 20, "what counts would not see the arguments being looked at"


def test_names_of_no_array_are_refused(kernels):
    with pytest.raises(KernelError, match=r"past_the_end has no array `z`\.\nIts arrays: x, y"):
        kernels.launch(
            "past_the_end", (1,), (32,), (32, FLOATS, FLOATS.copy()), fresh="y z", RIGHT=1
        )


def test_kernels_of_products_take_the_same_arguments_in_one_order():
    """A launch passes them by position. On tensor cores sums are float; gemm_combine takes those of an epilogue."""
    sources = package_sources()
    plain, tensor, combine = (
        sources[name].kernels[name].parameters for name in ("gemm", "gemm_tensor", "gemm_combine")
    )
    as_float = [each._replace(type=each.type.replace("Sum", "float")) for each in plain]
    assert as_float == list(tensor)
    names = [each.name for each in combine]
    assert [each.name for each in plain if each.name in names] == names
    readonly = {"workspace"}  # the other two kernels write it
    assert {each for each in combine if each.name not in readonly} <= set(plain)
