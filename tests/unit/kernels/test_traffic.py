"""How often kernels pass over memory: the checked simulator counts the bytes that a launch reads and writes."""

import ml_dtypes
import numpy as np
import pytest

from mpitrain import config
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import LaunchTraffic, Simulator
from mpitrain.machine.backend import Arena
from mpitrain.ops import OPERATIONS
from mpitrain.ops.cuda import product, wire
from mpitrain.ops.cuda.attention import CAUSAL
from mpitrain.ops.cuda.launches import sum_all, sum_rows
from mpitrain.ops.cuda.wire import top_k
from mpitrain.ops.device import cuda_ops
from mpitrain.ops.reference.attention import Seen
from mpitrain.ops.table import operands
from mpitrain.optim import RULES
from mpitrain.optim.optimizer import ElementWise, Update
from mpitrain.tools.bench.kernels.examples import examples
from tests.cases.numbers import numbers, stored
from tests.laws.operations import IMAGES, drawn


def traffic(call) -> list[LaunchTraffic]:
    """What the launches have moved that `call` makes through the kernels it is given."""
    found: list[LaunchTraffic] = []
    call(Kernels(Simulator(checked=True, traffic=found)))
    return found


def moved(kernel: str, call) -> LaunchTraffic:
    """What the only launch of a kernel has moved, of those that `call` makes through the operations it is given."""
    (found,) = (
        launch
        for launch in traffic(lambda kernels: call(cuda_ops(kernels)))
        if launch.kernel == kernel
    )
    return found


@pytest.mark.parametrize(
    ("dtype", "rows", "vocabulary", "room", "passes"),
    [("float32", 3, 50, 14, 1), ("bfloat16", 3, 71, 57, 1), ("float32", 1, 42_000, 0, 2)],
)
def test_cross_entropy_reads_and_writes_the_logits_once(dtype, rows, vocabulary, room, passes):
    logits = stored(numbers(1, rows, vocabulary + room), dtype)[:, :vocabulary]
    found = moved(
        "cross_entropy",
        lambda ops: ops.cross_entropy(logits, np.zeros(rows, np.int64), 1.0, Arena()),
    )
    assert found.written == {"targets": 0, "logits": logits.nbytes, "losses": 4 * rows}
    again = (
        rows * logits.itemsize if passes > 1 else 0
    )  # the target's logit, before it is overwritten
    assert found.read["logits"] == passes * logits.nbytes + again


@pytest.mark.parametrize(
    ("dtype", "width", "passes"), [("float32", 1024, 1), ("bfloat16", 37, 1), ("float32", 1028, 3)]
)
def test_layer_norm_reads_a_row_once_where_a_warp_holds_it(dtype, width, passes):
    x, gain = stored(numbers(1, 3, width), dtype), stored(numbers(2, width), dtype)
    found = moved("layer_norm", lambda ops: ops.layer_norm(x, gain, gain.copy(), 1e-5, Arena()))
    assert (found.read["x"], found.written["y"]) == (passes * x.nbytes, x.nbytes)


def test_a_gradient_is_added_to_rows_with_tokens_alone():
    """A tied table has its head's gradient already; 34 of these 37 rows stay as they are."""
    tokens, dx = np.array([[3, 3, 36, 0]]), stored(numbers(1, 1, 4, 40), "bfloat16")
    dtable = stored(numbers(2, 37, 40), "float32")
    found = moved(
        "embedding_backward_table",
        lambda ops: ops.embedding_backward_table(dx, (tokens, 0), dtable, True, Arena()),
    )
    assert found.read["dtable"] == found.written["dtable"] == 3 * 40 * dtable.itemsize
    assert found.read["dx"] == dx.nbytes


@pytest.mark.parametrize(
    ("dtype", "width", "passes"), [("float32", 36, 1), ("bfloat16", 37, 1), ("float32", 10_500, 2)]
)
def test_the_backward_of_layer_norm_reads_x_and_dy_once_where_a_row_fits(dtype, width, passes):
    x, gain, dy = (
        stored(numbers(1, 9, width), dtype),
        stored(numbers(2, width), dtype),
        stored(numbers(3, 9, width), dtype),
    )
    saved = x, np.zeros(9, np.float32), np.ones(9, np.float32)
    found = moved(
        "layer_norm_backward" if width < 2048 else "layer_norm_backward_wide",
        lambda ops: ops.layer_norm_backward_input(dy, gain, saved, Arena(), residual=x.copy()),
    )
    assert (found.read["x"], found.read["dy"], found.written["dx"]) == (
        passes * x.nbytes,
        passes * dy.nbytes,
        x.nbytes,
    )
    assert found.read["residual"] == x.nbytes


@pytest.mark.parametrize(
    ("dtype", "depth", "last"),
    [("float32", 20, "gemm"), ("bfloat16", 20, "gemm_tensor"), ("float32", 3000, "gemm_combine")],
)
def test_a_fused_product_reads_each_operand_once_and_writes_once(dtype, depth, last):
    """Also where the sum over K was split. Without them these were launches of 3 passes each."""
    x, w, c = (
        stored(numbers(seed, *shape), dtype)
        for seed, shape in ((1, (9, depth)), (2, (11, depth)), (3, (9, 11)))
    )
    found = moved(last, lambda ops: ops.linear(x, w, None, Arena(), residual=c))
    assert (found.read["residual"], found.read["C"], found.written["C"]) == (c.nbytes, 0, c.nbytes)
    dy, w, h = (
        stored(numbers(seed, *shape), dtype)
        for seed, shape in ((1, (9, depth)), (2, (depth, 11)), (3, (9, 11)))
    )
    found = moved(last, lambda ops: ops.gelu_linear_backward_input(dy, w, (h, False), c, Arena()))
    assert (found.read["C"], found.written["C"]) == (c.nbytes, c.nbytes)


def test_a_bias_and_a_residual_are_added_to_the_sum_over_ranks_in_one_pass():
    x, b, residual = (
        stored(numbers(seed, *shape), "bfloat16")
        for seed, shape in ((1, (9, 37)), (2, (37,)), (3, (9, 37)))
    )
    found = moved("add_bias", lambda ops: ops.add_bias(x, b, np.empty_like(x), Arena(), residual))
    assert (found.read["x"], found.read["residual"], found.read["y"], found.written["y"]) == (
        x.nbytes,
        x.nbytes,
        0,
        x.nbytes,
    )


def ones(dtype: str, *shape: int) -> np.ndarray:
    """Aligned elements of 1: 2056 of them, 257 shares of 8, if no shape is given."""
    return stored(np.ones(shape or 2056), dtype)


def steps(kernels: Kernels, dtype: str) -> None:
    """Every optimizer that steps each element by itself, with a mirror where elements are of 16 bits."""
    ops, mirror = cuda_ops(kernels), None if dtype == "float32" else ones(dtype)
    update = Update(config.Optimizer(), ops, Arena(), 1.0, 0.1, 1)
    every = {"scale": 1.0, "lr": 0.1, "weight_decay": 0.1, "arena": Arena(), "mirror": mirror}
    for rule in (rule for rule in RULES.values() if isinstance(rule.step, ElementWise)):
        if OPERATIONS[rule.step.op].launches:
            arrays = [ones("float32") for _ in ("p", "g", *rule.state)]
            getattr(ops, rule.step.op)(*arrays, **every, **rule.step.arguments(update))


def totals(kernels: Kernels, dtype: str) -> None:
    """Of squares, and of elements."""
    cuda_ops(kernels).gradient_facts(ones(dtype), Arena())
    sum_all(kernels, ones(dtype), Arena())


def pointwise(kernels: Kernels, dtype: str) -> None:
    """Activations and sums."""
    ops = cuda_ops(kernels)
    ops.relu_backward(ones(dtype), ops.relu(ones(dtype), Arena())[1], Arena())
    ops.add(ones(dtype), ones(dtype), ones(dtype), Arena())
    ops.weighted_sum(ones(dtype), 0.5, ones(dtype), 0.5, ones(dtype), Arena())
    ops.add_bias(
        ones(dtype, 9, 40), ones(dtype, 40), ones(dtype, 9, 40), Arena(), ones(dtype, 9, 40)
    )


def wires(kernels: Kernels, dtype: str) -> None:
    """Received chunks of a type, and numbers to the fp16 format in whole blocks."""
    wire.add_into(kernels, ones("float32"), ones(dtype))
    wire.maximum_into(kernels, ones("float32"), ones(dtype))
    wire.convert(kernels, ones("float32"), ones(dtype))
    wire.convert(kernels, ones(dtype), ones("float32"))
    wire.encode_fp16(kernels, ones("float32", 2048), ones("float16", 2048), ones("float32", 8))


def coded(kernels: Kernels, dtype: str) -> None:
    """The int8 format, and numbers from the fp16 format: 4 or 8 of their numbers are moved at once."""
    int8, fp16 = ((ones(kind, 2048), ones("float32", 8)) for kind in ("int8", "float16"))
    wire.encode_int8(kernels, ones("float32", 2048), *int8)
    wire.decode_int8(kernels, *int8, ones("float32", 2048), accumulate=True)
    wire.decode_fp16(kernels, *fp16, ones("float32", 2048), accumulate=True)


def embeddings(kernels: Kernels, dtype: str) -> None:
    """An embedding, and gradients of its tables in float32."""
    ops, dx = cuda_ops(kernels), ones(dtype, 2, 5, 40)
    _, saved = ops.embedding(
        np.arange(10).reshape(2, 5), ones(dtype, 37, 40), ones(dtype, 6, 40), Arena()
    )
    ops.embedding_backward_table(dx, saved, ones("float32", 37, 40), True, Arena())
    ops.embedding_backward_positions(dx, ones("float32", 6, 40), True, Arena())


def columns(kernels: Kernels, dtype: str) -> None:
    """A sum down columns."""
    sum_rows(kernels, ones(dtype, 130, 40), ones("float32", 40), True, Arena())


def norms(kernels: Kernels, dtype: str) -> None:
    """LayerNorm."""
    ops, x, gain = cuda_ops(kernels), ones(dtype, 9, 40), ones(dtype, 40)
    ops.layer_norm_backward_input(
        x, gain, ops.layer_norm(x, gain, gain.copy(), 1e-5, Arena())[1], Arena()
    )


def combined(kernels: Kernels, dtype: str) -> None:
    """The epilogue of a product that a library makes."""
    ops = cuda_ops(kernels, product.chosen("library"))
    ops.linear(ones(dtype, 9, 16), ones(dtype, 40, 16), ones(dtype, 40), Arena())


def selections(kernels: Kernels, dtype: str) -> None:
    """The largest elements of an array, which is float32."""
    top_k(kernels, numbers(1, 2056).astype(np.float32), 100, Arena())


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("launches", "bulk"),
    [
        (steps, "p g m v mirror"),
        (totals, "x"),
        (pointwise, "a b x y z dy dz residual"),
        (wires, "x y q"),
        (coded, "x y"),
        (embeddings, "table positions x dx dtable dpositions"),
        (columns, "x parts y"),
        (norms, "x y gain bias dy dx"),
        (combined, "workspace C bias"),
        (selections, "x"),
    ],
)
def test_every_access_to_aligned_arrays_moves_16_bytes(launches, bulk, dtype):
    seen = set()
    for launch in traffic(lambda kernels: launches(kernels, dtype)):
        for name in launch.accesses.keys() & bulk.split():
            bytes_moved = launch.read[name] + launch.written[name]
            assert bytes_moved == 16 * launch.accesses[name] > 0, f"{name} of {launch.kernel}"
            if name == "mirror":  # 2 bytes beside the 28 of a step of AdamW
                assert launch.read[name] == 0 and launch.written["p"] == 2 * bytes_moved
                read = {launch.read[one] for one in launch.read.keys() & {*"pgmv"}}
                assert read == {2 * bytes_moved}
            seen.add(name)
    assert seen == set(bulk.split()) - ({"mirror"} if dtype == "float32" else set())


def test_attention_on_tensor_cores_reads_what_its_128_rows_see_once():
    """200 tokens are blocks of 128 and 72 rows, which see 128 and 200 keys, and 200 and 72 queries."""
    heads, row = 2, 2 * 16 * 2  # bytes of a token in all heads
    q, dy, dq = (stored(numbers(seed, 1, 200, 32), "float16") for seed in (1, 2, 3))
    kv, dkv = (stored(numbers(seed, 1, 200, 64), "float16") for seed in (4, 5))
    forward = moved("attention_tensor", lambda ops: ops.attention(q, kv, heads, Arena()))
    assert (forward.read["q"], forward.read["kv"]) == (row * 200, row * 2 * 328)
    assert forward.written["y"] == row * 200
    saved = q, kv, np.zeros_like(dy), np.zeros((1, heads, 200), np.float32), heads, (), CAUSAL
    for_keys, for_queries = (
        moved(
            f"attention_tensor_backward_{half}",
            lambda ops: ops.attention_backward(dy, saved, dq, dkv, Arena()),
        )
        for half in ("kv", "q")
    )
    assert for_keys.read == {
        "q": row * 272,
        "kv": row * 2 * 200,
        "dy": row * 272,
        "log_sums": 4 * heads * 272,
        "dots": 4 * heads * 272,
        "dkv": 0,
    }
    read = for_queries.read
    assert (read["q"], read["kv"], read["dy"]) == (row * 200, row * 2 * 328, row * 200)
    assert (for_keys.written["dkv"], for_queries.written["dq"]) == (row * 400, row * 200)


def test_what_is_counted_is_what_a_kernel_moves():
    z, dy = np.ones(1031, np.float32), np.ones(1031, ml_dtypes.bfloat16).astype(np.float32)
    found = moved("activation_backward", lambda ops: ops.gelu_backward(dy, z, Arena()))
    assert found[:4] == (
        "activation_backward",
        {"z": z.nbytes, "dy": dy.nbytes},
        {"z": z.nbytes, "dy": 0},
        {"z": 2 * 260, "dy": 260},
    )


def test_each_operation_moves_the_bytes_of_its_row():
    """At least: caches serve vectors and tiles that are read again. Arrays of one shape: exactly."""
    sizes = {
        "M": 64,
        "K": 32,
        "N": 36,
        "C": 32,
        "V": 40,
        "B": 4,
        "T": 16,
        "H": 2,
        "E": 2,
        "D": 8,
        "L": 2056,
    } | IMAGES

    def draw(one, shape):
        array = drawn(one, shape, sizes)
        return array if one.is_integer else array.astype(np.float32)

    # Neither numbers of a step, nor tables of angles, nor codes and scales of moments count as operands.
    private = "numbers", "rotations", "maps", "m_scales", "v_scales"
    again = "choose", "count_choices"
    launches: list[LaunchTraffic] = []
    ops = cuda_ops(Kernels(Simulator(checked=True, traffic=launches)))
    arguments, exact = examples(ops, sizes, draw, Arena()), set()
    for name, row in OPERATIONS.items():
        given, line = arguments(name), operands(row.operands)
        launches.clear()
        getattr(ops, name)(**given)
        moved = sum(
            nbytes
            for launch in launches
            for counts in (launch.read, launch.written)
            for array, nbytes in counts.items()
            if array not in private
        )
        # Of experts only the rows that were routed move: the ends of their parts are data.
        assert moved >= row.nbytes(**sizes) or "@grouped_linear" in row.operands, name
        # How many partial sums are pending depends on the device. A warp reads its row of a router's logits k + 2 times,
        # and the warp of each expert all choices.
        shapes = {one.shape or one.reads for one in line.takes if not one.number}
        if len(shapes) == 1 and line.takes[0].name != "pending" and name not in again:
            exact.add(name)
            assert row.products or row.launches > 1 or moved == row.nbytes(**sizes), name
    assert {"add", "gelu", "relu_backward", "row_maximum", "sgd", "adamw"} <= exact


def test_attention_within_a_window_reads_no_key_before_it():
    """Of 400 tokens with a window of 65, blocks of 128 queries see the keys from their first less 64 on."""
    heads, row, seen = 1, 2 * 16, Seen(window=65)
    q, dy, dq = (stored(numbers(seed, 1, 400, 16), "float16") for seed in (1, 2, 3))
    kv, dkv = (stored(numbers(seed, 1, 400, 32), "float16") for seed in (4, 5))
    tokens = 128 + 192 + 192 + 80
    forward = moved("attention_tensor", lambda ops: ops.attention(q, kv, heads, Arena(), seen))
    assert forward.read["kv"] == row * 2 * tokens
    saved = q, kv, np.zeros_like(dy), np.zeros((1, heads, 400), np.float32), heads, (), seen
    for half, name, each in (("kv", "q", row), ("q", "kv", row * 2)):
        backward = moved(
            f"attention_tensor_backward_{half}",
            lambda ops: ops.attention_backward(dy, saved, dq, dkv, Arena()),
        )
        again = 192 + 192 + 144 + 16 if half == "kv" else tokens
        assert backward.read[name] == each * again
    plain = moved("attention", lambda ops: ops.attention(*wide(q, kv), heads, Arena(), seen))
    assert plain.read["kv"] == 2 * row * 2 * (64 + 5 * 128 + 80)


def wide(*arrays):
    return [array.astype(np.float32) for array in arrays]
