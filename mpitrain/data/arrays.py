"""Arrays as data: features or images x, and targets y, of NumPy, HDF5 and csv files.

Ranks share the scan of all rows: it finds numbers that are not finite, and the means and deviations
with which each rank scales the rows that it reads. A run directory keeps them (`Scaling`).

B rows of a batch, F features, C channels, H height, W width, K outputs.
"""

import csv
import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from mpitrain.data.hdf5 import datasets
from mpitrain.data.rows import Shuffled
from mpitrain.data.source import IGNORED, Form, Request, Targets
from mpitrain.data.token_files import TENTH, UNREADABLE
from mpitrain.errors import DataError, gigabytes
from mpitrain.files import PARSING, check_regular, paths_of, reading
from mpitrain.machine.process import free_memory

BLOCK = 1 << 22
"""The number of elements that a scan reads at a time."""
LEAST = 1e-12
"""A deviation below this part of the mean is rounding: the numbers are constant."""


class Arrays(NamedTuple):
    """Opened arrays, of which rows are read by number: memory maps, HDF5 datasets, or in memory.

    name  of their source, for messages
    x     (rows, ...)
    y     (rows, ...), or None where only predictions are wanted
    names of the columns of x and of y, where the file has them
    """

    name: str
    x: Any
    y: Any
    names: tuple[list[str], list[str]] = ([], [])


class Scaling(BaseModel):
    """What a scan finds in the rows to train on; numbers are scaled as (x - mean) / deviation.

    mean, deviation      of the F features, or of the C channels of images; not scaled: 0 and 1
    y_mean, y_deviation  of the K outputs
    y_shape              of the targets of a row
    classes              largest class + 1, or K
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    mean: list[float]
    deviation: list[float]
    y_mean: list[float]
    y_deviation: list[float]
    y_shape: list[int]
    classes: int


def npy_files(place: str) -> list[Path]:
    return [*map(Path, paths_of(place))]


def file_before_colon(place: str) -> list[Path]:
    return [Path(place.rpartition(":")[0] or place)]


def npy(name: str) -> Arrays:
    """Open `npy:X,Y`: two .npy files, which are memory maps."""
    return _two(name, [_mapped(path) for path in npy_files(name.partition(":")[2])])


def _mapped(path: Path) -> np.ndarray:
    try:
        check_regular(path)
        with PARSING:
            return np.lib.format.open_memmap(path, mode="r")
    except (OSError, OverflowError, *UNREADABLE) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(
            f"{path} cannot be read as an array of NumPy: {reason.rstrip('.')}.",
            "Name a .npy file.",
        ) from None


def hdf5(name: str) -> Arrays:
    """Open `hdf5:FILE:X,Y`: two datasets of an HDF5 file."""
    place = name.partition(":")[2]
    path, names = file_before_colon(place)[0], place.rpartition(":")[2]
    return _two(name, datasets(path, names.split(",")))


def _two(name: str, arrays: Sequence[Any]) -> Arrays:
    if len(arrays) > 2:
        raise DataError(
            f"{name} must name x and y, but names {len(arrays)}.", "Leave out the rest."
        )
    for array in arrays:
        if array.dtype.kind not in "fiub" or not array.ndim:
            raise DataError(
                f"{name} must have arrays of numbers, but one is {array.dtype} of shape {array.shape}.",
                "Convert it first.",
            )
    x, y = (*arrays, None)[:2]
    if y is not None and len(x) != len(y):
        raise DataError(
            f"x and y of {name} must have equally many rows, but have {len(x)} and {len(y)}.",
            "Each row of x needs its row of y.",
        )
    row = sum(math.prod(array.shape[1:]) for array in arrays)
    sizes = [array.dtype.itemsize * math.prod(array.shape) / 1e9 for array in arrays]
    what = " and ".join(
        f"{array.dtype} of shape {array.shape} ({size:,.3g} GB)"
        for array, size in zip(arrays, sizes, strict=True)
    )
    # A scan has two copies of a row in float64, and the order of rows needs three numbers of each.
    _check_room(name, 8 * (2 * row + 3 * len(x)), what)
    return Arrays(name, x, y)


def _check_room(name: str, nbytes: float, what: str) -> None:
    """Raise DataError if this host has no memory for so many bytes of a source."""
    if nbytes > (free := free_memory("cpu")):
        needed, room = gigabytes(nbytes, free)
        raise DataError(
            f"{name} is too large for this host: it has {what}, of which {needed} must be in memory "
            f"together, but {room} are free.",
            "Name data with smaller rows, or with fewer.",
        )


def table(name: str) -> Arrays:
    """Read `csv:FILE:TARGET,...`: columns by the names in the first line; all others are features."""
    place = name.partition(":")[2]
    path, (before, _, after) = file_before_colon(place)[0], place.rpartition(":")
    try:
        with TextIOWrapper(reading(path), encoding="utf-8-sig", newline="") as file:
            columns = [column.strip() for column in next(filter(None, csv.reader(file)), [])]
            cells = np.empty((0, 0))
            if first := next(filter(str.strip, file), ""):
                nbytes = os.fstat(file.fileno()).st_size
                cells_in_file = nbytes / len(first) * len(columns)
                _check_room(name, 8 * cells_in_file, f"about {cells_in_file:.3g} cells")
                lines = chain([first], file)
                cells = np.loadtxt(lines, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Name a csv file.") from None
    except (ValueError, csv.Error) as error:
        reason, is_ragged, _ = str(error).partition("; use `usecols`")
        raise DataError(
            f"{path} must have a number in each cell below its first line, but {reason.rstrip('.')}; "
            f"rows count from {len(is_ragged) and 1}, columns from 1.",
            "Correct the cell, or leave out its column.",
        ) from None
    targets = [after] if after in columns else after.split(",")
    targets = targets if before and after else []
    if missing := [target for target in targets if target not in columns]:
        raise DataError(
            f"{path} must have a column {missing[0]}, but has {', '.join(columns) or 'none'}.",
            "Write csv:FILE:TARGET, with a name of the first line.",
        )
    if len(columns) != (count := cells.shape[1]):
        raise DataError(
            f"The first line of {path} must name each column below it, but has {len(columns)} names for {count} columns.",
            "Write the names, with commas between, and a row of numbers on each line below.",
        )
    y = cells[:, [columns.index(target) for target in targets]]
    y = y[:, 0] if len(targets) == 1 else y
    features = [column for column in columns if column not in targets]
    x = cells[:, [column not in targets for column in columns]]
    is_whole = np.all((y == np.round(y)) & (np.abs(y) < 1 << 53))  # They may be classes.
    numbers = y.astype(np.int64) if is_whole else y
    return Arrays(name, x, numbers if targets else None, (features, targets))


def rows_of(array: Any, numbers: np.ndarray) -> np.ndarray:
    """Return rows by number in host memory; HDF5 reads them in ascending order, each once."""
    if isinstance(array, np.ndarray) or not len(numbers):
        return np.asarray(array[numbers] if len(numbers) else array[:0])
    unique, places = np.unique(numbers, return_inverse=True)
    return array[unique][places]


class ArraySource(Shuffled):
    """A data source of arrays.

    targets are (B,) int64 classes, or floats (B, K). Held out is another source, or random rows, the
    same in every run. Without y targets do not count, and no row is one to train on.
    """

    def __init__(self, opened: Callable[[str], Arrays], request: Request):
        self._request, name = request, request.name
        self._arrays = arrays = opened(name)
        held = arrays
        if request.other:
            held = arrays if request.validation == name else opened(request.validation)
        is_float = arrays.y is not None and arrays.y.dtype.kind == "f"
        takes, is_image = request.targets, request.form == "images"
        self.targets: Targets = "numbers" if takes == "classes" and is_float else takes
        self.form: Form = "images" if is_image else "samples"
        shape = arrays.x.shape[1:]
        self._y_shape = () if arrays.y is None else arrays.y.shape[1:]
        theirs = held.x.shape[1:], self._y_shape if held.y is None else held.y.shape[1:]
        if (is_image and len(shape) not in (2, 3)) or theirs != (shape, self._y_shape):
            raise DataError(
                f"Rows of {name} and held-out rows must have one shape{', channels, height and width' * is_image}, but "
                f"those of x have {shape} and {theirs[0]}, and those of y {self._y_shape} and {theirs[1]}.",
                "Name other data, or set model.kind to mlp.",
            )
        if self.targets == "classes" and self._y_shape not in ((), (1,)):
            raise DataError(
                f"A row has one class, but y of {name} has the shape {arrays.y.shape}.",
                "Set model.loss to mse for numbers, or bce for several yes or no.",
            )
        self.shape = (1, *shape)[-3:] if is_image else (math.prod(shape),)
        self.inputs = math.prod(self.shape)
        rows = np.arange(len(arrays.x))
        self._parts = [(arrays, rows), (held, np.arange(len(held.x)))]
        if not request.other:
            part = 0.1 if request.validation in ("", TENTH) else float(request.validation)
            count, order = math.ceil(part * len(rows)), np.random.default_rng(0).permutation(rows)
            self._parts = [(arrays, np.sort(order[count:])), (arrays, np.sort(order[:count]))]
        self.samples, self.held_out = (len(numbers) for _, numbers in self._parts)
        if not self.samples or not self.held_out or not self.inputs:
            raise DataError(
                f"{name} must have features, and rows to train on and to hold out, but x has the shape {arrays.x.shape}.",
                "Name a file of more rows or columns.",
            )
        super().__init__(self.samples)

    @cached_property
    def scaling(self) -> Scaling:
        """The scaling that the run has noted or its ranks have found; else from a scan of all rows."""
        noted = self._request.scaling or joined([self.scanned(0, 1)], self._request.name)
        try:
            scaling = Scaling.model_validate(noted)
        except ValidationError as error:
            raise DataError(
                f"scaling.json of the run is damaged: {error.errors()[0]['msg']}.", "Copy it again."
            ) from None
        outputs = None if self._arrays.y is None else math.prod(self._y_shape)
        if len(scaling.mean) != self.shape[0] or outputs not in (None, len(scaling.y_mean)):
            raise DataError(
                f"The run was trained on {len(scaling.mean)} features or channels and {len(scaling.y_mean)} numbers of y a row, "
                f"but {self._request.name} has {self.shape[0]} and {outputs or 'no'}.",
                "Name data as those that the run was trained on.",
            )
        return scaling

    @cached_property
    def classes(self) -> int:
        return self.scaling.classes

    @cached_property
    def amounts(self) -> dict[str, int]:
        noun = "classes" if self.targets == "classes" else "outputs"
        return {"samples": self.samples, "held_out_samples": self.held_out, noun: self.classes}

    def scanned(self, part: int, parts: int) -> list[Any]:
        """Scan slice `part` of `parts` of the rows: return [classes, shape of targets, moments of
        x and y, whether to scale them].

        raises  DataError that names the first number of x or y that is not allowed
        """
        width = 0 if self._arrays.y is None else math.prod(self._y_shape)
        moments, classes = [np.zeros((3, self.shape[0])), np.zeros((3, width))], width
        for index, (arrays, numbers) in enumerate(self._parts):
            own = numbers[part * len(numbers) // parts : (part + 1) * len(numbers) // parts]
            for some in np.split(own, range(0, len(own), max(1, BLOCK // self.inputs)))[1:]:
                found = [moments_of(self._matrix(arrays, some)), np.zeros((3, width))]
                if arrays.y is not None:
                    y = np.asarray(rows_of(arrays.y, some), np.float64).reshape(len(some), -1, 1)
                    if self.targets == "classes":
                        wrong, law = (y < 0) & (y != IGNORED), "have classes from 0 on"
                        classes = max(classes, int(y.max(initial=-1)) + 1)
                    elif self.targets == "fractions":
                        wrong, law = (y < 0) | (y > 1), "lie in 0..1 with model.loss=bce"
                    else:
                        wrong, law = np.isinf(y), "be finite, or NaN where it does not count"
                    _check(wrong, y, some, f"y of {arrays.name} must {law}", arrays.names[1])
                    if self.targets == "numbers":
                        found[1] = moments_of(y)
                if not index:
                    moments = [sum_of(*pair) for pair in zip(moments, found, strict=True)]
        scaled = self._request.reading.normalise
        scales = scaled, scaled and self.targets == "numbers"
        return [classes, self._y_shape, [m.tolist() for m in moments], scales, self._arrays.names]

    def _matrix(self, arrays: Arrays, numbers: np.ndarray) -> np.ndarray:
        """Return rows of x as (B, F, 1), or of images (B, C, H W), in float64; all must be finite."""
        shape = len(numbers), self.shape[0], self.inputs // self.shape[0]
        x = np.asarray(rows_of(arrays.x, numbers), np.float64).reshape(shape)
        law = f"x of {arrays.name} must be finite"
        _check(~np.isfinite(x), x, numbers, law, arrays.names[0])
        return x

    def _rows(self, part: int, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        arrays, numbers = self._parts[part][0], self._parts[part][1][chosen]
        scaling, dtype = self.scaling, self._request.dtype
        mean, deviation = (np.array(each)[:, None] for each in (scaling.mean, scaling.deviation))
        x = (self._matrix(arrays, numbers) - mean) / deviation
        x = x.reshape(len(numbers), *self.shape).astype(dtype)
        y = np.full((len(numbers), 1), np.nan) if arrays.y is None else rows_of(arrays.y, numbers)
        if self.targets == "classes":
            return x, np.nan_to_num(y.reshape(-1), nan=IGNORED).astype(np.int64)
        y = y.reshape(len(numbers), math.prod(y.shape[1:]))
        y = np.broadcast_to(y, (len(numbers), self.classes))
        return x, ((y - scaling.y_mean) / scaling.y_deviation).astype(dtype)

    def restored(self, y: np.ndarray) -> np.ndarray:
        """Return outputs (B, K) in the unit of the data."""
        return y * self.scaling.y_deviation + self.scaling.y_mean


def _column(number: int, names: Sequence[str]) -> str:
    return f"{number} ({names[number]})" if names else f"{number}"


def _check(
    is_wrong: np.ndarray, array: np.ndarray, rows: np.ndarray, law: str, names: Sequence[str]
) -> None:
    """Raise DataError at the first wrong number of some rows.

    rows   their numbers
    names  of the columns, or nothing
    """
    if is_wrong.any():
        row, *column = np.argwhere(is_wrong)[0].tolist()
        at = np.ravel_multi_index(column, array.shape[1:])
        raise DataError(
            f"{law}, but row {rows[row]} has {array[(row, *column)]:g} in column {_column(at, names)}; both count from 0.",
            "Correct the number, or leave out the row.",
        )


def moments_of(block: np.ndarray) -> np.ndarray:
    """Return the moments (3, columns) of numbers (rows, columns, any): count, mean, and the sum of
    squared differences from the mean. NaN does not count.
    """
    counts = (~np.isnan(block)).sum((0, 2))
    means = np.nansum(block, (0, 2)) / np.maximum(1, counts)
    return np.array([counts, means, np.nansum((block - means[:, None]) ** 2, (0, 2))])


def sum_of(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the moments of two parts together (Chan, Golub and LeVeque 1979)."""
    (count, mean, squares), (more, its_mean, its_squares) = one, other
    part, apart = more / np.maximum(1, count + more), its_mean - mean
    return np.array(
        [count + more, mean + apart * part, squares + its_squares + apart**2 * count * part]
    )


def joined(parts: Sequence[Any], name: str) -> dict[str, Any]:
    """Return the fields of a `Scaling`, from what `ArraySource.scanned` returned of each slice.

    name    of the source
    raises  DataError if a feature or an output is constant in all rows to train on
    """
    _, y_shape, (_, of_y), is_scaled, names = parts[0]
    if not of_y[0]:
        raise DataError(
            f"{name} has no targets to train on.",
            "Name them, as in npy:x.npy,y.npy or csv:FILE:TARGET.",
        )
    scaling: dict[str, Any] = {"classes": max(part[0] for part in parts), "y_shape": list(y_shape)}
    for index, what in enumerate(("x", "y")):
        count, mean, squares = reduce(sum_of, [np.array(part[2][index]) for part in parts])
        mean, deviation = np.where(count, mean, np.nan), np.sqrt(squares / np.maximum(1, count))
        if not is_scaled[index]:
            mean, deviation = np.zeros_like(mean), np.ones_like(mean)
        if (constant := np.flatnonzero(~(deviation > LEAST * np.abs(mean)))).size:
            raise DataError(
                f"Numbers must vary to be scaled, but column {_column(constant[0], names[index])} of {what} of {name} is "
                f"{mean[constant[0]]:g} in all rows to train on; columns count from 0.",
                "Leave the column out, or set data.normalise=false.",
            )
        scaling |= {
            "y_" * index + "mean": mean.tolist(),
            "y_" * index + "deviation": deviation.tolist(),
        }
    return scaling
