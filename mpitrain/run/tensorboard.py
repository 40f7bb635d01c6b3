"""The watcher that writes TensorBoard event files: the numbers of metrics.jsonl as scalars."""

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import TrainingError
from mpitrain.files import append, appending, mend, own_folder, remove, whole
from mpitrain.run.metrics import METRICS, read_metrics, series, strict
from mpitrain.run.watcher import Watcher

FOLDER = "tensorboard"
PREFIX, SUFFIX = "events.out.tfevents.", ".mpitrain"
"""The start of a name that TensorBoard reads, and the end of a name that is ours."""


class TensorBoard(Watcher):
    """Writes RUN/tensorboard/events.out.tfevents.SECONDS.mpitrain.

    A start writes the records of metrics.jsonl to a new file, which replaces that of an earlier
    start. So a resumed run has one file, without the steps that the resume repeats. Each later
    record is one write: a killed run leaves at most its last record incomplete. Tags are
    train/NAME and validation/NAME, where NAME is the key in metrics.jsonl without val_.
    """

    __slots__ = ("_descriptor", "_path", "_started")

    def __init__(self) -> None:
        self._descriptor = -1

    def on_begin(self, config: Config, run_dir: Path, record: dict[str, Any]) -> None:
        now = time.time()
        self._started = now - record["wall_s"]
        records = [version_record(self._started)]
        records += [self._record(line) for line in read_metrics(run_dir / METRICS)]
        name = f"{PREFIX}{int(now)}{SUFFIX}"
        self._path = run_dir / FOLDER / name
        try:
            for old in own_folder(self._path.parent).glob(f"{PREFIX}*{SUFFIX}"):
                remove(old)
            with whole(self._path) as file:
                file.write(b"".join(records))
            self._descriptor = appending(self._path)
        except OSError as error:
            raise self._refused(error) from None

    def on_log(self, record: dict[str, Any]) -> None:
        try:
            append(self._descriptor, self._record(strict(record)))
        except OSError as error:
            raise self._refused(error) from None

    on_evaluation = on_log

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _record(self, record: Mapping[str, Any]) -> bytes:
        """Return the TFRecord of the numbers in a line of metrics; empty if it has none."""
        numbers = series(record)
        seconds = self._started + numbers.pop("wall_s", 0.0)
        group = "validation" if "val_loss" in record else "train"
        tags = {f"{group}/{name.removeprefix('val_')}": value for name, value in numbers.items()}
        return scalars_record(seconds, int(record["step"]), tags) if tags else b""

    def _refused(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self._path} cannot be written: {error.strerror or error}.",
            f"{mend(error)}, or set run.tensorboard to false; then go on with --resume.",
        )


VERSION = b"brain.Event:2"
MASK = 0xA282EAD8
"""The constant that TFRecord adds to a rotated CRC."""


def _table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return tuple(table)


TABLE = _table()
"""CRC-32C (Castagnoli, RFC 3720) of each byte."""


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def framed(message: bytes) -> bytes:
    """Return a TFRecord of the message."""
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF)


def version_record(seconds: float) -> bytes:
    """Return the first record of a file.    seconds: since the epoch"""
    return framed(_double(1, seconds) + _bytes(3, VERSION))


def scalars_record(seconds: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Return a record of scalars by their tags, all of one step.    seconds: since the epoch"""
    summary = b"".join(
        _bytes(1, _bytes(1, tag.encode(errors="backslashreplace")) + _float(2, value))
        for tag, value in scalars.items()
    )
    return framed(_double(1, seconds) + b"\x10" + _varint(step) + _bytes(5, summary))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        return bytes([field << 3 | 5]) + struct.pack("<f", value)
    except OverflowError:  # A float64 beyond float32 is shown as infinite.
        return bytes([field << 3 | 5]) + struct.pack(
            "<f", float("inf") if value > 0 else -float("inf")
        )


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value
