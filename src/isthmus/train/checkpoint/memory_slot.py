"""`MemorySlot`: one snapshot of tensors in files that other processes see, whole or not at all.

    PATH.data    the tensors' bytes, each from a multiple of 64 on
    PATH.index   checksum, then which tensors (`SlotIndex`); present only while the data is whole

In shared memory both outlive the process that wrote them, however it ended. The checksum (CRC-32) covers
data and index.
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
from pydantic import ValidationError

from isthmus.core.base import Frozen, Index
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import write_atomically

SLOT_VERSION: Literal[1] = 1
_ALIGN_BYTES = 64


class StoredTensor(Frozen):
    """Where a tensor of a slot lies; `dtype` as torch names it (`float32`)."""

    name: str
    dtype: str
    shape: tuple[Index, ...]
    offset_bytes: Index

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


class SlotIndex(Frozen):
    """What a slot holds: the state after `step` steps and `samples` samples."""

    version: Literal[1] = SLOT_VERSION
    step: Index
    samples: Index
    num_bytes: Index
    tensors: tuple[StoredTensor, ...]

    @classmethod
    def of(cls, step: int, samples: int, tensors: Mapping[str, torch.Tensor]) -> SlotIndex:
        """Lay `tensors` out one after the other."""
        stored, end = [], 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            stored.append(StoredTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), offset_bytes=end))
            end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return cls(step=step, samples=samples, num_bytes=end, tensors=tuple(stored))


@dataclass(frozen=True)
class Snapshot:
    """The state after `step` steps; its tensors share the slot's memory until the slot is written again."""

    step: int
    samples: int
    tensors: dict[str, torch.Tensor]


class MemorySlot:
    """The slot whose files begin with `path`. One process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self._data, self._index = path.with_name(path.name + ".data"), path.with_name(path.name + ".index")
        self._memory: mmap.mmap | None = None

    @property
    def allocated_bytes(self) -> int:
        """What the slot's data takes now."""
        try:
            return self._data.stat().st_size
        except OSError:
            return 0

    def begin(self, num_bytes: int) -> torch.Tensor:
        """Declare the slot not whole; return its memory, [at least num_bytes] uint8, to be filled.

        Raises `UnavailableError` where the memory is not to be had.
        """
        size = max(num_bytes, mmap.PAGESIZE)
        try:
            self._data.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.forget()
            if self._memory is None or len(self._memory) != size or self.allocated_bytes != size:
                self._memory = _mapped(self._data, size)
        except OSError as error:
            raise UnavailableError(
                f"cannot keep {size} bytes in {self._data.parent}: {error.strerror or error}",
                hint="give it more room (shared memory of a container: --shm-size)",
            ) from error
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def seal(self, index: SlotIndex) -> Snapshot:
        """Declare that the memory holds what `index` says, and return that.

        Raises `UnavailableError` where it cannot.
        """
        if self._memory is None:
            raise RuntimeError("a slot is sealed that was not begun")
        body = index.model_dump_json()
        self._write_index(f"{_checksum(self._memory, body):08x}\n{body}")
        return _snapshot(index, self._memory)

    def adopt(self, label: str) -> int | None:
        """Declare that the memory holds what the slot held that had this `label`; return the step.

        None where it does not hold that.
        """
        checksum, _, body = label.partition("\n")
        if self._memory is None or f"{_checksum(self._memory, body):08x}" != checksum:
            return None
        self._write_index(label)
        return SlotIndex.model_validate_json(body).step

    def copy(self) -> tuple[str, torch.Tensor] | None:
        """Return label and memory, [bytes] uint8, for `adopt` elsewhere; None where the slot is not whole."""
        try:
            label = self._index.read_text(encoding="utf-8")
            return label, torch.frombuffer(self._opened(), dtype=torch.uint8)
        except (OSError, ValueError):
            return None

    def read(self) -> Snapshot | None:
        """Return what the slot holds, None where it is not whole: never written, half written, damaged."""
        try:
            checksum, _, body = self._index.read_text(encoding="utf-8").partition("\n")
            index = SlotIndex.model_validate_json(body)
            memory = self._opened()
        except (OSError, ValueError, ValidationError):
            return None
        whole = len(memory) >= index.num_bytes and f"{_checksum(memory, body):08x}" == checksum
        return _snapshot(index, memory) if whole else None

    def forget(self) -> None:
        """Declare the slot not whole."""
        self._index.unlink(missing_ok=True)

    def remove(self) -> None:
        """Give the memory back."""
        self._memory = None
        for file in (self._index, self._data):
            with suppress(OSError):
                file.unlink()

    def _opened(self) -> mmap.mmap:
        """Map the data to be read."""
        with self._data.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _write_index(self, label: str) -> None:
        try:
            write_atomically(self._index, label)
        except OSError as error:
            raise UnavailableError(f"cannot write {self._index}: {error}") from error


def view(memory: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return the tensor that `stored` places in `memory`, [bytes] uint8."""
    part = memory[stored.offset_bytes : stored.offset_bytes + stored.num_bytes]
    return part.view(getattr(torch, stored.dtype)).view(stored.shape)


def _snapshot(index: SlotIndex, memory: mmap.mmap) -> Snapshot:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return Snapshot(index.step, index.samples, {one.name: view(whole, one) for one in index.tensors})


def _checksum(memory: mmap.mmap, body: str) -> int:
    return zlib.crc32(body.encode(), zlib.crc32(memory))


def _mapped(file: Path, size: int) -> mmap.mmap:
    """Map `file` at `size` bytes that are there: shared memory that runs out later would end the process.

    A file of another size is replaced and not cut: who still reads it goes on reading.
    """
    if file.exists() and file.stat().st_size != size:
        file.unlink()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        raise
    finally:
        os.close(descriptor)
