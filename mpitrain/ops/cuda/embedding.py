"""Token and position embedding."""

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import INDEXED, ByDtypes, element, index, result
from mpitrain.ops.cuda.grids import POINTWISE, ROWS, blocks, row_blocks

TABLES = ByDtypes(lambda dx, dtable, tokens: element(dx) | result(dtable, dx) | index(tokens))
POSITIONS = ByDtypes(lambda dx, dpositions: element(dx) | result(dpositions, dx))


def embedding(kernels: Kernels, tokens, table, positions, arena, first=0, out=None):
    """Return (x, saved) with x[b, t] = table[tokens[b, t] - first] + positions[t].

    A token outside the table counts as a row of zeros.
    """
    vocab, width = table.shape
    x = arena.take((*tokens.shape, width), table.dtype) if out is None else out
    kernels.launch(
        "embedding",
        row_blocks(tokens.size),
        ROWS,
        (tokens.size, tokens.shape[1], width, vocab, first, tokens, table, positions, x),
        macros=INDEXED[table.dtype, tokens.dtype],
        fresh="x",
    )
    return x, (tokens, first)


def embedding_backward_table(kernels: Kernels, dx, saved, dtable, accumulate, arena):
    """Add each row of dx to its token's row of dtable, if the table has that row."""
    tokens, first = saved
    vocab, width = dtable.shape
    macros = TABLES[dx.dtype, dtable.dtype, tokens.dtype]
    kernels.launch(
        "embedding_backward_table",
        (-(-vocab // 32), -(-width // (32 * macros.run))),
        ROWS,
        (tokens.size, width, vocab, first, tokens, dx, float(accumulate), dtable),
        macros=macros,
        fresh="" if accumulate else "dtable",
    )


def embedding_backward_positions(kernels: Kernels, dx, dpositions, accumulate, arena):
    """Write or add the sum of dx over the batch; positions from T on have gradient 0."""
    batch, length, width = dx.shape
    macros = POSITIONS[dx.dtype, dpositions.dtype]
    kernels.launch(
        "embedding_backward_positions",
        blocks(dpositions.size, macros.run),
        POINTWISE,
        (batch, length, width, len(dpositions), dx, float(accumulate), dpositions),
        macros=macros,
        fresh="" if accumulate else "dpositions",
    )
