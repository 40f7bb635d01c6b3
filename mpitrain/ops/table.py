"""The table of all operations: one row each, which every reader looks up by name."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from mpitrain.ops import host, reference
from mpitrain.ops.operands import operands
from mpitrain.tables import Table


class Ops(Protocol):
    """The operations of one backend by name, as PyTorch's ATen kernels of one device.

    Notes
    -----
    `reference` documents each operation with shapes. `OPERATIONS` has a row for each.

    A backward is split in two. The input half returns (dx, pending). The weight halves take
    `pending`, so that they can run later or be left out.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


class Operation(NamedTuple):
    """Descriptor of an operation; a row of `OPERATIONS`.

    help       one phrase
    operands   arguments and results of an example call, with shapes: see `operands`
    rounds     the results or arguments that half precision rounds on the host, as words, or "nothing"
    host       the operation on NumPy arrays
    launches   kernel launches of the example, if no sum of a product is split; 0 without `cuda`
    cuda       the operation on kernels, or the name of the file in `ops/cuda` that has it; it takes
               `Kernels` first. None: devices refuse the operation
    reference  the definition, in plain NumPy; None: that is `host`
    products   multiply-adds of its matrix products, as a dim of the operands: MNK; empty: none.
               Causal attention counts whole squares of scores, as PaLM's appendix B does
    takes_runs whether `cuda` takes `GroupRuns` in place of a weight decay
    cuda_takes what `cuda` takes second: "multiply", the matrix product that device.gemm chooses;
               "numbers", the device's `LaunchNumbers`; empty: its first operand

    A plugin adds a row as it is imported, before a backend is made: `OPERATIONS["scale"] =
    Operation(...)`.
    """

    help: str
    operands: str
    rounds: str
    host: Callable[..., Any]
    launches: int = 0
    cuda: Callable[..., Any] | str | None = None
    reference: Callable[..., Any] | None = None
    products: str = ""
    takes_runs: bool = False
    cuda_takes: str = ""

    def nbytes(self, itemsize: int = 4, **sizes: int) -> int:
        """Return the bytes that a device reads and writes in the example, each array once.

        itemsize  bytes of an element
        sizes     the size of each letter
        """
        return operands(self.operands).nbytes(sizes, itemsize)


BUILT_IN = """
[layers: multiply]
linear | a matrix product with a bias and a residual | 1 | y | MNK
    x:M,K w:N,K b:N -> y:M,N saved
logits | a linear layer before a loss | 1 | y | MNK
    x:M,K w:N,K b:N -> y:M,N saved
linear_gelu | a linear layer with GELU | 1 | y | MNK
    x:M,K w:N,K b:N -> y:M,N saved:M,N
linear_relu | a linear layer with ReLU | 1 | y | MNK
    x:M,K w:N,K b:N -> y:M,N saved
linear_backward_input | input gradient of linear | 1 | dx | MNK
    dy:M,N w:N,K saved@linear -> dx:M,K pending
gelu_linear_backward_input | input gradient of linear and of the GELU before it | 1 | dz | MNK
    dy:M,N w:N,K saved@linear before@gelu|M,K -> dz:M,K pending
linear_gelu_backward_input | input gradient of linear_gelu | 2 | dx | MNK
    dy:M,N w:N,K saved@linear_gelu|M,N -> dx:M,K pending
linear_relu_backward_input | input gradient of linear_relu | 2 | dx | MNK
    dy:M,N w:N,K saved@linear_relu|M,N -> dx:M,K pending
linear_backward_weight | weight gradient of a linear layer | 1 | nothing | MNK
    pending@linear_backward_input|M,N+M,K dw:N,K accumulate=1 -> dw
[layers]
linear_backward_bias | bias gradient of a linear layer | 1 | nothing
    pending@linear_backward_input|N db:N accumulate=1 -> db
add | a sum of two arrays | 1 | out
    a:L b:L out:L|0 -> out
weighted_sum | a sum of two arrays, each times a number | 1 | nothing
    a:L alpha=0.75 b:L beta=-0.5 out:L|0 -> out
add_bias | a sum of rows, a bias and a residual | 1 | out
    x:M,N b:N out:M,N|0 -> out
dequantize | a weight of 8 bits as numbers | 1 | out
    q%:N,K scale:N out:N,K|0 -> out
gelu | GELU alone | 1 | y
    z:M,K -> y:M,K saved
gelu_backward | gradient of gelu | 1 | dz
    dy:M,K saved@gelu|M,K -> dz:M,K
gelu_erf | GELU with the error function | 1 | y
    z:M,K -> y:M,K saved
gelu_erf_backward | gradient of gelu_erf | 1 | dz
    dy:M,K saved@gelu_erf|M,K -> dz:M,K
tanh | hyperbolic tangent | 1 | y
    z:M,K -> y:M,K saved
tanh_backward | gradient of tanh | 1 | dz
    dy:M,K saved@tanh|M,K -> dz:M,K
relu | ReLU alone | 1 | y
    z:M,K -> y:M,K saved
relu_backward | gradient of relu | 1 | dz
    dy:M,K saved@relu|M,K -> dz:M,K
layer_norm | layer normalisation | 1 | y
    x:M,C gain:C bias:C epsilon=0.25 -> y:M,C saved
layer_norm_backward_input | input gradient of layer_norm | 1 | dx
    dy:M,C gain:C saved@layer_norm|M,C -> dx:M,C pending
layer_norm_backward_weight | gain and bias gradients of layer_norm | 1 | nothing
    pending@layer_norm_backward_input|2,C dgain:C dbias:C accumulate=1 -> dgain dbias
rms_norm | root mean square normalisation | 1 | y
    x:M,C gain:C epsilon=0.25 -> y:M,C saved
rms_norm_backward_input | input gradient of rms_norm | 1 | dx
    dy:M,C gain:C saved@rms_norm|M,C -> dx:M,C pending
rms_norm_backward_weight | gain gradient of rms_norm | 1 | nothing
    pending@rms_norm_backward_input|C dgain:C accumulate=1 -> dgain
swiglu | one half of each row, times SiLU of the other | 1 | y
    x:M,2N -> y:M,N saved
swiglu_backward | gradient of swiglu | 1 | dx
    dy:M,N saved@swiglu|M,2N -> dx:M,2N
embedding | rows of a table, plus positions | 1 | x
    tokens<V:B,T table:V,C|B,T,C positions:T,C -> x:B,T,C saved
embedding_backward_table | gradient of an embedding's table | 1 | nothing
    dx:B,T,C saved@embedding dtable:V,C|0 accumulate=0 -> dtable
embedding_backward_positions | gradient of an embedding's positions | 1 | nothing
    dx:B,T,C dpositions:T,C accumulate=1 -> dpositions
[attention]
attention | attention, causal unless asked otherwise | 1 | y | 2BTTHD
    q:B,T,HD kv:B,T,2ED heads=H -> y:B,T,HD saved
attention_next | attention of new tokens over stored keys and values | 1 | y | 4BTTHD
    q:B,T,HD kv:B,T,2ED keys:B,E,2T,D values:B,E,2T,D past<T:B heads=H -> y:B,T,HD keys values
attention_backward | gradient of attention | 3 | dq dkv | 4BTTHD
    dy:B,T,DH saved@attention|B,T,DH+B,T,2ED+B,T,DH dq:B,T,DH|0 dkv:B,T,2ED|0 -> dq dkv
attention_part | attention to some of the keys, with what joins such parts | 1 | y | 2BTKHD
    q:B,T,HD kv:B,K,2ED heads=H -> y:B,T,HD saved
attention_part_backward | gradient of attention_part | 3 | dq dkv | 4BTKHD
    dy:B,T,DH saved@attention_part|B,T,DH q:B,T,HD kv:B,K,2ED dq:B,T,DH|0 dkv:B,K,2ED|0
    -> dq dkv
[layers: numbers]
rotate | rotary positions of some heads | 1 | y
    x:B,T,2HD heads=H turned=1 theta=100.0 context=T scaling=(2,1,4,9) direction=1 -> y:B,T,2HD
dropout | random zeros, plus a residual | 1 | y
    x:M,C key=(5,3) step=2 first=7 columns=C rate=0.25 -> y:M,C
[attention: numbers]
attention_dropout | attention with random zeros | 1 | y | 2BTTHD
    q:B,T,HD kv:B,T,2ED heads=H key=(5,3) step=2 first=7 every=11 rate=0.25 -> y:B,T,HD saved
[attention]
attention_dropout_backward | gradient of attention_dropout | 3 | dq dkv | 4BTTHD
    dy:B,T,DH saved@attention_dropout|B,T,DH+B,T,2ED+B,T,DH dq:B,T,DH|0 dkv:B,T,2ED|0 -> dq dkv
[layers: multiply]
conv2d | a convolution of images with a bias | 2 | y | BIJSSFG
    x:B,I,J,F w:G,SSF b:G side=S -> y:B,I,J,G saved
conv2d_backward_input | input gradient of conv2d | 3 | dx | BIJSSFG
    dy:B,I,J,G w:G,SSF side=S -> dx:B,I,J,F
conv2d_backward_weight | weight gradient of conv2d | 2 | nothing | BIJSSFG
    dy:B,I,J,G saved@conv2d|B,I,J,F dw:G,SSF side=S accumulate=1 -> dw
[layers]
conv2d_backward_bias | bias gradient of conv2d | 2 | nothing
    dy:B,I,J,G db:G accumulate=1 -> db
max_pool | the largest number of each window of images | 1 | nothing
    x:B,PI,PJ,F size=P -> y:B,I,J,F saved%:B,I,J,F
max_pool_backward | gradient of max_pool | 1 | nothing
    dy:B,I,J,F saved@max_pool size=P -> dx:B,PI,PJ,F
[loss]
cross_entropy | loss and gradient of logits | 3 | dlogits
    logits:M,V targets<V:M scale=0.125 -> loss dlogits:M,V
cross_entropy_loss | loss of logits alone | 3 | nothing
    logits:M,V targets<V:M -> loss
count_correct | number of correct rows of logits | 3 | nothing
    logits:M,V targets<V:M -> count
row_maximum | largest logit of each row in a slice | 1 | nothing
    logits:M,V -> maxima:M
row_exponentials | sum of exponentials of each row in a slice | 1 | nothing
    logits:M,V targets<V:M first=0 maxima@row_maximum|M -> facts:2,M
row_argmax | index of the largest logit of each row in a slice | 1 | nothing
    logits:M,V first=0 maxima@row_maximum|M -> places:M
cross_entropy_split | cross_entropy of a slice of the vocabulary | 3 | dlogits
    logits:M,V targets<V:M first=0 maxima@row_maximum|M facts@row_exponentials|2,M scale=0.125
    -> loss dlogits:M,V
count_correct_split | count_correct of a split vocabulary | 3 | nothing
    places@row_argmax|M targets<V:M -> count
squared_error | squared error of numbers and its gradient | 3 | dpredictions
    predictions:L targets:L scale=0.125 -> loss dpredictions:L
absolute_error | absolute error of numbers and its gradient | 3 | dpredictions
    predictions:L targets:L scale=0.125 -> loss dpredictions:L
binary_cross_entropy | loss and gradient of logits of one bit | 3 | dpredictions
    predictions:L targets:L scale=0.125 -> loss dpredictions:L
[steps]
gradient_facts | sum of squares, and number of elements that are not finite | 2 | nothing
    x:L -> squares nonfinite
[steps: numbers]
sgd | a step of stochastic gradient descent | 1 | mirror
    p:L g:L scale=0.7 lr=0.1 weight_decay=0.01 -> p
momentum | a step with momentum | 1 | mirror
    p:L g:L m:L scale=0.7 lr=0.1 beta=0.9 weight_decay=0.01 -> p m
nesterov | a step with Nesterov momentum | 1 | mirror
    p:L g:L m:L scale=0.7 lr=0.1 beta=0.9 weight_decay=0.01 -> p m
lion | a step of Lion | 1 | mirror
    p:L g:L m:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.99 weight_decay=0.1 -> p m
adam | a step of Adam | 1 | mirror
    p:L g:L m:L v>0:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3
    -> p m v
adamw | a step of AdamW | 1 | mirror
    p:L g:L m:L v>0:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3
    -> p m v
adamw8bit | a step of AdamW with moments of 8 bits | 1 | mirror
    p:L g:L m%:L v%:L m_scales>0:L|0 v_scales>0:L|0 scale=0.7 lr=0.1 beta1=0.9 beta2=0.95
    eps=1e-08 weight_decay=0.1 step=3 lead=32 -> p m v
[steps]
add_squares | a sum of squares | 2 | nothing
    x:L squares:1 -> squares
[steps: numbers]
lamb_moments | moments of LAMB, and squares of parameters and update | 2 | nothing
    p:L g:L m:L v>0:L squares:2 scale=0.7 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1
    step=3 -> m v squares
lamb | a step of LAMB | 1 | mirror
    p:L m:L v>0:L squares>0:2 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3 ->
    p
adafactor_squares | squares of a gradient, summed by rows and by columns | 3 | nothing
    g:M,N rows<M!:M columns<N!:N row_squares:M column_squares:N scale=0.7 -> row_squares
    column_squares
adafactor_variances | the factored variance of Adafactor | 1 | nothing
    row>0:K column>0:N row_squares>0:K column_squares>0:N weight=0.3 eps=1e-08 -> row column
    row_squares column_squares
adafactor_update | squares of Adafactor's update | 2 | nothing
    g:M,N rows<M!:M columns<N!:N row_factors>0:M column_factors>0:N squares:1 scale=0.7
    eps=1e-08 -> squares
adafactor | a step of Adafactor | 1 | mirror
    p:M,N g:M,N rows<M!:M columns<N!:N row_factors>0:M column_factors>0:N
    parameter_squares>0:1 update_squares>0:1 count=21 scale=0.7 lr=0.1 rate=0.05 eps=1e-08
    weight_decay=0.1 -> p
muon_momentum | Nesterov momentum of Muon | 1 | nothing
    g:L m:L out:L|0 scale=0.7 momentum=0.9 -> m out
muon | a step of Muon | 1 | mirror
    p:L update:L lr=0.1 ratio=1.5 weight_decay=0.1 -> p
[steps: multiply]
newton_schulz | nearly the nearest semi-orthogonal matrix | 9 | nothing
    x:K,N steps=2 -> x
"""
"""Rows of the operations that `reference` and `cuda` have in files of equal names.

    [file of these operations: what their `cuda` takes after `kernels`]
    name | help | launches | rounds | products
        operands

B, T, C     batch, tokens, channels
H, E, D     query heads, heads of keys and values, channels of a head
M, K, N     rows, inputs (or keys of a part of attention), outputs
V           vocabulary
L           length of a flat array
I, J, F, G  rows and columns of an image, channels in and out
S, P        rows (and columns) of a convolution's kernel, and of a pooling window
"""

TAKE_RUNS = ("sgd", "momentum", "nesterov", "lion", "adam", "adamw")
"""The steps whose `cuda` accepts `GroupRuns` as its argument weight_decay."""


def _built_in() -> Iterator[tuple[str, Operation]]:
    for section in BUILT_IN.strip().removeprefix("[").split("\n["):
        header, _, rows = section.partition("]\n")
        file, _, second = header.partition(": ")
        definitions, tuned = getattr(reference, file), getattr(host, file)
        for row in rows.replace("\n    ", "\t").splitlines():
            first, *line = row.split("\t")
            name, phrase, launches, rounds, *products = first.split(" | ")
            yield (
                name,
                Operation(
                    phrase,
                    " ".join(line),
                    rounds,
                    getattr(tuned, name, None) or getattr(definitions, name),
                    int(launches),
                    file,
                    getattr(definitions, name),
                    "".join(products),
                    name in TAKE_RUNS,
                    second,
                ),
            )


OPERATIONS: Table[str, Operation] = Table(_built_in())
"""Operations by name."""
