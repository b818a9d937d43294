"""`Arena`: memory that a worker and the process of its transport share, in slots that are used again.

It has no name, so nothing of it is left when both have ended, however they did.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from dataclasses import dataclass, field

from isthmus.core.errors import UnavailableError

SPACE_BYTES = 2**40
"""Addresses, not memory: pages are there once they are written."""

KEEP_BYTES = 64 * 2**20
"""Slots that nobody holds keep their pages up to so many bytes."""

_PAGE_BYTES = 4096


@dataclass
class Slots:
    """Where in an arena is room, as numbers alone: slots of powers of two, the last one freed taken first."""

    keep_bytes: int = KEEP_BYTES
    end: int = 0
    idle_bytes: int = 0
    _free: defaultdict[int, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))

    def take(self, num_bytes: int) -> int:
        """Return the offset of room for `num_bytes`."""
        size = slot_bytes(num_bytes)
        if not self._free[size]:
            self.end += size
            return self.end - size
        offset, has_pages = self._free[size].pop()
        self.idle_bytes -= size if has_pages else 0
        return offset

    def give_back(self, offset: int, num_bytes: int) -> bool:
        """Free a slot; False where its pages are too many to be kept."""
        size = slot_bytes(num_bytes)
        keeps = self.idle_bytes + size <= self.keep_bytes
        if keeps:
            self.idle_bytes += size
            self._free[size].append((offset, True))
        else:
            self._free[size].insert(0, (offset, False))
        return keeps


def slot_bytes(num_bytes: int) -> int:
    """Return the size of the slot for `num_bytes`."""
    return max(_PAGE_BYTES, 1 << max(num_bytes - 1, 0).bit_length())


class Arena:
    """One side's view of the memory, which deals it out; the other side is given its `descriptor`."""

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
                f"no shared memory for the transport's process: {error.strerror or error}",
                hint="allow the worker more address space (ulimit -v), or use transport: thread",
            ) from error
        self._whole = memoryview(self._memory)
        self._slots = Slots()

    @property
    def held_bytes(self) -> int:
        """Memory that the arena takes now."""
        return os.fstat(self.descriptor).st_blocks * 512

    def take(self, num_bytes: int) -> int:
        """Return the offset of room for `num_bytes`; not thread-safe."""
        return self._slots.take(num_bytes)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free room that was taken; not thread-safe."""
        if not self._slots.give_back(offset, num_bytes):
            self._memory.madvise(mmap.MADV_REMOVE, offset, slot_bytes(num_bytes))

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return the memory there."""
        return self._whole[offset : offset + num_bytes]

    def close(self) -> None:
        """Let go of it, and of all that is in it; its addresses stay until nobody looks at any part of it."""
        if self._slots.end:
            self._memory.madvise(mmap.MADV_REMOVE, 0, self._slots.end)
        os.close(self.descriptor)


def is_supported() -> bool:
    """Tell whether this system has what an arena needs."""
    return hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")
