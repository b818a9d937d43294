"""`SharedMemoryArena`: memory shared by a worker and its transport process, allocated in reusable slots.

The memory is anonymous (memfd), so the kernel frees it when both processes have exited.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from dataclasses import dataclass, field

from isthmus.core.errors import UnavailableError

ADDRESS_SPACE_BYTES = 2**40
"""Reserved address space; pages are allocated on first write."""

MAX_IDLE_BYTES = 64 * 2**20
"""Free slots keep their pages up to this total."""

_PAGE_BYTES = 4096


@dataclass
class SlotAllocator:
    """Slot offsets of an arena, without the memory: sizes are powers of two, reuse is last-in first-out."""

    max_idle_bytes: int = MAX_IDLE_BYTES
    end_offset: int = 0
    """Offset after the last slot ever allocated."""
    idle_bytes: int = 0
    """Bytes of free slots that keep their pages."""
    _free_slots: defaultdict[int, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))

    def allocate(self, num_bytes: int) -> int:
        """Return the offset of a slot for `num_bytes`."""
        size = slot_bytes(num_bytes)
        if not self._free_slots[size]:
            self.end_offset += size
            return self.end_offset - size
        offset, has_pages = self._free_slots[size].pop()
        self.idle_bytes -= size if has_pages else 0
        return offset

    def free(self, offset: int, num_bytes: int) -> bool:
        """Free a slot; return False if its pages exceed the limit and must be released."""
        size = slot_bytes(num_bytes)
        keeps = self.idle_bytes + size <= self.max_idle_bytes
        if keeps:
            self.idle_bytes += size
            self._free_slots[size].append((offset, True))
        else:
            self._free_slots[size].insert(0, (offset, False))
        return keeps


def slot_bytes(num_bytes: int) -> int:
    """Return the slot size for `num_bytes`."""
    return max(_PAGE_BYTES, 1 << max(num_bytes - 1, 0).bit_length())


class SharedMemoryArena:
    """The shared memory and its allocator; the other process maps it by `descriptor`."""

    def __init__(self, descriptor: int | None = None, *, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        if not supports_shared_memory():
            raise UnavailableError(
                "this system has no anonymous shared memory (memfd_create)", hint="use transport: thread"
            )
        try:
            if descriptor is None:
                descriptor = os.memfd_create("isthmus", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, ADDRESS_SPACE_BYTES)
            self.descriptor = descriptor
            self._memory = mmap.mmap(descriptor, ADDRESS_SPACE_BYTES)
        except OSError as error:
            raise UnavailableError(
                f"cannot map shared memory for the transport process: {error.strerror or error}",
                hint="allow the worker more address space (ulimit -v), or use transport: thread",
            ) from error
        self._view = memoryview(self._memory)
        self._allocator = SlotAllocator(max_idle_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Physical memory in use, in bytes."""
        return os.fstat(self.descriptor).st_blocks * 512

    def allocate(self, num_bytes: int) -> int:
        """Return the offset of a slot for `num_bytes`; not thread-safe."""
        return self._allocator.allocate(num_bytes)

    def free(self, offset: int, num_bytes: int) -> None:
        """Free a slot; not thread-safe."""
        if not self._allocator.free(offset, num_bytes):
            self._memory.madvise(mmap.MADV_REMOVE, offset, slot_bytes(num_bytes))

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return the memory at `offset`."""
        return self._view[offset : offset + num_bytes]

    def close(self) -> None:
        """Release all pages and the descriptor; the mapping lives as long as any view of it."""
        if self._allocator.end_offset:
            self._memory.madvise(mmap.MADV_REMOVE, 0, self._allocator.end_offset)
        os.close(self.descriptor)


def supports_shared_memory() -> bool:
    """Return whether this system supports anonymous shared memory."""
    return hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")
