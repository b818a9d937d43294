"""`Arena`: memory shared by a worker and its transport process, allocated in reusable slots.

The memory is anonymous (memfd), so the kernel frees it when both processes have exited.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from dataclasses import dataclass, field

from isthmus.core.errors import UnavailableError

SPACE_BYTES = 2**40
"""Reserved address space; pages are allocated on first write."""

KEEP_BYTES = 64 * 2**20
"""Free slots keep their pages up to this total."""

_PAGE_BYTES = 4096


@dataclass
class Slots:
    """Slot offsets of an arena, without the memory: sizes are powers of two, reuse is last-in first-out."""

    keep_bytes: int = KEEP_BYTES
    end: int = 0
    """Offset after the last slot ever allocated."""
    idle_bytes: int = 0
    """Bytes of free slots that keep their pages."""
    _free: defaultdict[int, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))

    def take(self, num_bytes: int) -> int:
        """Return the offset of a slot for `num_bytes`."""
        size = slot_bytes(num_bytes)
        if not self._free[size]:
            self.end += size
            return self.end - size
        offset, has_pages = self._free[size].pop()
        self.idle_bytes -= size if has_pages else 0
        return offset

    def give_back(self, offset: int, num_bytes: int) -> bool:
        """Free a slot; return False if its pages exceed the limit and must be released."""
        size = slot_bytes(num_bytes)
        keeps = self.idle_bytes + size <= self.keep_bytes
        if keeps:
            self.idle_bytes += size
            self._free[size].append((offset, True))
        else:
            self._free[size].insert(0, (offset, False))
        return keeps


def slot_bytes(num_bytes: int) -> int:
    """Return the slot size for `num_bytes`."""
    return max(_PAGE_BYTES, 1 << max(num_bytes - 1, 0).bit_length())


class Arena:
    """The shared memory and its allocator; the other process maps it by `descriptor`."""

    def __init__(self, descriptor: int | None = None) -> None:
        if not is_supported():
            raise UnavailableError(
                "this system has no anonymous shared memory (memfd_create)", hint="use transport: thread"
            )
        try:
            if descriptor is None:
                descriptor = os.memfd_create("isthmus", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, SPACE_BYTES)
            self.descriptor = descriptor
            self._memory = mmap.mmap(descriptor, SPACE_BYTES)
        except OSError as error:
            raise UnavailableError(
                f"cannot map shared memory for the transport process: {error.strerror or error}",
                hint="allow the worker more address space (ulimit -v), or use transport: thread",
            ) from error
        self._whole = memoryview(self._memory)
        self._slots = Slots()

    @property
    def held_bytes(self) -> int:
        """Physical memory in use, in bytes."""
        return os.fstat(self.descriptor).st_blocks * 512

    def take(self, num_bytes: int) -> int:
        """Return the offset of a slot for `num_bytes`; not thread-safe."""
        return self._slots.take(num_bytes)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free a slot; not thread-safe."""
        if not self._slots.give_back(offset, num_bytes):
            self._memory.madvise(mmap.MADV_REMOVE, offset, slot_bytes(num_bytes))

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return the memory at `offset`."""
        return self._whole[offset : offset + num_bytes]

    def close(self) -> None:
        """Release all pages and the descriptor; the mapping lives as long as any view of it."""
        if self._slots.end:
            self._memory.madvise(mmap.MADV_REMOVE, 0, self._slots.end)
        os.close(self.descriptor)


def is_supported() -> bool:
    """Return whether this system supports anonymous shared memory."""
    return hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")
