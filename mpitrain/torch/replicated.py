"""Replicated: data parallelism for a PyTorch module (as torch's DistributedDataParallel).

A hook on each parameter copies its gradient into the flat buffer of `GradientSums`, while autograd
still computes the gradients of earlier layers. At the end of the backward pass autograd calls
`_finish`, which writes the averages into the gradients:

    forward    a hook on the outputs of the model
    backward   outputs: the pass is noted   parameter by parameter: copied, buckets start   _finish
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mpitrain.collectives.group import Group
from mpitrain.errors import CommError, ConfigError
from mpitrain.machine.cuda import as_array
from mpitrain.parallel.replicated import GradientSums, TensorFacts
from mpitrain.transport.base import Transport
from mpitrain.transport.mpi import connect

ALIGNED = 16
"""Bytes at whose multiples a buffer begins in a message: the largest itemsize of PyTorch."""

FLOATS = ("float32", "float64", "bfloat16", "float16")
"""The dtypes of trained parameters. Gradients of 16 bits are summed in float32."""

KINDS = ("cpu", "cuda")


class Replicated(torch.nn.Module):
    """A module whose gradients are averaged over all ranks at the end of each backward pass.

    Building it copies rank 0's parameters and buffers to all ranks; collective. Names of parameters
    and the `state_dict` are those of the module, without a prefix, and so are other attributes.

    Parameters
    ----------
    module : torch.nn.Module
        The same on every rank. Its trained parameters are float32, float64, bfloat16 or float16.
    transport : Transport, optional
        The ranks; None: all ranks of the MPI job, as `mpitrain.connect()`.
    algorithm, wire, bucket_mb
        As in the section [replication] of a configuration; bucket_mb 0: the best size for the hosts.
    broadcast_buffers : bool
        Whether each forward pass after a training step begins with rank 0's buffers.

    Raises
    ------
    MpitrainError
        On every rank, if modules differ between ranks, or an argument does not fit.

    Notes
    -----
    Parameters that need no gradient are copied once, and then left alone. A parameter whose `grad` is
    None on all ranks keeps None. If only some ranks have None, it counts as zeros there, and all
    ranks get the average. This is DDP with `find_unused_parameters=True`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        transport: Transport | None = None,
        algorithm: str = "auto",
        wire: str = "none",
        bucket_mb: float = 0.0,
        broadcast_buffers: bool = True,
    ):
        super().__init__()
        self.module = module
        transport = connect() if transport is None else transport
        self._sums = sums = GradientSums(
            transport, lambda: facts_of(module), algorithm, wire, bucket_mb
        )
        self._weight = 1 / transport.size
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._leaves = [torch.as_tensor(leaf) for leaf in sums.leaves]
        buffers = list(module.buffers())
        for tensor in (*module.parameters(), *buffers):
            Coalesced(sums.group, [tensor]).broadcast([tensor])
        self._coalesced = Coalesced(sums.group, buffers) if buffers and broadcast_buffers else None
        self._is_averaging, self._is_behind = True, False
        self._is_open, self._is_unseen, self._faults = False, False, list[str]()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index, name))
            for index, (name, parameter) in enumerate(self._trained.items())
        ]
        transport.tenants.add(self._close)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing in the backward passes of forward passes in this context. Gradients
        accumulate on each rank, until the first pass after it averages their sums.
        """
        before, self._is_averaging = self._is_averaging, False
        try:
            yield
        finally:
            self._is_averaging = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_open:
            raise CommError(
                f"rank {self._sums.group.rank}: the last backward pass ended by an error, so gradients of the ranks differ.",
                "Start the job again from a checkpoint.",
            )
        if self._coalesced and self._is_behind:
            self._coalesced.broadcast(self.module.buffers())
        outputs = self.module(*args, **kwargs)
        self._is_behind = torch.is_grad_enabled() and self._is_averaging
        if torch.is_grad_enabled():
            graphs = [out for out in tree_leaves(outputs) if getattr(out, "grad_fn", None)]
            self._is_unseen = self._is_averaging and not graphs
            if self._is_averaging:
                for output in graphs:
                    output.register_hook(self._open)
        return outputs

    def _open(self, gradient: Any = None) -> None:
        """Begin a backward pass: its end will call `_finish`."""
        if not self._is_open:
            self._is_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _ready(self, index: int, name: str, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter in a backward pass."""
        if self._is_unseen:  # The outputs are of a type that hides its tensors.
            self._open()
        if not self._is_open:
            return
        if index in self._sums.taken:
            self._faults.append(f"the gradient of {name} came twice")
        else:
            self._take(index, name, parameter)

    def _take(self, index: int, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            self._faults.append(f"the gradient of {name} is sparse")
            return
        self._leaves[index].copy_(gradient.detach())
        self._sums.ready(index)

    @torch.no_grad()
    def _finish(self) -> None:
        """End a backward pass: write the averages into the gradients; collective."""
        self._is_open, sums = False, self._sums
        parameters = list(self._trained.items())
        for index in sums.missing():  # Some have gradients of passes within `no_sync`.
            self._take(index, *parameters[index])
        without, faults = sums.missing(), self._faults
        self._faults = []
        failed, missing = sums.wait(len(faults))
        if failed:
            raise sums.refusal(
                faults,
                "Checkpoint with use_reentrant=False, and make embeddings with sparse=False.",
            )
        everyone = sums.group.transport.gather_text(without) if missing else [[]]
        unused = set.intersection(*map(set, everyone))
        for index, (_, parameter) in enumerate(parameters):
            if index in unused:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            torch.mul(self._leaves[index], self._weight, out=parameter.grad)

    def _close(self) -> None:
        """Compute alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._is_averaging, self._coalesced = False, None
        self._leaves.clear()  # They lie in a window.

    # The names of all parameters and buffers are those of the module.

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Rename the tensors for `module`, which a module around this one loads next."""
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Coalesced:
    """Tensors in one message, bound to a broadcast from rank 0.

    Building and `broadcast` are collective.
    """

    def __init__(self, group: Group, tensors: Sequence[torch.Tensor]):
        sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        self._views = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(message.split(sizes), tensors, strict=True)
        ]
        self._is_root = group.rank == 0
        self._message = group.bind_broadcast(as_array(message, "The buffers"))

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy rank 0's tensors to those of all ranks."""
        pairs = list(zip(self._views, tensors, strict=True))
        if self._is_root:
            for view, tensor in pairs:
                view.copy_(tensor)
        self._message.run()
        if not self._is_root:
            for view, tensor in pairs:
                tensor.copy_(view)


def facts_of(module: torch.nn.Module) -> list[TensorFacts]:
    """Return the facts of all parameters and buffers, the trained parameters first.

    raises  ConfigError if the module cannot be replicated
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"Replicated needs a torch.nn.Module, but it is a {type(module).__name__}.",
            "Pass the model; for arrays of other libraries there is mpitrain.Replicated.",
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if lazy := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        raise ConfigError(
            f"Replicated needs the shapes of all parameters, but {lazy[0]} has none yet.",
            "Call the model once before.",
        )
    trained = {name for name, tensor in tensors.items() if tensor.requires_grad}
    if not trained:
        raise ConfigError(
            "Replicated averages gradients, but no parameter of the model needs one.",
            "Use the model itself, or set requires_grad.",
        )
    facts = [
        TensorFacts(
            name,
            tensor.device.type,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            name in trained,
        )
        for name, tensor in sorted(tensors.items(), key=lambda named: named[0] not in trained)
    ]
    for one in facts:
        if one.is_trained and (
            one.dtype not in FLOATS or one.kind not in KINDS or one.kind != facts[0].kind
        ):
            raise ConfigError(
                f"Trained parameters must be {', '.join(FLOATS)} on the CPU or on one GPU, but {one.name} is {one} and "
                f"{facts[0].name} {facts[0]}.",
                "Convert it, or freeze it with requires_grad_(False).",
            )
    return facts
