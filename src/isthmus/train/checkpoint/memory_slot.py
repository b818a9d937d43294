"""`MemorySlot`: a snapshot of tensors in two files, valid as a whole or not at all.

    PATH.data    bytes of the tensors, each aligned to 64
    PATH.index   checksum (8 hex digits), newline, `SlotIndex` as JSON; exists only while the data is valid

In shared memory both files outlive the process. The checksum is the CRC-32 of data and index.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError, model_validator

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.train.checkpoint.layout.checkpoint_layout import DTYPE_BYTES, DtypeName, Extent, Extents

SLOT_VERSION: Literal[2] = 2
MAX_INDEX_BYTES = 64 << 20
"""Largest index of a slot; a peer's is refused before memory is taken for it."""
_ALIGN_BYTES = 64


class SlotTensor(FrozenModel):
    """Location of a tensor in a slot; `dtype` is torch's name (`float32`)."""

    name: str
    dtype: DtypeName
    shape: Extents
    offset_bytes: Extent

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class SlotIndex(FrozenModel):
    """Contents of a slot: the state after `step` steps and `samples` samples."""

    version: Literal[2] = SLOT_VERSION
    step: NonNegativeInt
    samples: NonNegativeInt
    # Size of the data with padding.
    num_bytes: NonNegativeInt
    tensors: tuple[SlotTensor, ...]

    @model_validator(mode="after")
    def _check_tensors(self) -> SlotIndex:
        """Refuse tensors outside the data, over each other, or of one name: the index may be a peer's."""
        end = 0
        for one in sorted(self.tensors, key=lambda tensor: (tensor.offset_bytes, tensor.num_bytes)):
            if one.offset_bytes < end or one.offset_bytes % DTYPE_BYTES[one.dtype]:
                raise ValueError(f"tensor '{one.name}' overlaps another one or is not aligned")
            end = one.offset_bytes + one.num_bytes
        if end > self.num_bytes or len({one.name for one in self.tensors}) != len(self.tensors):
            raise ValueError("a tensor leaves the data, or two have one name")
        return self

    @classmethod
    def from_tensors(cls, step: int, samples: int, tensors: Mapping[str, torch.Tensor]) -> SlotIndex:
        """Return the index of `tensors` (of any shape) laid out consecutively."""
        stored, end = [], 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            stored.append(SlotTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), offset_bytes=end))
            end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return cls(step=step, samples=samples, num_bytes=end, tensors=tuple(stored))


@dataclass(frozen=True)
class Snapshot:
    """The state after `step` steps; its tensors are views of the slot, valid until the next write to it."""

    step: int
    samples: int
    tensors: dict[str, torch.Tensor]


class MemorySlot:
    """The slot stored in `path`.data and `path`.index. One process may write it at a time."""

    def __init__(self, path: Path) -> None:
        self._data, self._index = path.with_name(path.name + ".data"), path.with_name(path.name + ".index")
        self._memory: mmap.mmap | None = None

    @property
    def allocated_bytes(self) -> int:
        """Current size of the data file; 0 if it does not exist."""
        try:
            return self._data.stat().st_size
        except OSError:
            return 0

    def open_for_write(self, num_bytes: int) -> torch.Tensor:
        """Invalidate the slot; return its writable memory, uint8 [n] with n >= `num_bytes`.

        Raises `UnavailableError` if the memory cannot be allocated.
        """
        size = max(num_bytes, mmap.PAGESIZE)
        try:
            self._data.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.invalidate()
            if self._memory is None or len(self._memory) != size or self.allocated_bytes != size:
                self._memory = _map_for_write(self._data, size)
        except OSError as error:
            raise UnavailableError(
                f"cannot keep {size} bytes in {self._data.parent}: {error.strerror or error}",
                hint="enlarge it (shared memory of a container: --shm-size)",
            ) from error
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def seal(self, index: SlotIndex) -> Snapshot:
        """Mark the slot valid with contents `index` and return them as a snapshot.

        Raises `UnavailableError` if the index cannot be written.
        """
        if self._memory is None:
            raise RuntimeError("the slot is not open for writing")
        body = index.model_dump_json()
        self._write_index(f"{_checksum(self._memory, body):08x}\n{body}")
        return _snapshot(index, self._memory)

    def seal_raw(self, label: str) -> int | None:
        """Mark the slot valid as a copy of the slot with index text `label`; return its step.

        Returns None if the checksum does not match the memory, or the index describes other data.
        """
        checksum, _, body = label.partition("\n")
        if self._memory is None or f"{_checksum(self._memory, body):08x}" != checksum:
            return None
        try:
            index = SlotIndex.model_validate_json(body)
        except ValidationError:
            return None
        if index.num_bytes > len(self._memory):
            return None
        self._write_index(label)
        return index.step

    def read_raw(self) -> tuple[str, torch.Tensor] | None:
        """Return index text and memory, uint8 [bytes], for `seal_raw` elsewhere; None if the slot is invalid."""
        try:
            label = self._index.read_text(encoding="utf-8")
            return label, torch.frombuffer(self._map_for_read(), dtype=torch.uint8)
        except (OSError, ValueError):
            return None

    def read(self) -> Snapshot | None:
        """Return the snapshot; None if it is missing, incomplete or damaged."""
        try:
            checksum, _, body = self._index.read_text(encoding="utf-8").partition("\n")
            index = SlotIndex.model_validate_json(body)
            memory = self._map_for_read()
        except (OSError, ValueError, ValidationError):
            return None
        valid = len(memory) >= index.num_bytes and f"{_checksum(memory, body):08x}" == checksum
        return _snapshot(index, memory) if valid else None

    def invalidate(self) -> None:
        """Mark the slot invalid."""
        self._index.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the files and release the memory."""
        self._memory = None
        for file in (self._index, self._data):
            with suppress(OSError):
                file.unlink()

    def _map_for_read(self) -> mmap.mmap:
        """Map the data copy-on-write."""
        with self._data.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _write_index(self, label: str) -> None:
        try:
            write_atomically(self._index, label)
        except OSError as error:
            raise UnavailableError(f"cannot write {self._index}: {error}") from error


def view_tensor(memory: torch.Tensor, stored: SlotTensor) -> torch.Tensor:
    """Return `stored` as a view of `memory`, uint8 [bytes]."""
    part = memory[stored.offset_bytes : stored.offset_bytes + stored.num_bytes]
    return part.view(getattr(torch, stored.dtype)).view(stored.shape)


def _snapshot(index: SlotIndex, memory: mmap.mmap) -> Snapshot:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return Snapshot(index.step, index.samples, {one.name: view_tensor(whole, one) for one in index.tensors})


def _checksum(memory: mmap.mmap, body: str) -> int:
    return zlib.crc32(body.encode(), zlib.crc32(memory))


def _map_for_write(file: Path, num_bytes: int) -> mmap.mmap:
    """Map `file` with `num_bytes` bytes allocated up front: running out of shared memory later raises SIGBUS.

    A file of another size is replaced rather than truncated, so that existing readers keep their mapping.
    """
    if file.exists() and file.stat().st_size != num_bytes:
        file.unlink()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        raise
    finally:
        os.close(descriptor)
