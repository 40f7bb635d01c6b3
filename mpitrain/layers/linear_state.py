"""The state that a linear operation saves for its backward: its input, and perhaps more."""

from __future__ import annotations  # help() then prints signatures as they are written here

from typing import Any

from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops


def state_of(ops: Ops, x: Any, weight: Any, bias: Any, arena: Arena) -> Any:
    """Return the state that `ops.linear` saves, without its product.

    The product of no rows has the same state, but for its input.
    """
    _, state = ops.linear(x[:0], weight, bias, arena)
    return with_input(state, x)


def input_of(saved: Any) -> Any:
    """Return the input in a linear operation's saved state.

    The state is the input itself, or a tuple; the first entry of the tuple is again such a state.
    """
    return input_of(saved[0]) if isinstance(saved, tuple) else saved


def with_input(saved: Any, x: Any) -> Any:
    """Return a linear operation's saved state with its input replaced by x."""
    return (with_input(saved[0], x), *saved[1:]) if isinstance(saved, tuple) else x
