"""Where arrays live: host memory through NumPy. A backend is the only thing that knows how they get there and back."""

from typing import Any, Protocol

import numpy as np

from mpitrain.arena import Arena


class Backend(Protocol):
    """Moves arrays between host memory and the memory that the ops of `kind` work on."""

    kind: str
    """As in device.kind, and as `ops_for` takes it."""

    def arena(self) -> Arena:
        """A fresh arena of this backend's memory."""

    def from_host(self, array: np.ndarray) -> Any:
        """The array in this backend's memory; may be the same one."""

    def to_host(self, array: Any) -> np.ndarray:
        """The array in host memory; may be the same one."""

    def synchronize(self) -> None:
        """Wait for all the work that was started here."""


class HostBackend:
    """NumPy arrays in host memory: nothing to move, nothing to wait for."""

    kind = "cpu"

    def arena(self) -> Arena:
        return Arena()

    def from_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def synchronize(self) -> None:
        pass


def backend_for(kind: str) -> Backend:
    """The backend of a resolved device.kind."""
    return {"cpu": HostBackend}[kind]()
