"""The table of all operations: one row each, which every reader looks up by name."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from mpitrain.ops import cuda, host, reference
from mpitrain.ops.operands import operands
from mpitrain.tables import Table

Returns = Callable[..., Any]
Pair = Callable[..., tuple[Any, Any]]
Writes = Callable[..., None]


class Ops(Protocol):
    """The operations of one backend, as PyTorch's ATen kernels of one device.

    Notes
    -----
    `reference` documents each operation with shapes. `OPERATIONS` has a row for each. The type of
    an attribute gives its results:

    Pair      (output, saved) of a forward, (dx, pending) of a backward, or two numbers
    Returns   one result
    Writes    nothing: it writes into its arguments

    A backward is split in two. The input half returns dx and `pending`. The weight halves take
    `pending`, so that they can run later or be left out.
    """

    linear: Pair
    logits: Pair
    linear_gelu: Pair
    linear_relu: Pair
    linear_backward_input: Pair
    gelu_linear_backward_input: Pair
    linear_gelu_backward_input: Pair
    linear_relu_backward_input: Pair
    linear_backward_weight: Writes
    linear_backward_bias: Writes
    add: Writes
    weighted_sum: Writes
    add_bias: Writes
    dequantize: Writes
    gelu: Pair
    gelu_backward: Returns
    relu: Pair
    relu_backward: Returns
    layer_norm: Pair
    layer_norm_backward_input: Pair
    layer_norm_backward_weight: Writes
    embedding: Pair
    embedding_backward_table: Writes
    embedding_backward_positions: Writes
    attention: Pair
    attention_next: Returns
    attention_backward: Returns
    dropout: Returns
    attention_dropout: Pair
    attention_dropout_backward: Returns
    conv2d: Pair
    conv2d_backward_input: Returns
    conv2d_backward_weight: Writes
    conv2d_backward_bias: Writes
    max_pool: Pair
    max_pool_backward: Returns
    cross_entropy: Pair
    cross_entropy_loss: Returns
    count_correct: Returns
    row_maximum: Returns
    row_exponentials: Returns
    row_argmax: Returns
    cross_entropy_split: Pair
    count_correct_split: Returns
    gradient_facts: Pair
    sgd: Writes
    momentum: Writes
    nesterov: Writes
    lion: Writes
    adam: Writes
    adamw: Writes
    adamw8bit: Writes
    add_squares: Writes
    lamb_moments: Writes
    lamb: Writes
    adafactor_squares: Writes
    adafactor_variances: Writes
    adafactor_update: Writes
    adafactor: Writes
    muon_momentum: Writes
    newton_schulz: Writes
    muon: Writes


class Operation(NamedTuple):
    """Descriptor of an operation; a row of `OPERATIONS`.

    help       one phrase
    operands   arguments and results of an example call, with shapes: see `operands`
    rounds     the result or argument that half precision rounds on the host, or "nothing"
    host       the operation on NumPy arrays
    launches   kernel launches of the example, if no sum of a product is split; 0 without `cuda`
    cuda       the operation on kernels. Its first parameter is `kernels`; `multiply` or `numbers`
               may follow (see `bodies.cuda`). None: devices refuse the operation
    reference  the definition, in plain NumPy; None: that is `host`
    products   multiply-adds of its matrix products, as a dim of the operands: MNK; empty: none.
               Causal attention counts whole squares of scores, as PaLM's appendix B does
    takes_runs whether `cuda` takes `Runs` of parameter groups in place of a weight decay

    A plugin adds a row as it is imported, before a backend is made: `OPERATIONS["scale"] =
    Operation(...)`.
    """

    help: str
    operands: str
    rounds: str
    host: Callable[..., Any]
    launches: int = 0
    cuda: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    products: str = ""
    takes_runs: bool = False

    def nbytes(self, itemsize: int = 4, **sizes: int) -> int:
        """Return the bytes that a device reads and writes in the example, each array once.

        itemsize  bytes of an element
        sizes     the size of each letter
        """
        return operands(self.operands).nbytes(sizes, itemsize)


def _built_in(
    definitions: ModuleType,
    tuned: ModuleType,
    kernels: ModuleType,
    rows: dict[str, tuple[str, str, str, int]],
    products: Mapping[str, str] | None = None,
    otherwise: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda definition: definition,
) -> dict[str, Operation]:
    """Return rows of operations of one name in three modules.

    tuned      where NumPy can do no better than the definition, it has none of this name
    rows       {name: (help, operands, rounds, launches)}
    products   {name: multiply-adds}, of the operations with matrix products
    otherwise  (definition) -> the operation on the host, if `tuned` has none
    """
    return {
        name: Operation(
            help,
            line,
            rounds,
            getattr(tuned, name, None) or otherwise(getattr(definitions, name)),
            launches,
            getattr(kernels, name),
            getattr(definitions, name),
            (products or {}).get(name, ""),
            name in getattr(kernels, "TAKE_RUNS", ()),
        )
        for name, (help, line, rounds, launches) in rows.items()
    }


LINEAR = (
    "linear",
    "logits",
    "linear_gelu",
    "linear_relu",
    "linear_backward_input",
    "gelu_linear_backward_input",
    "linear_gelu_backward_input",
    "linear_relu_backward_input",
    "linear_backward_weight",
)
"""The operations that are one matrix product of M x K by K x N elements."""

OPERATIONS: Table[str, Operation] = Table(
    **_built_in(
        reference.layers,
        host.linear,
        cuda.linear,
        {
            "linear": (
                "a matrix product with a bias and a residual",
                "x:M,K w:N,K b:N -> y:M,N saved",
                "y",
                1,
            ),
            "logits": ("a linear layer before a loss", "x:M,K w:N,K b:N -> y:M,N saved", "y", 1),
            "linear_gelu": (
                "a linear layer with GELU",
                "x:M,K w:N,K b:N -> y:M,N saved:M,N",
                "y",
                1,
            ),
            "linear_relu": ("a linear layer with ReLU", "x:M,K w:N,K b:N -> y:M,N saved", "y", 1),
            "linear_backward_input": (
                "input gradient of linear",
                "dy:M,N w:N,K saved@linear -> dx:M,K pending",
                "dx",
                1,
            ),
            "gelu_linear_backward_input": (
                "input gradient of linear and of the GELU before it",
                "dy:M,N w:N,K saved@linear before@gelu|M,K -> dz:M,K pending",
                "dz",
                1,
            ),
            "linear_gelu_backward_input": (
                "input gradient of linear_gelu",
                "dy:M,N w:N,K saved@linear_gelu|M,N -> dx:M,K pending",
                "dx",
                2,
            ),
            "linear_relu_backward_input": (
                "input gradient of linear_relu",
                "dy:M,N w:N,K saved@linear_relu|M,N -> dx:M,K pending",
                "dx",
                2,
            ),
            "linear_backward_weight": (
                "weight gradient of a linear layer",
                "pending@linear_backward_input|M,N+M,K dw:N,K accumulate=1 -> dw",
                "nothing",
                1,
            ),
        },
        products=dict.fromkeys(LINEAR, "MNK"),
    ),
    **_built_in(
        reference.layers,
        host.linear,
        cuda.linear,
        {
            "linear_backward_bias": (
                "bias gradient of a linear layer",
                "pending@linear_backward_input|N db:N accumulate=1 -> db",
                "nothing",
                1,
            ),
            "add": ("a sum of two arrays", "a:L b:L out:L|0 -> out", "out", 1),
            "weighted_sum": (
                "a sum of two arrays, each times a number",
                "a:L alpha=0.75 b:L beta=-0.5 out:L|0 -> out",
                "nothing",
                1,
            ),
            "add_bias": (
                "a sum of rows, a bias and a residual",
                "x:M,N b:N out:M,N|0 -> out",
                "out",
                1,
            ),
            "dequantize": (
                "a weight of 8 bits as numbers",
                "q%:N,K scale:N out:N,K|0 -> out",
                "out",
                1,
            ),
            "gelu": ("GELU alone", "z:M,K -> y:M,K saved", "y", 1),
            "gelu_backward": ("gradient of gelu", "dy:M,K saved@gelu|M,K -> dz:M,K", "dz", 1),
            "relu": ("ReLU alone", "z:M,K -> y:M,K saved", "y", 1),
            "relu_backward": ("gradient of relu", "dy:M,K saved@relu|M,K -> dz:M,K", "dz", 1),
        },
    ),
    **_built_in(
        reference.layers,
        host.norm,
        cuda.norm,
        {
            "layer_norm": (
                "layer normalisation",
                "x:M,C gain:C bias:C epsilon=0.25 -> y:M,C saved",
                "y",
                1,
            ),
            "layer_norm_backward_input": (
                "input gradient of layer_norm",
                "dy:M,C gain:C saved@layer_norm|M,C -> dx:M,C pending",
                "dx",
                1,
            ),
            "layer_norm_backward_weight": (
                "gain and bias gradients of layer_norm",
                "pending@layer_norm_backward_input|2,C dgain:C dbias:C accumulate=1 -> dgain dbias",
                "nothing",
                1,
            ),
        },
    ),
    **_built_in(
        reference.layers,
        host.embedding,
        cuda.embedding,
        {
            "embedding": (
                "rows of a table, plus positions",
                "tokens<V:B,T table:V,C|B,T,C positions:T,C -> x:B,T,C saved",
                "x",
                1,
            ),
            "embedding_backward_table": (
                "gradient of an embedding's table",
                "dx:B,T,C saved@embedding dtable:V,C|0 accumulate=0 -> dtable",
                "nothing",
                1,
            ),
            "embedding_backward_positions": (
                "gradient of an embedding's positions",
                "dx:B,T,C dpositions:T,C accumulate=1 -> dpositions",
                "nothing",
                1,
            ),
        },
    ),
    **_built_in(
        reference.layers,
        host.attention,
        cuda.attention,
        {
            "attention": ("causal attention", "qkv:B,T,3HD heads=H -> y:B,T,HD saved", "y", 1),
            "attention_next": (
                "attention of new tokens over stored keys and values",
                "qkv:B,T,3HD keys:B,H,2T,D values:B,H,2T,D past<T:B heads=H -> y:B,T,HD keys values",
                "y",
                1,
            ),
            "attention_backward": (
                "gradient of attention",
                "dy:B,T,HD saved@attention|B,T,4HD -> dqkv:B,T,3HD",
                "dqkv",
                3,
            ),
        },
        products={
            "attention": "2BTTHD",
            "attention_next": "4BTTHD",
            "attention_backward": "4BTTHD",
        },
    ),
    **_built_in(
        reference.dropout,
        host.linear,
        cuda.linear,
        {
            "dropout": (
                "random zeros, plus a residual",
                "x:M,C key=(5,3) step=2 first=7 columns=C rate=0.25 -> y:M,C",
                "y",
                1,
            ),
        },
    ),
    **_built_in(
        reference.dropout,
        host.attention,
        cuda.attention,
        {
            "attention_dropout": (
                "causal attention with random zeros",
                "qkv:B,T,3HD heads=H key=(5,3) step=2 first=7 every=11 rate=0.25 -> y:B,T,HD saved",
                "y",
                1,
            ),
            "attention_dropout_backward": (
                "gradient of attention_dropout",
                "dy:B,T,HD saved@attention_dropout|B,T,4HD -> dqkv:B,T,3HD",
                "dqkv",
                3,
            ),
        },
        products={"attention_dropout": "2BTTHD", "attention_dropout_backward": "4BTTHD"},
    ),
    **_built_in(
        # B images of I rows and J columns; F channels in, G out. Kernels are S x S, windows P x P.
        reference.images,
        host.images,
        cuda.images,
        {
            "conv2d": (
                "a convolution of images with a bias",
                "x:B,I,J,F w:G,SSF b:G side=S -> y:B,I,J,G saved",
                "y",
                2,
            ),
            "conv2d_backward_input": (
                "input gradient of conv2d",
                "dy:B,I,J,G w:G,SSF side=S -> dx:B,I,J,F",
                "dx",
                3,
            ),
            "conv2d_backward_weight": (
                "weight gradient of conv2d",
                "dy:B,I,J,G saved@conv2d|B,I,J,F dw:G,SSF side=S accumulate=1 -> dw",
                "nothing",
                2,
            ),
            "conv2d_backward_bias": (
                "bias gradient of conv2d",
                "dy:B,I,J,G db:G accumulate=1 -> db",
                "nothing",
                2,
            ),
            "max_pool": (
                "the largest number of each window of images",
                "x:B,PI,PJ,F size=P -> y:B,I,J,F saved%:B,I,J,F",
                "nothing",
                1,
            ),
            "max_pool_backward": (
                "gradient of max_pool",
                "dy:B,I,J,F saved@max_pool size=P -> dx:B,PI,PJ,F",
                "nothing",
                1,
            ),
        },
        products=dict.fromkeys(
            ("conv2d", "conv2d_backward_input", "conv2d_backward_weight"), "BIJSSFG"
        ),
    ),
    **_built_in(
        reference.loss,
        host.loss,
        cuda.loss,
        {
            "cross_entropy": (
                "loss and gradient of logits",
                "logits:M,V targets<V:M scale=0.125 -> loss dlogits:M,V",
                "dlogits",
                3,
            ),
            "cross_entropy_loss": (
                "loss of logits alone",
                "logits:M,V targets<V:M -> loss",
                "nothing",
                3,
            ),
            "count_correct": (
                "number of correct rows of logits",
                "logits:M,V targets<V:M -> count",
                "nothing",
                3,
            ),
            "row_maximum": (
                "largest logit of each row in a slice",
                "logits:M,V -> maxima:M",
                "nothing",
                1,
            ),
            "row_exponentials": (
                "sum of exponentials of each row in a slice",
                "logits:M,V targets<V:M first=0 maxima@row_maximum|M -> facts:2,M",
                "nothing",
                1,
            ),
            "row_argmax": (
                "index of the largest logit of each row in a slice",
                "logits:M,V first=0 maxima@row_maximum|M -> places:M",
                "nothing",
                1,
            ),
            "cross_entropy_split": (
                "cross_entropy of a slice of the vocabulary",
                "logits:M,V targets<V:M first=0 maxima@row_maximum|M facts@row_exponentials|2,M scale=0.125 -> loss dlogits:M,V",
                "dlogits",
                3,
            ),
            "count_correct_split": (
                "count_correct of a split vocabulary",
                "places@row_argmax|M targets<V:M -> count",
                "nothing",
                3,
            ),
        },
    ),
    **_built_in(
        reference.steps,
        host.steps,
        cuda.steps,
        otherwise=host.steps.in_blocks,
        rows={
            "gradient_facts": (
                "sum of squares, and number of elements that are not finite",
                "x:L -> squares nonfinite",
                "nothing",
                2,
            ),
            "sgd": (
                "a step of stochastic gradient descent",
                "p:L g:L scale=0.7 lr=0.1 weight_decay=0.01 -> p",
                "mirror",
                1,
            ),
            "momentum": (
                "a step with momentum",
                "p:L g:L m:L scale=0.7 lr=0.1 beta=0.9 weight_decay=0.01 -> p m",
                "mirror",
                1,
            ),
            "nesterov": (
                "a step with Nesterov momentum",
                "p:L g:L m:L scale=0.7 lr=0.1 beta=0.9 weight_decay=0.01 -> p m",
                "mirror",
                1,
            ),
            "lion": (
                "a step of Lion",
                "p:L g:L m:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.99 weight_decay=0.1 -> p m",
                "mirror",
                1,
            ),
            "adam": (
                "a step of Adam",
                "p:L g:L m:L v>0:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3 -> p m v",
                "mirror",
                1,
            ),
            "adamw": (
                "a step of AdamW",
                "p:L g:L m:L v>0:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3 -> p m v",
                "mirror",
                1,
            ),
            "adamw8bit": (
                "a step of AdamW with moments of 8 bits",
                "p:L g:L m%:L v%:L m_scales>0:L|0 v_scales>0:L|0 "
                "scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3 lead=32 -> p m v",
                "mirror",
                1,
            ),
        },
    ),
    **_built_in(
        reference.tensor_steps,
        host.tensor_steps,
        cuda.tensor_steps,
        {
            "add_squares": ("a sum of squares", "x:L squares:1 -> squares", "nothing", 2),
            "lamb_moments": (
                "moments of LAMB, and squares of parameters and update",
                "p:L g:L m:L v>0:L squares:2 scale=0.7 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3 -> m v squares",
                "nothing",
                2,
            ),
            "lamb": (
                "a step of LAMB",
                "p:L m:L v>0:L squares>0:2 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3 -> p",
                "mirror",
                1,
            ),
            "adafactor_squares": (
                "squares of a gradient, summed by rows and by columns",
                "g:M,N rows<M!:M columns<N!:N row_squares:M column_squares:N scale=0.7 -> row_squares column_squares",
                "nothing",
                3,
            ),
            "adafactor_variances": (
                "the factored variance of Adafactor",
                "row>0:K column>0:N row_squares>0:K column_squares>0:N weight=0.3 eps=1e-08 "
                "-> row column row_squares column_squares",
                "nothing",
                1,
            ),
            "adafactor_update": (
                "squares of Adafactor's update",
                "g:M,N rows<M!:M columns<N!:N row_factors>0:M column_factors>0:N squares:1 scale=0.7 eps=1e-08 -> squares",
                "nothing",
                2,
            ),
            "adafactor": (
                "a step of Adafactor",
                "p:M,N g:M,N rows<M!:M columns<N!:N row_factors>0:M column_factors>0:N parameter_squares>0:1 "
                "update_squares>0:1 count=21 scale=0.7 lr=0.1 rate=0.05 eps=1e-08 weight_decay=0.1 -> p",
                "mirror",
                1,
            ),
            "muon_momentum": (
                "Nesterov momentum of Muon",
                "g:L m:L out:L|0 scale=0.7 momentum=0.9 -> m out",
                "nothing",
                1,
            ),
            "muon": (
                "a step of Muon",
                "p:L update:L lr=0.1 ratio=1.5 weight_decay=0.1 -> p",
                "mirror",
                1,
            ),
            "newton_schulz": (
                "nearly the nearest semi-orthogonal matrix",
                "x:K,N steps=2 -> x",
                "nothing",
                9,
            ),
        },
    ),
)
"""Operations by name.

Sizes in the operands:

B, T, C  batch, tokens, channels
H, D     heads, channels of a head
M, K, N  rows, inputs, outputs
V        vocabulary
L        length of a flat array
"""
