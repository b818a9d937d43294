"""`WeightsFile`: a safetensors file read in blocks, without torch and without the whole of it in memory.

The format: 8 bytes with the length of the header, the header as JSON (name: dtype, shape, begin and end of the data),
and the data of all tensors without holes (https://github.com/huggingface/safetensors).

The header comes from outside: every number in it is checked against the size of the file before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from isthmus.weights.delta_error import DeltaError

BLOCK_BYTES = 8 << 20
"""Bytes of a block: what is read, coded, checked and written at once."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header, as the format's own reader has it."""

_LENGTH_BYTES = 8

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64,
}  # fmt: skip
"""Bits of an element, by the format's names of data types."""


@dataclass(frozen=True, kw_only=True)
class WeightsBlock:
    """A piece of the data: `num_bytes` from `begin_byte` of the file on, all of data type `dtype`."""

    begin_byte: int
    num_bytes: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class WeightsHeader:
    """The first bytes of a file, with their length in front, and the tensors as (name, dtype, shape, begin, end)."""

    content: bytes
    tensors: tuple[tuple[str, str, tuple[int, ...], int, int], ...]

    @property
    def file_bytes(self) -> int:
        """Return the size of the whole file."""
        return len(self.content) + (self.tensors[-1][4] if self.tensors else 0)

    def blocks(self) -> Iterator[WeightsBlock]:
        """Yield the blocks in order: neighbouring tensors of one data type together, cut at `BLOCK_BYTES`."""
        begin, dtype = 0, ""
        for _, one, _, start, _ in [*self.tensors, ("", "", (), self.file_bytes - len(self.content), 0)]:
            if one != dtype:
                for at in range(begin, start, BLOCK_BYTES):
                    size = min(BLOCK_BYTES, start - at)
                    yield WeightsBlock(begin_byte=len(self.content) + at, num_bytes=size, dtype=dtype)
                begin, dtype = start, one


def parse_header(content: bytes, file_bytes: int, source: str) -> WeightsHeader:
    """Return the header whose bytes are `content`; raises `DeltaError` unless it describes a file of this size."""
    try:
        document = json.loads(content[_LENGTH_BYTES:], object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        _reject(source, f"has a header that cannot be read: {str(error)[:100]}")
    if not isinstance(document, dict):
        _reject(source, "has a header that is no JSON object")
    document.pop("__metadata__", None)
    tensors = sorted((_tensor(name, entry, source) for name, entry in document.items()), key=lambda one: one[3:])
    end = 0
    for name, _, _, start, stop in tensors:
        if start != end:
            _reject(source, f"has a hole or an overlap before tensor '{name[:100]}'")
        end = stop
    if len(content) + end != file_bytes:
        _reject(source, f"has {file_bytes} bytes, its header describes {len(content) + end}")
    return WeightsHeader(content=content, tensors=tuple(tensors))


class WeightsFile:
    """Context manager with an open safetensors file; raises `DeltaError` if `path` is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._stream = path.open("rb")
        except OSError as error:
            _reject(str(path), f"cannot be read: {error.strerror}")
        try:
            self.header = self._read_header()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, block: WeightsBlock) -> bytes:
        """Return the bytes of a block; raises `DeltaError` where the file was cut meanwhile."""
        self._stream.seek(block.begin_byte)
        return self._read(block.num_bytes)

    def _read_header(self) -> WeightsHeader:
        file_bytes = os.fstat(self._stream.fileno()).st_size
        length = self._read(_LENGTH_BYTES)
        num_bytes = int.from_bytes(length, "little")
        if not 2 <= num_bytes <= min(MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
            _reject(str(self._path), f"has a header of {num_bytes} bytes in a file of {file_bytes}")
        return parse_header(length + self._read(num_bytes), file_bytes, str(self._path))

    def _read(self, num_bytes: int) -> bytes:
        found = self._stream.read(num_bytes)
        if len(found) < num_bytes:
            _reject(str(self._path), f"ends {num_bytes - len(found)} bytes too early")
        return found


def _tensor(name: str, entry: Any, source: str) -> tuple[str, str, tuple[int, ...], int, int]:
    """Return a tensor of the header; its size is that of its shape and data type."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        _reject(source, f"has no dtype, shape and data_offsets of tensor '{name[:100]}'")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _reject(source, f"has tensor '{name[:100]}' of unknown data type {dtype!r:.40}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _reject(source, f"has tensor '{name[:100]}' without a valid shape and place")
    if prod(shape) * DTYPE_BITS[dtype] != 8 * (offsets[1] - offsets[0]):
        _reject(source, f"has tensor '{name[:100]}' whose data do not have the size of its shape")
    return name, dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(values: Any) -> bool:
    """Return whether these are integers that a size of a file can be; `True` is no integer here."""
    return (
        isinstance(values, list) and len(values) <= 64 and all(type(one) is int and 0 <= one < 2**62 for one in values)
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _reject(source: str, problem: str) -> NoReturn:
    raise DeltaError(f"{source} {problem}", hint="pass a whole safetensors file")
