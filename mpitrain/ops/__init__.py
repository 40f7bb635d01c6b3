"""Numerical operations: one set of names, several backends.

`reference` defines each operation in plain NumPy. The other backends (`host`, `cuda`) have the same
names and signatures, and are tested against it. `table` has a row for each operation, and `bodies`
makes the operations of a backend from the rows. A forward function returns (output, saved). The matching
backward function takes `saved`. The content of `saved` is private to the backend; it may refer to
the output. Buffers that outlive a call, and large scratch, come from `arena`.
"""

from mpitrain.ops.table import OPERATIONS, Operation, Ops

__all__ = ["OPERATIONS", "Operation", "Ops"]
