"""Numerical operations: one name, several bodies.

`reference` is the meaning of each operation, in plain NumPy; the other bodies have the same names and signatures and
are tested against it. A forward returns (output, saved) and the matching backward takes `saved`, whose contents are
private to the body. Buffers that outlive a call, and large scratch, come from `arena`.
"""

from importlib import import_module
from types import ModuleType, SimpleNamespace

from mpitrain.errors import ConfigError
from mpitrain.kernels import engines

BODIES = {
    "reference": "mpitrain.ops.reference",
    "cpu": "mpitrain.ops.host",
}
"""Bodies that are modules. That of our kernels, for the kinds in `engines.KINDS`, is bound to what runs them."""


def ops_for(kind: str) -> ModuleType | SimpleNamespace:
    """The body for a kind of device; raises ConfigError for a kind that has none."""
    if kind in engines.KINDS:
        return import_module("mpitrain.ops.cuda").body(engines.kernels_for(kind))
    if kind not in BODIES:
        raise ConfigError(f"there are no operations for device kind {kind!r}.",
                          f"Choose one of {', '.join((*BODIES, *engines.KINDS))}.")
    return import_module(BODIES[kind])
