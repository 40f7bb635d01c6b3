"""Datasets of HDF5 files. A file that points to others is refused: ranks compare the named file alone."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.errors import DataError
from mpitrain.files import check_regular

FORM = "Write hdf5:FILE:/x,/y."
HOPS = 32
"""Soft links that are followed on the way to a dataset."""


class Dataset:
    """A dataset of HDF5, whose rows are read by number; DataError if it is damaged."""

    def __init__(self, path: Path, name: str, inner: Any):
        self._path, self._name, self._inner = path, name, inner
        with _sound(f"The dataset {name} of {path}"):
            self.dtype, self.shape = np.dtype(inner.dtype), tuple(inner.shape or ())
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        with _sound(f"The dataset {self._name} of {self._path}"):
            return np.asarray(self._inner[rows])


def datasets(path: Path, names: Sequence[str]) -> list[Dataset]:
    """Open datasets of an HDF5 file.

    raises  DataError if the file is damaged, lacks one of them, or points to another file
    """
    try:
        import h5py
    except ImportError:
        raise DataError(
            "data.source hdf5 needs h5py, which is not installed.", "pip install 'mpitrain[hdf5]'"
        ) from None
    with _sound(str(path)):
        check_regular(path)
        file = h5py.File(path, "r")
        opened = []
        for name in names:
            inner = _located(file, name, path, names)
            if not isinstance(inner, h5py.Dataset):
                raise DataError(
                    f"{path} must have the dataset {name}, but has {', '.join(file) or 'none'}.",
                    FORM,
                )
            if inner.is_virtual:
                others = sorted({source.file_name for source in inner.virtual_sources()})
                raise _elsewhere(
                    path, names, f"{name} is virtual, with rows of {', '.join(others)}"
                )
            if inner.external:
                others = sorted({str(entry[0]) for entry in inner.external})
                raise _elsewhere(path, names, f"{name} has its rows in {', '.join(others)}")
            opened.append(Dataset(path, name, inner))
    return opened


def _located(file: Any, name: str, path: Path, names: Sequence[str]) -> Any:
    """Return the object with a name, or None; a link to another file is refused, not opened."""
    import h5py

    here, parts, hops = file, name.split("/"), 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        link = here.get(part, getlink=True) if isinstance(here, h5py.Group) else None
        if isinstance(link, h5py.ExternalLink):
            raise _elsewhere(path, names, f"{name} is {link.path} of {link.filename}")
        if isinstance(link, h5py.SoftLink):
            if (hops := hops + 1) > HOPS:
                raise RuntimeError(f"{name} is a link that leads to itself")
            here = file if link.path.startswith("/") else here
            parts = [*link.path.split("/"), *parts]
        elif link is None:
            return None
        else:
            here = here[part]
    return here


def _elsewhere(path: Path, names: Sequence[str], reason: str) -> DataError:
    """Return the error for a file that points to others, with the command that makes one file of them."""
    code = (
        f'import h5py; a = h5py.File({json.dumps(str(path))}); b = h5py.File("one.h5", "x"); '
        f"[b.create_dataset(name, data=a[name]) for name in {json.dumps([*dict.fromkeys(names)])}]"
    )
    return DataError(
        f"{path} must hold its rows itself, as ranks compare only this file, but {reason}.",
        f"Make one file of them, one.h5: python -c {shlex.quote(code)}",
    )


@contextmanager
def _sound(what: str) -> Iterator[None]:
    """Turn the errors of h5py about damaged files into one DataError."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeDecodeError) as error:
        known = error.strerror if isinstance(error, OSError) else ""
        reason = " ".join((known or str(error)).split())[:200].rstrip(".")
        raise DataError(
            f"{what} cannot be read as HDF5: {reason}.", f"Copy it again. {FORM}"
        ) from None
