"""`OutgoingBytes`: one direction of a stream at its sender: what waits, what may be sent, and the end."""

from __future__ import annotations

from collections import deque

from isthmus.core.errors import ProtocolError
from isthmus.wan.tunnel.incoming_bytes import Chunk

PAUSE_BYTES = 2**21
"""Bytes waiting at which the worker's connection is no longer read."""


class OutgoingBytes:
    """Bytes of a worker until they leave in frames. `limit` is the receiver's credit."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.offset = 0
        """Bytes that have left in frames."""
        self.num_waiting_bytes = 0
        self.has_ended = False
        """Whether the worker has sent its end, which may still have to leave."""
        self.end_sent = False
        self._chunks: deque[Chunk] = deque()

    def takes_more(self, *, is_reading: bool) -> bool:
        """Whether the worker should be read, which `is_reading` says of the time before: from half of a pause on."""
        return not self.has_ended and self.num_waiting_bytes < (PAUSE_BYTES if is_reading else PAUSE_BYTES // 2)

    @property
    def can_send(self) -> bool:
        """Whether bytes or the end may leave now."""
        if self.num_waiting_bytes:
            return self.offset < self.limit
        return self.has_ended and not self.end_sent

    def add(self, data: Chunk) -> None:
        """Append bytes of the worker."""
        if data:
            self._chunks.append(data)
            self.num_waiting_bytes += len(data)

    def raise_limit(self, limit: int) -> None:
        """Note new credit; less than before changes nothing."""
        self.limit = max(self.limit, limit)

    def next_payload(self, max_bytes: int) -> Chunk:
        """Return the bytes of the next frame, up to `max_bytes` and the limit; empty if none may leave.

        Small chunks are joined; a frame that is half full ends with its chunk, which costs no copy.
        """
        most = min(max_bytes, self.limit - self.offset)
        if most <= 0 or not self._chunks:
            return b""
        parts, total = [], 0
        while self._chunks and total < most:
            if total >= max_bytes // 2 and len(self._chunks[0]) > most - total:
                break
            chunk = self._chunks.popleft()
            if len(chunk) > most - total:
                view = memoryview(chunk)
                self._chunks.appendleft(view[most - total :])
                chunk = view[: most - total]
            parts.append(chunk)
            total += len(chunk)
        self.offset += total
        self.num_waiting_bytes -= total
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def take_end(self) -> int:
        """Return the offset of the end, which leaves now."""
        if self._chunks or not self.has_ended:
            raise ProtocolError("the end of a stream leaves after its bytes")
        self.end_sent = True
        return self.offset
