"""The definition of each operation, forward and backward, in plain NumPy, with its row above it.

B batch, T tokens, C channels, H heads, D = C / H, V vocabulary;
M rows, K inputs, N outputs of a matrix product.

Types: all arrays of a call have one dtype, float32 or float64. Tokens and targets are signed
integers. Scalars are Python numbers.

Range checks: the code that reads data checks that tokens and targets lie in the vocabulary. No
operation checks it. On a slice of a split vocabulary, a wrong number looks like an entry of another
slice. Slices are runs of entries, ragged or empty. `first` is the index of a slice's first row or
column in the whole vocabulary.

Saved values: every forward that has a backward returns (output, saved). A backward uses its `saved`
once. It may overwrite arrays that only `saved` refers to. `saved` may refer to the inputs and the
output, so these must not change until the backward has run. It never refers to the output of
`linear`. An operation changes an input only where its docstring says so.

Arguments of several operations:

accumulate  BLAS's beta: True adds to the gradient that is passed in, False overwrites it
arena       gives the buffers in the tuned backends; here, NumPy allocates them
out         a contiguous array for the first result, of its shape and dtype; None: a buffer from the
            arena
residual    an array that is added to the first result, of its shape and dtype; None for no addition
pending     the second result of an input half of a backward; the weight halves read it

`linear_gelu` and `linear_relu` save a pair: the value that `linear` saves, and the data for the
derivative of the activation.
"""

from mpitrain.ops.reference import attention, experts, layers, steps
from mpitrain.ops.table import ROWS

__all__ = ["ROWS", "attention", "experts", "layers", "steps"]
