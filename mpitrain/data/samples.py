"""Sample sources, shuffled anew in each epoch: scikit-learn's digits, and images in MNIST files."""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.rows import Shuffled
from mpitrain.data.source import Form, Request
from mpitrain.errors import DataError
from mpitrain.files import contents

PARTS = ("train", "t10k")
"""The beginnings of the names of MNIST-format files."""


class SampleSource(Shuffled):
    """A data source of labelled samples in memory.

    inputs are features (B, F), images (B, C, H, W) or texts (B, T); targets are (B,) int64. An epoch
    has each sample once.

    form     None: as the shape of the samples says
    inputs   number of tokens of texts; 0: of features or pixels
    classes  0: as the targets say
    labels   names of the classes, if they have names
    """

    def __init__(
        self,
        train: tuple[np.ndarray, np.ndarray],
        test: tuple[np.ndarray, np.ndarray],
        form: Form | None = None,
        inputs: int = 0,
        classes: int = 0,
        labels: Sequence[str] = (),
    ):
        self._parts, self.labels = (train, test), labels
        self.samples, *shape = train[0].shape
        self.shape: tuple[int, ...] = tuple(shape)
        self.inputs = inputs or math.prod(shape)
        self.form: Form = form or ("images" if len(shape) == 3 else "samples")
        super().__init__(self.samples)
        self.classes = classes or max(1, int(max(train[1].max(), test[1].max())) + 1)
        self.held_out = len(test[1])
        self.amounts: dict[str, Any] = {
            "samples": self.samples,
            "held_out_samples": self.held_out,
            "classes": self.classes,
        }

    def _rows(self, part: int, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        samples, labels = self._parts[part]
        return samples[chosen], labels[chosen]


def open_digits(request: Request) -> SampleSource:
    """Return the 1797 handwritten 8 x 8 digits of scikit-learn, scaled to 0..1.

    Every fifth is a test image. As samples, an image is a row of 64 features.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(
            "data.source digits needs scikit-learn, which is not installed.",
            "pip install scikit-learn",
        )
    # The file alone: each rank would take more than 1 s to import scikit-learn.
    rows = np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    images, labels = (rows[:, :-1] / 16).astype(request.dtype), rows[:, -1].astype(np.int64)
    if request.form == "images":
        images = images.reshape(-1, 1, 8, 8)
    test = np.arange(len(labels)) % 5 == 4
    return SampleSource((images[~test], labels[~test]), (images[test], labels[test]))


def open_idx(request: Request) -> SampleSource:
    """Return the images of four MNIST-format files, gzipped or not, with pixels scaled to 0..1.

    request.place  the folder of train-images-idx3-ubyte and its three companions
    request.form   "images"; or "samples", where an image is a row of features
    """
    folder, parts, sizes = Path(request.place), {}, set()
    for part in PARTS:
        images = _idx_array(folder, f"{part}-images-idx3-ubyte", 3)
        labels = _idx_array(folder, f"{part}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise DataError(
                f"{folder} has {len(images)} {part} images but {len(labels)} labels.",
                "Every image needs a label.",
            )
        sizes.add(images.shape[1:])
        pixels = images[:, None] if request.form == "images" else images.reshape(len(images), -1)
        parts[part] = pixels.astype(request.dtype) / 255, labels.astype(np.int64)
    if len(sizes) > 1:
        raise DataError(
            f"Train and test images in {folder} differ in size.", "Use files of one data set."
        )
    return SampleSource(parts["train"], parts["t10k"])


def idx_files(place: str) -> list[Path]:
    names = (f"{part}-{kind}-ubyte" for part in PARTS for kind in ("images-idx3", "labels-idx1"))
    return [path for name in names if (path := _idx_file(Path(place), name))]


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)


def _idx_array(folder: Path, name: str, dims: int) -> np.ndarray:
    """Read one idx file: two zero bytes, type 8 (uint8), the number of dims, sizes, data.

    The sizes are big-endian uint32.
    """
    path = _idx_file(folder, name)
    if path is None:
        raise DataError(
            f"{folder} holds neither {name} nor {name}.gz.",
            "Name a folder with the four MNIST-format files.",
        )
    try:
        raw = gzip.decompress(contents(path)) if path.suffix == ".gz" else contents(path)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read: {reason}.", "Copy the file again.") from None
    head = 4 + 4 * dims
    if len(raw) < head or raw[:4] != bytes((0, 0, 8, dims)):
        raise DataError(
            f"{path} is not an idx file of {dims} dims of bytes.", "Use files in the MNIST format."
        )
    shape = struct.unpack(f">{dims}I", raw[4:head])
    if len(raw) - head != math.prod(shape):  # NumPy's product would wrap around at 64 bits.
        raise DataError(
            f"{path} should hold {math.prod(shape)} bytes after its header, but holds {len(raw) - head}.",
            "Copy the file again.",
        )
    if 0 in shape:
        raise DataError(
            f"{path} must have elements, but its dims are {' x '.join(map(str, shape))}.",
            "Every image needs pixels and a label.",
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)
