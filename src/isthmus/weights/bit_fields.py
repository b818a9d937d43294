"""`ByteReader`, `varint`, `pack_fields`, `unpack_fields`: the building blocks of coded changes.

Every read is bounded by the bytes that are there, so that no length in a file can make a large array.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.weights.delta_error import damaged

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

MAX_VARINT_BYTES = 9
"""Bytes of the longest varint: 63 bits."""


class ByteReader:
    """Reads `data` in order; each method raises `DeltaError` where it ends too early."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = np.frombuffer(data, np.uint8), 0

    @property
    def remaining(self) -> int:
        """Return how many bytes are left."""
        return len(self._data) - self._at

    def take(self, num_bytes: int) -> Bytes:
        """Return the next bytes, [num_bytes]."""
        if num_bytes > self.remaining:
            raise damaged(f"coded changes end {num_bytes - self.remaining} bytes too early")
        found = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return found

    def varint(self, largest: int) -> int:
        """Return the next integer; raises `DeltaError` above `largest`."""
        value = 0
        for place in range(MAX_VARINT_BYTES):
            byte = int(self.take(1)[0])
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                break
        else:
            value = largest + 1
        if value > largest:
            raise damaged(f"a number of coded changes is beyond {largest}")
        return value


def varint(value: int) -> bytes:
    """Return a non-negative integer in LEB128: 7 bits a byte, low bits first."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def pack_fields(values: Integers, width: int) -> bytes:
    """Return `values` [N], each from 0 to `2^width - 1`, in `width` bits (0 to 31) each, low bits first."""
    if width == 0 or len(values) == 0:
        return b""
    as_bytes = values.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : -(-width // 8)]
    bits = np.unpackbits(as_bytes, axis=1, count=width, bitorder="little")
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_fields(reader: ByteReader, count: int, width: int) -> Integers:
    """Return the next `count` values of `width` bits each, [count]."""
    if width == 0:
        return np.zeros(count, np.int64)
    data = reader.take(-(-count * width // 8))
    bits = np.unpackbits(data, count=count * width, bitorder="little").reshape(count, width)
    packed = np.packbits(bits, axis=1, bitorder="little")
    values = np.zeros((count, 4), np.uint8)
    values[:, : packed.shape[1]] = packed
    return values.view("<u4")[:, 0].astype(np.int64)
