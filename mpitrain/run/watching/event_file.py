"""Event files of TensorBoard, without TensorFlow: TFRecord framing around protobuf messages.

    record   length, masked CRC of length, message, masked CRC of message; numbers little-endian
    Event    1 wall_time double, 2 step varint, 3 file_version string, 5 summary
    Summary  1 value, repeated; of a value 1 is the tag, 2 simple_value as float32

Sources: tensorflow/core/lib/io/record_writer.h, core/util/event.proto, core/framework/summary.proto.
"""

import struct
from collections.abc import Mapping

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
