"""`TcpSide`: one gateway's end of the TCP connection to another site, which carries flows of a lossy link."""

from __future__ import annotations

from collections import deque

from isthmus.wan.tenancy.packets.tcp_frames import TcpEntry, TcpFrames, pack_tcp_ack, pack_tcp_frame

MAX_UNACKNOWLEDGED_BYTES = 16 * 2**20
"""Frames beyond are dropped: the NIC's own window stops it, or its resend comes later."""

RESENDS_S = 3.0
"""Time over which resends are counted."""
MIN_SENT_BYTES = 20_000


class TcpSide:
    """Numbers frames, and counts what the other gateway has acknowledged."""

    def __init__(self) -> None:
        self.is_up = False
        self.number = self.acknowledged = self._heard = 0
        self.unacknowledged_bytes = 0
        self._sizes: deque[tuple[int, int]] = deque()
        self._reader = TcpFrames()
        self._resends: deque[tuple[float, int, int]] = deque(maxlen=64)

    def change(self, is_up: bool) -> None:
        """Begin or end a connection; what it has not delivered is lost."""
        self.is_up = is_up
        self.acknowledged, self._heard, self.unacknowledged_bytes = self.number, 0, 0
        self._sizes.clear()
        self._resends.clear()
        self._reader = TcpFrames()

    def pack(self, vni: int, frame: bytes | memoryview) -> bytes | None:
        """Return what to send for a frame; None if too much is under way."""
        if not self.is_up or self.unacknowledged_bytes + len(frame) > MAX_UNACKNOWLEDGED_BYTES:
            return None
        self.number += 1
        self._sizes.append((self.number, len(frame)))
        self.unacknowledged_bytes += len(frame)
        return pack_tcp_frame(vni, self.number & 0xFFFFFFFF, frame)

    def take(self, data: bytes) -> tuple[list[TcpEntry], bytes]:
        """Return the frames in what has come, and the acknowledgement to send for them."""
        frames = list[TcpEntry]()
        for entry in self._reader.take(data):
            if entry.frame is None:
                self._acknowledge(entry.number)
            else:
                frames.append(entry)
                self._heard = entry.number
        return frames, pack_tcp_ack(self._heard) if frames else b""

    def _acknowledge(self, number: int) -> None:
        """Take an acknowledgement of 32 bits; one of what was never sent changes nothing."""
        ahead = (self.number - number) & 0xFFFFFFFF
        found = self.number - ahead
        if not self.acknowledged < found <= self.number:
            return
        self.acknowledged = found
        while self._sizes and self._sizes[0][0] <= found:
            self.unacknowledged_bytes -= self._sizes.popleft()[1]

    def count_resends(self, num_sent: int, num_resent: int, now_s: float) -> None:
        """Take in how many bytes the connection has sent, and sent again."""
        self._resends.append((now_s, num_sent, num_resent))

    def resent_share(self, now_s: float) -> float:
        """Return the share of bytes that were sent again lately; 0 where little was sent."""
        while self._resends and now_s - self._resends[0][0] > RESENDS_S:
            self._resends.popleft()
        if not self._resends:
            return 0.0
        num_sent = self._resends[-1][1] - self._resends[0][1]
        num_resent = self._resends[-1][2] - self._resends[0][2]
        return min(max(num_resent / num_sent, 0.0), 1.0) if num_sent >= MIN_SENT_BYTES else 0.0
