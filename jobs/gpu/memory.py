"""Two parts of the GPU job: kernels that only move bytes, against a copy; attention, against PyTorch's fused one.

python3 jobs/gpu/memory.py DEVICE              all kernels but attention
python3 jobs/gpu/memory.py DEVICE attention    attention alone
"""

import sys
from importlib.util import find_spec

from result import emit, micro, wrong_words

from mpitrain.ops.device import device_for
from mpitrain.tools.bench.kernels.operations import OperationRow, attentions, measure, measured

OF_A_COPY = 0.85
FORWARD, BACKWARD = 1.0, 0.7
"""Of PyTorch's attention, by the backend that the row names."""


def report(row: OperationRow, copy: float) -> None:
    """One kernel."""
    if row.unit == "GB/s":
        emit(
            f"{row.name} against a copy{wrong_words(row.wrong)}",
            f"{row.rate:,.1f} GB/s",
            f"{copy:,.1f} GB/s",
            ratio=row.rate / copy,
            required=OF_A_COPY,
            ok=row.wrong == 0,
        )
    elif row.name.startswith("attention"):
        has_peer = row.peer_us == row.peer_us
        backend = "flash attention" if "bfloat16" in row.name else "efficient attention"
        emit(
            f"{row.name} against PyTorch's {backend}{wrong_words(row.wrong)}",
            micro(row.time_us / 1e6),
            micro(row.peer_us / 1e6) if has_peer else "-",
            ratio=row.peer_us / row.time_us if has_peer else None,
            required=(BACKWARD if "back" in row.name else FORWARD) if has_peer else None,
            ok=row.wrong == 0,
            gflops=row.rate,
        )
    else:
        emit(
            f"{row.name}{wrong_words(row.wrong)}",
            micro(row.time_us / 1e6),
            ok=row.wrong == 0,
            gflops=row.rate,
        )


def main(kind: str, is_attention: bool) -> None:
    """A result for each, as it is measured."""
    device, peer = device_for(kind), None
    if is_attention and find_spec("torch"):
        from mpitrain.tools.bench.training.torch_peer import TorchAttention as peer
    if is_attention:
        for row in measured(device, attentions(device, peer)):
            report(row, 0.0)
        return
    rows = measure(device, attends=False)
    copy = next(rows).rate
    for row in rows:
        report(row, copy)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["attention"])
