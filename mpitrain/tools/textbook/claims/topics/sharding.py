"""Claims about ZeRO and tensor parallelism: bytes of training on threads, and counted memory."""

from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import busiest, counted

ZERO = "Rajbhandari et al., ZeRO, SC 2020"
MEGATRON = "Shoeybi et al., Megatron-LM, arXiv:1909.08053, 2019"
COMPARE = (
    "mpitrain launch -n 2 -- compare --modes ring --set layout.tp=2 --set layout.algorithm=ring"
)
DEEP = ("model.layers=8", "batch.size=16")


def zero_bytes(stage: int, micro_batches: int) -> Figures:
    """Compare the bytes of a step of 4 replicas with and without ZeRO."""
    job = (*DEEP, f"batch.micro_batches={micro_batches}")
    divided, plain = (busiest(4, *job, f"replication.zero={zero}") for zero in (stage, 0))
    return Figures(divided / plain, {"bytes with ZeRO": divided, "bytes without": plain})


def zero_three_bytes(stage: int, micro_batches: int) -> Figures:
    """Compare the bytes of ZeRO stage 3 with 1.5 times the bytes without ZeRO."""
    figures = zero_bytes(stage, micro_batches)
    return Figures(abs(figures.value / 1.5 - 1), figures.numbers)


def zero_memory(layers: int) -> Figures:
    """Compare 4 times the state of a rank with ZeRO stage 3, on 4 ranks, and its state without."""
    job = ("layout.dp=4", "model.width=32", f"model.layers={layers}")
    divided, whole = (counted(*job, f"replication.zero={zero}").state for zero in (3, 0))
    return Figures(4 * divided / whole, {"kB with ZeRO": divided / 1e3, "kB without": whole / 1e3})


def adam_state(optimizer: str) -> Figures:
    """Compare the bytes of optimizer state with the bytes of float32 parameters."""
    with_state, without = (
        counted("model.width=64", f"optimizer.name={name}") for name in (optimizer, "sgd")
    )
    state, parameters = with_state.state - without.state, 4 * without.parameters
    return Figures(
        abs(state / parameters - 2), {"kB of state": state / 1e3, "kB, model": parameters / 1e3}
    )


def block_all_reduces(is_sequence_parallel: str, keep: str) -> Figures:
    """Count the all-reduces of (B, T, C) that one more block adds to a step of 2 ranks."""
    job = ("layout.tp=2", "layout.algorithm=ring", "model.context=64", "model.width=32")
    divided = (
        f"layout.sequence_parallel={is_sequence_parallel}",
        f"layout.keep_gathered={keep}",
    )
    one, two = (busiest(2, *job, *divided, f"model.layers={layers}") for layers in (1, 2))
    whole = 8 * 64 * 32 * 4  # B T C in float32; a ring of 2 ranks sends as many bytes
    return Figures(
        (two - one) / whole, {"bytes of a block": two - one, "bytes of one all-reduce": whole}
    )


def tensor_or_data(batch: int, context: int, width: int) -> Figures:
    """Compare the bytes of a step with tensor parallelism and with data parallelism, on 2 ranks."""
    job = (f"batch.size={batch}", f"model.context={context}", f"model.width={width}")
    tensor = busiest(2, *job, "layout.tp=2", "layout.algorithm=ring")
    data = busiest(2, *job)
    return Figures(tensor / data, {"bytes, tensor parallel": tensor, "bytes, data parallel": data})


CLAIMS = {
    "zero-bytes": Claim(
        "ZeRO stages 1 and 2 send no more bytes than plain data parallelism.",
        f"{ZERO}, section 7",
        "bytes with ZeRO / without",
        "<=",
        1.01,
        zero_bytes,
        tuple(
            usual("stage {stage}, {micro_batches} micro-batches", stage=stage, micro_batches=m)
            for stage, m in ((1, 1), (1, 4), (2, 1), (2, 4))
        ),
        "mpitrain launch -n 4 -- compare --modes ring,zero1,zero2",
    ),
    "zero-3-bytes": Claim(
        "ZeRO stage 3 sends 1.5 times the bytes of plain data parallelism.",
        f"{ZERO}, section 7",
        "difference from 1.5 times, relative",
        "<=",
        0.1,
        zero_three_bytes,
        (
            usual("stage {stage}, {micro_batches} micro-batches", stage=3, micro_batches=1),
            other("stage {stage}, {micro_batches} micro-batches", stage=3, micro_batches=4),
        ),
        "mpitrain launch -n 4 -- compare --modes ring,zero3",
    ),
    "zero-3-memory": Claim(
        "ZeRO stage 3 divides the memory of the training state by the number of ranks.",
        f"{ZERO}, section 5",
        "memory with ZeRO on 4 ranks / without, times 4",
        "<=",
        1.1,
        zero_memory,
        (usual("{layers} layers", layers=16), other("{layers} layers", layers=1)),
        "mpitrain plan memory --dp 4 --set replication.zero=3",
    ),
    "adam-state": Claim(
        "Adam's state needs twice the memory of the parameters.",
        "Kingma and Ba, Adam, ICLR 2015",
        "difference from 2 times the parameters",
        "<=",
        0.05,
        adam_state,
        (
            usual("optimizer {optimizer}", optimizer="adamw"),
            other("optimizer {optimizer}", optimizer="adamw8bit"),
        ),
        "mpitrain plan memory --set optimizer.name=adamw8bit",
    ),
    "tensor-all-reduces": Claim(
        "Tensor parallelism needs the bytes of 4 all-reduces for each transformer block.",
        MEGATRON,
        "all-reduces that a block adds to a step",
        "<=",
        4.01,
        block_all_reduces,
        (
            usual("tensor parallelism alone", is_sequence_parallel="false", keep="false"),
            other(
                "sequence parallelism that gathers again", is_sequence_parallel="true", keep="false"
            ),
        ),
        COMPARE,
    ),
    "sequence-bytes": Claim(
        "Sequence parallelism sends no more bytes than tensor parallelism.",
        "Korthikanti et al., Reducing Activation Recomputation, MLSys 2023",
        "all-reduces that a block adds to a step",
        "<=",
        4.01,
        block_all_reduces,
        (
            usual("gathered inputs are saved", is_sequence_parallel="true", keep="true"),
            usual("gathered inputs are gathered again", is_sequence_parallel="true", keep="false"),
        ),
        f"{COMPARE} --set layout.sequence_parallel=true",
    ),
    "tensor-or-data": Claim(
        "Tensor parallelism sends more bytes than data parallelism.",
        MEGATRON,
        "bytes of tensor parallelism / of data parallelism",
        ">",
        1,
        tensor_or_data,
        (
            usual("batch {batch}, context {context}, width {width}", batch=8, context=64, width=32),
            other("batch {batch}, context {context}, width {width}", batch=2, context=16, width=64),
        ),
        COMPARE,
    ),
}
