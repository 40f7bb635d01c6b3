"""The backend "mpitrain": a process group of PyTorch over our groups and messages.

Reductions, all-gathers and broadcasts run as the bound collectives of `collectives.group`. Each is
bound once to a buffer of the process group, in shared memory within a host, for a number of
elements, a dtype and an operator. A call copies its tensors into the buffer and the result back.
All other collectives are exchanges: all messages of a call at once.

Calls run in their order (calls.py). A message of `send` or `recv` starts at once.
"""

import atexit
import inspect
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from mpitrain.collectives.compression import Matrix
from mpitrain.collectives.engine.arithmetic import Wire
from mpitrain.collectives.engine.executor import Execution, Reduction
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.exchanges import barrier
from mpitrain.collectives.selection.tuning import read_tuning
from mpitrain.errors import CommError, ConfigError, PeerLost
from mpitrain.machine import process
from mpitrain.torch import gpu
from mpitrain.torch.calls import WITHIN, Call, CallQueue, CallWork, MessageWork
from mpitrain.torch.comparison import ANSWER, DESTROY, Comparison, Notices
from mpitrain.torch.store import checked_launch, world
from mpitrain.transport.base import FIRST_CLAIMED_TAG, Transport

Op = dist.ReduceOp
OPERATORS = {
    Op.SUM: "add",
    Op.AVG: "add",
    Op.PRODUCT: "multiply",
    Op.MIN: "minimum",
    Op.MAX: "maximum",
    Op.BAND: "bitwise_and",
    Op.BOR: "bitwise_or",
    Op.BXOR: "bitwise_xor",
}
"""{operator of PyTorch: ours}; an average is a sum, divided afterwards."""

DTYPES = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    **{
        getattr(torch, name): np.dtype(name)
        for name in (
            *("float16", "float32", "float64", "bool"),
            *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        )
    },
}
"""{dtype of PyTorch that can be reduced: NumPy's}."""

BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"}
"""Variables that `accelerate launch` sets where it is asked for several processes; on a CPU it starts one."""

BINDINGS = 256
"""Most collectives that a process group keeps bound; the oldest goes first."""

LEAVE = 30.0
"""Longest that destroy_process_group waits for the other ranks, in seconds: they may destroy groups in another order."""

CROSSED = 0.3
"""Seconds in destroy_process_group after which a rank looks whether another one destroys another group first."""

SLOW = 1.0
"""Seconds in a call after which a rank compares it with the calls of the others."""

Tensors = list[torch.Tensor]


class GroupOptions(NamedTuple):
    """Settings of a process group, as `pg_options` of `init_process_group` and `new_group`.

    algorithm  of all-reduces, as `replication.algorithm`
    tuning     a tuning file of `mpitrain bench fit`; "": the built-in constants
    cuda_aware whether pointers to CUDA tensors go to MPI, as `device.cuda_aware`: "auto", "yes" or "no"
    trace      of the default group: a directory for the traces of all ranks, which `mpitrain report`
               reads; "": none
    """

    algorithm: str = "auto"
    tuning: str = ""
    trace: str = ""
    cuda_aware: str = "auto"


GROUPS = Counter[str]()
"""{name of a group: how many groups of this name there were}: a later one must not read what an earlier one said."""

DEFAULT: dict[str, Any] = {}
"""The arguments of `init_process_group`, by which `replace` makes the default group anew."""

OPEN = WeakSet["ProcessGroup"]()
"""The process groups that may have threads."""


@atexit.register
def _end_calls() -> None:
    """End the calls and messages in flight with an error, so that their threads end: no rank will answer them any more."""
    if WITHIN and OPEN:
        for group in [*OPEN]:
            group.abort()
        world().job.is_abandoned = True


TRACED: list[Transport] = []
"""The transport of all ranks with its recorder, if this program keeps a trace."""


def connected() -> Transport:
    """Return the transport over all ranks."""
    with checked_launch():
        transport = world()
        if transport.size == 1 and {*process.environment()} >= BY_ACCELERATE:
            raise ConfigError(
                "`accelerate launch` was asked for several processes, but has started this one alone.",
                f"Type `mpitrain launch -n 4 -- {process.own_command()}`; accelerate finds the ranks.",
            ).on_every_rank()
        return transport


def create(of_group: Any, options: GroupOptions | None) -> "ProcessGroup":
    """Make the process group that PyTorch asks for; collective over its ranks."""
    transport, ranks = connected(), of_group.global_ranks_in_group
    if not ranks and (of_group.group_rank, of_group.group_size) != (transport.rank, transport.size):
        raise ConfigError(
            f"The ranks of backend mpitrain are those of the MPI job, but this is rank {of_group.group_rank} of "
            f"{of_group.group_size} for PyTorch and rank {transport.rank} of {transport.size} for MPI.",
            "Start the ranks with mpirun, srun or `mpitrain launch`, and leave out rank and world_size.",
        )
    if not isinstance(options, GroupOptions | None):
        raise ConfigError(
            f"pg_options of backend mpitrain are mpitrain.torch.GroupOptions, but they are a {type(options).__name__}."
        )
    if options and options.cuda_aware not in ("auto", "yes", "no"):
        raise ConfigError(
            f"cuda_aware of GroupOptions is 'auto', 'yes' or 'no', but it is {options.cuda_aware!r}."
        )
    if options and options.trace:
        from mpitrain.torch.tracing import traced

        TRACED[:] = [traced(transport, Path(options.trace))]
    if not ranks:
        DEFAULT.update(timeout=of_group.timeout, pg_options=options)
    part = (*TRACED, transport)[0].subset(ranks or range(transport.size))
    name = of_group.group_id
    GROUPS[name] += 1
    store = dist.PrefixStore(f"group {GROUPS[name]}", of_group.store)
    return ProcessGroup(part, store, of_group.timeout, options or GroupOptions())


class ProcessGroup(dist.ProcessGroup):
    """A process group over a transport, which it owns; collective over the transport's ranks.

    store    where ranks that wait long compare their calls; of this group alone
    timeout  the longest that a call may take
    """

    def __init__(
        self, transport: Transport, store: dist.Store, timeout: timedelta, options: GroupOptions
    ):
        super().__init__(transport.rank, transport.size)
        tuning = read_tuning(Path(options.tuning)) if options.tuning else None
        self.transport, self.group = transport, Group(transport, options.algorithm, tuning)
        self._cuda_aware = options.cuda_aware
        self._device: torch.device | None = None
        self._gpu: gpu.GpuSide | None = None
        self._notices, self._seconds = Notices(store, transport), timeout.total_seconds()
        self._queue = CallQueue(transport, on_failure=self._notices.write_failure)
        self._exchange_tag = transport.claim_tag()
        self._buffers: dict[tuple[int, str], Any] = {}
        self._bound: OrderedDict[tuple, Binding] = OrderedDict()
        self._lossy: dict[tuple, Binding] = {}
        self._barrier = Execution(
            transport,
            np.empty(0, np.uint8),
            "add",
            barrier(transport.rank, transport.size),
            transport.claim_tag(),
        )
        self._hashes = np.empty(2, np.int64)
        self._agreement = Group(transport, "recursive-doubling").bind(self._hashes, "maximum")
        self._coalesced: list[CallWork] | None = None
        self._name = self._description = ""
        OPEN.add(self)

    # What PyTorch asks of every process group

    def getBackendName(self) -> str:
        return "mpitrain"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> "ProcessGroup":
        return self

    supports_splitting = supports_coalescing = False

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """End the calls that are left, then free communicator and windows, all ranks together.

        Nothing is freed if the group has failed on a rank, or if a rank has not come within the time
        limit, destroys another group of both first, or has ended.
        """
        if self._queue.error is None:
            self._leave()
        self._bound.clear()
        self._lossy.clear()
        self._buffers.clear()
        self._gpu = None
        if self._queue.is_closed:
            self.transport.close()

    def _leave(self) -> None:
        """Wait for all ranks, and close the queue if all of them have come."""
        leaving = Leaving(self.transport)

        def is_over() -> bool:
            return leaving.has_one_ended or self._barrier.poll()

        def run(call: Call) -> None:
            if self._gpu:
                self._gpu.stream.synchronize()  # The others free memory that its work may read.
            seconds = min(self._seconds, LEAVE)
            for _ in range(2):  # A rank that gave up in the first round does not begin the second.
                call.deadline = time.monotonic() + seconds
                if not leaving.has_one_ended:
                    self._barrier.start()
                self._finish(call, is_over, leaving, pause=CROSSED)

        try:
            self._call(DESTROY, run, []).wait()
        except CommError as error:
            if not leaving.is_alone and not isinstance(error, PeerLost):
                # The error may be that of an earlier call, for which nobody has waited.
                raise error.__cause__ or error from None
            return
        if not leaving.has_one_ended:
            self._queue.close()

    def abort(self) -> None:
        """Forget the group; a later call fails."""
        self._queue.give_up(CommError("The process group was aborted."))

    def end_thread(self) -> None:
        """End the thread of an aborted group, whose messages a loss has ended."""
        self._queue.end_thread()

    # Calls: how a method becomes one

    def _call(
        self,
        name: str,
        run: Callable[[Call], object],
        tensors: Sequence,
        opts: Any = None,
        inputs: Sequence = (),
        is_written: bool = True,
    ) -> CallWork:
        """Append a call. is_written: whether it writes `tensors`, its result, on this rank."""
        on_gpu = [tensor for tensor in flat([tensors, inputs]) if tensor.is_cuda]
        for tensor in flat([tensors, inputs]):
            if tensor.device.type not in ("cpu", "cuda"):
                raise ConfigError(
                    f"Backend mpitrain moves tensors of CPUs and NVIDIA GPUs, but this one is on {tensor.device}."
                )
        for tensor in flat([tensors] if is_written else []):
            if (
                tensor.layout == torch.strided
                and tensor.numel()
                and any(
                    size > 1 and not stride
                    for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
                )
            ):
                raise ConfigError(
                    f"rank {self.transport.members[self.rank()]}: {name} writes each element to a place of its own, but "
                    f"this tensor is expanded: sizes {[*tensor.shape]}, strides {[*tensor.stride()]}.",
                    "Pass tensor.contiguous().",
                )
        device = self._device_of(on_gpu) if on_gpu else None
        if device is not None:
            run, name = self._on_gpu(run, device, on_gpu), f"{name} on {device.type}"
        seconds = self._seconds
        if opts is not None and opts.timeout.total_seconds() > 0:
            seconds = opts.timeout.total_seconds()
        call = Call(name, run, tensors, seconds)
        call.device = device
        queue = self._queue.add(call, getattr(opts, "asyncOp", True))
        work = CallWork(queue, call)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _device_of(self, tensors: Tensors) -> torch.device:
        """Return the GPU of the tensors, the same one in all calls of the group."""
        for tensor in tensors:
            self._device = self._device or tensor.device
            if tensor.device != self._device:
                raise ConfigError(
                    f"A process group has one GPU on each rank, but rank {self.rank()} passed tensors of "
                    f"{self._device} and {tensor.device}.",
                    "Move them to one GPU, or make a group for each with new_group.",
                )
        return tensors[0].device

    def _on_gpu(
        self, run: Callable[[Call], object], device: torch.device, tensors: Tensors
    ) -> Callable[[Call], object]:
        """Return `run` on the group's stream of a GPU, behind what the caller's stream does so far."""
        before = torch.cuda.current_stream(device).record_event()

        def run_on_gpu(call: Call) -> None:
            if self._gpu is None:
                self._agree(call, ("GPU",))
                with torch.cuda.device(device):
                    self._gpu = gpu.GpuSide(
                        self.transport,
                        device,
                        self._cuda_aware,
                        self.group.algorithm,
                        self.group.tuning,
                    )
            call.stream = self._gpu.stream
            for tensor in tensors:  # PyTorch reuses their memory behind this stream, too.
                tensor.record_stream(call.stream)
            with self._gpu.here(before):
                run(call)
                call.after = call.stream.record_event()

        return run_on_gpu

    def _finish(
        self,
        call: Call,
        is_done: Callable[[], bool],
        awaited: "Awaited | None" = None,
        pause: float | None = None,
    ) -> None:
        """Poll until `is_done`; a call that takes long is compared with those of the other ranks.

        pause  seconds between two comparisons; None: SLOW
        raises  CommError if a rank makes another call or has failed, and behind the time limit
        """
        pause = SLOW if pause is None else pause
        due = call.began + min(pause, 0.5 * (call.deadline - call.began))
        awaited, traffic = awaited or Awaited(call, self.transport), self.transport.traffic
        me, members = self.rank(), self.transport.members
        look: Comparison | None = None

        def poll() -> bool:
            nonlocal look, due
            if is_done():
                return True
            traffic.waits_for = awaited  # Another wait of this rank may have ended meanwhile.
            now = time.monotonic()
            if look is None:
                if now > min(due, call.deadline):
                    look = Comparison(self._notices, call, self._others(call))
                return False
            if look.is_over or now > max(look.began, call.deadline) + ANSWER:
                look.check(call, me, members)
                awaited.is_alone = True
                look.check_failures(call, me, members)
                if look.began > call.deadline or not look.is_over or look.are_crossed:
                    raise CommError(
                        f"rank {members[me]}: {call} has not ended within {call.limit}; "
                        f"{look.absent(call)}.",
                        "Look at what that rank does, or give init_process_group a longer `timeout`.",
                    )
                awaited.is_alone, look, due = False, None, now + SLOW
            return False

        self._notices.write_corrected(call)
        if not is_done():
            # That of the GPU knows when the device, not a message, is awaited.
            is_on_gpu = call.stream is not None and self._gpu and self._gpu.carries
            transport = self._gpu.transport if self._gpu and is_on_gpu else self.transport
            transport.wait_until(poll, what=awaited)

    def _others(self, call: Call) -> list[Notices]:
        """Return the notices of the groups that this rank may destroy after this one; none for another call."""
        if call.name != DESTROY:
            return []
        others = [group for group in OPEN if group is not self and not group._queue.is_closed]
        return [group._notices for group in others if group._queue.error is None]

    def _binding(
        self, call: Call, kind: str, count: int, dtype: torch.dtype, memory: str, **how: Any
    ) -> "Binding":
        """Return the collective `kind` of this many elements, bound at the first such call.

        memory  "cpu" or "cuda", as of `_memory`
        """
        key = kind, count, dtype, memory, *how.values()
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        self._agree(call, key)
        group = self._gpu.group if self._gpu and memory == "cuda" else self.group
        numbers, elements = self._buffer(count, dtype, memory)
        reduction = getattr(group, f"bind_{kind}" if kind else "bind")(numbers, **how)
        if len(self._bound) >= BINDINGS:
            self._bound.popitem(last=False)
        self._bound[key] = Binding(elements, reduction)
        return self._bound[key]

    def _memory(self, tensor: torch.Tensor, op: str = "") -> str:
        """Return where a collective works on the tensor: "cuda" if its GPU can reduce it, else "cpu"."""
        on_gpu = tensor.is_cuda and self._gpu and self._gpu.reduces(tensor.dtype, op or "add")
        return "cuda" if on_gpu else "cpu"

    def _agree(self, call: Call, key: tuple) -> None:
        """Raise an error unless all ranks are about to bind the same: binding itself has no time limit."""
        own = zlib.crc32(repr(key).encode())
        self._hashes[:] = own, -own
        self._agreement.start()
        self._finish(call, self._agreement.poll)
        if self._hashes[0] != -self._hashes[1]:
            self._finish(call, lambda: False, pause=0.01)
        # A rank that gave up in the first round does not begin the second one.
        self._run(call, self._barrier)

    def _buffer(
        self, count: int, dtype: torch.dtype, memory: str = "cpu"
    ) -> tuple[Any, torch.Tensor]:
        """Return the first elements of a buffer of this group, for NumPy or CuPy and for PyTorch.

        The calls of a group take turns, so those of nearly one size share a buffer.
        """
        numbers = DTYPES[dtype]
        nbytes = count * numbers.itemsize
        size = 1 << max(12, (nbytes - 1).bit_length())
        if (size, memory) not in self._buffers:
            side = self._gpu if self._gpu and memory == "cuda" else self
            self._buffers[size, memory] = side.transport.allocate(size, np.uint8)
        raw = self._buffers[size, memory][:nbytes]
        tensor = gpu.tensor_of(raw) if memory == "cuda" else torch.from_numpy(raw)
        return raw.view(numbers), tensor.view(dtype)

    def _run(self, call: Call, reduction: Reduction) -> None:
        reduction.start()
        self._finish(call, reduction.order)

    def _exchange(
        self,
        call: Call,
        outgoing: Sequence[tuple[torch.Tensor, int]],
        incoming: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """Send tensors to ranks and receive tensors from ranks, all at once; also to oneself."""
        me, tag = self.rank(), self._exchange_tag
        landed = [
            (tensor, self._block(tensor, self._by_pointer(tensor)), rank)
            for tensor, rank in incoming
        ]
        own = iter([block for _, block, rank in landed if rank == me])
        requests = []
        for _, block, rank in landed:
            if rank != me:
                transport, array = self._message(block)
                requests.append(transport.start_recv(array, rank, tag))
        sent = [(self._block(tensor, self._by_pointer(tensor)), rank) for tensor, rank in outgoing]
        for block, rank in sent:
            if rank == me:
                bytes_in(next(own)).copy_(bytes_in(block))
            else:
                transport, array = self._message(block)
                requests.append(transport.start_send(array, rank, tag))
        self._finish(call, lambda: all(request.test() for request in requests))
        for tensor, block, _ in landed:
            copy_home(block, tensor)

    def _by_pointer(self, tensor: torch.Tensor) -> str:
        """Return "cuda" if messages take the tensor where it is in GPU memory, else "cpu".

        Such a message looks like one from host memory, so the other rank may have either.
        """
        return "cuda" if tensor.is_cuda and self._gpu and self._gpu.is_direct else "cpu"

    def _block(self, tensor: torch.Tensor, memory: str) -> torch.Tensor:
        """Return the tensor itself if it is one block of this memory, else a copy that is."""
        return on_host(tensor) if memory == "cpu" else whole(tensor).contiguous()

    def _message(self, block: torch.Tensor) -> tuple[Transport, Any]:
        """Return the transport of a block, and its bytes as an array."""
        if block.is_cuda and self._gpu:
            return self._gpu.transport, self._gpu.bytes_of(block)
        return self.transport, bytes_of(block)

    def _check(self, name: str, parts: Tensors, own: Tensors) -> None:
        """Raise an error, before a message is sent, unless the parts are one of each rank, and this rank's fits `own`."""
        dtypes = {part.dtype for part in (*parts, *own)}
        its = parts[self.rank() : self.rank() + 1]
        fits = [part.numel() for part in its] == [part.numel() for part in own]
        if len(parts) != self.size() or not fits or len(dtypes) > 1:
            raise ConfigError(
                f"rank {self.transport.members[self.rank()]}: {name} takes {self.size()} tensors of one dtype, one of "
                f"each rank, and that of this rank has the size of {shapes(own)}, but they are {shapes(parts)}."
            )

    def _parts(self, name: str, tensor: torch.Tensor, part: torch.Tensor) -> Tensors:
        """Return the parts of a contiguous tensor, one of each rank and as many elements as `part`."""
        n = self.size()
        if tensor.numel() != n * part.numel():
            raise ConfigError(
                f"rank {self.transport.members[self.rank()]}: {name} divides one tensor among {n} ranks, but "
                f"{shapes([tensor])} is not {n} times as large as {shapes([part])}."
            )
        if not part.numel():
            return [tensor] * n
        return [*tensor.view(-1).chunk(n)]

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> CallWork:
        opts = opts or dist.AllreduceOptions()
        op = opts.reduceOp
        parts = reducible(op, tensors)

        def run(call: Call) -> None:
            for tensor in parts:
                if tensor.is_sparse:
                    self._sum_sparse(call, tensor, op)
                    continue
                ours = OPERATORS[op.op]
                memory = self._memory(tensor, ours)
                bound = self._binding(call, "", tensor.numel(), tensor.dtype, memory, op=ours)
                bound.elements.copy_(tensor.reshape(-1))
                self._run(call, bound.reduction)
                tensor.copy_(self._mean(bound.elements, op).view(tensor.shape))

        return self._call(f"all_reduce {op_name(op)} {shapes(tensors)}", run, tensors, opts)

    allreduce_coalesced = allreduce

    def _sum_sparse(self, call: Call, tensor: torch.Tensor, op: Any) -> None:
        """Sum a sparse tensor: each rank receives the rows of all others. Ranks may have different rows."""
        own, ranks, parts = tensor.coalesce(), range(self.size()), list[torch.Tensor]()
        counts = [torch.empty(1, dtype=torch.int64) for _ in ranks]
        for rows in (torch.tensor([own._nnz()]), own.indices().t(), own.values()):
            places = (
                counts if not parts else [rows.new_empty([int(n), *rows.shape[1:]]) for n in counts]
            )
            self._exchange(
                call, [(rows, rank) for rank in ranks], [*zip(places, ranks, strict=True)]
            )
            parts.append(torch.cat(places))
        _, indices, values = parts
        total = torch.sparse_coo_tensor(indices.t(), self._mean(values, op), tensor.shape)
        tensor.copy_(total.coalesce())

    def reduce(self, tensors: Tensors, opts: Any) -> CallWork:
        op, root = opts.reduceOp, opts.rootRank
        places = reducible(op, tensors)

        def run(call: Call) -> None:
            for tensor in places:
                ours = OPERATORS[op.op]
                what = tensor.numel(), tensor.dtype, self._memory(tensor, ours)
                bound = self._binding(call, "reduce", *what, op=ours, root=root)
                bound.elements.copy_(tensor.reshape(-1))
                self._run(call, bound.reduction)
                if root == self.rank():
                    tensor.copy_(self._mean(bound.elements, op).view(tensor.shape))

        name = f"reduce {op_name(op)} to {root} {shapes(tensors)}"
        return self._call(name, run, tensors, opts, is_written=root == self.rank())

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> CallWork:
        opts = opts or dist.ReduceScatterOptions()
        op = opts.reduceOp
        places = reducible(op, outputs)
        parts = [reducible(op, [*map(whole, of_ranks)]) for of_ranks in inputs]
        for output, of_ranks in zip(places, parts, strict=True):
            self._check("reduce_scatter", of_ranks, [output])
        return self._call(
            f"reduce_scatter {op_name(op)} {' '.join(map(shapes, parts))}",
            lambda call: [
                self._reduce_scatter(call, *each, op) for each in zip(places, parts, strict=True)
            ],
            outputs,
            opts,
            parts,
        )

    def _reduce_scatter(
        self, call: Call, output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any
    ) -> None:
        """Reduce the parts of all ranks; the output of rank r is part r. Parts may differ in size."""
        sizes = [part.numel() for part in parts]
        first = sum(sizes[: self.rank()])
        are_equal = len({*sizes}) == 1
        kind = "reduce_scatter" if are_equal else ""
        ours = OPERATORS[op.op]
        what = sum(sizes), output.dtype, self._memory(output, ours)
        bound = self._binding(call, kind, *what, op=ours)
        for part, place in zip(parts, bound.elements.split(sizes), strict=True):
            place.copy_(part.reshape(-1))
        self._run(call, bound.reduction)
        own = bound.elements[first : first + output.numel()]
        output.copy_(self._mean(own, op).view(output.shape))

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> CallWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, wholes: Tensors, opts: Any = None
    ) -> CallWork:
        inputs = [
            self._parts("reduce_scatter", whole.reshape(-1), output)
            for whole, output in zip(wholes, outputs, strict=True)
        ]
        return self.reduce_scatter(outputs, inputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def average_lossy(
        self, total: torch.Tensor, bucket: int, wire: Wire, matrices: Sequence[Matrix]
    ) -> CallWork:
        """Average a float32 tensor, 1-D, over the ranks, with messages in a wire format.

        bucket  its number: what the wire format did not send stays with it for the next call
        """
        key = bucket, total.numel(), wire, *matrices

        def run(call: Call) -> None:
            if key not in self._lossy:
                self._agree(call, key)
                memory = self._memory(total)
                group = self._gpu.group if self._gpu and memory == "cuda" else self.group
                numbers, elements = self._buffer(total.numel(), total.dtype, memory)
                self._lossy[key] = Binding(elements, group.bind_lossy(numbers, wire, matrices))
            elements, reduction = self._lossy[key]
            elements.copy_(total)
            self._run(call, reduction)
            torch.div(elements, self.size(), out=total)

        return self._call(f"average in {wire.name} {shapes([total])}", run, [total])

    def _mean(self, total: torch.Tensor, op: Any) -> torch.Tensor:
        if op.op != Op.AVG:
            return total
        rounding = None if total.is_floating_point() else "trunc"
        return torch.div(total, self.size(), rounding_mode=rounding)

    # Copies

    def broadcast(self, tensors: Tensors, opts: Any) -> CallWork:
        root = opts.rootRank

        def run(call: Call) -> None:
            for tensor in tensors:
                block = self._block(tensor, self._memory(tensor))
                raw = bytes_in(block)
                what = raw.numel(), torch.uint8, block.device.type
                bound = self._binding(call, "broadcast", *what, root=root)
                if root == self.rank():
                    bound.elements.copy_(raw)
                self._run(call, bound.reduction)
                if root != self.rank():
                    raw.copy_(bound.elements)
                    copy_home(block, tensor)

        name = f"broadcast from {root} {shapes(tensors)}"
        return self._call(name, run, tensors, opts, is_written=root != self.rank())

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> CallWork:
        return self._gathering([[*places] for places in outputs], inputs, outputs, opts)

    def _gathering(
        self,
        outputs: list[Tensors],
        inputs: Tensors,
        result: list,
        opts: Any,
        last: Callable[[], object] = bool,
    ) -> CallWork:
        """Gather each input into the places of one output. last: called behind all of them."""
        for places, own in zip(outputs, inputs, strict=True):
            self._check("all_gather", places, [own])
        return self._call(
            f"all_gather {' '.join(map(shapes, outputs))}",
            lambda call: [
                *(self._all_gather(call, *each) for each in zip(outputs, inputs, strict=True)),
                last(),
            ],
            result,
            opts,
            [inputs, outputs],  # The places may be other memory than the result.
        )

    def _all_gather(self, call: Call, places: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Fill place r with the tensor of rank r. Tensors may differ in size."""
        if len({place.numel() for place in places}) > 1:
            self._exchange(
                call,
                [(own, rank) for rank in range(self.size())],
                [(place, rank) for rank, place in enumerate(places)],
            )
            return
        block = self._block(own, self._memory(own))
        raw, n = bytes_in(block), self.size()
        what = raw.numel() * n, torch.uint8, block.device.type
        bound = self._binding(call, "all_gather", *what)
        chunks = bound.elements.split(raw.numel()) if raw.numel() else [bound.elements] * n
        chunks[self.rank()].copy_(raw)
        self._run(call, bound.reduction)
        for place, chunk in zip(places, chunks, strict=True):
            place.copy_(chunk.view(own.dtype).view(place.shape))

    def all_gather_single(
        self, output: torch.Tensor, own: torch.Tensor, opts: Any = None
    ) -> CallWork:
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CallWork:
        # One with strides, as columns of a matrix, may have no views of its parts.
        blocks = [
            output if output.is_contiguous() else output.new_empty(output.shape)
            for output in outputs
        ]
        places = [
            self._parts("all_gather", block, own) for block, own in zip(blocks, inputs, strict=True)
        ]

        def last() -> None:
            for block, output in zip(blocks, outputs, strict=True):
                copy_home(block, output)

        return self._gathering(places, inputs, outputs, opts, last)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> CallWork:
        """Fill outputs[r][i] with inputs[i] of rank r."""
        return self.allgather([[*parts] for parts in zip(*outputs, strict=True)], inputs, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> CallWork:
        root, (own,) = opts.rootRank, inputs
        if root == self.rank():
            self._check("gather", outputs[0], [own])
        places = [*enumerate(outputs[0])] if root == self.rank() else []
        return self._call(
            f"gather to {root}",
            lambda call: self._exchange(
                call, [(own, root)], [(place, rank) for rank, place in places]
            ),
            outputs,
            opts,
            inputs,
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> CallWork:
        root, (place,) = opts.rootRank, outputs
        if root == self.rank():
            self._check("scatter", inputs[0], [place])
        parts = [*enumerate(inputs[0])] if root == self.rank() else []
        return self._call(
            f"scatter from {root}",
            lambda call: self._exchange(
                call, [(part, rank) for rank, part in parts], [(place, root)]
            ),
            outputs,
            opts,
            inputs,
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CallWork:
        places, parts = [*outputs], [*inputs]
        own = slice(self.rank(), self.rank() + 1)
        self._check("all_to_all", places, parts[own])
        self._check("all_to_all", parts, places[own])
        return self._call(
            "all_to_all",
            lambda call: self._exchange(
                call,
                [(part, rank) for rank, part in enumerate(parts)],
                [(place, rank) for rank, place in enumerate(places)],
            ),
            outputs,
            opts,
            parts,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> CallWork:
        """Send rows of a tensor to each rank; sizes are numbers of rows, equal if none are given."""
        n = self.size()
        places, parts = (
            tensor.split([*(sizes or [len(tensor) // n] * n)])
            for tensor, sizes in ((output, output_sizes), (whole, input_sizes))
        )
        return self.alltoall(places, parts, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> CallWork:
        return self._call("barrier", lambda call: self._run(call, self._barrier), [], opts)

    # Messages

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> MessageWork:
        (tensor,) = tensors
        self._check_tag(tag)
        block, transport, array = self._settled(tensor)
        request = transport.start_send(array, to, tag)
        return MessageWork(request, partial(self._await, [to]), lambda: None, [block])

    def _settled(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Transport, Any]:
        """Return a block with the tensor's elements, its transport and its bytes, which no stream uses."""
        if tensor.is_cuda:
            self._device_of([tensor])
        block = self._block(tensor, self._by_pointer(tensor))
        if block.is_cuda:
            torch.cuda.current_stream(block.device).synchronize()
        return block, *self._message(block)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> MessageWork:
        return self._receive(
            tensors, tag, lambda carrier, array: carrier.start_recv(array, source, tag), [source]
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MessageWork:
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        return self._receive(
            tensors, tag, lambda carrier, array: carrier.start_recv(array, None, tag), others
        )

    def _receive(
        self, tensors: Tensors, tag: int, start: Callable[[Transport, Any], Any], sources: list[int]
    ) -> MessageWork:
        (tensor,) = tensors
        self._check_tag(tag)
        block, transport, array = self._settled(tensor)
        device = tensor.device if tensor.is_cuda else None

        def finish() -> None:
            copy_home(block, tensor)

        wait = partial(self._await, sources)
        return MessageWork(start(transport, array), wait, finish, tensors, device)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag < FIRST_CLAIMED_TAG:
            raise CommError(
                f"rank {self.rank()}: tags are 0 to {FIRST_CLAIMED_TAG - 1}, but this message has {tag}."
            )

    def _await(self, peers: Sequence[int], request: Any, seconds: float | None) -> None:
        """Wait for a message from or to one of the peers."""
        seconds = seconds or self._seconds
        began = time.monotonic()
        name = f"rank {self.transport.members[self.rank()]}: {request}"
        look, due, times = None, began + SLOW, 0

        def poll() -> bool:
            nonlocal look, due, times
            if request.test():
                return True
            now = time.monotonic()
            if now > began + seconds:
                raise CommError(
                    f"{name} has not ended within its timeout of {seconds:g} s.",
                    "Look at what that rank does, or give init_process_group a longer `timeout`.",
                )
            if look is None and now > due and peers:
                look = Comparison(self._notices, None)
            elif look and look.is_over:
                have_left = look.said and all(look.said[peer].name == DESTROY for peer in peers)
                times = times + 1 if have_left else 0
                if times == 2:  # A message that was sent before has had its time to arrive.
                    raise CommError(
                        f"{name} cannot end: the other rank is in {DESTROY}.",
                        "Let each rank receive all that is sent to it, before it destroys the group.",
                    )
                look, due = None, now + SLOW
            return False

        self.transport.wait_until(poll, what=request)

    # Coalescing: works of a `with` block of PyTorch become one

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> CallWork | None:
        works, self._coalesced = self._coalesced, None
        return works[-1] if works else None  # Calls end in their order.


def refusing(method: Callable[..., CallWork]) -> Callable[..., CallWork]:
    """Return a collective that tells the other ranks, which wait in it, if it raises an error here before a message."""

    @wraps(method)
    def collective(group: ProcessGroup, *arguments: Any, **options: Any) -> CallWork:
        try:
            return method(group, *arguments, **options)
        except Exception as error:
            if "is_told" not in vars(error):  # One collective may call another.
                vars(error)["is_told"] = True
                group._queue.refuse(error)
            raise

    return collective


# C++ calls these methods where torch.compile looks at every frame. A process group is opaque to it.
for kind in (ProcessGroup, CallWork):
    for name, function in [*vars(kind).items()]:
        if isinstance(function, FunctionType) and name in dir(kind.__base__) and name[:2] != "__":
            is_collective = inspect.signature(function).return_annotation is CallWork
            opaque = refusing(function) if is_collective else function
            setattr(kind, name, torch.compiler.disable(opaque))


class Binding(NamedTuple):
    """A bound collective. elements: its buffer, 1-D."""

    elements: torch.Tensor
    reduction: Reduction


class Awaited:
    """What a rank waits for in a call, for the reports of deadlocks and ended ranks.

    is_alone  another rank has failed or is late
    """

    is_alone = False

    def __init__(self, what: object, transport: Transport):
        self._what, self._members = what, transport.members

    def needs(self, left: Any) -> bool:
        return any(member in left for member in self._members)

    def __str__(self) -> str:
        return str(self._what)


class Leaving(Awaited):
    """The wait for all ranks in `destroy_process_group`; it is over, too, once a rank has ended."""

    has_one_ended = False

    def __init__(self, transport: Transport):
        super().__init__(DESTROY, transport)

    def needs(self, left: Any) -> bool:
        self.has_one_ended = self.has_one_ended or super().needs(left)
        return False


def flat(tensors: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            yield tensor
        else:
            yield from flat(tensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its elements in memory as they are: a conjugate is only marked as one."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is one block of host memory, else a copy that is."""
    return whole(tensor).cpu().contiguous()


def copy_home(host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what `on_host` or `_block` returned to the tensor, if it is a copy."""
    if host.data_ptr() != tensor.data_ptr():
        tensor.copy_(host)


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    # One element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = bytes_in(tensor).numpy()
    return array


def reducible(op: Any, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return the tensors, complex ones as views of their real numbers; raise an error if they cannot be reduced."""
    ours = OPERATORS.get(op.op)
    if ours is None:
        raise ConfigError(
            f"Backend mpitrain reduces by {', '.join(map(op_name, OPERATORS))}, but not by {op_name(op)}."
        )
    for tensor in tensors:
        if tensor.is_sparse and ours != "add":
            raise ConfigError(
                f"Backend mpitrain reduces sparse tensors by sum or avg, but not by {op_name(op)}."
            )
        is_sum_of_complex = tensor.is_complex() and ours == "add" and not tensor.is_sparse
        is_bitwise = ours.startswith("bitwise") and tensor.is_floating_point()
        if (tensor.dtype not in DTYPES or is_bitwise) and not is_sum_of_complex:
            raise ConfigError(
                f"Backend mpitrain cannot reduce {tensor.dtype} by {op_name(op)}.",
                "Convert the tensor first, for example to torch.float32.",
            )
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


def shapes(tensors: Sequence[torch.Tensor]) -> str:
    return " ".join(f"{str(t.dtype)[6:]}{[*t.shape]}" for t in tensors)
