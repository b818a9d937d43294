"""Write and read the files with a checkpoint's shards: safetensors, one or more per rank.

    shard-00004-model-00001-of-00001.safetensors    the shards of rank 3

A file has each tensor name once, so a rank with several ranges of one tensor writes several files. The header has
the offsets of each shard in the form of torch's `HuggingFaceStorageWriter` (`DCP_SHARDING_INFO`), hence
`torch.distributed.checkpoint.load` reads a checkpoint with `HuggingFaceStorageReader`. This code reads no header: it
takes positions from the checked layout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from isthmus.comm.group.group_work import tensor_bytes
from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import DTYPE_BYTES, CheckpointLayout, StoredShard
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard

PIECE_BYTES = 8 << 20
"""Bytes that are written, or read and cut, at once."""

_SAFETENSORS_NAMES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL",
}  # fmt: skip

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True)
class WrittenFile:
    """A file with shards: its name, size and checksum, and the positions of its shards."""

    name: str
    num_bytes: int
    sha256: str
    shards: tuple[StoredShard, ...]


def rank_file_prefix(rank: int) -> str:
    """Return what the names of a rank's files begin with; torch counts shards from 1."""
    return f"shard-{rank + 1:05d}-"


def rank_file_name(rank: int, number: int = 1, count: int = 1) -> str:
    """Return the name of a rank's file `number` of `count`."""
    return f"{rank_file_prefix(rank)}model-{number:05d}-of-{count:05d}.safetensors"


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of the tensor's data type, such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def write_shards(folder: Path, rank: int, shards: Iterable[TensorShard]) -> list[WrittenFile]:
    """Write a rank's shards (in host memory) to its files and flush them; raises `OSError` if that fails."""
    files: list[list[TensorShard]] = [[]]
    seen: dict[str, int] = {}
    for one in shards:
        number = seen[one.name] = seen.get(one.name, -1) + 1
        if number == len(files):
            files.append([])
        files[number].append(one)
    return [
        _write_file(folder / rank_file_name(rank, number, len(files)), part) for number, part in enumerate(files, 1)
    ]


def read_shards(folder: Path, layout: CheckpointLayout, shards: Sequence[TensorShard]) -> None:
    """Fill the tensors of `shards`, however the model was sharded when it was written.

    `layout` has been checked. Raises `UnavailableError` if a tensor is missing, of another shape or cut short.
    """
    with OpenFiles(folder) as files:
        for stored, box, target in plan_reads(layout, shards, folder):
            read_box(files.read_at(stored), stored, box, target)


def plan_reads(
    layout: CheckpointLayout, shards: Sequence[TensorShard], source: object
) -> Iterator[tuple[StoredShard, Box, torch.Tensor]]:
    """Yield which box of which stored shard fills which view of the tensors of `shards`.

    A box is relative to its stored shard. Raises `UnavailableError` if a tensor is missing or of another shape.
    """
    by_tensor = layout.by_tensor()
    for one in shards:
        stored = by_tensor.get(one.name)
        if stored is None:
            raise _other_model(source, f"has no tensor '{one.name}'")
        if stored[0].shape != one.shape:
            what = f"holds '{one.name}' as {list(stored[0].shape)}, the model as {list(one.shape)}"
            raise _other_model(source, what)
        for part in stored:
            starts = tuple(map(max, one.offsets, part.offsets))
            ends = tuple(
                min(at + size, other + length)
                for at, size, other, length in zip(one.offsets, one.tensor.shape, part.offsets, part.sizes, strict=True)
            )
            lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
            if all(length > 0 for length in lengths):
                target = one.tensor.detach()
                for dim, (start, at, length) in enumerate(zip(starts, one.offsets, lengths, strict=True)):
                    target = target.narrow(dim, start - at, length)
                yield part, (tuple(map(int.__sub__, starts, part.offsets)), lengths), target


ReadAt = Callable[[int, memoryview], None]
"""Fill a buffer from byte n of a stored shard on."""


def read_box(read_at: ReadAt, stored: StoredShard, box: Box, target: torch.Tensor) -> None:
    """Copy `box` of a stored shard to `target`, of the box's shape; `read_at` reads the shard's bytes."""
    starts, lengths = box
    dtype, size = getattr(torch, stored.dtype), DTYPE_BYTES[stored.dtype]
    first = _flat(starts, stored.sizes)
    count = prod(lengths)
    if _flat([at + length - 1 for at, length in zip(starts, lengths, strict=True)], stored.sizes) - first + 1 == count:
        direct = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
        packed = target if direct else torch.empty(lengths, dtype=dtype)
        read_at(first * size, tensor_bytes(packed))
        if not direct:
            target.copy_(packed)
        return
    # Rows of which only a part is wanted: read whole rows in pieces, and cut.
    row = prod(stored.sizes[1:])
    step = max(PIECE_BYTES // (row * size), 1)
    for begin in range(0, lengths[0], step):
        number = min(step, lengths[0] - begin)
        rows = torch.empty((number, *stored.sizes[1:]), dtype=dtype)
        read_at((starts[0] + begin) * row * size, tensor_bytes(rows))
        for dim in range(1, len(lengths)):
            rows = rows.narrow(dim, starts[dim], lengths[dim])
        target.narrow(0, begin, number).copy_(rows)


class OpenFiles:
    """Context manager with the files of the checkpoint in `folder`, opened when first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read_at(self, stored: StoredShard) -> ReadAt:
        """Return the reader of a stored shard; it raises `UnavailableError` if the file ends or cannot be read."""

        def read(at: int, into: memoryview) -> None:
            try:
                if stored.file not in self._open:
                    self._open[stored.file] = os.open(self._folder / stored.file, os.O_RDONLY)
                self._fill(stored, at, into)
            except OSError as error:
                raise UnavailableError(f"cannot read {self._folder / stored.file}: {error.strerror}") from error

        return read

    def _fill(self, stored: StoredShard, at: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            got = os.preadv(self._open[stored.file], [into[done:]], stored.start_byte + at + done)
            if got == 0:
                raise UnavailableError(f"{self._folder / stored.file} ends within '{stored.name}'")
            done += got


def _write_file(file: Path, shards: Sequence[TensorShard]) -> WrittenFile:
    """Write one safetensors file; the checksum is computed on the way."""
    shards = sorted(shards, key=lambda one: -one.tensor.element_size())  # every tensor is aligned
    header, starts = _header(shards)
    digest, num_bytes = hashlib.sha256(header), len(header)
    with file.open("wb") as stream:
        stream.write(header)
        for one in shards:
            data = tensor_bytes(one.tensor.contiguous())
            for begin in range(0, len(data), PIECE_BYTES):
                piece = data[begin : begin + PIECE_BYTES]
                stream.write(piece)
                digest.update(piece)
            num_bytes += len(data)
        stream.flush()
        os.fsync(stream.fileno())
    stored = tuple(
        StoredShard(
            name=one.name, dtype=dtype_name(one.tensor), shape=one.shape, offsets=one.offsets,
            sizes=tuple(one.tensor.shape), file=file.name, start_byte=start,
        )
        for one, start in zip(shards, starts, strict=True)
    )  # fmt: skip
    return WrittenFile(file.name, num_bytes, digest.hexdigest(), stored)


def _header(shards: Sequence[TensorShard]) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file with `shards` in order, and where each begins in the file."""
    offsets = {one.name: {"saved_offsets": list(one.offsets)} for one in shards}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    entries: dict[str, object] = {"__metadata__": metadata}
    starts, end = [], 0
    for one in shards:
        start, end = end, end + one.tensor.nbytes
        starts.append(start)
        entries[one.name] = {
            "dtype": _SAFETENSORS_NAMES[dtype_name(one.tensor)],
            "shape": list(one.tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def _flat(position: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the row-major index of a position."""
    index = 0
    for at, size in zip(position, sizes, strict=True):
        index = index * size + at
    return index


def _other_model(source: object, what: str) -> UnavailableError:
    return UnavailableError(
        f"checkpoint {source} {what}",
        hint="it belongs to another model; use another checkpoint folder",
    )
