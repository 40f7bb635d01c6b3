"""All cases by the kernel source they are about."""

from collections.abc import Callable, Iterator

from tests.cases import (
    documents,
    experts,
    hopper,
    images,
    layers,
    products,
    rings,
    tensor_steps,
    training,
)
from tests.cases.askew import askew

SUITE: dict[str, tuple[Callable[[], Iterator[Callable]], ...]] = {
    "gemm": (products.ordinary, experts.grouped),
    "gemm_combine": (products.ordinary, products.by_library),
    "gemm_tensor": (products.tensor, experts.grouped_tensor),
    "gemm_hopper": (products.hopper,),
    "pointwise": (layers.linears, layers.gates, askew),
    "rotate": (layers.rotations,),
    "dropout": (layers.dropouts,),
    "columns": (layers.linears, layers.embeddings, askew),
    "layer_norm": (layers.norms, layers.rms_norms, askew),
    "embedding": (layers.embeddings, askew),
    "attention": (layers.attentions, documents.whole_documents, documents.windows, rings.parts),
    "attention_dropout": (
        layers.dropped_attentions,
        documents.dropped_documents,
        documents.dropped_windows,
    ),
    "attention_dots": (layers.attentions, rings.parts),
    "attention_next": (layers.next_attentions,),
    "attention_tensor": (
        layers.tensor_attentions,
        documents.tensor_documents,
        documents.tensor_windows,
        rings.tensor_parts,
    ),
    "attention_tensor_backward": (
        layers.tensor_attentions,
        documents.tensor_documents,
        documents.tensor_windows,
        rings.tensor_parts,
    ),
    "attention_hopper": (hopper.hopper_attentions,),
    "attention_hopper_backward": (hopper.hopper_attentions,),
    "cross_entropy": (training.losses,),
    "steps": (training.steps,),
    "tensor_steps": (training.steps, tensor_steps.tensor_steps),
    "steps_8bit": (training.coded_steps,),
    "totals": (training.totals,),
    "convert": (training.conversions,),
    "wire": (training.wires,),
    "top_k": (training.selections,),
    "experts": (experts.choices,),
    "images": (images.pictures,),
}
"""Source -> the groups of cases that would notice a fault in it."""
