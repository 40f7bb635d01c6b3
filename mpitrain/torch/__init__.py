"""PyTorch's distributed package over MPI: `import mpitrain.torch` registers the backend "mpitrain".

    import mpitrain.torch
    torch.distributed.init_process_group("mpitrain")      rank and size come from MPI

GroupOptions    `pg_options` of `init_process_group` and `new_group`
hook            a communication hook of DistributedDataParallel that compresses gradients
Replicated      a module whose gradients are averaged over all ranks; it needs no process group
replace         makes the default group anew after a loss, with spares in the places of lost ranks
stop_requested  whether the batch job asks the program to save a checkpoint and exit with 85
"""

try:
    import torch
    import torch.distributed as dist

    from mpitrain.machine import process
    from mpitrain.torch.hook import hook as hook
    from mpitrain.torch.process_group import GroupOptions as GroupOptions
    from mpitrain.torch.process_group import create
    from mpitrain.torch.replace import replace as replace
    from mpitrain.torch.replicated import Replicated as Replicated
    from mpitrain.torch.stop import stop_requested as stop_requested
    from mpitrain.torch.store import rendezvous_by_mpi
except ImportError as error:
    raise ImportError(f"mpitrain.torch needs PyTorch ({error}): pip install torch") from error

OLDEST = (2, 13)

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(
        f"mpitrain.torch needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, but this is {torch.__version__}: "
        "pip install -U torch"
    )

__all__ = ["GroupOptions", "Replicated", "hook", "replace", "stop_requested"]

process.name_local_rank()
if "MPITRAIN" not in dist.Backend._plugins:
    dist.Backend.register_backend("mpitrain", create, extended_api=True, devices=["cpu", "cuda"])
    rendezvous_by_mpi()
