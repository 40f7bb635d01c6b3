"""Replicated: the gradients of a caller's own training loop are averaged over the ranks."""

import sys

import numpy as np
import pytest

from mpitrain.errors import CommError, ConfigError, MpitrainError
from mpitrain.parallel.replicated import Replicated
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.fakes.pointers import PointerThreads

SHAPES = [(3, 4), (5,), (), (0,), (37, 2), (1,)]
PADDED = 32 + 32 + 32 + 0 + 96 + 32
"""Elements of SHAPES, each padded to a multiple of 32."""
CONTROL = 2 * 8
"""Bytes of the control message."""


def coded(rank, ranks, step, number, shape):
    """Whole numbers that name rank, step, parameter and element; their mean over ranks is whole."""
    places = np.arange(np.prod(shape), dtype=float)
    return np.reshape(ranks * (1e6 * rank + 1e4 * step + 1e3 * number + places), shape)


def mean(ranks, step, number, shape):
    return sum(coded(rank, ranks, step, number, shape) for rank in range(ranks)) / ranks


def parameters(rank, dtype="float64"):
    return [coded(rank, 1, 7, n, shape).astype(dtype) for n, shape in enumerate(SHAPES)]


@pytest.mark.product
@pytest.mark.parametrize("algorithm", ("ring", "auto", "star", "shared"))
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_the_average_over_ranks_is_written_to_each_gradient(ranks, algorithm):
    def train(transport):
        rank = transport.rank
        own = parameters(rank)
        average = Replicated(transport, own, algorithm, bucket_mb=5e-4)
        for array, first in zip(own, parameters(0), strict=True):
            assert np.array_equal(array, first), "rank 0's parameters are everyone's"
        for step in range(3):
            # The second step is strided, and each rank has an order of its own.
            gradients = [coded(rank, ranks, step, n, shape) for n, shape in enumerate(SHAPES)]
            if step == 1:
                gradients = [np.repeat(g, 2, -1)[..., ::2] if g.ndim else g for g in gradients]
            order = np.random.default_rng([rank, step]).permutation(len(SHAPES)).tolist()
            for number in order:
                average.ready(number, gradients[number])
            average.wait()
            for number, (gradient, shape) in enumerate(zip(gradients, SHAPES, strict=True)):
                assert np.array_equal(gradient, mean(ranks, step, number, shape))
        transport.close()

    run_ranks(ranks, train)


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_a_step_sends_the_bytes_of_a_ring_and_one_control_message(ranks, dtype):
    def train(transport):
        average = Replicated(transport, parameters(0, dtype), "ring")
        before = transport.traffic.nbytes
        for number, one in enumerate(parameters(0, dtype)):
            average.ready(number, one)
        average.wait()
        return transport.traffic.nbytes - before

    size = PADDED * np.dtype(dtype).itemsize
    # 2 (n - 1) / n of the bytes on each rank: all ranks together, to avoid ragged chunks.
    assert sum(run_ranks(ranks, train)) == 2 * (ranks - 1) * (size + CONTROL)


def test_buckets_are_reduced_while_the_backward_pass_computes():
    def train(transport):
        average = Replicated(transport, parameters(0), "ring", bucket_mb=5e-4)
        before, sent = transport.traffic.messages, []
        for number in reversed(range(len(SHAPES))):
            average.ready(number, parameters(0)[number])
            sent.append(transport.traffic.messages - before)
        average.wait()
        return sent[0], sent[2]

    first, third = run_ranks(2, train)[0]
    assert first == 0 and third > 0, "the first bucket has parameters 5 to 3"


@pytest.mark.parametrize("wire, nearly", [("bf16", 2e-2), ("int8", 3e-2)])
def test_a_wire_format_gives_all_ranks_the_same_bits(wire, nearly):
    def train(transport):
        rng = np.random.default_rng(transport.rank)
        gradient = rng.standard_normal(1000).astype("float32")
        average = Replicated(transport, [np.zeros(1000, "float32")], wire=wire)
        average.ready(0, gradient)
        average.wait()
        return gradient

    one, other = run_ranks(2, train)
    exact = sum(np.random.default_rng(r).standard_normal(1000) for r in range(2)) / 2
    assert np.array_equal(one, other) and 0 < np.abs(one - exact).max() < nearly


WRONG = {
    "missing": (lambda average, own: None, "gradient 1 is missing"),
    "twice": (
        lambda average, own: [average.ready(1, own[1]), average.ready(1, own[1])],
        "gradient 1 came twice",
    ),
    "shape": (lambda average, own: average.ready(1, own[0]), "(3, 4)"),
    "dtype": (lambda average, own: average.ready(1, own[1].astype("f4")), "float32"),
    "None": (lambda average, own: average.ready(1, None), "NoneType"),
    "read-only": (lambda average, own: average.ready(1, np.broadcast_to(1.0, 5)), "read-only"),
    "number": (
        lambda average, own: [average.ready(9, own[1]), average.ready(1, own[1])],
        "gradient 9",
    ),
    "float": (lambda average, own: average.ready(1.0, own[1]), "gradient 1.0"),
}


@pytest.mark.product
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("ranks", (1, 3))
def test_a_wrong_gradient_on_one_rank_is_an_error_on_all(ranks, kind):
    wrong, said = WRONG[kind]

    def train(transport):
        own = parameters(0)
        average = Replicated(transport, own, bucket_mb=5e-4)
        for number, one in enumerate(own):
            if number != 1 or transport.rank != ranks - 1:
                average.ready(number, one)
        if transport.rank == ranks - 1:
            wrong(average, own)
        with pytest.raises(CommError) as error:
            average.wait()
        assert error.value.agreed and said in str(error.value)
        assert f"on rank {ranks - 1}" in str(error.value)
        assert np.array_equal(own[0], parameters(0)[0]), "unchanged"
        gradients = [np.full(one.shape, transport.rank + 1.0) for one in own]
        for number, gradient in enumerate(gradients):
            average.ready(number, gradient)
        average.wait()
        assert (gradients[0] == (ranks + 1) / 2).all(), "the next step is in order again"

    run_ranks(ranks, train)


def raising():
    raise ValueError("a fault of the caller's code")


@pytest.mark.parametrize(
    "arguments, kind, said",
    [
        (lambda rank: {"parameters": parameters(0)[rank:]}, CommError, "number of parameters"),
        (lambda rank: {"parameters": [np.zeros(3 + rank)]}, CommError, "(3) on cpu"),
        (lambda rank: {"parameters": [np.zeros(3, f"f{4 + 4 * rank}")]}, CommError, "float64"),
        (lambda rank: {"algorithm": ("ring", "tree")[rank]}, CommError, "tree"),
        (lambda rank: {"bucket_mb": 1.0 + rank}, CommError, "2.0"),
        (lambda rank: {"algorithm": "circle"}, ConfigError, "circle"),
        (lambda rank: {"algorithm": "none/own.py"}, ConfigError, "own.py cannot be read"),
        (lambda rank: {"wire": "bf61"}, ConfigError, "replication.wire"),
        (lambda rank: {"wire": "bf16"}, ConfigError, "float64"),
        (lambda rank: {"bucket_mb": -1}, ConfigError, "bucket_mb"),
        (lambda rank: {"parameters": []}, ConfigError, "empty"),
        (lambda rank: {"parameters": (parameters(0), None)[rank]}, ConfigError, "On rank 1 ("),
        (
            lambda rank: {"parameters": (raising() if rank else one for one in parameters(0))},
            MpitrainError,
            "On rank 1 (",
        ),
        (lambda rank: {"bucket_mb": (1, "1 MB")[rank]}, MpitrainError, "On rank 1 ("),
        (lambda rank: {"parameters": [np.zeros(3, "i8")]}, ConfigError, "int64"),
        (lambda rank: {"parameters": [np.zeros(3), np.zeros(3, "f4")]}, ConfigError, "float32"),
        (lambda rank: {"parameters": [[1.0]]}, ConfigError, "list"),
        (lambda rank: {"parameters": [np.broadcast_to(1.0, 3)]}, ConfigError, "read-only"),
    ],
)
def test_arguments_that_ranks_cannot_share_are_an_error_on_all(arguments, kind, said):
    def build(transport):
        with pytest.raises(kind) as error:
            Replicated(transport, **{"parameters": parameters(0), **arguments(transport.rank)})
        assert error.value.agreed and said in str(error.value)

    run_ranks(2, build)


def test_an_all_reduce_of_a_file_averages(tmp_path):
    (tmp_path / "own.py").write_text(
        "def all_reduce(rank, ranks, count):\n"
        "    return [([(1 - rank, 0, count)], [(1 - rank, 0, count)], True)]\n"
    )

    def train(transport):
        average = Replicated(transport, [np.zeros(3)], str(tmp_path / "own.py"))
        gradient = np.full(3, transport.rank + 1.0)
        average.ready(0, gradient)
        average.wait()
        return gradient.tolist()

    assert run_ranks(2, train) == [[1.5] * 3] * 2


@pytest.mark.compile
def test_gradients_in_gpu_memory_are_averaged_by_kernels(monkeypatch):
    gpu.play(monkeypatch)

    def train(threads):
        transport, rank = PointerThreads(threads), threads.rank
        own = [cupy.asarray(one) for one in parameters(rank, "float32")]
        average = Replicated(transport, own, "ring")
        gradients = [
            cupy.asarray(coded(rank, 2, 0, n, shape).astype("f4")) for n, shape in enumerate(SHAPES)
        ]
        for number in reversed(range(len(SHAPES))):
            average.ready(number, gradients[number])
        average.wait()
        for number, shape in enumerate(SHAPES):
            assert np.array_equal(cupy.asnumpy(own[number]), parameters(0, "f4")[number])
            assert np.array_equal(cupy.asnumpy(gradients[number]), mean(2, 0, number, shape))

    run_ranks(2, train)
    assert not cupy.faults and sys.modules["cupy"] is cupy


def torch_and_replicated():
    return pytest.importorskip("torch"), pytest.importorskip("mpitrain.torch").Replicated


def test_a_module_keeps_its_names_and_attributes_alone_and_within_another():
    torch, wrapped = torch_and_replicated()

    def train(transport):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        model.note = "kept"
        replicated = wrapped(model, transport)
        outer = torch.nn.Sequential(torch.nn.Identity(), replicated)
        assert replicated.note == "kept" and replicated.module is model
        for one, prefix in ((replicated, ""), (outer, "1.")):
            names = [prefix + name for name in model.state_dict()]
            assert list(one.state_dict()) == names
            assert [name for name, _ in one.named_parameters()] == names[:4]
            other = {name: torch.full_like(t, 7) for name, t in one.state_dict().items()}
            one.load_state_dict(other)
            assert all((tensor == 7).all() for tensor in model.state_dict().values())
            with pytest.raises(RuntimeError, match="Missing key"):
                one.load_state_dict(dict(list(other.items())[1:]))
        assert not replicated.eval().module[1].training
        transport.close()
        replicated(torch.ones(2, 2)).sum().backward()  # each rank alone

    run_ranks(2, train)


def test_each_backward_pass_that_reaches_the_outputs_averages():
    torch, wrapped = torch_and_replicated()

    class Hidden:
        def __init__(self, value):
            self.value = value

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(2, 1, False), torch.nn.Linear(2, 1, False)
            self.form = "plain"

        def forward(self, x):
            if self.form == "checkpoint":
                checkpoint = torch.utils.checkpoint.checkpoint
                return self.other(x) + checkpoint(self.one, x, use_reentrant=True)
            value = self.one(x) + self.other(x)
            return Hidden(value) if self.form == "hidden" else value

    def train(transport):
        rank, mean = transport.rank, 1.5
        model = Model()
        replicated = wrapped(model, transport, bucket_mb=1e-5)

        def gradients(loss):
            for parameter in model.parameters():
                parameter.grad = None
            loss.backward()
            return [None if p.grad is None else p.grad.tolist()[0] for p in model.parameters()]

        x = torch.ones(1, 2, requires_grad=True)
        for model.form in ("plain", "checkpoint", "hidden"):
            outputs = replicated(x)
            value = outputs.value if model.form == "hidden" else outputs
            assert gradients(value * (rank + 1)) == [[mean, mean], [mean, mean]]
        model.form = "plain"
        one, other = replicated(x), replicated(2 * x)  # two forward passes, two backward passes
        assert gradients(one * (rank + 1)) == gradients(other * (rank + 1) / 2)
        with torch.no_grad():
            replicated(x)
        assert gradients(one.detach() + replicated.module(x) * rank)[0] == [rank, rank], "alone"
        with replicated.no_sync():
            assert gradients(replicated(x) * rank)[0] == [rank, rank]
        replicated(x * (rank + 1)).backward()
        assert model.one.weight.grad.tolist()[0] == [0.5 + mean] * 2
        transport.close()

    run_ranks(2, train)


@pytest.mark.parametrize("kind", ("twice", "sparse", "raised"))
def test_a_wrong_backward_pass_is_an_error_that_names_parameter_and_rank(kind):
    torch, wrapped = torch_and_replicated()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.plain = torch.nn.Embedding(3, 1), torch.nn.Linear(1, 1)

        def forward(self, x, kind):
            self.word.sparse = kind == "sparse"
            y = self.plain(self.word(x))
            if kind != "twice":
                return y
            return y + torch.utils.checkpoint.checkpoint(self.plain, y, use_reentrant=True)

    def fail(gradient):
        raise ValueError("a fault of the caller's code")

    def train(transport):
        replicated, x = wrapped(Model(), transport), torch.tensor([0, 2])
        y = replicated(x, kind if transport.rank == 1 else "")
        if kind == "raised":
            y.register_hook(fail)
            with pytest.raises(ValueError):
                y.sum().backward()
            with pytest.raises(CommError, match=f"rank {transport.rank}: the last backward pass"):
                replicated(x, "")
            return
        with pytest.raises(CommError) as error:
            y.sum().backward()
        name = {"twice": "plain.weight came twice", "sparse": "word.weight is sparse"}[kind]
        assert error.value.agreed and f"{name} on rank 1" in str(error.value)
        replicated.zero_grad()
        (replicated(x, "").sum() * (transport.rank + 1)).backward()
        assert replicated.plain.bias.grad.tolist() == [3.0], "the next step is in order again"

    run_ranks(2, train)


@pytest.mark.parametrize(
    "make, kind, said",
    [
        (
            lambda nn, rank: nn.Linear(2, 3 + rank),
            CommError,
            "the weight is float32 of shape (3, 2)",
        ),
        (lambda nn, rank: nn.Linear(2, 2).requires_grad_(not rank), ConfigError, "On rank 1 ("),
        (
            lambda nn, rank: nn.Sequential(
                nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(not rank)
            ),
            CommError,
            "1.weight",
        ),
        (
            lambda nn, rank: (nn.BatchNorm1d(2), nn.GroupNorm(1, 2))[rank],
            CommError,
            "5 on rank 0 and 2 on rank 1",
        ),
        (lambda nn, rank: [nn.Linear(2, 2)], ConfigError, "torch.nn.Module, but it is a list"),
        (lambda nn, rank: nn.LazyLinear(2), ConfigError, "weight has none yet"),
        (lambda nn, rank: nn.Linear(2, 2, device="meta"), ConfigError, "on meta"),
        (
            lambda nn, rank: nn.Linear(2, 2, dtype=__import__("torch").complex64),
            ConfigError,
            "complex64",
        ),
    ],
)
def test_modules_that_ranks_cannot_share_are_an_error_on_all(make, kind, said):
    torch, wrapped = torch_and_replicated()

    def build(transport):
        with pytest.raises(kind) as error:
            wrapped(make(torch.nn, transport.rank), transport)
        assert error.value.agreed and said in str(error.value)

    run_ranks(2, build)
