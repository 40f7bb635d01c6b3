"""Numerical operations: one set of names, several backends.

`reference` defines each operation in plain NumPy, and gives it its row. The other backends (`host`,
`cuda`) have the same names and signatures, and are tested against it. `device` makes the operations
of a backend from the rows. A forward function returns (output, saved). The matching
backward function takes `saved`. The content of `saved` is private to the backend; it may refer to
the output. Buffers that outlive a call, and large scratch, come from `arena`.
"""

from mpitrain.ops.reference import ROWS
from mpitrain.ops.table import Operation, Ops
from mpitrain.tables import Table

OPERATIONS: Table[str, Operation] = Table(ROWS)
"""Operations by name."""

__all__ = ["OPERATIONS", "Operation", "Ops"]
