"""`IncomingBytes`: one direction of a stream at its receiver: order, end and credit."""

from __future__ import annotations

from isthmus.core.errors import ProtocolError

MIN_WINDOW_BYTES = 2**20
"""Credit that a stream begins with."""

MAX_WINDOW_BYTES = 2**25
"""Most credit of a stream: 1 Gbit/s over a round trip of 0.26 s."""

Chunk = bytes | bytearray | memoryview


class CreditBudget:
    """Bytes of credit that the streams of a tunnel share: the bound of a tunnel's memory."""

    def __init__(self, num_bytes: int) -> None:
        self.free_bytes = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Take `num_bytes` if they are free; return whether they were."""
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        return True


class IncomingBytes:
    """Puts the bytes of one direction in order; each byte is delivered once.

    `limit` is the offset up to which the sender may send. It grows when the reader takes bytes; the window between
    the two doubles while the budget has room, so a fast stream soon fills its path.
    """

    def __init__(self, budget: CreditBudget, window_bytes: int = MIN_WINDOW_BYTES) -> None:
        """Take `window_bytes` that the caller has taken from `budget`."""
        self._budget, self._window_bytes = budget, window_bytes
        self.limit = window_bytes
        self.delivered = 0
        """Offset up to which the bytes were handed to the reader."""
        self._taken = 0
        self._early: dict[int, Chunk] = {}
        self._end: int | None = None

    @property
    def num_early(self) -> int:
        """Chunks that wait for earlier bytes."""
        return len(self._early)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes and the end have been handed out."""
        return self._end is not None and self.delivered == self._end

    @property
    def is_taken(self) -> bool:
        """Whether the reader has taken all bytes up to the end."""
        return self.is_complete and self._taken == self._end

    def add(self, offset: int, data: Chunk) -> list[Chunk]:
        """Return the chunks that are now in order; raise `ProtocolError` for bytes beyond limit or end, or twice."""
        end = offset + len(data)
        if end > self.limit or (self._end is not None and end > self._end):
            raise ProtocolError(f"bytes {offset} to {end} are beyond {self.limit if self._end is None else self._end}")
        if offset < self.delivered or offset in self._early:
            raise ProtocolError(f"byte {offset} came twice")
        if offset > self.delivered:
            self._early[offset] = data
            return []
        ready = [data]
        self.delivered = end
        while (follow := self._early.pop(self.delivered, None)) is not None:
            ready.append(follow)
            self.delivered += len(follow)
        return ready

    def finish(self, offset: int) -> None:
        """Mark the end; raise `ProtocolError` if bytes beyond it have come or another end is known."""
        beyond = max((at + len(data) for at, data in self._early.items()), default=self.delivered)
        if self._end is not None or offset < beyond or offset > self.limit:
            raise ProtocolError(f"the end {offset} does not fit the bytes of its stream")
        self._end = offset

    def take(self, num_bytes: int) -> int | None:
        """Note that the reader took `num_bytes`; return a new limit where it is worth a frame."""
        self._taken += num_bytes
        if self._end is not None or self._taken + self._window_bytes - self.limit < self._window_bytes // 2:
            return None
        grown = min(self._window_bytes, MAX_WINDOW_BYTES - self._window_bytes)
        if grown and self._budget.take(grown):
            self._window_bytes += grown
        self.limit = self._taken + self._window_bytes
        return self.limit

    def release(self) -> None:
        """Give the window back to the budget; the stream ends here."""
        self._budget.free_bytes += self._window_bytes
        self._window_bytes = 0
        self._early.clear()
