"""`FrameBuffer`: a packet in a buffer with room before it, so that headers are added and removed in place."""

from __future__ import annotations

HEADROOM_BYTES = 64
"""Room before a frame: outer IPv4 (20), UDP (8) and VXLAN (8), and an 802.1Q tag (4)."""
MAX_FRAME_BYTES = 9216 + 18
"""Longest Ethernet frame: a jumbo packet, its header and a tag."""


class FrameBuffer:
    """The bytes `data[start:end]`. A shell reads into `data` from `HEADROOM_BYTES` on, and uses the buffer again."""

    __slots__ = ("data", "end", "start")

    def __init__(self, frame: bytes = b"", headroom_bytes: int = HEADROOM_BYTES) -> None:
        self.data = bytearray(headroom_bytes) + frame
        self.start, self.end = headroom_bytes, len(self.data)

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def view(self) -> memoryview:
        """The packet, without a copy."""
        return memoryview(self.data)[self.start : self.end]

    def push(self, num_bytes: int) -> int:
        """Make room for a header before the packet; return its place in `data`."""
        if num_bytes > self.start:
            raise ValueError(f"a header of {num_bytes} bytes has no room in {self.start}")
        self.start -= num_bytes
        return self.start

    def pull(self, num_bytes: int) -> None:
        """Leave out the first bytes."""
        if num_bytes > len(self):
            raise ValueError(f"{num_bytes} bytes of {len(self)}")
        self.start += num_bytes
