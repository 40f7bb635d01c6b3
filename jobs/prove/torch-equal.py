"""Claim: PyTorch computes over mpitrain what it computes over gloo, in trainings and in drawn programs of collectives.

    mpirun -n 3 python jobs/prove/torch-equal.py [NAME ...] [--draws 300]

The same ranks run everything over gloo, then over mpitrain. A training has 20 steps, and its losses and parameters must differ
by at most 1e-6. A drawn program calls collectives of a group of some of the ranks, with drawn dtypes, shapes and orders of
waiting. Results of integers must be equal in every bit, those of other numbers to rounding. Names are those of the functions
of TRAININGS; without one, all of them run. A few minutes; needs `pip install torch transformers accelerate
pytorch-lightning` and g++.
"""

import argparse
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS, WIDTH = 20, 24, 24
"""ROWS is the global batch. 2, 3 and 4 ranks divide it and WIDTH."""
CLOSE = 1e-6


def model(layers: int = 2) -> nn.Sequential:
    """Return layers of `WIDTH -> 2 WIDTH -> WIDTH`, with the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(layers)
        )
    )


def rows(step: int, is_whole: bool = False) -> torch.Tensor:
    """Return the rows of this rank, or the global batch."""
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return batch if is_whole else batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(output: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, inputs.sin())


def steps(run: nn.Module, optimizer: Any, is_whole: bool = False) -> list[torch.Tensor]:
    """Train, and return the losses and the parameters of this rank."""
    losses = []
    for step in range(STEPS):
        inputs = rows(step, is_whole)
        optimizer.zero_grad()
        loss = loss_of(run(inputs), inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *map(local, run.parameters())]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def ddp() -> list[torch.Tensor]:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    return steps(wrapped, sgd(wrapped.parameters()))


def fsdp2() -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    whole = model()
    for part in [*whole, whole]:
        fully_shard(part)
    return steps(whole, sgd(whole.parameters()))


def tensor_parallel() -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    whole, mesh = model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in whole:
        parallelize_module(part, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return steps(whole, sgd(whole.parameters()), is_whole=True)


def pipeline() -> list[torch.Tensor]:
    """One stage for each rank, under 1F1B with 8 micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    part = model(layers=size)[rank]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule, optimizer = Schedule1F1B(stage, 8, loss_fn=loss_of), sgd(part.parameters())
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        inputs = rows(step, is_whole=True)
        optimizer.zero_grad()
        own = {"target": inputs, "losses": losses} if rank == size - 1 else {}
        schedule.step(*([] if rank else [inputs]), **own)
        optimizer.step()
    return [*losses, *map(local, part.parameters())]


def zero() -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9
    )
    return steps(wrapped, optimizer)


def compiled() -> list[torch.Tensor]:
    torch._dynamo.reset()
    wrapped = torch.compile(DistributedDataParallel(model()))
    return steps(wrapped, sgd(wrapped.parameters()))


def trainer() -> list[torch.Tensor]:
    """A small GPT under the Trainer of transformers."""
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    gpt = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2)
    )
    tokens = torch.randint(64, (ROWS * STEPS, 16), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=ROWS // dist.get_world_size(),
            max_steps=STEPS,
            optim="sgd",
            learning_rate=0.05,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        dataset = [{"input_ids": row, "labels": row} for row in tokens]
        run = Trainer(gpt, arguments, train_dataset=dataset)
        assert run.accelerator.num_processes == dist.get_world_size()
        run.train()
    losses = [torch.tensor(line["loss"]) for line in run.state.log_history if "loss" in line]
    return [*losses, *map(local, gpt.parameters())]


def accelerated() -> list[torch.Tensor]:
    """A loop of accelerate, whose data loader divides the rows."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, whole = Accelerator(cpu=True), model()
    assert accelerator.num_processes == dist.get_world_size()
    data = torch.cat([rows(step, is_whole=True) for step in range(STEPS)])
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS // dist.get_world_size())
    wrapped, optimizer, loader = accelerator.prepare(whole, sgd(whole.parameters()), loader)
    losses = []
    for inputs in loader:
        optimizer.zero_grad()
        loss = loss_of(wrapped(inputs), inputs)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach().reshape(1)))
    assert len(losses) == STEPS
    return [*losses, *map(local, wrapped.parameters())]


def lightning() -> list[torch.Tensor]:
    """The Trainer of Lightning, whose data loader divides the rows."""
    from lightning_fabric.plugins.environments import MPIEnvironment
    from pytorch_lightning import LightningModule, Trainer

    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model(), list[torch.Tensor]()

        def training_step(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
            loss = loss_of(self.model(inputs), inputs)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

    size, own = dist.get_world_size(), Own()
    data = torch.cat([rows(step, is_whole=True) for step in range(STEPS)])
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    run = Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp",
        plugins=[MPIEnvironment()],
        max_epochs=1,
        **quiet,
    )
    assert run.world_size == size
    run.fit(own, torch.utils.data.DataLoader(data, batch_size=ROWS // size))
    assert len(own.losses) == STEPS
    return [*own.losses, *map(local, own.parameters())]


TRAININGS = {
    training.__name__: training
    for training in (
        *(ddp, fsdp2, tensor_parallel, pipeline, zero, compiled),
        *(trainer, accelerated, lightning),
    )
}

INTEGERS = torch.uint8, torch.int8, torch.int32, torch.int64
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
MOVED = (*INTEGERS, *FLOATS, torch.bool, torch.complex64)
Results = list[torch.Tensor]


class Draw:
    """One call of a program, on a member of its group.

    random      yields the same numbers on every member
    is_strided  whether tensors are not contiguous: gloo takes contiguous ones only
    """

    def __init__(self, seed: str, group: Any, members: Sequence[int], is_strided: bool):
        self.random, self.group, self.members = random.Random(seed), group, members
        self.rank, self.n = members.index(dist.get_rank()), len(members)
        self._values = torch.Generator().manual_seed(hash_of(f"{seed} {self.rank}"))
        self.dtype = self.random.choice(INTEGERS + FLOATS)
        self.later = {"group": group, "async_op": self.random.random() < 0.5}
        self.root = self.random.choice(members)
        self._is_strided = self.random.random() < 0.5 and is_strided

    def shape(self) -> list[int]:
        sizes = (0, 1, 2, 3, 5, 7, 17)
        shape = [self.random.choice(sizes) for _ in range(self.random.randrange(4))]
        return [*shape, 1009] if self.random.random() < 0.2 else shape

    def tensor(self, shape: Sequence[int]) -> torch.Tensor:
        """Return values of this rank: small ones, so that a sum or a product of floats is near to 1."""
        whole = torch.randint(1, 100, [*shape], generator=self._values)
        values = (whole / 50 if self.dtype.is_floating_point else whole).to(self.dtype)
        if not self._is_strided or not shape:
            return values
        return torch.stack([values, values], -1)[..., 0]

    def op(self) -> Any:
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
        bits = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
        return self.random.choice(ops if self.dtype.is_floating_point else ops + bits)


def hash_of(text: str) -> int:
    return random.Random(text).getrandbits(48)


def all_reduce(draw: Draw) -> tuple[Any, Results]:
    tensor = draw.tensor(draw.shape())
    return dist.all_reduce(tensor, draw.op(), **draw.later), [tensor]


def broadcast(draw: Draw) -> tuple[Any, Results]:
    draw.dtype = draw.random.choice(MOVED)
    tensor = draw.tensor(draw.shape())
    return dist.broadcast(tensor, draw.root, **draw.later), [tensor]


def reduce(draw: Draw) -> tuple[Any, Results]:
    tensor = draw.tensor(draw.shape())
    work = dist.reduce(tensor, draw.root, draw.op(), **draw.later)
    return work, [tensor] if draw.root == dist.get_rank() else []


def all_gather(draw: Draw) -> tuple[Any, Results]:
    draw.dtype = draw.random.choice(MOVED)
    shape = draw.shape()
    parts = [draw.tensor(shape) for _ in draw.members]
    return dist.all_gather(parts, draw.tensor(shape), **draw.later), parts


def all_gather_single(draw: Draw) -> tuple[Any, Results]:
    shape = draw.shape() or [1]
    whole = draw.tensor([draw.n * shape[0], *shape[1:]]).contiguous()
    own = draw.tensor(shape).contiguous()
    return dist.all_gather_single(whole, own, **draw.later), [whole]


def reduce_scatter(draw: Draw) -> tuple[Any, Results]:
    shape = draw.shape()
    own, parts = draw.tensor(shape), [draw.tensor(shape) for _ in draw.members]
    return dist.reduce_scatter(own, parts, draw.op(), **draw.later), [own]


def reduce_scatter_single(draw: Draw) -> tuple[Any, Results]:
    shape = draw.shape() or [1]
    whole = draw.tensor([draw.n * shape[0], *shape[1:]]).contiguous()
    own = draw.tensor(shape).contiguous()
    return dist.reduce_scatter_single(own, whole, draw.op(), **draw.later), [own]


def gather(draw: Draw) -> tuple[Any, Results]:
    shape = draw.shape()
    is_root = draw.root == dist.get_rank()
    parts = [draw.tensor(shape) for _ in draw.members] if is_root else []
    return dist.gather(draw.tensor(shape), parts or None, draw.root, **draw.later), parts


def scatter(draw: Draw) -> tuple[Any, Results]:
    own = draw.tensor(shape := draw.shape())
    is_root = draw.root == dist.get_rank()
    parts = [draw.tensor(shape) for _ in draw.members] if is_root else None
    return dist.scatter(own, parts, draw.root, **draw.later), [own]


def all_to_all_single(draw: Draw) -> tuple[Any, Results]:
    """Uneven: splits[i][j] rows go from rank i to rank j."""
    splits = [[draw.random.randrange(4) for _ in draw.members] for _ in draw.members]
    sent, received = splits[draw.rank], [line[draw.rank] for line in splits]
    whole, own = draw.tensor([sum(received), 3]).contiguous(), draw.tensor([sum(sent), 3])
    return dist.all_to_all_single(whole, own.contiguous(), received, sent, **draw.later), [whole]


def all_to_all(draw: Draw) -> tuple[Any, Results]:
    shape = draw.shape()
    received, sent = ([draw.tensor(shape) for _ in draw.members] for _ in range(2))
    return dist.all_to_all(received, sent, **draw.later), received


def all_reduce_coalesced(draw: Draw) -> tuple[Any, Results]:
    tensors = [draw.tensor(draw.shape()) for _ in range(draw.random.randrange(1, 4))]
    return dist.all_reduce_coalesced(tensors, draw.op(), **draw.later), tensors


def ring(draw: Draw) -> tuple[Any, Results]:
    """A batch of sends to the next rank and receives from the one before it."""
    if draw.n == 1:
        return None, []
    shape, after, before = draw.shape(), (draw.rank + 1) % draw.n, draw.rank - 1
    own, received = draw.tensor(shape), draw.tensor(shape)
    pairs = [(dist.isend, own, after), (dist.irecv, received, before)]
    draw.random.shuffle(pairs)
    works = dist.batch_isend_irecv(
        [dist.P2POp(call, tensor, draw.members[peer], draw.group) for call, tensor, peer in pairs]
    )
    return works, [received]


def objects(draw: Draw) -> tuple[Any, Results]:
    found = [None] * draw.n
    dist.all_gather_object(found, draw.tensor(draw.shape()), group=draw.group)
    return None, found


def barrier(draw: Draw) -> tuple[Any, Results]:
    return dist.barrier(**draw.later), []


CALLS: list[Callable[[Draw], tuple[Any, Results]]] = [
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_single,
    reduce_scatter,
    reduce_scatter_single,
    gather,
    scatter,
    all_to_all_single,
    all_to_all,
    all_reduce_coalesced,
    ring,
    objects,
    barrier,
]


def program(number: int) -> Results:
    """Run some calls in a group of some of the ranks, wait for them in a drawn order, and return all results."""
    same = random.Random(f"program {number}")
    size = dist.get_world_size()
    members = sorted(same.sample(range(size), same.randint(1, size)))
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return []
    is_strided = dist.get_backend() != "gloo"
    results, works = [], []
    for index, call in enumerate(same.choices(CALLS, k=8)):
        work, tensors = call(Draw(f"{number} {index}", group, members, is_strided))
        results += tensors
        works += work if isinstance(work, list) else [work] if work else []
    random.Random(f"order {number} {dist.get_rank()}").shuffle(works)
    for work in works:
        work.wait()
    dist.destroy_process_group(group)
    return results


def distance(ours: Results, theirs: Results) -> float:
    """Return the largest difference, relative to values above 1, in units of float32's rounding error as a part of the dtype's.

    It is infinite for integers that differ, other shapes or dtypes, and NaN.
    """
    apart = 0.0 if len(ours) == len(theirs) else inf
    for one, other in zip(ours, theirs, strict=False):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return inf
        if torch.equal(one, other):
            continue
        if not one.dtype.is_floating_point:
            return inf
        largest = ((one.double() - other.double()).abs() / other.double().abs().clamp(min=1)).max()
        found = largest.item() * torch.finfo(torch.float32).eps / torch.finfo(one.dtype).eps
        apart = max(apart, found if found == found else inf)
    return apart


def compare(
    work: Mapping[str, Callable[[], Results]], file: str, rank: int, size: int
) -> dict[str, float]:
    """Run all functions over gloo, then over mpitrain, and return {name: distance of the results of this rank}.

    file  one that does not exist yet, the same on all ranks
    """
    import mpitrain.torch  # noqa: F401  registers the backend

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    theirs = {name: run() for name, run in work.items()}
    dist.destroy_process_group()
    dist.init_process_group("mpitrain")
    ours = {name: run() for name, run in work.items()}
    dist.destroy_process_group()
    return {name: distance(ours[name], theirs[name]) for name in work}


def drawn(count: int) -> dict[str, Callable[[], Results]]:
    return {f"program {number}": partial(program, number) for number in range(count)}


def main() -> None:
    """Print a line for each training and one for all drawn programs. The exit code is 1 if anything differs."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TRAININGS))
    parser.add_argument("--draws", type=int, default=0, metavar="N")
    given = parser.parse_args()
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    names = given.names or ([] if given.draws else [*TRAININGS])
    file = world.bcast(tempfile.mktemp())
    work = {name: TRAININGS[name] for name in names} | drawn(given.draws)
    everyone = world.gather(compare(work, file, world.rank, world.size))
    worst = {name: max(apart[name] for apart in everyone) for name in work} if everyone else {}
    for name in names if worst else []:
        print(f"{world.size} ranks, {name}: differs by {worst[name]:.1e} after {STEPS} steps")
    if worst and given.draws:
        different = [name for name in drawn(given.draws) if not worst[name] <= CLOSE]
        print(
            f"{world.size} ranks, {given.draws} drawn programs: {len(different)} differ", *different
        )
    sys.exit(not all(apart <= CLOSE for apart in worst.values()))


if __name__ == "__main__":
    main()
